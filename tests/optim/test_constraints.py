"""``max_norm`` and ``normalize`` beside everything else that an optimizer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep import storage
from sparsestep.errors import InputError
from tests.table import each_engine, randn, running_on, same_bits


def made(**options: Any) -> tuple[torch.nn.Embedding, torch.optim.Optimizer]:
    table = torch.nn.Embedding(20, 4, sparse=True)
    table.weight.data.copy_(3 * randn((20, 4)))
    return table, sparsestep.Adam(table.parameters(), lr=0.1, **options)


def look_up(table: torch.nn.Embedding, *rows: int) -> None:
    table.weight.grad = None
    table(torch.tensor(rows)).sum().backward()


def norms(weight: torch.Tensor) -> list[float]:
    return [round(norm, 5) for norm in weight.detach().norm(dim=1).tolist()]


def test_dense_gradients_constrain_every_row_instead_of_torchs_kernel():
    for options in ({}, {"fused": True}, {"foreach": True}):
        table, opt = made(normalize=True, **options)
        table.weight.grad = torch.ones_like(table.weight)
        opt.step()
        assert norms(table.weight) == [1.0] * 20
        assert [each.engine for each in opt.explain()] == ["native"]


def test_zero_tiny_and_huge_rows_and_a_nan_that_poisons_its_row_alone():
    rows = torch.tensor([[0.0, 0.0], [3e-45, 0.0], [3e38, 3e38], [torch.nan, 3.0], [3.0, 4.0]])
    weight = torch.nn.Parameter(rows)
    weight.grad = torch.zeros_like(weight)
    sparsestep.SGD([weight], lr=0.1, normalize=True).step()
    assert norms(weight[[0, 1, 2, 4]]) == [0.0, 1.0, 1.0, 1.0]
    weight.data = torch.tensor([[torch.nan, 3.0], [3.0, 4.0]])
    weight.grad = torch.zeros_like(weight)
    sparsestep.SGD([weight], lr=0.1, max_norm=1.0).step()
    assert weight[0, 1] == 3.0
    assert norms(weight[1:]) == [1.0]


@each_engine
def test_half_precision_is_rounded_once(engine: str):
    """After the constraint, at random if asked for: the same in rows of several tiles."""
    for random in (False, True):
        weight = torch.nn.Parameter(randn((3, 1200)).bfloat16())
        options = {"stochastic_rounding": True, "rounding_seed": 3} if random else {}
        with running_on(engine) as name:
            opt = sparsestep.SGD([weight], lr=0.1, normalize=True, engine=name, **options)
            exact = weight.detach().double()
            weight.grad = torch.ones_like(weight)
            opt.step()
        exact = torch.nn.functional.normalize(exact - 0.1, dim=1)
        if random:
            assert ((weight - exact).abs() <= exact.abs() / 128).all()
            assert (weight != exact.bfloat16()).any()
        else:
            off = (weight != exact.bfloat16()).double().mean()
            assert off < 0.01  # where float32 lies between two numbers of bfloat16


def test_long_rows_in_half_precision_are_the_reference_engines():
    weight = torch.nn.Parameter(randn((2, 9000)).bfloat16())
    weight.grad = torch.ones_like(weight)
    with pytest.raises(InputError):
        sparsestep.SGD([weight], lr=0.1, max_norm=1.0, engine="native").step()
    wide = torch.nn.Parameter(randn((2, 9000)))
    wide.grad = torch.ones_like(wide)
    sparsestep.SGD([wide], lr=0.1, max_norm=1.0, engine="native").step()
    assert norms(wide) == [1.0, 1.0]


def test_int8_state_is_not_constrained():
    (table, opt), (other, theirs) = (
        made(state_dtype=torch.int8, rounding_seed=1, **more) for more in ({}, {"max_norm": 0.5})
    )
    for each, optimizer in ((table, opt), (other, theirs)):
        look_up(each, 1, 5)
        optimizer.step()
    assert norms(other.weight[[1, 5]]) == [0.5, 0.5]
    for name in ("exp_avg", "exp_avg_sq"):
        assert same_bits(opt.state[table.weight][name], theirs.state[other.weight][name])


def test_a_table_in_a_file_marks_the_rows_that_a_step_constrains(tmp_path: Path):
    weight = storage.mapped(tmp_path / "table", (1000, 4), optimizer=sparsestep.Adam)
    weight.copy_(randn((1000, 4)))
    table = torch.nn.Embedding.from_pretrained(weight, freeze=False)
    param = table.weight
    opt = sparsestep.Adam([param], lr=0.1, max_norm=0.5)
    storage.save(tmp_path / "checkpoint", table, opt)
    param.grad = torch.sparse_coo_tensor([[1, 5]], torch.ones(2, 4), (1000, 4))
    opt.step()
    storage.save(tmp_path / "checkpoint", table, opt)
    after = param.detach().clone()
    param.data.zero_()
    storage.load(tmp_path / "checkpoint", table, opt)
    assert same_bits(param, after)
    assert norms(param[[1, 5]]) == [0.5, 0.5]
