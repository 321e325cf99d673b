"""What some ranks save, other numbers of ranks load; training goes on with the same bits."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from tests.table import same_bits

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.conftest import Once
from tests.distributed.pair import run_ranks
from tests.distributed.runs import STEPS, Tables, put_together
from tests.distributed.shard_checkpoints import (
    CASES,
    HALF,
    OTHER,
    WHOLE,
    begin,
    go_on,
    load_half,
    save_half,
)


@pytest.fixture(scope="module")
def runs(once: Once) -> tuple[Path, dict[Any, dict[str, Any]]]:
    """One process saves, two ranks, and three; each loads what the others have saved."""

    def run(folder: Path) -> tuple[Path, dict[Any, dict[str, Any]]]:
        save_half(folder, 0, 1)
        results = run_ranks("tests.distributed.shard_checkpoints", folder, 3)
        found: dict[Any, dict[str, Any]] = {}
        for key in results[0]:
            found[key] = put_together([each[key] for each in results if key in each], key[1])
        for saved_by in (1, 2, 3):
            found.update(load_half(folder, 0, 1, saved_by))
        return folder, found

    return cast("tuple[Path, dict[Any, dict[str, Any]]]", once("checkpoints", run))


def assert_bits(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key != "norms":
            mine, its = torch.as_tensor(ours[key]), torch.as_tensor(value)
            assert same_bits(mine.float(), its.float()), key


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_from_a_checkpoint_of_any_number_of_ranks(runs: Any, name: str):
    """Into the same kind and into another, as if there had been one process all the time."""
    _, found = runs
    case = CASES[name]
    model, opt = begin(case, "plain")
    go_on(case, model, opt, HALF, 0, 1)
    whole = go_on(case, model, opt, WHOLE, 0, 1)
    seen = [key for key in found if key[0] == name]
    pairs = {(saved_by, world) for _, _, saved_by, world in seen}
    assert pairs == set(itertools.product((1, 2, 3), repeat=2))
    assert {kind for _, kind, _, _ in seen} == {case.kind, OTHER[name]}
    for key in seen:
        assert_bits(found[key], whole)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_becomes_an_ordinary_one(runs: Any, name: str):
    shared, _ = runs
    case = CASES[name]
    model, opt = begin(case, "plain")
    half = go_on(case, model, opt, HALF, 0, 1)
    for world in (1, 2, 3):
        found = sparsestep.distributed.consolidate(shared / f"{name}-{world}")
        plain = Tables()
        plain.load_state_dict(found["model"])
        other = case.make(plain.parameters(), lr=1.0, semantics=case.semantics)
        other.load_state_dict(found["optimizer"])
        assert other.param_groups[0]["lr"] == 0.1
        assert_bits(go_on(case, plain, other, range(0), 0, 1), half)
    if case.make is sparsestep.SparseAdam:
        theirs = torch.optim.SparseAdam(list(Tables().parameters()))
        theirs.load_state_dict(found["optimizer"])


def test_a_plain_model_saves_what_a_sharded_one_loads(tmp_path: Path):
    case = CASES["rows"]
    model, opt = begin(case, "plain")
    go_on(case, model, opt, HALF, 0, 1)
    sparsestep.distributed.save(tmp_path / "plain", model, opt)
    other, again = begin(case, "rows")
    sparsestep.distributed.load(tmp_path / "plain", other, again)
    ours = go_on(case, other, again, WHOLE, 0, 1)
    assert_bits(ours, go_on(case, model, opt, WHOLE, 0, 1))
    assert WHOLE.stop == STEPS


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path):
    def refused(model: nn.Module, opt: Any) -> str:
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(sparsestep.InputError) as raised:
            sparsestep.distributed.load(tmp_path / "saved", model, opt)
        assert all(map(torch.equal, before, model.parameters()))
        return str(raised.value)

    table = nn.Embedding(5, 2)
    sparsestep.distributed.save(tmp_path / "saved", table, sparsestep.Adam(table.parameters()))
    larger = nn.Embedding(6, 2)
    assert "'weight' must have the shape" in refused(larger, sparsestep.Adam(larger.parameters()))
    net = nn.Sequential(nn.Embedding(5, 2))
    assert "none for '0.weight'" in refused(net, sparsestep.Adam(net.parameters()))
    other = nn.Embedding(5, 2)
    unknown: list[Tensor] = [nn.Parameter(torch.zeros(3))]
    assert "must be those of the model" in refused(other, sparsestep.Adam(unknown))
    assert "must be one of sparsestep" in refused(other, torch.optim.Adam(other.parameters()))
    for function in (sparsestep.distributed.save, sparsestep.distributed.async_save):
        with pytest.raises(sparsestep.InputError, match=r"must be an nn\.Module\. Got Adam"):
            function(tmp_path / "swapped", sparsestep.Adam(other.parameters()), other)
