"""Storage decides nothing: the same entries give the same bits in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.masked import masked_tensor

import sparsestep
from sparsestep import IndexedGrad, functional
from tests.generate.cases import each_case
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.subject import Snapshot, by_hand
from tests.table import DTYPES, PLAIN, Variant, each_engine, on_each_engine, randn, running_on

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


@dataclass
class Steps:
    """A step to be taken from a state that is not the first."""

    before: Entries
    entries: Entries
    options: dict[str, Any]
    start: Tensor


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    unit = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 40)]))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4) | st.just(15)))
    shape = (unit[0] * grid[0], unit[1] * grid[1])
    share = st.sampled_from([0.2, 0.5, 0.5, 1.0])
    seeds = st.integers(0, 2**16)
    before, entries = (Entries.random(shape, unit, draw(share), draw(seeds)) for _ in range(2))
    options = {"maximize": draw(st.booleans()), "lr": draw(st.sampled_from([1e-3, 0.1, 1.0]))}
    dtype = draw(st.sampled_from(DTYPES))
    return Steps(before, entries, options, randn(shape, draw(seeds)).to(dtype))


@on_each_engine(PLAIN)
@each_case(examples=5, case=steps())
def test_the_layout_decides_nothing(variant: Variant, engine: str, case: Steps):
    """All layouts give one result, which is the rule, in float64, on what is held."""
    dtype, entries = case.start.dtype, case.entries
    with running_on(engine) as name:
        warm = by_hand(variant, name, case.start, **case.options)
        warm.take(case.before.coo(dtype))
        wanted, before = warm.wanted([entries.drawn(None)]), Snapshot(warm)
        first = warm.copy().take(entries.coo(dtype))
        for layout, (grad, mask) in entries.stored(
            dtype, by_row=variant.rule.needs_whole_rows
        ).items():
            drawn = entries.drawn(grad)
            run = warm.copy().take(grad, mask)
            if run.optimizer.engine == "native":
                assert run.same_as(first), layout
            run.check([drawn], wanted, before)


# One of each kind: per element, with decay, with numbers per row, without any state.
WITH_OPTIONS = [
    Variant(sparsestep.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    Variant(sparsestep.SparseAdam, {"bias_correction": "per_row"}),
    Variant(sparsestep.RowwiseAdagrad, {}),
    Variant(sparsestep.RowwiseAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sparsestep.SGD, {}),
]
each_of_a_few = pytest.mark.parametrize("variant", WITH_OPTIONS, ids=str)


@each_of_a_few
def test_large_gradients_in_every_layout(variant: Variant):
    """Enough for several threads, buckets of positions and rows of several tiles."""
    for shape, unit in (((24, 1200), (4, 6)), ((600, 24), (2, 24))):
        entries = Entries.random(shape, unit, 0.4, seed=0)
        stored = entries.stored(torch.float32, by_row=variant.rule.needs_whole_rows)
        torch.set_num_threads(1)
        first = by_hand(variant, "native", randn(shape)).take(*stored["coo"])
        torch.set_num_threads(2)
        for layout, (grad, mask) in stored.items():
            run = by_hand(variant, "native", randn(shape)).take(grad, mask)
            assert run.same_as(first), layout


@each_of_a_few
@each_engine
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_a_parameter_without_elements(variant: Variant, engine: str, shape: tuple[int, int]):
    nothing = torch.zeros(0, dtype=torch.int64)
    zeros = torch.zeros(shape)
    with running_on(engine) as name:
        for grad in (
            zeros.to_sparse_csr(),
            zeros.to_sparse_csc(),
            zeros.to_sparse_bsr((2, 2)),
            zeros.to_sparse_bsc((1, 4)),
            masked_tensor(zeros.to_sparse_coo(), (zeros > 0).to_sparse_coo()),
            IndexedGrad(nothing, torch.zeros(0), 0, 1),
            IndexedGrad(nothing, torch.zeros(0, 3), 3, 0, nothing),
        ):
            run = by_hand(variant, name, zeros).take(grad)
            assert run.tensors[0].shape == shape


@pytest.mark.parametrize("name", ["csr", "csc", "torch.sparse_bsr (2, 2)", "masked csr"])
def test_what_torch_does_not_let_one_assign(name: str):
    """If this fails, torch has become more generous, and the documentation should say so."""
    stored = Entries.random((6, 8), (2, 2), 0.4, seed=0).stored(torch.float32)
    param = torch.nn.Parameter(torch.zeros(6, 8))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient"):
        param.grad = stored[name][0]


def test_batches_of_compressed_matrices():
    dense = torch.zeros(3, 2, 4)
    dense[[0, 1, 1, 2, 0, 2], [1, 0, 1, 1, 0, 1], [2, 0, 3, 1, 1, 3]] = torch.arange(1.0, 7.0)
    for grad in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsc((2, 1))):
        param = torch.zeros(dense.shape)
        functional.sgd_(param, grad, lr=1.0)
        assert torch.equal(param, -dense), grad.layout
