"""Batches, dense dims, slots of any size, and gradients or parameters without elements."""

from __future__ import annotations

import pytest
import torch
from torch.masked import masked_tensor

from sparsestep import IndexedGrad, functional
from tests.generate.layouts import BLOCKED, Entries, Stored, coalesced, compress
from tests.grads.layout_runs import FEW, MARKS, Run, each_kind, each_of_a_few, randn
from tests.table import Variant, each_variant, running_on, same_bits, steps_of

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, *BLOCKED)
each_compressed = pytest.mark.parametrize("layout", COMPRESSED, ids=str)


# Batches, dense dims, slots of any size


@each_compressed
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dense", [(), (2,), (3, 2)], ids=str)
@each_kind
def test_batches_and_dense_dims(
    layout: torch.layout, batch: tuple[int, ...], dense: tuple[int, ...], engine: str
):
    block = (2, 3) if layout in BLOCKED else (1, 1)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.zeros(*batch, 8 // block[0], 9 // block[1], dtype=torch.bool)
    for each in blocks.reshape(-1, *blocks.shape[-2:]):  # as many in each batch
        each.reshape(-1)[torch.randperm(each.numel(), generator=generator)[:5]] = True
    held = blocks.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    shape = (*held.shape, *dense)
    values = torch.randint(-16, 17, shape, generator=generator) / 8
    made = [
        compress(v, h, layout, block)
        for v, h in zip(values.reshape(-1, 8, 9, *dense), held.reshape(-1, 8, 9), strict=True)
    ]
    starts, others, inside = (torch.stack(each) for each in zip(*made, strict=True))
    grad = torch.sparse_compressed_tensor(
        *(each.reshape(*batch, *each.shape[1:]) for each in (starts, others, inside)),
        shape,
        layout=layout,
    )
    coo = coalesced(held.nonzero().t(), values[held], shape)
    with running_on(engine) as name:
        for variant in FEW:
            first = Run(variant, name, randn(shape)).step(coo)
            assert Run(variant, name, randn(shape)).step(grad).like(first), variant


@each_of_a_few
@each_kind
@pytest.mark.parametrize("shape", [(48,), (4, 12), (12, 4), (4, 3, 4), (1, 48), (48, 1)], ids=str)
def test_slots_of_every_size(variant: Variant, engine: str, shape: tuple[int, ...]):
    """An IndexedGrad may cut a parameter into any equal pieces, whatever its dims are."""
    generator = torch.Generator().manual_seed(0)
    with running_on(engine) as name:
        for slots in (n for n in range(1, 49) if 48 % n == 0):
            block = 48 // slots
            positions = torch.randint(0, slots, (min(slots, 5),), generator=generator)
            values = torch.randint(-16, 17, (len(positions), block), generator=generator) / 8
            elements = (positions[:, None] * block + torch.arange(block)).reshape(-1)
            indices = torch.stack(torch.unravel_index(elements, shape))
            coo = torch.sparse_coo_tensor(indices, values.reshape(-1), shape)
            # The same rows of values through a source, back to front.
            source = torch.arange(len(positions)).flip(0)
            first = Run(variant, name, randn(shape)).step(coo)
            for grad in (
                IndexedGrad(positions, values, slots, block),
                IndexedGrad(positions, values.flip(0), slots, block, source),
            ):
                assert Run(variant, name, randn(shape)).step(grad).like(first), slots


@each_kind
def test_a_touched_without_positions_is_a_dense_gradient(engine: str):
    values = randn((4, 6), 1)
    with running_on(engine) as name:
        results = []
        for grad in (
            values,
            IndexedGrad(None, values),
            IndexedGrad(None, values.t().contiguous().t()),
        ):
            param, sums = randn((4, 6)), torch.zeros(4, 6)
            functional.adagrad_(param, grad, sums, step=1, engine=name)
            results.append((param, sums))
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


def test_one_number_is_a_parameter_too():
    for grad in (
        torch.tensor(2.0),
        IndexedGrad(torch.tensor([0]), torch.tensor([2.0])),
        IndexedGrad(torch.tensor([0, 0]), torch.tensor([1.5, 0.5]), 1, 1),
        masked_tensor(torch.tensor(2.0), torch.tensor(True)),
        torch.sparse_coo_tensor(torch.zeros(0, 2), torch.tensor([1.5, 0.5]), ()),
    ):
        param = torch.tensor(1.0)
        functional.sgd_(param, grad, lr=0.25, engine="native")
        assert param.item() == 0.5


# Nothing to do


def empty(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Stored]:
    """Gradients that hold nothing."""
    return Entries(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), shape).stored(dtype)


@each_variant
@each_kind
def test_a_gradient_that_holds_nothing_counts_and_moves_nothing(variant: Variant, engine: str):
    with running_on(engine) as name:
        warm = Run(variant, name, randn((4, 6))).step(
            coalesced(torch.tensor([[1]]), randn((1, 6)), (4, 6))
        )
        for layout, (grad, mask) in empty((4, 6)).items():
            if layout == "strided, elements masked" and variant.rule.by_row:
                continue
            run = warm.again().step(grad, mask)
            assert same_bits(run.param, warm.param), layout
            for kept in variant.rule.state:
                ours, theirs = (r.by_hand.state[r.param][kept.name] for r in (run, warm))
                assert same_bits(ours, theirs), layout
            count = steps_of(run.optimizer, run.param)
            assert count == (None if count is None else 2), layout


@each_of_a_few
@each_kind
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_a_parameter_without_elements(variant: Variant, engine: str, shape: tuple[int, int]):
    nothing = torch.zeros(0, dtype=torch.int64)
    zeros = torch.zeros(shape)
    with running_on(engine) as name:
        for grad in (
            zeros.to_sparse_coo(),
            zeros.to_sparse_csr(),
            zeros.to_sparse_csc(),
            zeros.to_sparse_bsr((2, 2)),
            zeros.to_sparse_bsc((1, 4)),
            masked_tensor(zeros, zeros > 0),
            masked_tensor(zeros.to_sparse_coo(), (zeros > 0).to_sparse_coo()),
            IndexedGrad(nothing, torch.zeros(0, shape[1])),
            IndexedGrad(nothing, torch.zeros(0), 0, 1),
            IndexedGrad(nothing, torch.zeros(0, 3), 3, 0, nothing),
            IndexedGrad(None, zeros),
        ):
            run = Run(variant, name, zeros).step(grad)
            assert run.param.shape == shape
