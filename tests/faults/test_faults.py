"""One fault in an operation of every kind, and the injectors; ``make faults`` has the rest."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.faults import harness, planted, ranks
from tests.faults.allocations import ROOT, shim

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shim() is None,
    reason="needs glibc, fork and a C compiler",
)

PAIRS = (
    *(
        "mixed step/signal",
        "deferred step/signal",
        "mixed step/allocation",
        "replayed step/line",
        "deferred step/line",
        "masked step/line",
    ),
    *("dense step: Adam, in pieces/out of memory", "rule step/allocation", "functional step/line"),
    *("step in backward/line", "lookup: tracked/allocation", "grow/allocation"),
    *("load_state_dict/line", "vocabulary: lru/line", "mapped step/allocation"),
    *("train and save: evicting/kill", "load/kill", "ranks: step/allocation", "ranks: load/line"),
    *("ranks: clip/line", "ranks: lookup/line", "ranks: lookup of large messages/allocation"),
    *("ranks: step on copies/line", "ranks: step of large messages/allocation"),
)


def run(*options: str) -> str:
    """The output of the harness; its exit code is 1 where it has found something."""
    # More processes than cores: ranks and disks are waited for.
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", "--workers", "4", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    assert bool(done.returncode) == ("FOUND" in done.stdout)
    return done.stdout


def test_no_operation_is_torn():
    found = run("--sample", "1", "--pairs", *PAIRS)
    assert f"{len(PAIRS)} cases, 0 findings" in found, found


def test_no_rank_leaves_the_others_in_an_exchange():
    found = run("--sample", "4", "--pairs", "ranks: vocabulary: merge/allocation")
    assert "4 cases, 0 findings" in found, found


def test_no_failed_allocation_leaves_a_vocabulary_half_shared():
    each = map(str, range(80))
    found = run("--nth", *each, "--pairs", "shard vocabularies/allocation")
    assert "80 cases, 0 findings" in found, found


def test_ranks_wait_for_one_that_is_interrupted_before_it_joins_them():
    found = run("--nth", "0", "--pairs", "ranks: clip/line", "ranks: shard/line")
    assert "2 cases, 0 findings" in found, found


def test_no_failed_allocation_tears_a_vocabulary():
    pairs = [f"vocabulary: {each}/allocation" for each in ("lru", "grow", "load", "merge")]
    found = run("--sample", "4", "--pairs", *pairs, "forget: deferred/allocation")
    assert " 0 findings" in found, found


BAD_ALLOC = "MemoryError('std::bad_alloc') in torch/distributed/distributed_c10d.py"
LOST = "RuntimeError('gloo: connection closed by peer') in torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("errors", "kinds", "is_limit"),
    [
        ([None, None, LOST, BAD_ALLOC], ["done", "done", "undone", "undone"], True),
        ([None, None, None, BAD_ALLOC], ["done", "done", "done", "undone"], False),
        ([None, LOST, LOST, BAD_ALLOC], ["done", "undone", "undone", "undone"], False),
        (
            [None, None, LOST, "MemoryError('std::bad_alloc') in sparsestep/distributed/wire.py"],
            ["done", "done", "undone", "undone"],
            False,
        ),
        ([None, None, None, None], ["done", "done", "undone", "undone"], False),
    ],
)
def test_hosts_may_differ_only_as_the_promises_say(errors, kinds, is_limit):
    make = ranks.OPERATIONS["ranks: step on hosts"]
    assert harness.is_limit_of_hosts(make, errors, kinds) is is_limit


def test_defects_are_found():
    text = run("--sample", "4", "--module", planted.__name__)
    found = set(re.findall(r"^FOUND in (\S+/.+): finding at", text, re.MULTILINE))
    torn = {f"torn/{fault}" for fault in ("line", "allocation", "out of memory", "signal")}
    others = {"locked/line", "deaf/signal", "crashing/allocation", "half/kill", "alone/allocation"}
    assert found >= torn | others
    assert not any("guarded" in each for each in found)
