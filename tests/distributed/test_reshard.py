"""Ids get new owners: what a rank makes of what was stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsestep.distributed.checkpoint._reshard import (
    NEW_ROW,
    ReassignedIds,
    VocabularyBlock,
    VocabularyLayout,
    reassign_ids,
)
from sparsestep.distributed.collectives import Collectives
from sparsestep.nn.id_table import Options

# Two ranks have saved: the first has rows 0, 2, 4 and 6, the second 1, 3 and 5.
ROWS, COLUMNS = 7, 2
STORED = torch.tensor(
    [[0, 0, 0], [0, 0, 0], [10, 4, 8], [11, 2, 3], [12, 1, 9], [13, 9, 5], [0, 0, 0]]
)
CANDIDATES = torch.tensor([[20, 1], [30, 1], [21, 2], [31, 1], [22, 1], [0, 0]])
# In use, candidates, seen since counts were halved, the time, rows that changed hands.
NUMBERS = torch.tensor([[3, 3], [3, 2], [20, 15], [9, 5], [6, (1 << 40) + 4]])


def loaded(**changes: Any) -> ReassignedIds:
    layout = VocabularyLayout(ROWS, COLUMNS, shared=1, admit=2, tables={})
    block = VocabularyBlock(NUMBERS, 0, STORED, 0, CANDIDATES)._replace(**changes)
    return reassign_ids(Collectives(None), layout, block, Options(ROWS, 1, 2, None))


def test_ids_keep_their_counts_their_ages_their_order_and_their_rows():
    found = loaded()
    assert found.saved.used == 5
    assert found.saved.ids[1:5].tolist() == [10, 11, 12, 13]
    assert found.saved.counts[1:5].tolist() == [4, 2, 1, 9]
    assert found.now == 9
    assert (found.now - found.saved.seen[1:5]).tolist() == [9 - 8, 5 - 3, 9 - 9, 5 - 5]
    assert found.saved.sightings == 35
    # Row 6 was free. The shared row of the second rank is not needed, another row is new.
    assert found.source.tolist() == [0, 2, 3, 4, 5, 6, NEW_ROW]


def test_no_seed_is_used_twice():
    assert loaded().seed == 6
    more = NUMBERS.clone()
    more[4, 1] += 100
    assert loaded(numbers=more).seed == 104


@pytest.mark.parametrize("room", [9, 4])
def test_candidates_take_turns(room: int, monkeypatch: pytest.MonkeyPatch):
    """Those that each rank has seen last come last; of too many, these are kept."""
    monkeypatch.setattr(Options, "candidates", room)
    saved = loaded().saved
    ids, counts = (
        each[: saved.candidates].tolist() for each in (saved.candidate_ids, saved.candidate_counts)
    )
    assert ids == [20, 21, 30, 22, 31][-room:]
    assert counts == [dict(CANDIDATES.tolist())[each] for each in ids]
