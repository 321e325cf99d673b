"""The same numbers as torch.optim.SparseAdam."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from torch import Tensor

import sparsestep
from tests.generate.cases import Case, cases
from tests.generate.grads import Drawn, plain_coo
from tests.properties.marks import QUIET
from tests.table import each_dtype, each_engine, running_on, same_bits

pytestmark = QUIET


def take_step(opt: torch.optim.Optimizer, params: list, drawn: list[Drawn | None]) -> None:
    for param, each in zip(params, drawn, strict=True):
        param.grad = None if each is None else each.grad.to(param.dtype)
    opt.step()


def distance(ours: Tensor, theirs: Tensor, before: Tensor) -> float:
    """The largest distance relative to the larger of value and update."""
    if ours.numel() == 0:
        return 0.0
    ours, theirs, before = ours.double(), theirs.double(), before.double()
    scale = torch.maximum(theirs.abs(), (theirs - before).abs())
    apart = (ours - theirs).abs()
    return float(torch.where(apart > 0, apart / scale, 0.0).max())


def comparable(case: Case) -> Case:
    """The params that both take: contiguous, and with dims, or torch leaves them as they are."""
    kept = [index for index, values in enumerate(case.start) if values.dim()]
    assume(kept)
    return replace(
        case,
        start=[case.start[index].clone(memory_format=torch.contiguous_format) for index in kept],
        steps=[[step[index] for index in kept] for step in case.steps],
    )


@each_engine
@given(case=cases(max_steps=20, dtypes={torch.float32: 1, torch.float64: 1}, kinds=(plain_coo,)))
@settings(max_examples=settings.default.max_examples // 2)  # of up to twenty steps each
def test_step_by_step_like_torch(engine: str, case: Case):
    """Both start each step from torch's params, so that the distance is that of one step."""
    case = comparable(case)
    ours, theirs = case.params(), case.params()
    with running_on(engine) as name:
        our_opt = sparsestep.SparseAdam(case.groups(ours), **case.options, engine=name)
        their_opt = torch.optim.SparseAdam(case.groups(theirs), **case.options)
        for drawn in case.steps:
            before = [p.detach().clone() for p in theirs]
            take_step(our_opt, ours, drawn)
            take_step(their_opt, theirs, drawn)
            for our, their, old, each in zip(ours, theirs, before, drawn, strict=True):
                limit = 1e-6 if our.dtype == torch.float32 else 1e-14
                assert distance(our.detach(), their.detach(), old) <= limit
                if each is not None:
                    assert same_bits(our.detach()[~each.held], old[~each.held])
                our.data.copy_(their.data)
        for our, their in zip(ours, theirs, strict=True):
            assert our_opt.state[our].keys() == their_opt.state[their].keys()
            for name in our_opt.state[our]:
                # The moments take no square root, so they are torch's to the last bit.
                assert torch.equal(
                    torch.as_tensor(our_opt.state[our][name]),
                    torch.as_tensor(their_opt.state[their][name]),
                )


@each_engine
@given(case=cases(max_steps=20, dtypes={torch.float16: 1, torch.bfloat16: 1}, kinds=(plain_coo,)))
@settings(max_examples=settings.default.max_examples // 2)  # of up to twenty steps each
def test_half_precision_is_torch_in_float32_rounded_once(engine: str, case: Case):
    """What torch computes in float32 from the same params, to half of the last place."""
    case = comparable(case)
    ours = case.params()
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    with running_on(engine) as name:
        our_opt = sparsestep.SparseAdam(case.groups(ours), **case.options, engine=name)
        their_opt = torch.optim.SparseAdam(case.groups(theirs), **case.options)
        for drawn in case.steps:
            before = [p.detach().clone() for p in theirs]
            take_step(our_opt, ours, drawn)
            take_step(their_opt, theirs, drawn)
            for our, their, old in zip(ours, theirs, before, strict=True):
                info = torch.finfo(our.dtype)
                value = their.detach()
                half_place = value.abs() * (info.eps / 2) + info.smallest_normal * info.eps
                in_float32 = 1e-6 * torch.maximum(value.abs(), (value - old).abs())
                apart = (our.detach().float() - value).abs()
                assert bool((apart <= half_place + in_float32).all())
                their.data.copy_(our.data)


@each_dtype
@each_engine
def test_duplicates_that_would_overflow_half_precision_are_summed_wider(
    dtype: torch.dtype, engine: str
):
    """40000 + 40000 - 40000 is 40000, though the first sum is no float16."""
    param = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    values = torch.tensor([[40000.0] * 2, [40000.0] * 2, [-40000.0] * 2], dtype=dtype)
    with running_on(engine) as name:
        opt = sparsestep.SparseAdam([param], lr=0.5, engine=name)
        param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1]]), values, (3, 2))
        opt.step()
    moved = param.detach().float()
    assert torch.equal(moved[[0, 2]], torch.zeros(2, 2))
    assert torch.allclose(moved[1], torch.full((2,), -0.5), rtol=1e-2)


def test_embedding_training_like_torch():
    """A model, autograd and all: padding, the same table twice, a batch that touches nothing."""
    torch.manual_seed(0)
    ours = torch.nn.Embedding(50, 8, sparse=True, padding_idx=0)
    theirs = torch.nn.Embedding(50, 8, sparse=True, padding_idx=0)
    theirs.load_state_dict(ours.state_dict())
    our_opt = sparsestep.SparseAdam(ours.parameters(), lr=0.01)
    their_opt = torch.optim.SparseAdam(list(theirs.parameters()), lr=0.01)
    batches = [torch.randint(0, 50, (2, 30)) for _ in range(10)]
    batches.insert(3, torch.zeros(2, 4, dtype=torch.int64))  # padding only: nnz = 0
    for batch in batches:
        for table, opt in ((ours, our_opt), (theirs, their_opt)):
            opt.zero_grad()
            (table(batch[0]) * table(batch[1])).sum().backward()
            opt.step()
    assert our_opt.state[ours.weight]["step"] == len(batches)
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)


@each_engine
def test_accumulated_gradients_count_as_their_sum(engine: str):
    """Over several backward calls, with equal and different rows."""
    torch.manual_seed(0)
    weight = torch.randn(9, 4)
    tables = [torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False) for _ in range(2)]
    tables[0].sparse = True
    with running_on(engine) as name:
        opts = [sparsestep.SparseAdam(t.parameters(), lr=0.1, engine=name) for t in tables]
        for ids in ([1, 2], [2, 5], [2, 2]):
            tables[0](torch.tensor(ids)).square().sum().backward()
        for ids in ([1, 2], [2, 5], [2, 2]):
            tables[1](torch.tensor(ids)).square().sum().backward()
        assert tables[0].weight.grad.is_sparse
        assert not tables[1].weight.grad.is_sparse
        for opt in opts:
            opt.step()
    touched = [1, 2, 5]
    assert torch.allclose(tables[0].weight[touched], tables[1].weight[touched])
    untouched = [0, 3, 4, 6, 7, 8]
    assert same_bits(tables[0].weight[untouched].detach(), weight[untouched])
