"""Ids and their rows, in the core and in Python, against the plainest model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparsestep.nn.vocabulary.id_table import IdTable, Options
from tests.nn import vocabulary_model
from tests.nn.vocabulary_model import Model, compare, reloaded

few_ids = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), *range(100, 118)])


class AgainstTheModel(RuleBasedStateMachine):
    """Calls, steps, lookups that change nothing, checkpoints."""

    @initialize(
        rows=st.integers(1, 9),
        shared=st.integers(1, 3),
        admit=st.integers(1, 4),
        evict=st.sampled_from([None, "lru", "lfu"]),
    )
    def begin(self, rows: int, shared: int, admit: int, evict: Any):
        self.options = Options(rows, min(rows, shared), admit, evict)
        self.model = Model(self.options)
        self.real = IdTable(self.options)
        self.now = 1

    @rule(
        ids=st.lists(few_ids, max_size=14),
        learns=st.booleans(),
        undone=st.booleans(),
        steps=st.booleans(),
    )
    def look_up(self, ids: list[int], learns: bool, undone: bool, steps: bool):
        assert compare(self.real, self.model, ids, self.now, learns=learns, undone=undone)
        self.now += steps

    @rule()
    def save_and_load(self):
        self.real = reloaded(self.real, self.options, self.now)

    @invariant()
    def all_is_saved(self):
        if not hasattr(self, "model"):
            return
        first, model = self.options.shared, self.model
        real = self.real
        saved = real.save()
        assert saved.used == real.used == first + len(model.row_of)
        found = {int(saved.ids[row]): row for row in range(first, saved.used)}
        assert found == model.row_of
        counts = saved.counts[first : saved.used].tolist()
        assert counts == [model.count[row] for row in range(first, saved.used)]
        pairs = torch.stack([saved.candidate_ids, saved.candidate_counts], dim=1)
        assert pairs[: saved.candidates].tolist() == list(map(list, model.candidates.items()))


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("seed", range(2))
def test_many_ids_against_the_model(seed: int):
    vocabulary_model.run(20_000, seed)


@pytest.mark.slow
def test_a_million_operations_against_the_model():
    vocabulary_model.run(1_000_000, 17)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_at_once_are_the_same_for_any_number_of_threads(threads: int):
    torch.set_num_threads(threads)
    options = Options(40_000, 1, 1, "lru")
    ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(3)) * 2**40
    real = IdTable(options)
    claim = real.claim(ids, 1)
    assert claim.without == len(ids)
    real.commit(claim)
    rows = claim.rows
    assert rows.tolist() == [*range(1, 40_000), *(10_001 * [0])]
    again, without = real.find(ids)
    assert without == 10_001
    assert torch.equal(again, rows)
    before = real.save()
    real.claim(ids[:30_000].repeat(2), 2)  # abandoned
    for one, other in zip(real.save(), before, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    both = ids[:30_000].repeat(2)
    real.commit(real.claim(both, 2))
    assert real.save().counts[rows[:30_000]].unique().tolist()[-1] == 3


def test_ids_that_come_twice_are_not_loaded():
    options = Options(4, 1, 1, None)
    real = IdTable(options)
    ids = torch.tensor([7, 8])
    real.commit(real.claim(ids, 1))
    saved = real.save()
    saved.ids[2] = 7
    assert not real.load(saved, 1)
    assert real.find(ids)[0].tolist() == [1, 2]
