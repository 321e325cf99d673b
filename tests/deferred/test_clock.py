"""Rows that catch up, against the steps that they have missed, taken one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.deferred.rows import DeferredRows
from tests.deferred.idle_rows import KINDS, rates, settings_of
from tests.table import INSTRUCTION_SETS, Variant, each_engine, running_on, same_bits

each_kind = pytest.mark.parametrize("variant", KINDS, ids=str)


def pending(
    variant: Variant, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int = 0
) -> tuple[DeferredRows, Tensor, list[Tensor]]:
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
    clock = DeferredRows(settings_of(variant, 0.0), shape[0], 3, new=False)
    clock.last_step[-1] = ~3
    return clock, param.to(dtype), state


def miss(clock: DeferredRows, variant: Variant, lrs: list[float]) -> None:
    for lr in lrs:
        clock.commit_step(settings_of(variant, lr))


def one_by_one(
    clock: DeferredRows, variant: Variant, lrs: list[float], param: Tensor, state: list[Tensor]
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
        old = rule.apply(old, zero, 4 + number, {**hyper, "lr": lr})
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
        clock.catch_up(param, state, None, engine=name)
    for ours, wanted in zip((param, *state), exact, strict=True):
        assert distance(ours, wanted) <= 1e-13
    assert clock.last_step.tolist() == [3 + missed] * 8 + [~(3 + missed)]


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
    runs: list[tuple[DeferredRows, Tensor, list[Tensor], str, bool]] = []
    for dtype in (torch.float64, torch.float32):
        for engine in engines:
            for halfway in (False, True):
                own = (param.to(dtype, copy=True), [t.to(dtype, copy=True) for t in state])
                runs.append((clock_like(clock), *own, engine, halfway))
    for number, lr in enumerate(lrs):
        clock.commit_step(settings_of(variant, lr))
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


def clock_like(clock: DeferredRows) -> DeferredRows:
    """Another parameter with the same history."""
    other = object.__new__(DeferredRows)
    other.__dict__.update(clock.__dict__)
    other._steps = copy.deepcopy(clock._steps)
    return other


def catch_up_each(clock: DeferredRows, runs: list[Any]) -> None:
    for one, param, state, engine, _ in runs:
        one.history = clock.history
        with running_on(engine) as name:
            one.catch_up(param, state, None, engine=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@each_engine
def test_an_average_whose_sign_counts_never_fades_to_zero(dtype: torch.dtype, engine: str):
    """Lion drifts along it for as long as the row is idle; dense steps never make it zero."""
    variant = Variant(sparsestep.Lion, {"betas": (0.9, 0.5)})
    clock = DeferredRows(settings_of(variant, 0.0), 3, 0, new=False)
    average = torch.tensor([[1e-3], [-1e-3], [0.0]], dtype=dtype)
    param = torch.zeros(3, 1, dtype=dtype)
    with running_on(engine) as name:
        for _ in range(2):
            miss(clock, variant, [2.0**-10] * 1200)
            clock.catch_up(param, [average], None, engine=name)
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
            clock.catch_up(param, state, given, engine=name)
        chosen = torch.zeros(9, dtype=torch.bool)
        chosen[given.flatten().long()] = True
        for ours, was in zip((param, *state), before, strict=True):
            assert same_bits(ours[~chosen], was[~chosen])
        assert clock.last_step.tolist() == [
            (23 if chosen[row] else 3) if row < 8 else ~3 for row in range(9)
        ]
        results.append([t[7] for t in (param, *state)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@each_engine
def test_last_steps(engine: str):
    """A row that is about to be updated counts as current after that step, and as touched."""
    variant = Variant(sparsestep.SGD, {"momentum": 0.5})
    clock = DeferredRows(settings_of(variant, 0.0), 5, 7, new=True)
    param, buffer = torch.zeros(5, 1), torch.zeros(5, 1)
    assert clock.last_step.tolist() == [~7] * 5
    with running_on(engine) as name:

        def catch_up_rows(rows: list[int] | None, touch: bool) -> int:
            given = None if rows is None else torch.tensor(rows)
            stale = clock.catch_up(param, [buffer], given, engine=name)
            if touch:
                clock.set_last_step(given)
            return stale

        catch_up_rows([1], touch=True)
        assert clock.last_step.tolist() == [~7, 8, ~7, ~7, ~7]
        miss(clock, variant, [1.0])
        catch_up_rows([0, 1, 2], touch=False)
        assert clock.last_step.tolist() == [~8, 8, ~8, ~7, ~7]
        miss(clock, variant, [1.0])
        catch_up_rows([], touch=True)
        assert clock.last_step.tolist() == [~8, 8, ~8, ~7, ~7]
        catch_up_rows([1, 2, 3], touch=True)
        assert clock.last_step.tolist() == [~8, 10, 10, 10, ~7]
        miss(clock, variant, [1.0])
        clock.catch_up_all(param, [buffer], engine=name)
    assert clock.last_step.tolist() == [~10, 10, 10, 10, ~10]
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
    clock = DeferredRows(settings_of(variant, 0.0), 4, 0, new=True)
    clock.last_step[:2] = 0  # these have had a gradient
    param = torch.ones(4, 3)
    state = [torch.ones(4) if k.per_row else torch.ones(4, 3) for k in variant.rule.state]
    miss(clock, variant, [lr, lr])
    with running_on(engine) as name:
        found = [
            clock.catch_up(param, state, torch.tensor([0, 1, 2, 0]), engine=name),
            clock.catch_up(param, state, torch.tensor([0, 1, 2, 0]), engine=name),
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
        clock = opt.deferred[id(param)]
        real = (param.detach(), [opt.state[param][n] for n in ("linear", "sum")])
        assert clock.catch_up(*real, torch.arange(4), engine=name) == 0
        opt.param_groups[0]["lr"] = 0.2
        param.grad = torch.sparse_coo_tensor([[9]], torch.randn(1, 3).to(dtype), (50, 3))
        opt.step()
        assert clock.catch_up(*real, torch.arange(9), engine=name) == 4


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
        stale = clock.catch_up(param, state, rows, engine=name)
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
        clock.catch_up(param, state, torch.tensor([8, 3]), engine=name)
        clock.catch_up(param, state, None, engine=name)
    for ours, wanted in zip((param, *state), exact, strict=True):
        assert distance(ours.reshape(wanted.shape), wanted) <= 1e-13
