"""The same numbers as torch.optim.SparseAdam."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, given

import sparsestep
from tests.generate.cases import Case, cases
from tests.generate.grads import Drawn, plain_coo
from tests.generate.params import REAL
from tests.properties.marks import QUIET
from tests.table import each_dtype, each_engine, running_on, same_bits

pytestmark = QUIET


def take_step(opt: torch.optim.Optimizer, params: list, drawn: list[Drawn | None]) -> None:
    for param, each in zip(params, drawn, strict=True):
        param.grad = None if each is None else each.grad.to(param.dtype)
    opt.step()


def comparable(case: Case) -> Case:
    """The params that both take: contiguous, and with dims, or torch leaves them as they are."""
    kept = [index for index, values in enumerate(case.start) if values.dim()]
    assume(kept)
    return replace(
        case,
        start=[case.start[index].clone(memory_format=torch.contiguous_format) for index in kept],
        steps=[[step[index] for index in kept] for step in case.steps],
    )


# Of one step: a few roundings in float32, and one of the result in half precision.
ROUNDINGS = {torch.float64: 1e-14}
HALVES = (torch.float16, torch.bfloat16)


@each_engine
@given(case=cases(max_steps=20, dtypes=REAL, kinds=(plain_coo,)))
def test_step_by_step_like_torch(engine: str, case: Case):
    """Both start each step from the same params; in half precision, torch computes in float32."""
    case = comparable(case)
    ours = case.params()
    is_half = ours[0].dtype in HALVES
    theirs = [
        torch.nn.Parameter(p.detach().float() if is_half else p.detach().clone()) for p in ours
    ]
    with running_on(engine) as name:
        our_opt = sparsestep.SparseAdam(case.groups(ours), **case.options, engine=name)
        their_opt = torch.optim.SparseAdam(case.groups(theirs), **case.options)
        for drawn in case.steps:
            before = [p.detach().clone() for p in theirs]
            take_step(our_opt, ours, drawn)
            take_step(their_opt, theirs, drawn)
            for our, their, old, each in zip(ours, theirs, before, drawn, strict=True):
                value, info = their.detach(), torch.finfo(our.dtype)
                room = torch.maximum(value.abs(), (value - old).abs())
                room *= ROUNDINGS.get(our.dtype, 1e-6)
                if is_half:
                    room += value.abs() * (info.eps / 2) + info.smallest_normal * info.eps
                assert bool(((our.detach().to(value.dtype) - value).abs() <= room).all())
                if each is not None:
                    kept = old[~each.held].to(our.dtype)
                    assert same_bits(our.detach()[~each.held], kept)
                if is_half:
                    their.data.copy_(our.data)
                else:
                    our.data.copy_(their.data)
        for our, their in zip(ours, theirs, strict=True):
            assert our_opt.state[our].keys() == their_opt.state[their].keys()
            for name in our_opt.state[our]:
                # The moments take no square root, so they are torch's to the last bit.
                assert torch.equal(
                    torch.as_tensor(our_opt.state[our][name]),
                    torch.as_tensor(their_opt.state[their][name]),
                )


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
