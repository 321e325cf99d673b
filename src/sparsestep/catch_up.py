"""Dense semantics at sparse cost: what a row missed is made up for when it is next needed.

Under ``semantics="dense"`` an entry without a gradient counts as one whose gradient is zero: its
momentum goes on moving it, its averages fade, its weight decays. Nothing of that is done when it
happens. A row remembers the step up to which it is current, and all that it missed since is done at
once before the row is read or updated.

For Adam a row that is current after step j and needed after step n has moved by

    sum over s = j+1 .. n of  size_s * m * b1^(s-j) / (sqrt(v * b2^(s-j)) / root_s + eps) * W_s

where W_s is what decay has left since step s. Expanded in powers of eps / sqrt(v), every term is a
number that depends on (j, n) alone times a number that depends on the entry alone. So four sums
for each past step, kept in float64, serve all entries of all rows, however long they were idle. An
entry whose eps / sqrt(v) is not small is followed step by step instead, as far as b1^k matters. The
other rules are special cases: a geometric series, a constant drift, or nothing but decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract import Idle, Settings
from sparsestep.engines import native
from sparsestep.errors import InputError, sentence

# What a term may be smaller than, relative to the first, to be left out.
_NEGLIGIBLE = 1e-18
# How many past steps are kept; then every row is brought up to date and the history begins anew.
_MOST_STEPS = 1 << 16
_MOST_GROWTH = 1e150
_SMALL = {torch.float64: 1e-4}
_USUALLY_SMALL = 0.02
_TERMS = 4
# What an average whose sign counts never becomes smaller than; usually the smallest normal number.
_LEAST = {torch.float16: 2.0**-24}


class History:
    """What the steps since ``base`` would have done to an idle row, whatever its last step.

    Attributes:
        base: the step that every row has reached.
        steps: how many steps were taken since.
        growth: 1 / (what decay has left since base), for each step.
        sizes: the size of each step's move.
        roots: what the square root is divided by in each step.
        sums: for each past step, the sums over all later ones; relative to ``growth``.
    """

    def __init__(self, idle: Idle, hyper: Mapping[str, Any], base: int) -> None:
        self.idle = idle
        self.base = base
        self.steps = 0
        self.first, self.second = idle.factors(hyper)
        self.eps = float(hyper.get("eps", 0.0))
        fades = idle.fades.get(idle.square) == 1
        self.fade = math.sqrt(self.second) if fades else 1.0
        self.hyper = hyper
        self._find_reach()
        self.growth, self.sizes, self.roots = torch.ones(3, 1, dtype=torch.float64).unbind()
        self.sums = torch.zeros(_TERMS, 1, dtype=torch.float64)
        self._reserve(256)

    def _find_reach(self) -> None:
        """How many steps back a move still matters, and whether the series may be used."""
        ratios = [self.first]
        if self.idle.along == "quotient":
            ratios = [_quotient(self.first, self.fade ** (i + 1)) for i in range(_TERMS)]
        self.reach = max(_reach(ratio) for ratio in ratios)
        self.converges = self.reach < _MOST_STEPS
        # Followed step by step, an entry is done when its first term's ratio has died out.
        self.follow = _reach(ratios[0])
        reach = self.reach if self.converges else 1
        powers = torch.arange(reach, 0, -1, dtype=torch.float64)
        self._ratios = torch.stack([torch.tensor(r, dtype=torch.float64) ** powers for r in ratios])

    def _reserve(self, capacity: int) -> None:
        def grown(old: Tensor, *shape: int, fill: float = 0.0) -> Tensor:
            new = torch.full(shape, fill, dtype=torch.float64)
            new[..., : old.shape[-1]] = old
            return new

        self.growth = grown(self.growth, capacity, fill=1.0)
        self.sizes = grown(self.sizes, capacity)
        self.roots = grown(self.roots, capacity, fill=1.0)
        self.sums = grown(self.sums, _TERMS, capacity)
        steps = torch.arange(capacity, dtype=torch.float64)
        self.firsts = torch.tensor(self.first, dtype=torch.float64) ** steps
        self.seconds = torch.tensor(self.second, dtype=torch.float64) ** steps

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What the core reads, in its order."""
        return self.growth, self.sizes, self.roots, self.firsts, self.seconds, self.sums

    @staticmethod
    def small_for(dtype: torch.dtype) -> float:
        """The largest eps / sqrt(v) for which four terms of the series are enough."""
        return _SMALL.get(dtype, _USUALLY_SMALL)

    @property
    def now(self) -> int:
        """The latest step."""
        return self.base + self.steps

    @property
    def is_full(self) -> bool:
        """Whether every row has to be brought up to date before the next step."""
        return self.steps + 2 >= _MOST_STEPS or float(self.growth[self.steps]) > _MOST_GROWTH

    def begin_anew(self) -> None:
        """Forget the past; every row has reached ``now``."""
        self.base, self.steps = self.now, 0
        self.growth[0] = 1.0
        self.sums.zero_()

    def advance(self, size: float, root: float, shrink: float) -> None:
        """Take note of a step."""
        n = self.steps + 1
        if n >= len(self.growth):
            self._reserve(2 * len(self.growth))
        growth = float(self.growth[n - 1]) / shrink
        self.growth[n], self.sizes[n], self.roots[n] = growth, size, root
        if self.idle.along in ("sign", "leader"):
            self.sums[0, n] = self.sums[0, n - 1] + size * growth
        elif self.idle.along in ("buffer", "quotient") and self.converges:
            begin = max(0, n - self.reach)
            ratios = self._ratios[:, self.reach - (n - begin) :]
            weights = [[size * growth * root ** (i + 1)] for i in range(len(ratios))]
            if len(ratios) == 1:  # no denominator
                weights = [[size * growth]]
            part = self.sums[: len(ratios), begin:n]
            part.addcmul_(ratios, torch.tensor(weights, dtype=torch.float64))
        self.steps = n


def _quotient(first: float, fade: float) -> float:
    """How the terms of a sum shrink; a square that is gone at once leaves nothing to divide by."""
    return first / fade if fade else math.inf if first else 0.0


def _reach(ratio: float) -> int:
    if ratio <= 0.0:
        return 1
    if ratio >= 1.0:
        return _MOST_STEPS
    return min(_MOST_STEPS, max(1, math.ceil(math.log(_NEGLIGIBLE) / math.log(ratio))))


class Idling:
    """A parameter whose idle rows are behind.

    Attributes:
        last: for each row the step up to which it is current; ``~step`` for a row that has never
            had a gradient, so that momentum it does not have is not missed.
    """

    def __init__(self, settings: Settings, rows: int, done: int, *, new: bool) -> None:
        rule = settings.rule
        if rule.idle is None:
            raise InputError(refusal(rule.name))
        self.rule = rule
        self.constants = constants(settings)
        self.history = History(rule.idle, {**settings.hyper, "lr": 0.0}, done)
        self.among: Tensor | None = None  # the rows that a mask lets move; None: all
        self.last = torch.full((rows,), ~done if new else done, dtype=torch.int32)

    def advance(self, settings: Settings) -> None:
        """Take note of a step that was just done, with these settings."""
        assert self.rule.idle is not None
        if settings.hyper.get("lr"):  # FTRL rests where the latest rate put it
            self.history.hyper = dict(settings.hyper)
        size, root = self.rule.idle.size(self.history.now + 1, settings.hyper)
        if self.rule.idle.along == "leader":  # counts the steps in which it did not rest
            size = 1.0 if settings.hyper["lr"] else 0.0
        self.history.advance(size, root, settings.shrink)

    def bring(
        self,
        param: Tensor,
        state: list[Tensor],
        rows: Tensor | None,
        *,
        touch: bool,
        engine: str = "auto",
    ) -> int:
        """Make rows current; returns how many of them were not: of whose parameter.

        Args:
            param: the parameter, real.
            state: its state tensors, real.
            rows: which ones, with repetitions; ``None`` for all.
            touch: they are about to be updated by the step after ``now``.
            engine: as for a step.
        """
        self._check(param, state)
        rows = None if rows is None else rows.reshape(-1).long()
        if engine != "reference" and native.core is not None:
            stale = native.catch_up(self, param, state, rows, touch)
            if stale is not None:
                return stale
        return _bring(self, param, state, rows, touch)

    def _check(self, param: Tensor, state: list[Tensor]) -> None:
        """Refuse what is not of the shape that the rows were counted in."""
        rows = len(self.last)
        wanted = [param.shape[:1] if kept.per_row else param.shape for kept in self.rule.state]
        if len(param) != rows or [tensor.shape for tensor in state] != wanted:
            contract = f"a parameter with rows that are behind must keep its shape, {rows} rows"
            got = f"{tuple(param.shape)} with state {[tuple(t.shape) for t in state]}"
            raise InputError(sentence(contract, got, "Make a new optimizer for it"))

    def bring_all(self, param: Tensor, state: list[Tensor], engine: str = "auto") -> None:
        """Make every row current, of those that may move at all; forget the past."""
        if not self.history.steps:
            return
        self.bring(param, state, self.among, touch=False, engine=engine)
        now = self.history.now
        self.last = torch.where(self.last < 0, ~now, now).to(torch.int32)
        self.history.begin_anew()


def constants(settings: Settings) -> tuple[Any, ...]:
    """The options that must not change while rows are behind; lr and decay may."""
    varying = {"lr", "lr_decay"}
    hyper = {k: v for k, v in settings.hyper.items() if k not in varying}
    return settings.rule.name, tuple(sorted(hyper.items(), key=lambda item: item[0]))


def refusal(name: str) -> str:
    """Phrase that a rule has no such form."""
    return sentence(
        "semantics='dense' needs a rule that says what it does without a gradient",
        f"rule {name!r}",
        "Use semantics='masked'",
    )


@torch.no_grad()
def _bring(
    idling: Idling, param: Tensor, state: list[Tensor], rows: Tensor | None, touch: bool
) -> int:
    """In torch, in float64: the oracle of the native kernel."""
    history, last = idling.history, idling.last
    rows = torch.arange(len(last)) if rows is None else rows.unique()
    old = last[rows].long()
    fresh = old < 0
    since = torch.where(fresh, ~old, old) - history.base
    behind = since < history.steps
    stamp = history.now + 1 if touch else history.now
    last[rows] = torch.where(fresh & ~torch.tensor(touch), ~stamp, stamp).to(torch.int32)
    rows, since, fresh = rows[behind], since[behind], fresh[behind]
    if not len(rows) or not param.numel():
        return 0
    wide = [t[rows].double().reshape(len(rows), -1) for t in (param, *state)]
    named = dict(zip((s.name for s in idling.rule.state), wide[1:], strict=True))
    moved = _moved(history, wide[0], named, since, param.dtype)
    faded = _faded(history, named, since, [tensor.dtype for tensor in state])
    for tensor, new in zip((param, *state), (moved, *faded), strict=True):
        tensor[rows] = new.to(tensor.dtype).reshape(tensor[rows].shape)
    return int(_is_stale(history, wide[0], moved, since, fresh).sum())


def _is_stale(
    history: History, before: Tensor, after: Tensor, since: Tensor, fresh: Tensor
) -> Tensor:
    """Which rows were not where they should have been."""
    n, along = history.steps, history.idle.along
    if along == "leader":  # more than a rounding, of bfloat16
        return ((after - before).abs() > after.abs() / 256).any(dim=1)
    decayed = history.growth[since] != history.growth[n]
    if along == "nothing":
        return decayed
    if along != "sign" and not history.converges:  # there is no sum that would tell
        return decayed | ~fresh
    sums = history.sums[0]
    return decayed | ~fresh & (sums[since] != (sums[n] if along == "sign" else 0.0))


def _faded(
    history: History, state: dict[str, Tensor], since: Tensor, dtypes: list[torch.dtype]
) -> list[Tensor]:
    missed = history.steps - since
    factors = (history.firsts[missed][:, None], history.seconds[missed][:, None])
    idle, result = history.idle, []
    for (name, old), dtype in zip(state.items(), dtypes, strict=True):
        new = old * factors[idle.fades[name]] if name in idle.fades else old
        if idle.along == "sign" and name == idle.buffer and history.first:
            least = _LEAST.get(dtype, torch.finfo(dtype).smallest_normal)
            new = torch.where(new.abs() < least, old.sign() * least, new)
        result.append(new)
    return result


def _moved(
    history: History, param: Tensor, state: dict[str, Tensor], since: Tensor, dtype: torch.dtype
) -> Tensor:
    idle, n = history.idle, history.steps
    left = (history.growth[since] / history.growth[n])[:, None]
    if idle.along == "leader":
        rested = history.sums[0, n] == history.sums[0, since]
        return torch.where(rested[:, None], param, _leader(history, param, state))
    if idle.along == "nothing":
        return param * left
    buffer = state[idle.buffer]
    if idle.along == "sign":
        end = n if history.first else since + 1  # from where on there is no sign left
        drift = (history.sums[0, end] - history.sums[0, since]) / history.growth[n]
        return param * left - buffer.sign() * drift[:, None]
    sums = (history.sums[:, since] / history.growth[n])[..., None]
    if idle.along == "buffer" and history.converges:
        return param * left - buffer * sums[0]
    if idle.along == "buffer":
        return param * left - buffer * _followed(history, torch.ones_like(buffer), since)
    root = state[idle.square].sqrt()
    small = torch.zeros_like(buffer, dtype=torch.bool)
    move = torch.zeros_like(buffer)
    if history.converges:
        missed = (n - since).clamp(max=history.reach).double()[:, None]
        ratio = history.eps / root
        small = ratio * history.fade**-missed <= history.small_for(dtype)
        y = -ratio
        move = buffer / root * (sums[0] + y * (sums[1] + y * (sums[2] + y * sums[3])))
        small = small.expand_as(buffer)
    followed = buffer * _followed(history, root.expand_as(buffer), since, ~small & (buffer != 0))
    move = torch.where(small, move, followed)
    return param * left - torch.where(buffer == 0, 0.0, move)


def _followed(history: History, root: Tensor, since: Tensor, where: Tensor | None = None) -> Tensor:
    """The sum of the moves of each entry, for a buffer of one, term by term."""
    n, quotient = history.steps, history.idle.along == "quotient"
    total = torch.zeros_like(root)
    rows = torch.arange(len(since)) if where is None else where.any(dim=1).nonzero().squeeze(1)
    for k in range(1, int(min(history.follow, n - int(since[rows].min()))) + 1 if len(rows) else 0):
        step = since[rows] + k
        on = step <= n
        step = step.clamp(max=n)
        size = history.sizes[step] * history.growth[step] / history.growth[n]
        weight = torch.where(on, size * history.firsts[k], 0.0)[:, None]
        if quotient:
            divisor = root[rows] * history.fade**k / history.roots[step][:, None] + history.eps
            total[rows] += weight / divisor
        else:
            total[rows] += weight
    return total


def _leader(history: History, param: Tensor, state: dict[str, Tensor]) -> Tensor:
    hyper = history.hyper
    if not hyper["lr"]:
        return param
    linear, root = state["linear"], state["sum"].sqrt()
    leader = (linear.sign() * hyper["l1"] - linear) / (
        (hyper["beta"] + root) / hyper["lr"] + hyper["l2"]
    )
    return torch.where(linear.abs() <= hyper["l1"], 0.0, leader)
