"""Ids that are sent ahead change nothing but when they are sent; what goes wrong is agreed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import sparsestep

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.pair import Results
from tests.distributed.shard_ahead import STEPS
from tests.distributed.shard_cases import KINDS
from tests.distributed.test_shard_behaviour import begin, whole
from tests.table import same_bits


@pytest.mark.parametrize("kind", KINDS)
def test_ids_sent_ahead_give_the_same_bits(found: list[Results], kind: str):
    for each in found:
        ours, theirs = each["ahead", kind, 1], each["ahead", kind, 0]
        assert same_bits(ours["after"], theirs["after"])
        assert theirs["sent"] == STEPS
        assert ours["sent"] == 3, "the first two, and the one where a rank had other tensors"


def test_all_look_ups_of_a_model_are_sent_ahead(found: list[Results]):
    for each in found:
        ours, theirs = each["model ahead", 1], each["model ahead", 0]
        assert same_bits(ours["after"], theirs["after"])
        assert ours["moved"]
        assert (theirs["sent"], ours["sent"]) == (2 * STEPS, 4)


def test_bad_ids_that_were_to_be_sent_ahead(found: list[Results]):
    *others, last = found
    assert last["bad ids ahead"]["said"][3].startswith("Embedding (7 x 2): ids must be in [0, 7)")
    for each in others:
        assert each["bad ids ahead"]["said"][3].startswith(f"rank {len(found) - 1}, which looks up")
    for each in found:
        messages = each["bad ids ahead"]["said"]
        assert [n for n, message in enumerate(messages) if message] == [3]
    after = begin()
    after[1] -= (STEPS - 1) * len(found)
    for rank in range(len(found)):
        after[rank] -= STEPS - 1
    torch.testing.assert_close(whole(found, "bad ids ahead"), after)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_where_a_loader_raises_all_ranks_do(found: list[Results], prefetch: int):
    *others, last = found
    assert last["failing", prefetch]["said"] == "ValueError: the disk is gone"
    for each in others:
        assert f"rank {len(found) - 1} has no next batch" in each["failing", prefetch]["said"]
    for each in found:
        assert each["failing", prefetch]["seen"] == ([0] if prefetch else [0, 1])


def test_a_loader_that_writes_to_the_batch_it_gave_is_refused(found: list[Results]):
    for each in found:
        assert "must not modify a batch after yielding it" in each["overwritten"]["said"]


def test_one_process_has_nobody_to_send_to():
    table = nn.Embedding(5, 2)
    sparsestep.distributed.shard(table, plan="rows")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in sparsestep.distributed.lockstep([torch.tensor([1])] * 3, prefetch=1):
            table(ids[:1])
    with pytest.raises(sparsestep.InputError) as raised:
        sparsestep.distributed.lockstep([], prefetch=2)
    assert "prefetch must be 0 or 1" in str(raised.value)
