"""Layouts at their edges: one number, no elements, parts of rows, masked tensors, memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.masked import masked_tensor

from sparsestep import IndexedGrad, functional
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.properties.test_layouts import each_of_a_few
from tests.subject import by_hand
from tests.table import (
    Variant,
    each_engine,
    each_optimizer,
    randn,
    running_on,
    same_bits,
    state_tensors,
)


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


def test_batches_of_compressed_matrices():
    dense = torch.zeros(3, 2, 4)
    dense[[0, 1, 1, 2, 0, 2], [1, 0, 1, 1, 0, 1], [2, 0, 3, 1, 1, 3]] = torch.arange(1.0, 7.0)
    for grad in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsc((2, 1))):
        param = torch.zeros(dense.shape)
        functional.sgd_(param, grad, lr=1.0)
        assert torch.equal(param, -dense), grad.layout


@each_engine
def test_of_a_row_only_what_is_held_moves_and_all_of_it_counts(engine: str):
    """The mean is over the whole row; what is not held adds nothing to it."""
    held = torch.tensor([[False, True, False, True], [False] * 4, [True, False, False, False]])
    values = torch.tensor([[9.0, 3.0, 9.0, 4.0], [9.0] * 4, [2.0, 9.0, 9.0, 9.0]])
    mean_square = torch.tensor([25 / 4, 0.0, 4 / 4])
    with running_on(engine) as name:
        for layout, (grad, _) in Entries(values, held).stored(torch.float32, by_row=True).items():
            param, sums = torch.ones(3, 4), torch.full((3,), 0.5)
            functional.rowwise_adagrad_(param, grad, sums, lr=0.1, engine=name)
            assert torch.equal(sums, 0.5 + mean_square), layout
            expected = 1 - 0.1 * values / sums[:, None].sqrt()
            assert torch.allclose(param[held], expected[held], rtol=1e-6), layout
            assert torch.equal(param[~held], torch.ones(9)), layout


# MaskedTensors as ``.grad``, and layouts that torch does not let one assign


pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


@each_optimizer
@each_engine
def test_masked_tensors_as_grad(optimizer: type[RuleOptimizer], engine: str):
    """The optimizer classes take from .grad what their functional twins are handed."""
    steps = [Entries.random((6, 8), (1, 1), 0.4, seed).stored(torch.float32) for seed in range(3)]
    with running_on(engine) as name:
        for layout in ("masked", "masked strides", "masked coo", "masked coo rows", "coo"):
            run = by_hand(Variant(optimizer, {}), name, randn((6, 8)))
            param = torch.nn.Parameter(randn((6, 8)))
            opt = optimizer([param], engine=name)
            for stored in steps:
                grad, _ = stored[layout]
                assert isinstance(grad, Tensor)
                run.take(grad)
                param.grad = grad
                opt.step()
                opt.zero_grad()
                assert param.grad is None
            ours = [param.detach(), *state_tensors(opt)]
            assert all(map(same_bits, ours, run.tensors)), layout


@pytest.mark.parametrize("name", ["csr", "csc", "torch.sparse_bsr (2, 2)", "masked csr"])
def test_what_torch_does_not_let_one_assign(name: str):
    """If this fails, torch has become more generous, and the documentation should say so."""
    stored = Entries.random((6, 8), (2, 2), 0.4, seed=0).stored(torch.float32)
    param = torch.nn.Parameter(torch.zeros(6, 8))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient"):
        param.grad = stored[name][0]


# The example of the MaskedTensor notebook (torch's issue 1369)


def notebook() -> tuple[Tensor, Entries, Tensor]:
    """Its parameter, gradient and sum of squares; the step size is 0.1, eps 1e-10."""
    values = torch.zeros(2, 4)
    values[[0, 1, 1], [2, 0, 2]] = torch.tensor([3.0, 4.0, 5.0])
    return torch.arange(8.0).reshape(2, 4), Entries(values, values != 0), torch.full((2, 4), 0.5)


@each_engine
def test_the_example_of_the_notebook(engine: str):
    start, entries, _ = notebook()
    theirs = torch.nn.Parameter(start.clone())
    opt = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-10, initial_accumulator_value=0.5)
    theirs.grad = entries.coo(torch.float32)
    opt.step()
    sums = torch.tensor([[0.5, 0.5, 9.5, 0.5], [16.5, 0.5, 25.5, 0.5]])
    assert torch.equal(opt.state[theirs]["sum"], sums)
    expected = start - 0.1 * entries.values / (sums.sqrt() + 1e-10)
    assert torch.allclose(theirs, expected, rtol=1e-7)

    stored = entries.stored(torch.float32)
    for block in ((1, 2), (2, 1), (2, 2), (1, 4), (2, 4)):
        # Blocks hold zeros too, by which Adagrad moves nothing.
        stored[f"bsr {block}"] = (entries.values.to_sparse_bsr(block), None)
        stored[f"bsc {block}"] = (entries.values.to_sparse_bsc(block), None)
    with running_on(engine) as name:
        for layout, (grad, mask) in stored.items():
            param, _, state_sum = notebook()
            functional.adagrad_(
                param, grad, state_sum, step=1, lr=0.1, eps=1e-10, mask=mask, engine=name
            )
            assert torch.equal(state_sum, sums), layout
            assert torch.allclose(param, theirs, rtol=1e-7), layout
            assert same_bits(param[~entries.held], start[~entries.held]), layout


# Memory


LARGE = """
import sys, warnings
import torch, sparsestep
from sparsestep import IndexedGrad, functional
from sparsestep.memory import lazy as pages

warnings.simplefilter("ignore")

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

SHAPE = torch.Size([2**17, 2**14])  # 4 GB for each tensor, were it touched
param, state = (
    pages.zeros(SHAPE, torch.float16, torch.device("cpu")) for _ in range(2)
)
rows, columns = torch.arange(7, 2**17, 2**14), torch.arange(5, 2**14, 2**11)
values = torch.ones(8, dtype=torch.float16)
starts = torch.zeros(2**17 + 1, dtype=torch.int64)
starts[rows + 1] = 1
starts = starts.cumsum(0)
across = torch.zeros(2**14 + 1, dtype=torch.int64)
across[columns + 1] = 1
across = across.cumsum(0)
coo = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, SHAPE)
csr = torch.sparse_csr_tensor(starts, columns, values, SHAPE)
csr_mask = torch.sparse_csr_tensor(starts, columns, values > 0, SHAPE)
grads = {
    "coo": coo,
    "csr": csr,
    "csc": torch.sparse_csc_tensor(across, rows, values, SHAPE),
    "bsr": torch.sparse_bsr_tensor(
        starts, columns // 2, values[:, None, None].repeat(1, 1, 2), SHAPE
    ),
    "masked": torch.masked.masked_tensor(csr, csr_mask),
    "touched": IndexedGrad(rows * 2**14 + columns, values, 2**31, 1),
}
sums = torch.zeros(2**17)
before = resident()
for engine in ("native", "reference"):
    for name, grad in grads.items():
        functional.adagrad_(param, grad, state, step=1, engine=engine)
        functional.rowwise_adagrad_(param, grad, sums, engine=engine)
        grown = resident() - before
        assert grown < 200, f"{engine} {name}: {grown} MiB"
assert param[rows, columns].max() < 0
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_handful_of_entries_takes_memory_for_a_handful():
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
