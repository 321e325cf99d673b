"""DeferredRows and StepHistory, against the missed steps, taken one by one."""

from __future__ import annotations

import pytest
import torch
from numpy.polynomial.chebyshev import chebval
from torch import Tensor

import sparsestep
from sparsestep.deferred import history as histories
from sparsestep.deferred.history import StepHistory
from sparsestep.deferred.rows import DeferredRows
from sparsestep.engines.base import GroupSettings
from tests.deferred.runs import DECAY, on_both_engines
from tests.subject import refused
from tests.table import INSTRUCTION_SETS, Variant, running_on

pytestmark = pytest.mark.usefixtures("one_thread")
ADAM = Variant(sparsestep.AdamW, {})
DIVERGENT = Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)})  # the series does not converge
AMSGRAD = Variant(sparsestep.AdamW, {"amsgrad": True})
NESTEROV = Variant(sparsestep.SGD, {"momentum": 0.9, "nesterov": True})
LION = Variant(sparsestep.Lion, {"weight_decay": 0.1})
FTRL = Variant(sparsestep.Ftrl, {"l1": 0.1, "l2": 0.1})
LONG = [ADAM, DIVERGENT, AMSGRAD, NESTEROV, LION, FTRL]
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
    rows.stored_steps[-1] = ~3 ^ rows.initial_step
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


@pytest.mark.parametrize("variant", LONG, ids=str)
def test_rows_that_missed_thousands_of_steps(variant: Variant):
    """In one go and in two, in two precisions, on both engines."""
    palette = rates(50)
    lrs = [palette[n * n % 47] for n in range(3_000)]
    rows, param, state = pending(variant, (4, 3))
    exact = one_by_one(rows, variant, lrs, param, state)
    engines = INSTRUCTION_SETS[-1:]
    if rows.history.converges or not engines:  # or it would take the reference too long
        engines = ["reference", *engines]
    runs = [
        (
            [t.to(dtype, copy=True) for t in (param, *state)],
            rows.stored_steps.clone(),
            engine,
            halfway,
        )
        for dtype in (torch.float64, torch.float32)
        for engine in engines
        for halfway in (False, True)
    ]
    for is_second, half in enumerate((lrs[:1501], lrs[1501:])):
        miss(rows, variant, half)
        for (own, *others), last_step, engine, halfway in runs:
            if is_second or halfway:
                rows.stored_steps.copy_(last_step)
                with running_on(engine) as name:
                    rows.catch_up(own, others, None, engine=name)
                last_step.copy_(rows.stored_steps)
    for ours, _, _, _ in runs:
        room = 1e-11 if ours[0].dtype == torch.float64 else 3e-6
        for tensor, wanted in zip(ours, exact, strict=True):
            # What has faded to less than float32 can tell apart is no longer compared.
            off = float((tensor.double() - wanted).abs().max())
            assert off <= room * max(1.0, float(wanted.abs().max()))


def test_a_total_starts_at_zero_when_the_oldest_steps_are_dropped():
    """Or later differences of it would lose digits."""
    rows, param, state = pending(LION, (4, 3))
    lrs = rates(600)
    exact = one_by_one(rows, LION, lrs, param, state)
    miss(rows, LION, lrs[:300])
    rows.catch_up(param, state, None)
    rows.history.drop_oldest(300)
    assert not rows.history.sums.any()
    miss(rows, LION, lrs[300:])
    rows.catch_up(param, state, None)
    assert_near([param, *state], exact)


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
        rows.stored_steps[:2] = 0 ^ rows.initial_step  # these have had a gradient
        param = torch.ones(4, 3)
        state = [torch.ones(4) if k.per_row else torch.ones(4, 3) for k in variant.rule.state]
        miss(rows, variant, [lr, lr])
        ids = torch.tensor([0, 1, 2, 0])
        with running_on(engine) as name:
            assert rows.catch_up(param, state, ids, engine=name) == wanted
            assert rows.catch_up(param, state, ids, engine=name) == 0


@on_both_engines
def test_ftrl_moves_idle_rows_only_if_the_learning_rate_changes(engine: str):
    dtype = torch.bfloat16
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

    def fail(self: StepHistory, capacity: int) -> None:
        raise MemoryError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(StepHistory, "_reserve", fail)
        with refused(opt, error=MemoryError):
            opt.step()
    before = param.detach().clone()
    opt.step()
    assert not torch.equal(param, before)


# The betas of Adam, and the past step from which on no row is replayed in float32.
SERIES = [((0.9, 0.999), 0), ((0.9, 0.99), 0), ((0.9, 0.95), 1), ((0.99, 0.999), 10)]


@pytest.mark.parametrize(("betas", "first"), SERIES, ids=str)
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_the_error_of_a_series_is_within_its_bound(
    betas: tuple[float, float], first: int, native: bool, monkeypatch: pytest.MonkeyPatch
):
    """For any eps and square: against the sum over steps, one by one."""
    if not native:
        monkeypatch.setattr(histories, "ext", None)
    variant = Variant(sparsestep.AdamW, {"betas": betas, "weight_decay": 0.1})
    rows = DeferredRows(settings_of(variant, 0.0), 1, 0, new=False)
    miss(rows, variant, rates(300))
    history = rows.history
    u = torch.linspace(0, 1, 101, dtype=torch.float64)
    for since in (0, 1, 3, 10, 50, 250, 298):
        step = torch.arange(since + 1, 301)
        missed = (step - since).double()
        size = history.sizes[step] * history.inverse_decay[step] * betas[0] ** missed
        ratio = betas[1] ** (missed / 2) / history.roots[step] / history.centers[since]
        exact = (size / (ratio + (1 - ratio) * u[:, None])).sum(1)
        *series, error = history.sums[since].tolist()
        off = torch.from_numpy(chebval((2 * u - 1).numpy(), series)) - exact
        assert float(off.abs().max()) <= error + 1e-13 * float(exact.max())
        if since >= first:
            assert error <= history.max_error(torch.float32) * series[0]
