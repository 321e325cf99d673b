"""``optimizer.catch_up`` and ``optimizer.forget``: what is done to rows between steps."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.subject import Snapshot, Subject, refused
from tests.table import EVERY, WITH_DENSE, Variant, each_engine, running_on, same_bits, state_of

# Rows that catch up


def momentum(engine: str = "auto") -> tuple[torch.nn.Parameter, sparsestep.SGD]:
    """Rows 0 to 3 of five have had a gradient, one in each step."""
    param = torch.nn.Parameter(torch.zeros(5, 1))
    opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, semantics="dense", engine=engine)
    for row in range(4):
        param.grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 1), (5, 1))
        opt.step()
    return param, opt


STALE = [-1.0, -1.0, -1.0, -1.0, 0.0]
CURRENT = [-1.875, -1.75, -1.5, -1.0, 0.0]


@each_engine
def test_catch_up_of_some_rows(engine: str):
    for rows in (
        torch.tensor([0, 2]),
        torch.tensor([[0, 2], [2, 4]]),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([2, 0, 2, 2], dtype=torch.uint8),
        torch.tensor([0, 9, 2, 9])[::2],
    ):
        with running_on(engine) as name:
            param, opt = momentum(name)
            opt.catch_up(param, torch.tensor([], dtype=torch.int64))
            assert param.flatten().tolist() == STALE
            opt.catch_up(param, torch.tensor(1))
            opt.catch_up(param, rows)
            assert param.flatten().tolist() == CURRENT
            opt.catch_up(param, rows)
            opt.catch_up(param)
        assert param.flatten().tolist() == CURRENT
        buffer = opt.state[param]["momentum_buffer"]
        assert buffer.flatten().tolist() == [0.125, 0.25, 0.5, 1.0, 0.0]


@pytest.mark.parametrize("semantics", ["dense", "masked"])
def test_without_a_step_or_under_masked_semantics_there_is_nothing_to_catch_up(semantics: str):
    """Code that does not know which semantics it has may call it."""
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param], semantics=semantics)
    if semantics == "masked":
        param.grad = torch.ones(5, 1).to_sparse_coo()
        opt.step()
    before = param.detach().clone()
    opt.catch_up()
    opt.catch_up(param, torch.tensor([3]))
    assert same_bits(param, before)


def test_rows_that_do_not_exist_are_refused():
    """A mask least of all: it would be taken for rows 0 and 1."""
    param, opt = momentum()
    for rows in (
        *(torch.tensor([0, -1, 1]), torch.tensor([0, 5, 1]), torch.tensor([2**40])),
        *(torch.tensor([True] * 5), torch.tensor([1.5]), [1]),
    ):
        for method in (opt.catch_up, opt.forget):
            with refused(opt, note=str(rows)):
                method(param, rows)
    for other in (torch.nn.Parameter(torch.ones(5, 1)), param.detach(), "weight"):
        for method in (opt.catch_up, opt.forget):
            with refused(opt):
                method(other, torch.tensor([0]))
    opt.catch_up()
    assert param.flatten().tolist() == CURRENT


@each_engine
def test_a_parameter_that_was_replaced_is_refused(engine: str):
    """Its state has another shape: nothing outside of it may be written."""
    for shape in ((5, 40), (50, 1), (2, 1)):
        with running_on(engine) as name:
            param, opt = momentum(name)
            param.grad = None
            param.data = torch.zeros(shape)
            for rows in (None, torch.tensor([1])):
                with pytest.raises(InputError):
                    opt.catch_up(param, rows)
        assert not param.any()


# Rows that start over


ROWS = 6


def gradient(rows: list[int], seed: int) -> Tensor:
    values = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(seed))
    return torch.sparse_coo_tensor([rows], values, (ROWS, 3))


def trained(variant: Variant, steps: list[list[int]], **options: Any) -> tuple[Tensor, Any]:
    param = torch.nn.Parameter(torch.linspace(-1, 1, ROWS * 3).view(ROWS, 3))
    opt = variant([param], **options)
    for seed, rows in enumerate(steps):
        opt.catch_up(param, torch.tensor(rows))
        param.grad = gradient(rows, seed)
        opt.step()
    return param, opt


def test_state_of_forgotten_rows_is_initial_and_that_of_others_stays():
    """Of each rule, and in int8; whole, and packed by a mask over elements."""
    coded = {"state_dtype": torch.int8, "rounding_seed": 1, "weight_decay": 0.0}
    elements = torch.eye(ROWS, 3) + 1 > torch.arange(3)
    for variant, mask in product([*EVERY, Variant(sparsestep.AdamW, coded)], (None, elements)):
        param, opt = trained(variant, [[0, 1, 2], [1, 1, 5]], mask=mask)
        fresh, begun = trained(variant, [[3], [3]], mask=mask)  # others are as in the beginning
        before = Snapshot(Subject(opt))
        opt.forget(param, torch.tensor([[1], [5], [1]]))
        assert same_bits(param, before.params[0])
        for name, value in state_of(opt, param).items():
            if name == "step":
                assert value == before.state[0][name]
                continue
            for row in range(ROWS):
                kept = state_of(begun, fresh)[name] if row in (1, 5) else before.state[0][name]
                assert same_bits(value[row], kept[row]), (variant, name, row)


def test_under_dense_semantics_a_forgotten_row_is_current_and_goes_on_as_a_new_one():
    steps = [[0, 1], [2], [0]]
    for cls in WITH_DENSE:
        variant = Variant(cls, {"weight_decay": 0.1} if cls is sparsestep.AdamW else {})
        param, opt = trained(variant, steps, semantics="dense")
        expected, other = trained(variant, steps, semantics="dense")
        other.catch_up()
        opt.forget(param, torch.tensor([1, 4]))
        assert same_bits(param[[1, 4]], expected[[1, 4]])
        # From here on, a row with new state: like one without any, of the same value.
        opt.catch_up()
        with torch.no_grad():
            param[1] = param[3]
        opt.forget(param, torch.tensor([1]))
        for rows in ([0], [1, 3], [0]):  # the same gradient for both
            if cls is sparsestep.AdamW or rows == [0]:  # without decay, new rows are never stale
                opt.catch_up(param, torch.tensor(rows))
            param.grad = torch.sparse_coo_tensor([rows], torch.ones(len(rows), 3), (ROWS, 3))
            opt.step()
        opt.catch_up()
        assert same_bits(param[1], param[3])
        for name, tensor in opt.state[param].items():
            if name != "step":
                assert same_bits(tensor[1], tensor[3]), (variant, name)


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_before_the_first_step_there_is_nothing_to_forget(semantics: str):
    param = torch.nn.Parameter(torch.ones(ROWS, 3))
    opt = sparsestep.Adam([param], semantics=semantics)
    opt.forget(param, torch.tensor([0]))
    assert len(opt.state) == 0
    opt.materialize_state()
    opt.forget(param, torch.tensor([0, 0]))
    param.grad = gradient([0], 1)
    opt.step()
    opt.forget(param, torch.empty(0, dtype=torch.int32))
    assert opt.state[param]["exp_avg"][0].abs().sum() > 0
    opt.state[param]["exp_avg_sq"] = torch.ones(2, 3)
    with refused(opt, note="state that does not fit"):
        opt.forget(param, torch.tensor([0]))


def test_complex_parameters_and_single_numbers_have_rows_too():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    single = torch.nn.Parameter(torch.ones(()))
    opt = sparsestep.Adagrad([param, single], initial_accumulator_value=0.25)
    param.grad, single.grad = torch.ones_like(param), torch.ones_like(single)
    opt.step()
    opt.forget(param, torch.tensor([2]))
    opt.forget(single, torch.tensor(0))
    assert opt.state[param]["sum"].tolist() == [1.25 + 0.25j, 1.25 + 0.25j, 0.25 + 0.25j]
    assert float(opt.state[single]["sum"]) == 0.25
