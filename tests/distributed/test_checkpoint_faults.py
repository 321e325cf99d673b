"""What goes wrong on one rank while all save or load is raised on all, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.checkpoint_faults import SECONDS
from tests.distributed.conftest import RunOnce


@pytest.fixture(scope="module")
def ranks(run_once: RunOnce) -> list[dict[str, Any]]:
    return run_once("tests.distributed.checkpoint_faults", 2)


@pytest.mark.parametrize("method", ["save", "async_save"])
def test_ranks_that_do_not_share_a_disk_cannot_save(ranks: Any, method: str):
    for each in ranks:
        kind, said = each[f"unshared {method}"]
        assert kind == "InputError"
        assert "must be on a disk that all ranks share" in said
        assert each["left"] == []


def test_ranks_that_do_not_share_a_disk_cannot_load(ranks: Any):
    for each in ranks:
        kind, said = each["unshared load"]
        assert kind == "InputError"
        assert "no file sparsestep.json" in said
    assert ranks[0]["unshared load"][1].startswith("rank 1: ")


CASES = {
    "disk full on 1": (1, "OSError", "OSError"),
    "disk full on 0": (0, "OSError", "OSError"),
    "disk full at the end": (0, "OSError", "OSError"),
    "interrupted": (1, "KeyboardInterrupt", "InputError"),
    "out of memory": (1, "MemoryError", "MemoryError"),
    "out of memory before": (1, "MemoryError", "MemoryError"),
}


@pytest.mark.parametrize("method", ["save", "save_later"])
@pytest.mark.parametrize("case", CASES)
def test_a_save_that_fails_on_one_rank_fails_on_all(ranks: Any, case: str, method: str):
    where, here, there = CASES[case]
    assert ranks[where][f"{case}, {method}"][0] == here
    kind, said = ranks[1 - where][f"{case}, {method}"]
    assert kind == there
    assert f"rank {where}: " in said


def test_a_save_that_fails_leaves_the_earlier_checkpoint(ranks: Any):
    for each in ranks:
        assert each["names"]
        assert each["earlier"]


@pytest.mark.parametrize(
    ("case", "here", "there"),
    [
        ("load interrupted", "KeyboardInterrupt", "InputError"),
        ("load out of memory", "MemoryError", "MemoryError"),
        ("load unreadable", "OSError", "OSError"),
        ("load refused", "MemoryError", "MemoryError"),
    ],
)
def test_a_load_that_fails_on_one_rank_fails_on_all(ranks: Any, case: str, here: str, there: str):
    assert ranks[1][case][0] == here
    assert ranks[0][case][0] == there
    assert "rank 1: " in ranks[0][case][1]
    assert all(each["unchanged"] for each in ranks)


@pytest.mark.parametrize("case", ["damaged", "missing"])
def test_a_damaged_part_of_one_rank_is_refused_by_all(ranks: Any, case: str):
    for each in ranks:
        kind, said = each[case]
        assert kind == "InputError"
        assert "__1_0.distcp" in said
        assert each["unchanged"]


def test_a_folder_has_the_latest_checkpoint(ranks: Any):
    for each in ranks:
        assert each["later"]
        assert each["count"] == 4  # two parts and two files that say what they are


def test_the_group_that_saves_in_the_background_has_the_timeout_of_the_user(ranks: Any):
    for each in ranks:
        assert each["own group"]
        assert each["timeout"] == SECONDS
