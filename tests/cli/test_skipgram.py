from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import sparsestep
from sparsestep.cli import skipgram
from sparsestep.cli.identifiers import Vocabulary
from sparsestep.cli.skipgram import BATCH, NEGATIVES, Batches, Run, Tables, pairs, start, train

# Without the C++ core, the library says that it is slow; what is tested here stays true.
pytestmark = pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")

KNOWN = Vocabulary(("a", "b", "c", "d"), (40, 20, 10, 1))
NEAR = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])


def batches(steps: int = 4, seed: int = 3) -> Batches:
    return Batches(NEAR, KNOWN.counts, steps, seed)


def test_pairs_stay_within_the_window_and_the_file() -> None:
    found = pairs([["a", "b", "c", "d"], ["d", "a"]], KNOWN, window=2)
    expected = ["ab", "bc", "cd", "ac", "bd", "da"]
    both_ways = sorted(expected + [pair[::-1] for pair in expected])
    assert sorted(KNOWN.words[i] + KNOWN.words[j] for i, j in found.T.tolist()) == both_ways


def test_pairs_of_files_that_are_shorter_than_the_window() -> None:
    assert pairs([[], ["a"], ["unknown"]], KNOWN).shape == (2, 0)


def test_batches_are_the_same_for_the_same_seed() -> None:
    once, again = batches(), batches()
    for one, two, three in zip(once, once, again, strict=True):
        for first, second, third in zip(one, two, three, strict=True):
            assert torch.equal(first, second)
            assert torch.equal(first, third)


def test_batches_differ_from_step_to_step_and_from_seed_to_seed() -> None:
    first, second = batches(steps=2)
    (other,) = batches(steps=1, seed=4)
    assert not torch.equal(first.candidates, second.candidates)
    assert not torch.equal(first.candidates, other.candidates)


def test_a_batch_holds_a_true_neighbour_first_and_noise_after_it() -> None:
    (batch,) = batches(steps=1)
    assert batch.words.shape == (BATCH,)
    assert batch.candidates.shape == (BATCH, 1 + NEGATIVES)
    near = {tuple(pair) for pair in NEAR.T.tolist()}
    drawn = torch.stack([batch.words, batch.candidates[:, 0]])
    assert {tuple(pair) for pair in drawn.T.tolist()} == near


def test_noise_follows_the_counts_to_the_power_of_three_quarters() -> None:
    shares = torch.tensor(KNOWN.counts, dtype=torch.float64) ** 0.75
    found = torch.bincount(batches().noise, minlength=4) / len(batches().noise)
    assert_close(found, shares / shares.sum(), atol=1e-5, rtol=0, check_dtype=False)


def test_the_start_depends_on_the_seed_alone() -> None:
    assert torch.equal(start(4, 8, seed=1).words, start(4, 8, seed=1).words)
    assert not torch.equal(start(4, 8, seed=1).words, start(4, 8, seed=2).words)


def test_training_is_reproducible_and_leaves_the_start_alone() -> None:
    weights = start(4, 8, seed=0)
    before = Tables(*(table.clone() for table in weights))
    runs = [train("x", sparsestep.SparseAdam, weights, batches()) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert skipgram.difference(runs[0].tables, runs[1].tables) == 0
    assert skipgram.difference(weights, before) == 0
    assert skipgram.difference(weights, runs[0].tables) > 0


def test_both_optimizers_arrive_at_the_same_weights() -> None:
    weights = start(4, 8, seed=0)
    theirs = train("theirs", torch.optim.SparseAdam, weights, batches(steps=20))
    ours = train("ours", sparsestep.SparseAdam, weights, batches(steps=20))
    assert_close(ours.losses, theirs.losses)
    assert skipgram.difference(ours.tables, theirs.tables) < 1e-5
    assert ours.losses[-1] < ours.losses[0]


def test_a_run_records_every_step() -> None:
    seen: list[int] = []
    run = train(
        "x",
        sparsestep.SparseAdam,
        start(4, 8, seed=0),
        batches(),
        lambda run: seen.append(len(run.losses)),
    )
    assert seen == [1, 2, 3, 4]
    assert len(run.seconds) == 4
    assert 0 < run.optimizer_seconds < sum(run.seconds)


def test_the_final_loss_is_the_mean_of_the_last_hundred() -> None:
    tables = start(1, 1, seed=0)
    assert Run("x", [9.0] * 50 + [2.0] * 50 + [4.0] * 50, [], 0.0, tables).final_loss == 3.0
    assert Run("x", [1.0, 2.0], [], 0.0, tables).final_loss == 1.5


def test_fewer_steps_are_the_first_ones() -> None:
    (first,) = replace(batches(), steps=1)
    assert torch.equal(first.candidates, next(iter(batches())).candidates)


def test_neighbours_are_frequent_and_never_the_word_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.2], [1.0, 0.01]])
    assert skipgram.neighbours(vectors, KNOWN, "a", count=9) == ["d", "b", "c"]
    monkeypatch.setattr(skipgram, "_KNOWN_WELL", 3)
    assert skipgram.neighbours(vectors, KNOWN, "a", count=2) == ["b", "c"]
    assert skipgram.neighbours(vectors, KNOWN, "d", count=1) == ["a"]
