"""A table that is looked up several times: the core reads the parts where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep._native import ext
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.dedup import slot_norms
from sparsestep.grads.indexed import IndexedGrad
from tests.torch_versions import needs_tensors_that_the_core_reads

pytestmark = pytest.mark.skipif(
    ext is None, reason="only the core takes values in several places without a copy"
)

ROWS, DIM = 7, 5
RULES = {
    "SGD": lambda params: sparsestep.SGD(params, lr=0.1, weight_decay=0.1, maximize=True),
    "AdamW": lambda params: sparsestep.AdamW(params, lr=0.1),
    "RowwiseAdagrad": lambda params: sparsestep.RowwiseAdagrad(params, lr=0.1),
}


def part(seed: int, entries: int, form: str, dtype: torch.dtype) -> IndexedGrad:
    """What one lookup leaves: a row for each id, or one for each bag, with factors or without."""
    chance = torch.Generator().manual_seed(seed)
    positions = torch.randint(ROWS, (entries,), generator=chance)
    bags = entries if form == "rows" else 3
    values = torch.randn(bags, DIM, generator=chance).to(dtype)
    source = None if form == "rows" else torch.randint(bags, (entries,), generator=chance)
    scale = torch.rand(entries, generator=chance) if form == "weighted bags" else None
    return IndexedGrad(positions, values, ROWS, DIM, source, scale)


several_parts = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from([0, 1, 20, 300]),
        st.sampled_from(["rows", "bags", "weighted bags"]),
    ),
    min_size=2,
    max_size=4,
)


def never(parts: Any) -> IndexedGrad:
    raise AssertionError("values were copied")


def stepped(rule: str, dtype: torch.dtype, grads: list[Tensor]) -> list[Tensor]:
    """A parameter and its state after steps; the core knows it by the third."""
    param = torch.nn.Parameter(torch.ones(ROWS, DIM, dtype=dtype))
    optimizer = RULES[rule]([param])
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return [param.detach(), *optimizer.state[param].values()]


@needs_tensors_that_the_core_reads
@given(
    rule=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    parts=several_parts,
    threads=st.sampled_from([1, 2]),
)
def test_several_parts_give_the_bits_of_one_that_is_put_together(
    rule: str, dtype: torch.dtype, parts: list[tuple[int, int, str]], threads: int
):
    found = [part(*each, dtype) for each in parts]
    like, shape = torch.empty(0, dtype=dtype), torch.Size([ROWS, DIM])
    first = CompactGrad.of([found[0]], shape, like)
    together = CompactGrad.of([CompactGrad.of(found, shape, like).indexed()], shape, like)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        theirs = stepped(rule, dtype, [first, first, together])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IndexedGrad, "cat", never)
            ours = stepped(rule, dtype, [first, first, CompactGrad.of(found, shape, like)])
    finally:
        torch.set_num_threads(before)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)


@needs_tensors_that_the_core_reads
def test_a_loop_with_two_look_ups_copies_no_values(monkeypatch: pytest.MonkeyPatch):
    table = sparsestep.nn.Embedding(ROWS, DIM)
    optimizer = sparsestep.SparseAdam(table.parameters(), lr=0.1)
    for step in range(5):
        if step == 2:  # the core knows the parameter by now
            monkeypatch.setattr(IndexedGrad, "cat", never)
        optimizer.zero_grad()
        centre = table(torch.tensor([1, 2, 1]))
        context = table(torch.tensor([[3, 1], [0, 0], [2, 5]]))
        (centre.unsqueeze(1) * context).sum().backward()
        optimizer.step()


def test_values_that_the_step_writes_are_read_before():
    shape = torch.Size([ROWS, DIM])
    results = []
    for shares in (True, False):
        param = torch.nn.Parameter(torch.arange(float(ROWS * DIM)).view(ROWS, DIM))
        optimizer = sparsestep.SGD([param], lr=0.5)
        for _ in range(3):
            own = param.detach()[1:3] if shares else param.detach()[1:3].clone()
            others = torch.ones(3, DIM)
            param.grad = CompactGrad.of(
                [
                    IndexedGrad(torch.tensor([0, 2, 2]), others, ROWS, DIM),
                    IndexedGrad(torch.tensor([1, 2, 6]), own, ROWS, DIM, torch.tensor([1, 0, 1])),
                ],
                shape,
                others,
            )
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_id_in_any_part_changes_nothing(where: int):
    param = torch.nn.Parameter(torch.ones(ROWS, DIM))
    optimizer = sparsestep.Adagrad([param], lr=0.1)
    parts = [part(seed, 20, "rows", torch.float32) for seed in (1, 2)]
    param.grad = CompactGrad.of(parts, param.shape, param)
    optimizer.step()
    optimizer.step()
    before = param.detach().clone()
    positions = parts[where].indices
    assert positions is not None
    positions[7] = ROWS
    param.grad = CompactGrad.of(parts, param.shape, param)
    with pytest.raises(sparsestep.InputError, match=rf"in \[0, {ROWS}\)"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 2


@needs_tensors_that_the_core_reads
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    parts=several_parts,
    order=st.sampled_from([1.0, 2.0, torch.inf]),
)
def test_clipping_reads_several_parts_where_they_are(
    dtype: torch.dtype, parts: list[tuple[int, int, str]], order: float
):
    found = [part(*each, dtype) for each in parts]
    like, shape = torch.empty(0, dtype=dtype), torch.Size([ROWS, DIM])
    together = slot_norms((CompactGrad.of(found, shape, like).indexed(),), order)
    ours = slot_norms(tuple(found), order)
    assert ours is not None
    assert together is not None
    assert torch.equal(ours, together)
