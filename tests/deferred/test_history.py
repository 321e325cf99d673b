"""What an idle row has missed: the sums over past steps, against a direct summation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.deferred import history as histories
from sparsestep.deferred.history import StepHistory
from sparsestep.rules.idle import AdamDrift
from tests.deferred.idle_rows import ADAM, KINDS, rates, settings_of
from tests.table import Variant


def new_history(variant: Variant, base: int = 0) -> StepHistory:
    settings = settings_of(variant, 0.0)
    assert settings.rule.idle_update is not None
    return StepHistory(settings.rule.idle_update, settings.hyperparams, base)


def tables(history: StepHistory) -> list[Tensor]:
    by_step = [history.inverse_decay, history.sizes, history.roots, history.sums]
    return [*by_step, *history.powers.values()]


def advance(history: StepHistory, variant: Variant, lrs: list[float]) -> list[tuple[float, ...]]:
    """Take note of steps; returns size, root and shrink of each."""
    taken = []
    decay = variant.options.get("weight_decay", 0.0)
    for lr in lrs:
        hyper = {**history.hyper, "lr": lr}
        size, root = history.motion.size(history.now + 1, hyper)
        taken.append((size, root, 1 - lr * decay))
        history.append(*taken[-1])
    return taken


def directly(history: StepHistory, taken: list[tuple[float, ...]], since: int, term: int) -> float:
    """The sum over all steps after ``since``, added up one by one."""
    motion = history.motion
    ratio = history.decays[motion.buffer]
    if isinstance(motion, AdamDrift):
        ratio /= motion.root_decay(history.decays) ** (term + 1)
    total, left = 0.0, 1.0
    for step in range(len(taken), since, -1):
        size, root, shrink = taken[step - 1]
        weight = size * left * root ** (term + 1)
        total += weight if motion.has_total else weight * ratio ** (step - since)
        left *= shrink
    return total


SUMMED = [ADAM, KINDS[6], KINDS[7], KINDS[8], KINDS[10], KINDS[12]]


@pytest.mark.parametrize("variant", SUMMED, ids=str)
def test_sums_are_those_of_a_direct_summation(variant: Variant):
    history = new_history(variant, base=3)
    taken = advance(history, variant, rates(500))
    n, now = history.steps, history.inverse_decay[history.steps]
    assert (n, history.now) == (500, 503)
    terms = len(history.motion.ratios(history.decays))
    for since in (0, 1, 7, 250, 400, 480, 498, 499):
        for term in range(terms):
            ours = float(history.sums[term, since] / now)
            assert ours == pytest.approx(directly(history, taken, since, term), rel=1e-12)
    assert not history.sums[:, n].any()


def test_the_drift_along_a_sign_is_a_difference_of_sums():
    variant = Variant(sparsestep.Lion, {"weight_decay": 0.1})
    history = new_history(variant)
    taken = advance(history, variant, rates(300))
    sums, now = history.sums[0], history.inverse_decay[300]
    for since in (0, 1, 150, 299):
        drift = float((sums[300] - sums[since]) / now)
        assert drift == pytest.approx(directly(history, taken, since, 0), rel=1e-12)


def test_the_inverse_of_decay_is_what_it_has_taken():
    history = new_history(ADAM)
    taken = advance(history, ADAM, rates(300))
    for since in (0, 100, 299):
        left = math.prod(shrink for _, _, shrink in taken[since:])
        ours = float(history.inverse_decay[since] / history.inverse_decay[300])
        assert ours == pytest.approx(left, rel=1e-13)


def test_powers_of_the_factors():
    history = new_history(ADAM)
    advance(history, ADAM, rates(300))
    for k in (0, 1, 2, 299):
        assert float(history.powers["exp_avg"][k]) == pytest.approx(0.5**k, rel=1e-14)
        assert float(history.powers["exp_avg_sq"][k]) == pytest.approx(0.9**k, rel=1e-13)


@pytest.mark.parametrize("steps", [255, 256, 257, 1100])
def test_more_steps_than_the_first_capacity(steps: int):
    history = new_history(ADAM)
    capacity = len(history.inverse_decay)
    taken = advance(history, ADAM, rates(steps))
    assert all(table.shape[-1] > steps for table in tables(history))
    assert (len(history.inverse_decay) > capacity) == (steps >= capacity)
    now = history.inverse_decay[steps]
    for since in (0, steps // 2, steps - 1):
        ours = float(history.sums[1, since] / now)
        assert ours == pytest.approx(directly(history, taken, since, 1), rel=1e-12, abs=1e-300)
    assert [float(size) for size in history.sizes[1 : steps + 1]] == [size for size, *_ in taken]


def test_a_history_that_begins_anew_is_as_a_new_one():
    anew = new_history(ADAM)
    advance(anew, ADAM, rates(400))
    anew.clear()
    assert (anew.base, anew.steps, anew.now) == (400, 0, 400)
    fresh = new_history(ADAM, base=400)
    for history in (anew, fresh):
        advance(history, ADAM, rates(50, seed=1))
    for ours, wanted in zip(tables(anew), tables(fresh), strict=True):
        assert torch.equal(ours[..., :51], wanted[..., :51])


def test_how_far_back_a_step_matters():
    history = new_history(Variant(sparsestep.SGD, {"momentum": 0.9}))
    assert history.converges
    assert 0.9**history.horizon <= 1e-18 < 0.9 ** (history.horizon - 1)
    history = new_history(Variant(sparsestep.AdamW, {}))
    slowest = 0.9 / 0.999**2  # of the four terms
    assert history.converges
    assert slowest**history.horizon <= 1e-18 < slowest ** (history.horizon - 1)
    assert history.replay_limit <= history.horizon


@pytest.mark.parametrize("betas", [(0.95, 0.9), (0.9, 0.81), (0.9, 0.0), (0.5, 1e-200)])
def test_where_the_series_does_not_converge(betas: tuple[float, float]):
    history = new_history(Variant(sparsestep.AdamW, {"betas": betas}))
    assert not history.converges
    advance(history, ADAM, rates(10))
    assert not history.sums.any()


def test_without_a_first_moment_nothing_is_left_after_a_step():
    for betas in ((0.0, 0.9), (0.0, 0.0)):
        history = new_history(Variant(sparsestep.AdamW, {"betas": betas}))
        assert (history.converges, history.horizon, history.replay_limit) == (True, 1, 1)


def test_a_history_is_full_after_so_many_steps(monkeypatch):
    history = new_history(ADAM)
    monkeypatch.setattr(histories, "_MAX_STEPS", 10)
    advance(history, ADAM, rates(7))
    assert not history.is_full
    advance(history, ADAM, rates(1))
    assert history.is_full
    history.clear()
    assert not history.is_full


@pytest.mark.parametrize(
    "variant", [*SUMMED, Variant(sparsestep.Lion, {"weight_decay": 0.1})], ids=str
)
def test_a_history_without_its_oldest_steps_is_as_one_that_began_later(variant: Variant):
    long, short = new_history(variant), new_history(variant, base=300)
    lrs = rates(500)
    advance(long, variant, lrs)
    advance(short, variant, lrs[300:])
    long.drop_oldest(300)
    assert (
        (long.base, long.steps, long.now) == (short.base, short.steps, short.now) == (300, 200, 500)
    )
    for more in (0, 100):
        advance(long, variant, rates(more))
        advance(short, variant, rates(more))
        n = short.steps + 1
        for ours, wanted in (
            (long.inverse_decay, short.inverse_decay),
            (long.sums.T, short.sums.T),
        ):
            assert torch.allclose(ours[:n], wanted[:n], rtol=1e-11, atol=1e-280)
            assert not long.sums[:, n:].any()
        assert torch.equal(long.sizes[1:n], short.sizes[1:n])
        assert torch.equal(long.roots[1:n], short.roots[1:n])
        assert long.latest_inverse_decay == float(long.inverse_decay[n - 1])


def test_a_history_is_full_when_decay_has_left_almost_nothing():
    history = new_history(ADAM)
    steps = 0
    while not history.is_full:
        history.append(0.1, 1.0, 1e-4)
        steps += 1
    assert steps == 38
    assert history.sums.isfinite().all()


def test_a_step_without_memory_for_a_longer_history_changes_nothing(monkeypatch):
    """A history doubles while a step is prepared; its commit allocates nothing of that size."""
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.AdamW([param], lr=0.1, semantics="dense")
    param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2))
    opt.step()
    history = opt.deferred[id(param)].history
    while history.steps + 1 < history.capacity:
        opt.step()
    before = param.detach().clone(), history.steps

    def fail(self: StepHistory, capacity: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StepHistory, "_reserve", fail)
        with pytest.raises(MemoryError):
            opt.step()
    assert torch.equal(param, before[0])
    assert history.steps == before[1]
    opt.step()
    assert not torch.equal(param, before[0])
