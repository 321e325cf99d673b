"""DeferredRows and StepHistory, against the missed steps, taken one by one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.deferred import history as histories
from sparsestep.deferred.history import StepHistory
from sparsestep.deferred.rows import DeferredRows
from sparsestep.engines.base import GroupSettings
from sparsestep.rules.idle import AdamDrift
from tests.deferred.runs import DECAY, on_both_engines
from tests.table import INSTRUCTION_SETS, Variant, running_on, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
ADAM = Variant(sparsestep.AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.1})
AMSGRAD = Variant(sparsestep.AdamW, {"amsgrad": True})
ROWWISE = Variant(sparsestep.RowwiseAdam, {"betas": (0.8, 0.9), **DECAY})
NESTEROV = Variant(sparsestep.SGD, {"momentum": 0.9, "nesterov": True})
CENTERED = Variant(sparsestep.RMSprop, {"momentum": 0.5, "centered": True})
LION = Variant(sparsestep.Lion, {"weight_decay": 0.1})
KINDS = [
    ADAM,
    Variant(sparsestep.AdamW, {}),
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"betas": (0.9, 0.0)}),
    Variant(sparsestep.AdamW, {"betas": (0.0, 0.9)}),
    Variant(sparsestep.AdamW, {"eps": 1.0}),
    AMSGRAD,
    Variant(sparsestep.SparseAdam, {}),
    ROWWISE,
    Variant(sparsestep.SGD, DECAY),
    NESTEROV,
    Variant(sparsestep.SGD, {"momentum": 0.9999}),  # reaches back further than is kept
    CENTERED,
    LION,
    Variant(sparsestep.Lion, {"betas": (0.9, 0.0)}),  # no sign is left after one step
    Variant(sparsestep.Ftrl, {"l1": 0.1, "l2": 0.1}),
]
each_kind = pytest.mark.parametrize("variant", KINDS, ids=str)
_settings: dict[tuple[str, float], GroupSettings] = {}


def settings_of(variant: Variant, lr: float) -> GroupSettings:
    key = (str(variant), lr)
    if key not in _settings:
        _settings[key] = variant([torch.zeros(1, 1)], lr=lr, semantics="dense").settings(0)
    return _settings[key]


def rates(steps: int, seed: int = 0) -> list[float]:
    """Learning rates that vary, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(steps, generator=generator, dtype=torch.float64) * 0.01
    return torch.where(torch.rand(steps, generator=generator) < 0.1, 0.0, drawn).tolist()


def pending(
    variant: Variant, shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> tuple[DeferredRows, Tensor, list[Tensor]]:
    """A parameter whose rows have just had a gradient, all but the last one."""
    generator = torch.Generator().manual_seed(0)
    rule = variant.rule
    param = torch.randn(shape, generator=generator, dtype=torch.float64)
    state = []
    for spec in rule.state:
        of = torch.randn(shape[:1] if spec.per_row else shape, generator=generator).double()
        of *= 10 ** (6 * torch.rand(of.shape, generator=generator).double() - 5)
        if "sq" in spec.name or "sum" in spec.name:
            of = of.square()
        if of.dim() > 1:
            of[-1] = 0.0
        state.append(of.to(dtype))
    if rule.name == "amsgrad":
        state[2] = torch.maximum(state[1], state[2])
    if rule.name == "rmsprop_centered_momentum":
        state[2] = state[2].clamp(-0.1, 0.1) * state[0].sqrt()
    rows = DeferredRows(settings_of(variant, 0.0), shape[0], 3, new=False)
    rows.last_step[-1] = ~3
    return rows, param.to(dtype), state


def miss(rows: DeferredRows, variant: Variant, lrs: list[float]) -> None:
    for lr in lrs:
        rows.prepare_commit(settings_of(variant, lr), None)()


def one_by_one(
    rows: DeferredRows, variant: Variant, lrs: list[float], param: Tensor, state: list[Tensor]
) -> list[Tensor]:
    """The rule itself with gradients of zero, in float64."""
    decay = variant.options.get("weight_decay", 0.0)
    old = [t.double().reshape(len(param), -1) for t in (param, *state)]
    zero = torch.zeros_like(old[0])
    hyper = {name: value for name, value in rows.history.hyperparams.items() if name != "lr"}
    for number, lr in enumerate(lrs):
        if "weight_decay" in variant.options or variant.cls is sparsestep.AdamW:
            old[0] = old[0] * (1 - lr * (decay or 0.01))
        old = rows.rule.apply(old, zero, 4 + number, {**hyper, "lr": lr})
    return [new.reshape(t.shape) for new, t in zip(old, (param, *state), strict=True)]


def assert_near(ours: list[Tensor], exact: list[Tensor]) -> None:
    """Relative to what is largest."""
    for tensor, wanted in zip(ours, exact, strict=True):
        off = (tensor.double().reshape(wanted.shape) - wanted).abs().max()
        assert off <= 1e-13 * wanted.abs().max().clamp(min=1e-300)


@each_kind
@on_both_engines
def test_rows_that_missed_some_steps(variant: Variant, engine: str):
    for missed in (1, 2, 3, 40):
        lrs = rates(missed + 1)[1:]
        rows, param, state = pending(variant, (9, 5))
        exact = one_by_one(rows, variant, lrs, param, state)
        miss(rows, variant, lrs)
        with running_on(engine) as name:
            rows.catch_up(param, state, None, engine=name)
        assert_near([param, *state], exact)
        assert rows.last_step.tolist() == [3 + missed] * 8 + [~(3 + missed)]


LONG = [KINDS[1], KINDS[2], AMSGRAD, ROWWISE, NESTEROV, LION, KINDS[15]]


@pytest.mark.parametrize("variant", LONG, ids=str)
def test_rows_that_missed_ten_thousand_steps(variant: Variant):
    """In one go and in two, in two precisions, on both engines."""
    palette = rates(50)
    lrs = [palette[n * n % 47] for n in range(10_000)]
    rows, param, state = pending(variant, (4, 3))
    exact = one_by_one(rows, variant, lrs, param, state)
    engines = INSTRUCTION_SETS[-1:]
    if rows.history.converges or not engines:  # or it would take the reference too long
        engines = ["reference", *engines]
    runs: list[tuple[DeferredRows, list[Tensor], str, bool]] = []
    for dtype in (torch.float64, torch.float32):
        for engine in engines:
            for halfway in (False, True):
                own = [t.to(dtype, copy=True) for t in (param, *state)]
                runs.append((with_history_of(rows), own, engine, halfway))

    def catch_up(chosen: list[Any]) -> None:
        for other, (its_param, *its_state), engine, _ in chosen:
            other.history = rows.history
            with running_on(engine) as name:
                other.catch_up(its_param, its_state, None, engine=name)

    miss(rows, variant, lrs[:5001])
    catch_up([run for run in runs if run[-1]])
    miss(rows, variant, lrs[5001:])
    catch_up(runs)
    for _, ours, _, _ in runs:
        room = 1e-11 if ours[0].dtype == torch.float64 else 3e-6
        for tensor, wanted in zip(ours, exact, strict=True):
            # What has faded to less than float32 can tell apart is no longer compared.
            off = float((tensor.double() - wanted).abs().max())
            assert off <= room * max(1.0, float(wanted.abs().max()))


def with_history_of(rows: DeferredRows) -> DeferredRows:
    """Another parameter with the same history."""
    other = object.__new__(DeferredRows)
    other.__dict__.update(rows.__dict__)
    other._steps = copy.deepcopy(rows._steps)
    return other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@on_both_engines
def test_an_average_whose_sign_counts_never_fades_to_zero(dtype: torch.dtype, engine: str):
    """Lion drifts along it for as long as the row is idle; dense steps never make it zero."""
    variant = Variant(sparsestep.Lion, {"betas": (0.9, 0.5)})
    rows = DeferredRows(settings_of(variant, 0.0), 3, 0, new=False)
    average = torch.tensor([[1e-3], [-1e-3], [0.0]], dtype=dtype)
    param = torch.zeros(3, 1, dtype=dtype)
    with running_on(engine) as name:
        for _ in range(2):
            miss(rows, variant, [2.0**-10] * 1200)
            rows.catch_up(param, [average], None, engine=name)
    assert param.flatten().tolist() == [-2.34375, 2.34375, 0.0]
    assert average.sign().flatten().tolist() == [1.0, -1.0, 0.0]
    assert float(average.abs().max()) < 1e-7


@pytest.mark.parametrize("variant", [ADAM, ROWWISE, NESTEROV, LION, KINDS[15]], ids=str)
@on_both_engines
def test_rows_come_in_any_order_and_repeatedly(variant: Variant, engine: str):
    lrs = rates(20)
    ids = torch.tensor([7, 2, 7, 7, 0, 2])
    results = []
    for given in (ids, ids.unique(), ids.view(2, 3), ids.int(), ids[::2].repeat(3)):
        rows, param, state = pending(variant, (9, 5), torch.float32)
        before = [t.clone() for t in (param, *state)]
        miss(rows, variant, lrs)
        with running_on(engine) as name:
            rows.catch_up(param, state, given, engine=name)
        chosen = torch.zeros(9, dtype=torch.bool)
        chosen[given.flatten().long()] = True
        for ours, was in zip((param, *state), before, strict=True):
            assert same_bits(ours[~chosen], was[~chosen])
        assert rows.last_step.tolist() == [
            (23 if chosen[row] else 3) if row < 8 else ~3 for row in range(9)
        ]
        results.append([t[7] for t in (param, *state)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@on_both_engines
def test_last_steps(engine: str):
    """A row that is about to be updated counts as current after that step, and as updated."""
    variant = Variant(sparsestep.SGD, {"momentum": 0.5})
    rows = DeferredRows(settings_of(variant, 0.0), 5, 7, new=True)
    param, buffer = torch.zeros(5, 1), torch.zeros(5, 1)
    assert rows.last_step.tolist() == [~7] * 5
    with running_on(engine) as name:

        def catch_up(ids: list[int], *, update: bool) -> list[int]:
            rows.catch_up(param, [buffer], torch.tensor(ids), engine=name)
            if update:
                rows.prepare_last_step(torch.tensor(ids))()
            return rows.last_step.tolist()

        assert catch_up([1], update=True) == [~7, 8, ~7, ~7, ~7]
        miss(rows, variant, [1.0])
        assert catch_up([0, 1, 2], update=False) == [~8, 8, ~8, ~7, ~7]
        miss(rows, variant, [1.0])
        assert catch_up([], update=True) == [~8, 8, ~8, ~7, ~7]
        assert catch_up([1, 2, 3], update=True) == [~8, 10, 10, 10, ~7]
        miss(rows, variant, [1.0])
        rows.catch_up_all(param, [buffer], engine=name)
    assert rows.last_step.tolist() == [~10, 10, 10, 10, ~10]
    assert (rows.history.base, rows.history.steps) == (10, 0)


# How many of two rows with and one without a gradient so far are stale, at a rate and at rest.
STALE = [
    (Variant(sparsestep.SGD, {"momentum": 0.5}), 2),
    (Variant(sparsestep.SGD, {}), 0),
    (Variant(sparsestep.SGD, DECAY), 3),
    (Variant(sparsestep.Adam, {}), 2),
    (Variant(sparsestep.Adam, {"betas": (0.9, 0.5)}), 2),  # replayed
    (Variant(sparsestep.AdamW, {}), 3),
    (Variant(sparsestep.RMSprop, {}), 0),
    (Variant(sparsestep.Adagrad, {}), 0),
    (Variant(sparsestep.RowwiseAdagrad, {}), 0),
    (Variant(sparsestep.Lion, {}), 2),
    (Variant(sparsestep.Ftrl, {}), 3),
]


@pytest.mark.parametrize(("variant", "stale"), STALE, ids=str)
@on_both_engines
def test_how_many_rows_were_stale(variant: Variant, stale: int, engine: str):
    replayed = variant.options.get("betas") is not None  # counts rows at rest as well
    for lr, wanted in ((0.1, stale), (0.0, stale if replayed else 0)):
        rows = DeferredRows(settings_of(variant, 0.0), 4, 0, new=True)
        rows.last_step[:2] = 0  # these have had a gradient
        param = torch.ones(4, 3)
        state = [torch.ones(4) if k.per_row else torch.ones(4, 3) for k in variant.rule.state]
        miss(rows, variant, [lr, lr])
        ids = torch.tensor([0, 1, 2, 0])
        with running_on(engine) as name:
            assert rows.catch_up(param, state, ids, engine=name) == wanted
            assert rows.catch_up(param, state, ids, engine=name) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_both_engines
def test_ftrl_moves_idle_rows_only_if_the_learning_rate_changes(engine: str, dtype: torch.dtype):
    param = torch.nn.Parameter(torch.zeros(50, 3, dtype=dtype))
    with running_on(engine) as name:
        opt = sparsestep.Ftrl([param], lr=0.1, l1=0.1, l2=0.1, semantics="dense", engine=name)

        def step(row: int) -> None:
            param.grad = torch.sparse_coo_tensor([[row]], torch.randn(1, 3).to(dtype), (50, 3))
            opt.step()

        for row in range(4):
            step(row)
        rows = opt.deferred[id(param)]
        real = (param.detach(), [opt.state[param][n] for n in ("linear", "sum")])
        assert rows.catch_up(*real, torch.arange(4), engine=name) == 0
        opt.param_groups[0]["lr"] = 0.2
        step(9)
        assert rows.catch_up(*real, torch.arange(9), engine=name) == 4


@pytest.mark.parametrize("threads", [1, 2, 8])
@on_both_engines
def test_many_rows_are_shared_out(engine: str, threads: int):
    """Every row catches up once, however often it is named."""
    variant, lrs = KINDS[1], rates(10)
    ids = torch.randint(0, 3000, (6000,), generator=torch.Generator().manual_seed(0))
    rows, param, state = pending(variant, (3000, 8))
    exact = one_by_one(rows, variant, lrs, param, state)
    before = param.clone()
    miss(rows, variant, lrs)
    torch.set_num_threads(threads)
    with running_on(engine) as name:
        stale = rows.catch_up(param, state, ids, engine=name)
    chosen = torch.zeros(3000, dtype=torch.bool)
    chosen[ids] = True
    assert stale == int(chosen.sum())
    assert torch.equal(param[~chosen], before[~chosen])
    assert_near([t[chosen] for t in (param, *state)], [t[chosen] for t in exact])


STRIDES = {
    "columns first": lambda t: t.t().contiguous().t(),
    "every other row": lambda t: t.repeat_interleave(2, dim=0)[::2],
    "every other column": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "three dims": lambda t: t.view(9, 2, 3).transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("strides", STRIDES)
@on_both_engines
def test_tensors_of_any_strides(engine: str, strides: str):
    variant, lrs = KINDS[1], rates(10)
    rows, param, state = pending(variant, (9, 6))
    exact = one_by_one(rows, variant, lrs, param, state)
    param, *state = map(STRIDES[strides], (param, *state))
    assert not param.is_contiguous()
    miss(rows, variant, lrs)
    with running_on(engine) as name:
        rows.catch_up(param, state, torch.tensor([8, 3]), engine=name)
        rows.catch_up(param, state, None, engine=name)
    assert_near([param, *state], exact)


# StepHistory: the sums over past steps, against a direct summation


def new_history(variant: Variant, base: int = 0) -> StepHistory:
    settings = settings_of(variant, 0.0)
    assert settings.rule.idle_update is not None
    return StepHistory(settings.rule.idle_update, settings.hyperparams, base)


def tables(history: StepHistory) -> list[Tensor]:
    by_step = [history.inverse_decay, history.sizes, history.roots, history.sums]
    return [*by_step, *history.powers.values()]


def append(history: StepHistory, variant: Variant, lrs: list[float]) -> list[tuple[float, ...]]:
    """Append steps; returns size, root and shrink of each."""
    steps = []
    decay = variant.options.get("weight_decay", 0.0)
    for lr in lrs:
        size, root = history.idle_update.size(history.now + 1, {**history.hyperparams, "lr": lr})
        steps.append((size, root, 1 - lr * decay))
        history.append(*steps[-1])
    return steps


def directly(history: StepHistory, steps: list[tuple[float, ...]], since: int, term: int) -> float:
    """The sum over all steps after ``since``, added up one by one."""
    idle = history.idle_update
    ratio = history.decays[idle.buffer]
    if isinstance(idle, AdamDrift):
        ratio /= idle.root_decay(history.decays) ** (term + 1)
    total, left = 0.0, 1.0
    for step in range(len(steps), since, -1):
        size, root, shrink = steps[step - 1]
        weight = size * left * root ** (term + 1)
        total += weight if idle.has_total else weight * ratio ** (step - since)
        left *= shrink
    return total


SUMMED = [ADAM, AMSGRAD, KINDS[7], ROWWISE, NESTEROV, CENTERED, LION]


@pytest.mark.parametrize("variant", SUMMED, ids=str)
def test_a_history_has_the_sums_of_a_direct_summation(variant: Variant):
    """With more steps than its first capacity, and after dropping the oldest."""
    history = new_history(variant, base=3)
    capacity = history.capacity
    steps = append(history, variant, rates(500))
    assert capacity < 500 < history.capacity

    def check(steps: list[tuple[float, ...]]) -> None:
        n = len(steps)
        now = history.inverse_decay[n]
        assert (history.steps, history.now) == (n, 503)
        assert [float(size) for size in history.sizes[1 : n + 1]] == [size for size, *_ in steps]
        for since in (0, 1, 7, n // 2, n - 100, n - 20, n - 2, n - 1):
            for term in range(len(history.idle_update.ratios(history.decays))):
                ours = history.sums[term, since] / now
                if history.idle_update.has_total:  # of Lion: a difference of sums
                    ours = history.sums[term, n] / now - ours
                wanted = directly(history, steps, since, term)
                assert float(ours) == pytest.approx(wanted, rel=1e-11, abs=1e-300)
            left = math.prod(shrink for _, _, shrink in steps[since:])
            assert float(history.inverse_decay[since] / now) == pytest.approx(left, rel=1e-13)
        # A total starts at 0, or later differences would lose digits; a series ends there.
        assert not history.sums[:, 0 if history.idle_update.has_total else n].any()
        assert not history.sums[:, n + 1 :].any()
        assert history.latest_inverse_decay == float(now)
        for name, powers in history.powers.items():
            for k in (0, 1, 2, n - 1):
                wanted = history.decays[name] ** k
                assert float(powers[k]) == pytest.approx(wanted, rel=1e-12, abs=1e-300)

    check(steps)
    history.drop_oldest(300)
    assert history.base == 303
    check(steps[300:])


def test_a_cleared_history_is_as_a_new_one():
    cleared = new_history(ADAM)
    append(cleared, ADAM, rates(400))
    cleared.clear()
    assert (cleared.base, cleared.steps, cleared.now) == (400, 0, 400)
    fresh = new_history(ADAM, base=400)
    for history in (cleared, fresh):
        append(history, ADAM, rates(50, seed=1))
    for ours, wanted in zip(tables(cleared), tables(fresh), strict=True):
        assert torch.equal(ours[..., :51], wanted[..., :51])


def test_how_far_back_a_step_matters():
    slowest = 0.9 / 0.999**2  # of the four terms of Adam
    for variant, ratio in ((NESTEROV, 0.9), (KINDS[1], slowest)):
        history = new_history(variant)
        assert history.converges
        assert ratio**history.horizon <= 1e-18 < ratio ** (history.horizon - 1)
    assert history.replay_limit <= history.horizon
    for betas in ((0.0, 0.9), (0.0, 0.0)):  # nothing is left after a step
        history = new_history(Variant(sparsestep.AdamW, {"betas": betas}))
        assert (history.converges, history.horizon, history.replay_limit) == (True, 1, 1)


@pytest.mark.parametrize("betas", [(0.95, 0.9), (0.9, 0.81), (0.9, 0.0), (0.5, 1e-200)])
def test_where_the_series_does_not_converge(betas: tuple[float, float]):
    history = new_history(Variant(sparsestep.AdamW, {"betas": betas}))
    assert not history.converges
    append(history, ADAM, rates(10))
    assert not history.sums.any()


def test_when_a_history_is_full(monkeypatch: pytest.MonkeyPatch):
    history = new_history(ADAM)
    monkeypatch.setattr(histories, "MAX_STEPS", 10)
    append(history, ADAM, rates(7))
    assert not history.is_full
    append(history, ADAM, rates(1))
    assert history.is_full
    history.clear()
    assert not history.is_full
    monkeypatch.undo()
    for steps in range(38):  # until decay has left almost nothing
        assert not history.is_full, steps
        history.append(0.1, 1.0, 1e-4)
    assert history.is_full
    assert history.sums.isfinite().all()


def test_a_step_without_memory_for_a_longer_history_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
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
