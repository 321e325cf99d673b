"""The parts of dense semantics, one by one: the sums over past steps, and rows that catch up."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.contract.motion import Quotient
from sparsestep.dense import history as histories
from sparsestep.dense.clock import History, RowClock
from sparsestep.engines.protocol import Settings
from sparsestep.errors import InputError
from tests.table import INSTRUCTION_SETS, Variant, each_engine, running_on, same_bits

# One for each way in which an idle row moves.
ADAM = Variant(sparsestep.AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.1})
KINDS = [
    ADAM,
    Variant(sparsestep.AdamW, {}),
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"betas": (0.9, 0.0)}),
    Variant(sparsestep.AdamW, {"betas": (0.0, 0.9)}),
    Variant(sparsestep.AdamW, {"eps": 1.0}),
    Variant(sparsestep.AdamW, {"amsgrad": True}),
    Variant(sparsestep.SparseAdam, {}),
    Variant(
        sparsestep.RowwiseAdam,
        {"betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    Variant(sparsestep.SGD, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sparsestep.SGD, {"momentum": 0.9, "nesterov": True}),
    Variant(sparsestep.SGD, {"momentum": 0.9999}),  # reaches back further than is kept
    Variant(sparsestep.RMSprop, {"momentum": 0.5, "centered": True}),
    Variant(sparsestep.Lion, {"weight_decay": 0.1}),
    Variant(sparsestep.Lion, {"betas": (0.9, 0.0)}),  # no sign is left after one step
    Variant(sparsestep.Ftrl, {"l1": 0.1, "l2": 0.1}),
]
each_kind = pytest.mark.parametrize("variant", KINDS, ids=str)


_settings: dict[tuple[str, float], Settings] = {}


def settings_of(variant: Variant, lr: float) -> Settings:
    key = (str(variant), lr)
    if key not in _settings:
        opt = variant([torch.zeros(1, 1)], lr=lr, semantics="dense")
        _settings[key] = opt._settings_of(0, opt.param_groups[0])
    return _settings[key]


def rates(steps: int, seed: int = 0) -> list[float]:
    """Learning rates that vary, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(steps, generator=generator, dtype=torch.float64) * 0.01
    return torch.where(torch.rand(steps, generator=generator) < 0.1, 0.0, drawn).tolist()


def new_history(variant: Variant, base: int = 0) -> History:
    settings = settings_of(variant, 0.0)
    assert settings.rule.motion is not None
    return History(settings.rule.motion, settings.hyper, base)


def tables(history: History) -> list[Tensor]:
    by_step = [history.inverse_decay, history.sizes, history.roots, history.sums]
    return [*by_step, *history.powers.values()]


def advance(history: History, variant: Variant, lrs: list[float]) -> list[tuple[float, ...]]:
    """Take note of steps; returns size, root and shrink of each."""
    taken = []
    decay = variant.options.get("weight_decay", 0.0)
    for lr in lrs:
        hyper = {**history.hyper, "lr": lr}
        size, root = history.motion.size(history.now + 1, hyper)
        taken.append((size, root, 1 - lr * decay))
        history.advance(*taken[-1])
    return taken


def directly(history: History, taken: list[tuple[float, ...]], since: int, term: int) -> float:
    """The sum over all steps after ``since``, added up one by one."""
    motion = history.motion
    ratio = history.decays[motion.buffer]
    if isinstance(motion, Quotient):
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
    anew.begin_anew()
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
    assert history.most_replayed <= history.horizon


@pytest.mark.parametrize("betas", [(0.95, 0.9), (0.9, 0.81), (0.9, 0.0), (0.5, 1e-200)])
def test_where_the_series_does_not_converge(betas: tuple[float, float]):
    history = new_history(Variant(sparsestep.AdamW, {"betas": betas}))
    assert not history.converges
    advance(history, ADAM, rates(10))
    assert not history.sums.any()


def test_without_a_first_moment_nothing_is_left_after_a_step():
    for betas in ((0.0, 0.9), (0.0, 0.0)):
        history = new_history(Variant(sparsestep.AdamW, {"betas": betas}))
        assert (history.converges, history.horizon, history.most_replayed) == (True, 1, 1)


def test_a_history_is_full_after_so_many_steps(monkeypatch):
    history = new_history(ADAM)
    monkeypatch.setattr(histories, "_MOST_STEPS", 10)
    advance(history, ADAM, rates(7))
    assert not history.is_full
    advance(history, ADAM, rates(1))
    assert history.is_full
    history.begin_anew()
    assert not history.is_full


@pytest.mark.parametrize(
    "variant", [*SUMMED, Variant(sparsestep.Lion, {"weight_decay": 0.1})], ids=str
)
def test_a_history_that_forgets_its_oldest_steps_is_as_one_that_began_later(variant: Variant):
    long, short = new_history(variant), new_history(variant, base=300)
    lrs = rates(500)
    advance(long, variant, lrs)
    advance(short, variant, lrs[300:])
    long.forget(300)
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
        history.advance(0.1, 1.0, 1e-4)
        steps += 1
    assert steps == 38
    assert history.sums.isfinite().all()


# Rows that catch up


def pending(
    variant: Variant, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0
) -> tuple[RowClock, Tensor, list[Tensor]]:
    """A parameter whose rows have just had a gradient, all but the last one."""
    generator = torch.Generator().manual_seed(seed)
    rule = variant.rule
    param = torch.randn(shape, generator=generator, dtype=torch.float64)
    state = []
    for kept in rule.state:
        of = torch.randn(shape[:1] if kept.per_row else shape, generator=generator).double()
        of *= 10 ** (6 * torch.rand(of.shape, generator=generator).double() - 5)
        if "sq" in kept.name or "sum" in kept.name:
            of = of.square()
        if of.dim() > 1:
            of[-1] = 0.0
        state.append(of.to(dtype))
    if rule.name == "amsgrad":
        state[2] = torch.maximum(state[1], state[2])
    if rule.name == "rmsprop_centered_momentum":
        state[2] = state[2].clamp(-0.1, 0.1) * state[0].sqrt()
    clock = RowClock(settings_of(variant, 0.0), shape[0], 3, new=False)
    clock.last[-1] = ~3
    return clock, param.to(dtype), state


def miss(clock: RowClock, variant: Variant, lrs: list[float]) -> None:
    for lr in lrs:
        clock.advance(settings_of(variant, lr))


def one_by_one(
    clock: RowClock, variant: Variant, lrs: list[float], param: Tensor, state: list[Tensor]
) -> list[Tensor]:
    """The rule itself with gradients of zero, in float64."""
    rule, decay = clock.rule, variant.options.get("weight_decay", 0.0)
    rows = len(param)
    old = [t.double().reshape(rows, -1) for t in (param, *state)]
    zero = torch.zeros_like(old[0])
    hyper = {name: value for name, value in clock.history.hyper.items() if name != "lr"}
    for number, lr in enumerate(lrs):
        if "weight_decay" in variant.options or variant.cls is sparsestep.AdamW:
            old[0] = old[0] * (1 - lr * (decay or 0.01))
        old = rule.new_values(old, zero, 4 + number, {**hyper, "lr": lr})
    return [new.reshape(t.shape) for new, t in zip(old, (param, *state), strict=True)]


def distance(ours: Tensor, exact: Tensor) -> float:
    """The largest, relative to what is largest."""
    return float((ours.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-300))


GAPS = [1, 2, 3, 40]


@each_kind
@each_engine
@pytest.mark.parametrize("missed", GAPS)
def test_a_row_that_missed_some_steps(variant: Variant, engine: str, missed: int):
    lrs = rates(missed + 1)[1:]
    clock, param, state = pending(variant, (9, 5), torch.float64)
    exact = one_by_one(clock, variant, lrs, param, state)
    miss(clock, variant, lrs)
    with running_on(engine) as name:
        clock.catch_up_rows(param, state, None, engine=name)
    for ours, wanted in zip((param, *state), exact, strict=True):
        assert distance(ours, wanted) <= 1e-13
    assert clock.last.tolist() == [3 + missed] * 8 + [~(3 + missed)]


LONG = [KINDS[1], KINDS[2], KINDS[6], KINDS[8], KINDS[10], KINDS[13], KINDS[15]]


@pytest.mark.parametrize("variant", LONG, ids=str)
def test_a_row_that_missed_ten_thousand_steps(variant: Variant):
    """In one go and in two, in two precisions, on both engines."""
    palette = rates(50)
    lrs = [palette[n * n % 47] for n in range(10_000)]
    clock, param, state = pending(variant, (4, 3), torch.float64)
    exact = one_by_one(clock, variant, lrs, param, state)
    engines = INSTRUCTION_SETS[-1:]
    if clock.history.converges or not engines:  # or it would take the reference too long
        engines = ["reference", *engines]
    runs: list[tuple[RowClock, Tensor, list[Tensor], str, bool]] = []
    for dtype in (torch.float64, torch.float32):
        for engine in engines:
            for halfway in (False, True):
                own = (param.to(dtype, copy=True), [t.to(dtype, copy=True) for t in state])
                runs.append((clock_like(clock), *own, engine, halfway))
    for number, lr in enumerate(lrs):
        clock.advance(settings_of(variant, lr))
        if number == 5000:
            catch_up_each(clock, [run for run in runs if run[-1]])
    catch_up_each(clock, runs)
    for _, ours, kept, _, _ in runs:
        room = 1e-11 if ours.dtype == torch.float64 else 3e-6
        for tensor, wanted in zip((ours, *kept), exact, strict=True):
            # What has faded to less than float32 can tell apart is no longer compared.
            assert float((tensor.double() - wanted).abs().max()) <= room * max(
                1.0, float(wanted.abs().max())
            )


def clock_like(clock: RowClock) -> RowClock:
    """Another parameter with the same history."""
    other = object.__new__(RowClock)
    other.__dict__.update(clock.__dict__)
    other._stamps = copy.deepcopy(clock._stamps)
    return other


def catch_up_each(clock: RowClock, runs: list[Any]) -> None:
    for one, param, state, engine, _ in runs:
        one.history = clock.history
        with running_on(engine) as name:
            one.catch_up_rows(param, state, None, engine=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each_engine
def test_an_average_whose_sign_counts_never_fades_to_zero(dtype: torch.dtype, engine: str):
    """Lion drifts along it for as long as the row is idle; dense steps never make it zero."""
    variant = Variant(sparsestep.Lion, {"betas": (0.9, 0.5)})
    clock = RowClock(settings_of(variant, 0.0), 3, 0, new=False)
    average = torch.tensor([[1e-3], [-1e-3], [0.0]], dtype=dtype)
    param = torch.zeros(3, 1, dtype=dtype)
    with running_on(engine) as name:
        for _ in range(2):
            miss(clock, variant, [2.0**-10] * 1200)
            clock.catch_up_rows(param, [average], None, engine=name)
    assert param.flatten().tolist() == [-2.34375, 2.34375, 0.0]
    assert average.sign().flatten().tolist() == [1.0, -1.0, 0.0]
    assert float(average.abs().max()) < 1e-7


@each_kind
@each_engine
def test_rows_come_in_any_order_and_repeatedly(variant: Variant, engine: str):
    lrs = rates(20)
    rows = torch.tensor([7, 2, 7, 7, 0, 2])
    results = []
    for given in (rows, rows.unique(), rows.view(2, 3), rows.int(), rows[::2].repeat(3)):
        clock, param, state = pending(variant, (9, 5), torch.float32)
        before = [t.clone() for t in (param, *state)]
        miss(clock, variant, lrs)
        with running_on(engine) as name:
            clock.catch_up_rows(param, state, given, engine=name)
        chosen = torch.zeros(9, dtype=torch.bool)
        chosen[given.flatten().long()] = True
        for ours, was in zip((param, *state), before, strict=True):
            assert same_bits(ours[~chosen], was[~chosen])
        assert clock.last.tolist() == [
            (23 if chosen[row] else 3) if row < 8 else ~3 for row in range(9)
        ]
        results.append([t[7] for t in (param, *state)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@each_engine
def test_stamps(engine: str):
    """A row that is about to be updated counts as current after that step, and as touched."""
    variant = Variant(sparsestep.SGD, {"momentum": 0.5})
    clock = RowClock(settings_of(variant, 0.0), 5, 7, new=True)
    param, buffer = torch.zeros(5, 1), torch.zeros(5, 1)
    assert clock.last.tolist() == [~7] * 5
    with running_on(engine) as name:

        def catch_up_rows(rows: list[int] | None, touch: bool) -> int:
            given = None if rows is None else torch.tensor(rows)
            stale = clock.catch_up_rows(param, [buffer], given, engine=name)
            if touch:
                clock.stamp(given)
            return stale

        catch_up_rows([1], touch=True)
        assert clock.last.tolist() == [~7, 8, ~7, ~7, ~7]
        miss(clock, variant, [1.0])
        catch_up_rows([0, 1, 2], touch=False)
        assert clock.last.tolist() == [~8, 8, ~8, ~7, ~7]
        miss(clock, variant, [1.0])
        catch_up_rows([], touch=True)
        assert clock.last.tolist() == [~8, 8, ~8, ~7, ~7]
        catch_up_rows([1, 2, 3], touch=True)
        assert clock.last.tolist() == [~8, 10, 10, 10, ~7]
        miss(clock, variant, [1.0])
        clock.catch_up_all(param, [buffer], engine=name)
    assert clock.last.tolist() == [~10, 10, 10, 10, ~10]
    assert (clock.history.base, clock.history.steps) == (10, 0)


# Which rows were read where they should not have been, had they been read before they caught up.
STALE = {
    "momentum": (sparsestep.SGD, {"momentum": 0.5}, 0.1, 2),
    "momentum, at rest": (sparsestep.SGD, {"momentum": 0.5}, 0.0, 0),
    "no momentum": (sparsestep.SGD, {}, 0.1, 0),
    "no momentum, but decay": (
        sparsestep.SGD,
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        0.1,
        3,
    ),
    "decay, at rest": (
        sparsestep.SGD,
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        0.0,
        0,
    ),
    "Adam": (sparsestep.Adam, {}, 0.1, 2),
    "Adam, at rest": (sparsestep.Adam, {}, 0.0, 0),
    "Adam, replayed": (sparsestep.Adam, {"betas": (0.9, 0.5)}, 0.1, 2),
    "AdamW": (sparsestep.AdamW, {}, 0.1, 3),
    "only a fading average": (sparsestep.RMSprop, {}, 0.1, 0),
    "Adagrad": (sparsestep.Adagrad, {}, 0.1, 0),
    "one sum per row": (sparsestep.RowwiseAdagrad, {}, 0.1, 0),
    "sign": (sparsestep.Lion, {}, 0.1, 2),
    "sign, at rest": (sparsestep.Lion, {}, 0.0, 0),
    "leader": (sparsestep.Ftrl, {}, 0.1, 3),
    "leader, at rest": (sparsestep.Ftrl, {}, 0.0, 0),
}


@pytest.mark.parametrize("case", STALE)
@each_engine
def test_how_many_rows_were_stale(case: str, engine: str):
    cls, options, lr, stale = STALE[case]
    variant = Variant(cls, options)
    clock = RowClock(settings_of(variant, 0.0), 4, 0, new=True)
    clock.last[:2] = 0  # these have had a gradient
    param = torch.ones(4, 3)
    state = [torch.ones(4) if k.per_row else torch.ones(4, 3) for k in variant.rule.state]
    miss(clock, variant, [lr, lr])
    with running_on(engine) as name:
        found = [
            clock.catch_up_rows(param, state, torch.tensor([0, 1, 2, 0]), engine=name),
            clock.catch_up_rows(param, state, torch.tensor([0, 1, 2, 0]), engine=name),
        ]
    assert found == [stale, 0]


@each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_leader_that_stays_is_not_stale(engine: str, dtype: torch.dtype):
    """FTRL moves an idle row only where the learning rate has changed since."""
    variant = Variant(sparsestep.Ftrl, {"l1": 0.1, "l2": 0.1})
    param = torch.nn.Parameter(torch.zeros(50, 3, dtype=dtype))
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        for row in range(4):
            param.grad = torch.sparse_coo_tensor([[row]], torch.randn(1, 3).to(dtype), (50, 3))
            opt.step()
        clock = opt._clocks[id(param)]
        real = (param.detach(), [opt.state[param][n] for n in ("linear", "sum")])
        assert clock.catch_up_rows(*real, torch.arange(4), engine=name) == 0
        opt.param_groups[0]["lr"] = 0.2
        param.grad = torch.sparse_coo_tensor([[9]], torch.randn(1, 3).to(dtype), (50, 3))
        opt.step()
        assert clock.catch_up_rows(*real, torch.arange(9), engine=name) == 4


# What the optimizer offers


def momentum(engine: str = "auto") -> tuple[torch.nn.Parameter, sparsestep.SGD]:
    """Rows 0 to 3 of five have had a gradient, one in each step."""
    param = torch.nn.Parameter(torch.zeros(5, 1))
    opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, semantics="dense", engine=engine)
    for row in range(4):
        param.grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 1), (5, 1))
        opt.step()
    return param, opt


CURRENT = [-1.875, -1.75, -1.5, -1.0, 0.0]


@each_engine
@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([0, 2]),
        torch.tensor([2, 0, 2, 2, 0]),
        torch.tensor([[0, 2], [2, 4]]),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([2, 0], dtype=torch.int16),
        torch.tensor([2, 0], dtype=torch.uint8),
        torch.tensor([0, 9, 2, 9])[::2],
    ],
    ids=lambda rows: f"{rows.dtype}-{tuple(rows.shape)}",
)
def test_catch_up_of_some_rows(engine: str, rows: Tensor):
    with running_on(engine) as name:
        param, opt = momentum(name)
        opt.catch_up(param, rows)
        assert param.flatten().tolist() == [-1.875, -1.0, -1.5, -1.0, 0.0]
        opt.catch_up(param, rows)
        opt.catch_up(param)
    assert param.flatten().tolist() == CURRENT
    assert opt.state[param]["momentum_buffer"].flatten().tolist() == [0.125, 0.25, 0.5, 1.0, 0.0]


@each_engine
def test_catch_up_of_one_row(engine: str):
    with running_on(engine) as name:
        param, opt = momentum(name)
        opt.catch_up(param, torch.tensor(1))
        opt.catch_up(param, torch.tensor([], dtype=torch.int64))
    assert param.flatten().tolist() == [-1.0, -1.75, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("semantics", ["dense", "masked"])
def test_catch_up_of_an_unknown_parameter_is_refused(semantics: str):
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param], semantics=semantics)
    for other in (torch.nn.Parameter(torch.ones(5, 1)), param.detach(), param.data):
        for rows in (None, torch.tensor([0])):
            with pytest.raises(InputError, match=r"^AdamW: .*Got another, \(5, 1\)\.$"):
                opt.catch_up(other, rows)
    with pytest.raises(InputError, match=r"one of this optimizer's\. Got str"):
        opt.catch_up("weight")  # type: ignore[arg-type]


def test_under_masked_semantics_there_is_nothing_to_catch_up():
    """Code that does not know which semantics it has may call it."""
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param])
    param.grad = torch.ones(5, 1).to_sparse_coo()
    opt.step()
    before = param.detach().clone()
    opt.catch_up()
    opt.catch_up(param, torch.tensor([3]))
    assert same_bits(param.detach(), before)


def test_how_many_rows_were_behind_is_what_bringing_all_of_them_says():
    """So a step with a dense gradient knows whether it was taken at old values."""
    param, opt = momentum()
    clock, state = opt._clocks[id(param)], [opt.state[param]["momentum_buffer"]]
    assert clock.is_behind
    assert clock.catch_up_all(param.detach(), state) == 3
    assert not clock.is_behind
    assert clock.catch_up_all(param.detach(), state) == 0


def test_catch_up_before_the_first_step_does_nothing():
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param], semantics="dense")
    opt.catch_up()
    opt.catch_up(param, torch.tensor([1]))
    assert torch.equal(param, torch.ones(5, 1))
    masked = sparsestep.AdamW([param])
    masked.catch_up()
    masked.catch_up(param, torch.tensor([1]))


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_rows_that_do_not_exist_are_refused(bad: int):
    param, opt = momentum()
    with pytest.raises(sparsestep.InputError, match=rf"SGD: .*in \[0, 5\). Got {bad}"):
        opt.catch_up(param, torch.tensor([0, bad, 1]))
    assert param.flatten().tolist() == [-1.0, -1.0, -1.0, -1.0, 0.0]
    opt.catch_up()
    assert param.flatten().tolist() == CURRENT


@pytest.mark.parametrize("rows", [torch.tensor([True] * 5), torch.tensor([1.5]), [1]], ids=str)
def test_rows_that_are_no_integers_are_refused(rows: Any):
    """A mask least of all: it would be taken for rows 0 and 1."""
    param, opt = momentum()
    with pytest.raises(sparsestep.InputError, match="rows must be integers"):
        opt.catch_up(param, rows)


@each_engine
@pytest.mark.parametrize("shape", [(5, 40), (50, 1), (2, 1)], ids=str)
def test_a_parameter_that_was_replaced_is_refused(engine: str, shape: tuple[int, ...]):
    """Its state has another shape: nothing outside of it may be written."""
    with running_on(engine) as name:
        param, opt = momentum(name)
        param.grad = None
        param.data = torch.zeros(shape)
        for rows in (None, torch.tensor([1])):
            with pytest.raises(sparsestep.InputError, match="must keep its shape, 5 rows"):
                opt.catch_up(param, rows)
    assert not param.any()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@each_engine
def test_many_rows_are_shared_out(engine: str, threads: int):
    """Every row is done once, however often it is named and whoever gets it."""
    variant = Variant(sparsestep.AdamW, {})
    lrs = rates(10)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 3000, (6000,), generator=generator)
    clock, param, state = pending(variant, (3000, 8), torch.float64)
    torch.set_num_threads(1)
    exact = one_by_one(clock, variant, lrs, param, state)
    before = param.clone()
    miss(clock, variant, lrs)
    torch.set_num_threads(threads)
    with running_on(engine) as name:
        stale = clock.catch_up_rows(param, state, rows, engine=name)
    chosen = torch.zeros(3000, dtype=torch.bool)
    chosen[rows] = True
    assert stale == int(chosen.sum())
    assert torch.equal(param[~chosen], before[~chosen])
    for ours, wanted in zip((param, *state), exact, strict=True):
        assert distance(ours[chosen], wanted[chosen]) <= 1e-13


@each_engine
@pytest.mark.parametrize(
    "strides", ["columns first", "every other row", "every other column", "three dims"]
)
def test_tensors_that_lie_otherwise(engine: str, strides: str):
    variant = Variant(sparsestep.AdamW, {})
    lrs = rates(10)

    def placed(t: Tensor) -> Tensor:
        if strides == "columns first":
            return t.t().contiguous().t()
        if strides == "every other row":
            return t.repeat_interleave(2, dim=0)[::2]
        if strides == "every other column":
            return t.repeat_interleave(2, dim=1)[:, ::2]
        return t.view(9, 2, 3).transpose(1, 2).contiguous().transpose(1, 2)

    clock, param, state = pending(variant, (9, 6), torch.float64)
    exact = one_by_one(clock, variant, lrs, param, state)
    param, state = placed(param), [placed(t) for t in state]
    assert not param.is_contiguous()
    miss(clock, variant, lrs)
    with running_on(engine) as name:
        clock.catch_up_rows(param, state, torch.tensor([8, 3]), engine=name)
        clock.catch_up_rows(param, state, None, engine=name)
    for ours, wanted in zip((param, *state), exact, strict=True):
        assert distance(ours.reshape(wanted.shape), wanted) <= 1e-13
