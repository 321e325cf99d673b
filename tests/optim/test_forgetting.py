"""``optimizer.forget``: rows begin anew, as if they never had a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.table import EVERY, WITH_DENSE, Variant, same_bits, snapshot, unchanged

ROWS = 6
dense_variants = [
    Variant(cls, {"weight_decay": 0.1} if cls is sparsestep.AdamW else {}) for cls in WITH_DENSE
]


def gradient(rows: list[int], seed: int, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rows), width, generator=generator)
    return torch.sparse_coo_tensor([rows], values, (ROWS, width))


def trained(variant: Variant, steps: list[list[int]], **options: Any) -> tuple[Tensor, Any]:
    param = torch.nn.Parameter(torch.linspace(-1, 1, ROWS * 3).view(ROWS, 3))
    opt = variant([param], **options)
    for seed, rows in enumerate(steps):
        opt.catch_up(param, torch.tensor(rows))
        param.grad = gradient(rows, seed)
        opt.step()
    return param, opt


@pytest.mark.parametrize("engine", ["reference", "auto"])
@pytest.mark.parametrize("variant", EVERY, ids=str)
def test_state_of_forgotten_rows_is_initial_and_that_of_others_stays(variant: Variant, engine: str):
    param, opt = trained(variant, [[0, 1, 2], [1, 1, 5]], engine=engine)
    fresh, begun = trained(variant, [[3], [3]], engine=engine)  # others are as in the beginning
    before = snapshot(opt)
    opt.forget(param, torch.tensor([[1], [5], [1]]))
    assert same_bits(param.detach(), before[0])
    for name, value in opt.state[param].items():
        if name == "step":
            assert value == before[1][name]
            continue
        initial = begun.state[fresh][name]
        for row in range(ROWS):
            kept = initial if row in (1, 5) else before[1][name]
            assert same_bits(value[row], kept[row]), (name, row)


@pytest.mark.parametrize("variant", dense_variants, ids=str)
def test_under_dense_semantics_a_forgotten_row_is_current_and_goes_on_as_a_new_one(
    variant: Variant,
):
    steps = [[0, 1], [2], [0]]
    param, opt = trained(variant, steps, semantics="dense")
    expected, other = trained(variant, steps, semantics="dense")
    other.catch_up()
    opt.forget(param, torch.tensor([1, 4]))
    assert same_bits(param[1].detach(), expected[1].detach())
    assert same_bits(param[4].detach(), expected[4].detach())
    # From here on, a row with new state: like one that was never touched and has the same value.
    opt.catch_up()
    with torch.no_grad():
        param[1] = param[3]
    opt.forget(param, torch.tensor([1]))
    for rows in ([0], [1, 3], [0]):  # the same gradient for both
        opt.catch_up(param, torch.tensor(rows))
        param.grad = torch.sparse_coo_tensor([rows], torch.ones(len(rows), 3), (ROWS, 3))
        opt.step()
    opt.catch_up()
    assert same_bits(param[1].detach(), param[3].detach())
    for name, tensor in opt.state[param].items():
        if name != "step":
            assert same_bits(tensor[1], tensor[3]), name


def test_a_forgotten_row_that_is_written_is_no_surprise():
    """Nobody is warned of a row that was read or written while it was behind."""
    table = torch.nn.Embedding(ROWS, 3, sparse=True)
    opt = sparsestep.Adam(table.parameters(), semantics="dense")
    opt.track(table)
    for rows in ([0, 1], [2], [1, 4]):
        opt.zero_grad()
        opt.forget(table.weight, torch.tensor(rows))
        table(torch.tensor(rows)).sum().backward()
        opt.step()


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


def test_the_initial_value_may_be_an_option():
    param = torch.nn.Parameter(torch.ones(2, 2))
    opt = sparsestep.Adagrad([{"params": [param], "initial_accumulator_value": 0.5}])
    param.grad = torch.ones(2, 2)
    opt.step()
    opt.forget(param, torch.tensor([1]))
    assert opt.state[param]["sum"].tolist() == [[1.5, 1.5], [0.5, 0.5]]


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


def test_masked_groups_and_the_next_step():
    """The step after it is the first of the row; its mask goes on as before."""
    mask = torch.tensor([True, True, False, False, False, False])
    param = torch.nn.Parameter(torch.zeros(ROWS, 3))
    opt = sparsestep.RowwiseAdagrad([{"params": [param], "mask": mask}], lr=0.1)
    for _ in range(3):
        param.grad = torch.ones(ROWS, 3)
        opt.step()
    before = param.detach().clone()
    opt.forget(param, torch.tensor([0, 2]))
    opt.step()
    assert torch.allclose(before[0] - param[0], torch.tensor(0.1))  # a first step is as long as lr
    assert torch.allclose(before[1] - param[1], torch.tensor(0.05))
    assert same_bits(param[2].detach(), before[2])


def test_functional_optimizers_forget_as_well():
    weight = torch.zeros(ROWS, 3)
    opt = sparsestep.FunctionalAdam([weight])
    opt.step([gradient([0, 1], 3)])
    opt.forget(weight, torch.tensor([1]))
    moments = opt.state[weight]["exp_avg"]
    assert moments[0].abs().sum() > 0
    assert moments[1].abs().sum() == 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([6]), r"rows to forget must be in \[0, 6\)\. Got 6\.$"),
        (torch.tensor([0, -1]), r"rows to forget must be in \[0, 6\)\. Got -1\.$"),
        (torch.tensor([0.0]), r"rows must be an integer tensor\. Got torch\.float32\.$"),
        ([0], r"rows must be an integer tensor\. Got list\.$"),
    ],
)
def test_what_is_no_row_is_refused(rows: Any, message: str):
    param, opt = trained(Variant(sparsestep.Adam, {}), [[0]])
    before = snapshot(opt)
    with pytest.raises(InputError, match="^Adam: " + message):
        opt.forget(param, rows)
    assert unchanged(opt, before)


def test_parameters_and_state_that_do_not_fit_are_refused():
    param, opt = trained(Variant(sparsestep.Adam, {}), [[0]])
    for other in (param.detach(), torch.nn.Parameter(torch.ones(ROWS, 3))):
        with pytest.raises(InputError, match=r"^Adam: .*one of this optimizer's\. Got another"):
            opt.forget(other, torch.tensor([0]))
    with pytest.raises(InputError, match=r"^Adam: .*one of this optimizer's\. Got str"):
        opt.forget("weight", torch.tensor([0]))  # type: ignore[arg-type]
    opt.state[param]["exp_avg_sq"] = torch.ones(2, 3)
    before = snapshot(opt)
    with pytest.raises(InputError, match=r"^Adam: the state 'exp_avg_sq' must have shape"):
        opt.forget(param, torch.tensor([0]))
    assert unchanged(opt, before)
