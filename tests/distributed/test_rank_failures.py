"""If one rank fails, or differs from the others, all ranks raise and nothing changes on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import failing_ranks
from tests.distributed.conftest import RunOnce
from tests.distributed.pair import Results, run_ranks


@pytest.fixture(scope="session")
def ranks(run_once: RunOnce) -> list[Results]:
    return run_once("tests.distributed.failing_ranks", 2)


def assert_both_raise(ranks: list[Results], key: Any, error: str = "MemoryError") -> None:
    other, failed = (each[key] for each in ranks)
    assert failed["said"].startswith(error)
    assert other["said"].startswith("InputError: rank 1")
    what = "ran out of memory" if error == "MemoryError" else "was interrupted"
    assert what in other["said"]
    assert other["unchanged"]
    assert failed["unchanged"]


@pytest.mark.parametrize("where", failing_ranks.LOOKUP_FAULTS)
def test_memory_that_runs_out_in_a_lookup(ranks: list[Results], where: str):
    assert_both_raise(ranks, ("lookup", where))
    for each in ranks:
        assert failing_ranks.same(each["lookup", where]["after"], each["without", "rows"]["after"])


STEPS = [
    *((name, kind) for name in failing_ranks.STEP_FAULTS for kind in ("rows", "copy")),
    *((name, "rows") for name in failing_ranks.LARGE_FAULTS),
]


@pytest.mark.parametrize(("where", "kind"), [each for each in STEPS if each != ("pack", "copy")])
def test_memory_that_runs_out_in_a_step(ranks: list[Results], where: str, kind: str):
    key = ("step", where, kind)
    assert_both_raise(ranks, key)
    for each in ranks:  # the step can be taken once there is memory
        assert failing_ranks.same(each[key]["after"], each["without", kind]["after"])


def test_an_interrupted_rank_keeps_the_others_from_stepping(ranks: list[Results]):
    assert_both_raise(ranks, "interrupted", "KeyboardInterrupt")


def test_memory_that_runs_out_while_ids_are_prefetched(ranks: list[Results]):
    other, failed = (each["prefetched"]["said"] for each in ranks)
    assert [bool(said) for said in other] == [bool(said) for said in failed]
    assert sum(map(bool, failed)) == 1
    assert any("rank 1, which looks up the table, ran out of memory" in said for said in other)


@pytest.mark.parametrize("where", ["owners", "read", "look up"])
def test_memory_that_runs_out_in_a_vocabulary(ranks: list[Results], where: str):
    assert_both_raise(ranks, ("vocabulary", where))


SAID = {
    "rows": "shape of 'user': 7 x 2 on rank 0, 8 x 2 on rank 1",
    "dim": "shape of 'user': 7 x 2 on rank 0, 7 x 3 on rank 1",
    "dtype": "dtype of 'user': torch.float32 on rank 0, torch.float64 on rank 1",
    "tables": "tables: 'user', 'item' on rank 0, 'user', 'item', 'more.0' on rank 1",
    "plan": "plan of 'user': 'rows' on rank 0, 'copy' on rank 1",
    "plan of one": "plan of 'item': 'rows' on rank 0, 'tables'",
    "reduce": "reduce of 'user': mean on rank 0, sum on rank 1",
    "order": "order: fast on rank 0, global on rank 1",
}


@pytest.mark.parametrize("name", failing_ranks.MODELS)
def test_ranks_with_different_tables(ranks: list[Results], name: str):
    for each in ranks:
        found = each["model", name]
        assert found["said"].startswith("InputError")
        assert SAID.get(name, "") in found["said"]
        assert found["unchanged"]
        assert not found["sharded"]
    if name == "refused":
        assert "rank 1 rejected its input" in ranks[0]["model", name]["said"]
        assert "Got 'row'. Use 'rows'." in ranks[1]["model", name]["said"]


DIFFERENT = {
    "lr": "lr for the group of 'user': 0.1 on rank 0, 0.2 on rank 1",
    "rows": "lr for the group of 'user': 0.1 on rank 0, 0.2 on rank 1",
    "betas": "betas for the group of 'user': (0.9, 0.999) on rank 0, (0.8, 0.999) on rank 1",
    "class": "caller: Adam.step() on rank 0, SGD.step() on rank 1.",
    "semantics": "semantics: masked on rank 0, dense on rank 1",
    "groups": "param groups: 'user', 'item' on rank 0, 'user'; 'item' on rank 1.",
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_optimizers(ranks: list[Results], name: str):
    for each in ranks:
        found = each["optimizer", name]
        assert DIFFERENT[name] in found["said"]
        assert found["unchanged"]
        assert found["moved"]


def test_a_learning_rate_that_differs_later(ranks: list[Results]):
    for each in ranks:
        first, second, third = each["later"]["said"]
        assert (first, third) == ("", "")
        assert "lr for the table: 0.25 on rank 0, 1.25 on rank 1" in second
    assert failing_ranks.same(*(each["later"]["after"] for each in ranks))


def test_a_rank_that_steps_where_another_clips(ranks: list[Results]):
    for each in ranks:
        assert "clip_grad_norm_ on rank 0, Adam.step() on rank 1" in each["clipped"]["said"]


def test_a_table_that_one_rank_has_frozen(ranks: list[Results]):
    for each in ranks:
        assert "frozen tables: none on rank 0, '' on rank 1" in each["frozen"]["said"]


# Timeouts


def test_groups_wait_as_long_as_the_users(tmp_path: Path):
    first, second = run_ranks("tests.distributed.timeout_worker", tmp_path, 2)
    for each in (first, second):
        assert each["timeouts"] == [3.0, 3.0, 7.0]
    for name, seconds in first["waited"].items():
        assert "timed out" in first["said"][name].lower(), name
        assert seconds < 30, name


# Tables in files


def collection(weight: nn.Parameter) -> nn.Module:
    made = sparsestep.nn.EmbeddingBagCollection({"user": tuple(weight.shape), "item": (5, 2)})
    made.tables["user"].weight = weight
    return made


def bag(weight: nn.Parameter) -> nn.Module:
    return nn.EmbeddingBag(*weight.shape, _weight=weight)


def with_vocabulary(weight: nn.Parameter) -> nn.Module:
    table = sparsestep.nn.Embedding(*weight.shape, _weight=weight)
    vocabulary = sparsestep.nn.Vocabulary(len(weight))
    vocabulary.attach(table)
    return nn.ModuleDict({"table": table, "ids": vocabulary})


@pytest.mark.parametrize("plan", ["auto", "rows", "tables", "copy"])
@pytest.mark.parametrize("make", [bag, collection, with_vocabulary])
def test_a_table_in_a_file_is_not_sharded(tmp_path: Path, make: Any, plan: str):
    weight = nn.Parameter(sparsestep.storage.mapped(tmp_path / "items", (100, 2)))
    model = make(weight)
    kinds = [type(each) for each in model.modules()]
    params = list(model.parameters())
    with pytest.raises(sparsestep.InputError, match="must be in memory") as raised:
        sparsestep.distributed.shard(model, plan=plan)
    assert "weight.detach().clone()" in str(raised.value)
    assert [type(each) for each in model.modules()] == kinds
    assert all(ours is theirs for ours, theirs in zip(params, model.parameters(), strict=True))
    assert isinstance(model.get_parameter(_name(model, weight)), sparsestep.storage.Mapped)


def _name(model: nn.Module, weight: nn.Parameter) -> str:
    return next(name for name, each in model.named_parameters() if each.shape == weight.shape)


def test_a_part_of_a_table_in_a_file_is_not_sharded(tmp_path: Path):
    whole = sparsestep.storage.mapped(tmp_path / "items", (100, 2))
    table = nn.Embedding(90, 2, _weight=nn.Parameter(whole[10:]))
    with pytest.raises(sparsestep.InputError, match="must be in memory"):
        sparsestep.distributed.shard(table)


# Wrong arguments


@pytest.fixture
def plan() -> sparsestep.distributed.Plan:
    return sparsestep.distributed.shard(nn.Embedding(5, 2), plan="rows")


def test_a_plan_for_bags_of_one_length():
    tables = [sparsestep.distributed.Placement(name, 1000, 16, 4, "rows") for name in "ab"]
    plan = sparsestep.distributed.Plan(tables, world=2)
    by_name = plan.for_batch(512, {"a": 20, "b": 20})
    assert str(plan.for_batch(512, 20)) == str(by_name)
    assert by_name.bytes_sent_by(0) > plan.for_batch(512).bytes_sent_by(0)


HALF = 2.5
WRONG = [None, -1, HALF, float("nan"), "x", [], {3: 4}, torch.ones(2), 10**30, True]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_a_plan_refuses(plan: sparsestep.distributed.Plan, wrong: Any):
    refuse = pytest.raises(sparsestep.InputError)
    placement = plan.placements[0]
    with refuse:
        plan.for_batch(wrong)
    with refuse:
        plan.for_batch(512, {"": wrong} if wrong is not HALF else -2.5)
    with refuse:
        plan.bytes_on(wrong)
    with refuse:
        plan.bytes_sent_by(wrong)
    with refuse:
        placement.rows_on(0, wrong)
    with refuse:
        sparsestep.distributed.Plan([placement], wrong)
    with refuse:
        sparsestep.distributed.Placement("a", wrong, 4, 4)
    with refuse:
        plan.local("", wrong)
    with refuse:
        plan[wrong]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "row"}, "or a dict of these by table. Got 'row'. Use 'rows'."),
        ({"plan": {"": "row"}}, "Got 'row' for ''. Use 'rows'."),
        ({"plan": None}, "Got a NoneType."),
        ({"plan": ["rows"]}, "Got a list."),
        ({"plan": {"": ["rows"]}}, "Got ['rows'] for ''."),
        ({"plan": {3: "rows"}}, "a table's name must be one of ''. Got 3."),
        ({"reduce": None}, "Got None."),
        ({"reduce": {"x": "sum"}}, "Got a table 'x'. The tables are ''."),
        ({"order": ["fast"]}, "order must be one of fast, global"),
    ],
)
def test_what_shard_names(change: dict[str, Any], message: str):
    with pytest.raises(sparsestep.InputError) as raised:
        sparsestep.distributed.shard(nn.Embedding(5, 2), **change)
    assert message in str(raised.value)


def test_what_lockstep_refuses():
    with pytest.raises(sparsestep.InputError, match="the loader must be iterable"):
        sparsestep.distributed.lockstep(None)  # type: ignore[arg-type]
    with pytest.raises(sparsestep.InputError, match="prefetch must be 0 or 1"):
        sparsestep.distributed.lockstep([], torch.ones(2))  # type: ignore[arg-type]
