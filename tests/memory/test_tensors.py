"""Tensors that can be updated in place, and memory that several share."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import sparsestep
from sparsestep.memory.tensors import has_internal_overlap, overlapping
from sparsestep.optim import OPTIMIZERS
from tests.table import EVERY, same_bits


@pytest.mark.parametrize("bytes_left", [0, 16])
def test_memory_that_was_taken_away_is_noticed(bytes_left: int):
    table = nn.Parameter(torch.zeros(5, 2))
    opt = sparsestep.Lion([table])
    table.grad = torch.ones(5, 2).to_sparse(1)
    for _ in range(2):
        opt.step()
    table.untyped_storage().resize_(bytes_left)
    with pytest.raises(sparsestep.InputError, match="for all of its elements"):
        opt.step()


@given(st.data())
def test_internal_overlap_is_that_of_the_elements(data: st.DataObject):
    """Strides alone decide in the common cases only."""
    dims = data.draw(st.integers(0, 3))
    shape = data.draw(st.tuples(*[st.integers(0, 4)] * dims))
    strides = data.draw(st.tuples(*[st.integers(0, 7)] * dims))
    places = [
        sum(map(int.__mul__, index, strides))
        for index in itertools.product(*(range(n) for n in shape))
    ]
    tensor = torch.zeros(100).as_strided(shape, strides)
    assert has_internal_overlap(tensor) == (len(set(places)) < len(places))


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6))
def test_tensors_that_overlap_are_found(bounds: list[tuple[int, int]]):
    line = torch.zeros(12)
    views = [line[min(pair) : max(pair)] for pair in bounds]
    places = [set(range(min(pair), max(pair))) for pair in bounds]
    found = overlapping(views)
    for i, view in enumerate(views):
        shared = any(places[i] & other for j, other in enumerate(places) if i != j)
        assert (id(view) in found) == shared


KINDS = list(itertools.product(["native", "reference", "torch"], repeat=2))


@pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_no_update_of_overlapping_views_is_lost(kinds: tuple[str, str]):
    """Run by the core, by the reference engine (odd strides), by torch's kernel."""
    line = torch.zeros(12)
    params, grads = [], []
    for kind, begin in zip(kinds, (0, 4), strict=True):
        view = line[begin : begin + 8].view(2, 2, 2)
        odd = kind == "reference"
        params.append(view.transpose(1, 2) if odd else view)
        dense = torch.ones(2, 2, 2)
        sparse = sparsestep.IndexedGrad(torch.tensor([0, 1]), dense)
        grads.append(dense if kind == "torch" else sparse)
    sparsestep.FunctionalSGD(params, lr=1.0).step(grads)
    assert line.tolist() == [-1.0] * 4 + [-2.0] * 4 + [-1.0] * 4


# Gradients in memory of the parameter, or in none


def test_a_gradient_of_zeros_without_memory():
    for optimizer in OPTIMIZERS:
        params = [nn.Parameter(torch.ones(5, 2)) for _ in range(2)]
        grads = torch._efficientzerotensor((5, 2)), torch.zeros(5, 2)
        for param, grad in zip(params, grads, strict=True):
            opt = optimizer([param])
            for _ in range(2):
                param.grad = grad
                opt.step()
        assert same_bits(*params), optimizer.__name__


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("field", ["indices", "value_index"])
def test_indices_in_the_memory_of_the_parameter(engine: str, field: str):
    """They are overwritten by the step that reads them: as floats, small integers are tiny."""
    entries = torch.arange(40)
    numbers = entries.flip(0)
    values = (entries - entries // 2).view(torch.float64)
    grad = sparsestep.IndexedGrad(numbers, values)
    if field == "value_index":
        grad = sparsestep.IndexedGrad(entries.roll(-1), values.roll(1), value_index=numbers)
    sparsestep.functional.sgd_(numbers.view(torch.float64), grad, lr=1.0, engine=engine)
    assert torch.equal(numbers, entries.flip(0) // 2)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("sparse", [False, True])
def test_values_in_the_memory_of_the_parameter(engine: str, sparse: bool):
    param = torch.arange(3000.0).view(1000, 3)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    expected = param.index_add(0, order if sparse else torch.arange(1000), -0.5 * param)
    grad = sparsestep.IndexedGrad(order, param) if sparse else param
    sparsestep.functional.sgd_(param, grad, lr=0.5, engine=engine)
    assert same_bits(param, expected)


def table(rows: int = 6) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4).requires_grad_()


def step(opt: torch.optim.Optimizer, param: torch.Tensor, *rows: int) -> None:
    values = torch.ones(len(rows), 4)
    param.grad = torch.sparse_coo_tensor(torch.tensor([rows]), values, param.shape)
    opt.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_every_optimizer_shares_its_state(steps: int):
    for variant in EVERY:
        if variant.options.get("dampening"):
            continue  # refused
        params = table(), table()
        shared, other = (variant([param], lr=0.1) for param in params)
        for opt, param in zip((shared, other), params, strict=True):
            for _ in range(steps):
                step(opt, param, 1, 5)
            if opt is shared:
                opt.share_memory()
                assert {spec.name for spec in variant.rule.state} <= opt.state[param].keys()
            step(opt, param, 0, 5)
        tensors = [v for v in shared.state[params[0]].values() if isinstance(v, torch.Tensor)]
        assert all(tensor.is_shared() for tensor in tensors), "the step has kept it there"
        assert same_bits(*(param.detach() for param in params)), str(variant)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_large_state_is_shared_with_another_process():
    param = table(rows=100_000)
    param.requires_grad_(False).share_memory_()
    opt = sparsestep.Adam([param.requires_grad_()], lr=0.1)
    opt.share_memory()
    worker = torch.multiprocessing.get_context("fork").Process(target=step, args=(opt, param, 7))
    torch.set_num_threads(1)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    kept = opt.state[param]
    assert float(kept["step"]) == 1
    assert kept["exp_avg"][7].ne(0).all()
    assert kept["exp_avg"].count_nonzero() == 4
