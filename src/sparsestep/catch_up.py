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
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract import Idle, Settings
from sparsestep.engines import native
from sparsestep.errors import InputError, sentence
from sparsestep.parameters import memory_of

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

    All of it lies in the CPU's memory, wherever the parameter is: Python writes a few numbers per
    step, and what is read is a few numbers per row.

    Attributes:
        base: the step that every row has reached.
        steps: how many steps were taken since.
        grown: the latest ``growth``.
        growth: 1 / (what decay has left since base), for each step.
        sizes: the size of each step's move.
        roots: what the square root is divided by in each step.
        sums: for each past step, the sums over all later ones; relative to ``growth``.
    """

    def __init__(self, idle: Idle, hyper: Mapping[str, Any], base: int) -> None:
        self.idle = idle
        self.base = base
        self.steps = 0
        self.grown = 1.0
        self.first, self.second = idle.factors(hyper)
        self.eps = float(hyper.get("eps", 0.0))
        fades = idle.fades.get(idle.square) == 1
        self.fade = math.sqrt(self.second) if fades else 1.0
        self.hyper = hyper
        self._find_reach()
        self._tables: Tensor = _shared(array("d", [1.0, *(2 + _TERMS) * [0.0]])).unsqueeze(1)
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
        self._ratios = torch.stack([_powers(ratio, reach + 1)[1:].flip(0) for ratio in ratios])
        self._weight = array("d", [0.0]) * len(ratios)
        self._weights = _shared(self._weight).unsqueeze(1)

    def _reserve(self, capacity: int) -> None:
        # Written as an array, which is much cheaper than one number at a time into a tensor.
        numbers = array("d", [0.0]) * ((3 + _TERMS) * capacity)
        tables = _shared(numbers).view(-1, capacity)
        tables[:, : self._tables.shape[1]] = self._tables
        self.capacity, self._numbers, self._tables = capacity, numbers, tables
        self.growth, self.sizes, self.roots = tables[:3].unbind()
        self.sums = tables[3:]
        self._summed = self.sums[: len(self._weight)]
        self.firsts, self.seconds = (_powers(f, capacity) for f in (self.first, self.second))

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
        return self.steps + 2 >= _MOST_STEPS or self.grown > _MOST_GROWTH

    def begin_anew(self) -> None:
        """Forget the past; every row has reached ``now``."""
        self.sums[:, : self.steps + 1] = 0.0
        self.base, self.steps, self.grown = self.now, 0, 1.0

    def advance(self, size: float, root: float, shrink: float) -> None:
        """Take note of a step."""
        n = self.steps + 1
        if n >= self.capacity:
            self._reserve(2 * self.capacity)
        numbers, capacity = self._numbers, self.capacity
        self.grown /= shrink
        numbers[n], numbers[capacity + n], numbers[2 * capacity + n] = self.grown, size, root
        along, move = self.idle.along, size * self.grown
        if along == "sign" or along == "leader":
            numbers[3 * capacity + n] = numbers[3 * capacity + n - 1] + move
        elif along != "nothing" and self.converges:
            self._add(n, move, root if along == "quotient" else 1.0)
        self.steps = n

    def _add(self, n: int, move: float, root: float) -> None:
        """Add the n-th step's move to the sums of those before it, as far as it matters."""
        ratios, reach = self._ratios, self.reach
        for term in range(len(self._weight)):
            move *= root
            self._weight[term] = move
        if n < reach:
            ratios, reach = ratios[:, reach - n :], n
        self._summed.narrow(1, n - reach, reach).addcmul_(ratios, self._weights)


def _shared(numbers: array[float]) -> Tensor:
    """A tensor in the memory of an array."""
    return torch.frombuffer(numbers, dtype=torch.float64)


def _powers(factor: float, count: int) -> Tensor:
    exponents = torch.arange(count, dtype=torch.float64, device="cpu")
    return torch.full((), factor, dtype=torch.float64, device="cpu") ** exponents


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
        rows: how many there are.
        last: for each row the step up to which it is current; ``~step`` for a row that has never
            had a gradient, so that momentum it does not have is not missed. In the CPU's memory,
            like the history.
        among: the rows that a mask lets move; ``None`` for all.
        owner: the parameter. Held on to, so that no other can come to have its id.
    """

    def __init__(self, settings: Settings, rows: int, done: int, *, new: bool) -> None:
        rule = settings.rule
        if rule.idle is None:
            raise InputError(refusal(rule.name))
        self.rule = rule
        self.rows = rows
        self.constants = constants(settings)
        self._latest: Settings | None = settings
        self.history = History(rule.idle, {**settings.hyper, "lr": 0.0}, done)
        self.among: Tensor | None = None
        self.owner: Tensor | None = None
        self._movable: tuple[Tensor, Tensor] | None = None
        stamp = ~done if new else done
        self.last = torch.full((rows,), stamp, dtype=torch.int32, device="cpu")

    def advance(self, settings: Settings) -> None:
        """Take note of a step that was just done, with these settings."""
        idle, hyper = self.history.idle, settings.hyper
        if hyper.get("lr"):  # FTRL rests where the latest rate put it
            self.history.hyper = hyper
        size, root = idle.size(self.history.now + 1, hyper)
        if idle.along == "leader":  # counts the steps in which it did not rest
            size = 1.0 if hyper["lr"] else 0.0
        self.history.advance(size, root, settings.shrink)

    def is_under(self, settings: Settings) -> bool:
        """Whether rows that are behind may go on under these settings."""
        if settings is not self._latest:
            self._latest = settings if self.constants == constants(settings) else None
        return self._latest is not None

    def state_in(self, kept: Mapping[str, Any] | None) -> list[Tensor] | None:
        """The state of the rule under which rows are behind.

        Args:
            kept: what the optimizer keeps for the parameter.

        Returns:
            ``None`` where it is gone: whoever clears it wants the parameter to begin anew.
        """
        found = [kept.get(spec.name) if kept else None for spec in self.rule.state]
        tensors = [memory_of(tensor) for tensor in found if tensor is not None]
        return tensors if len(tensors) == len(found) else None

    def that_may_move(self, rows: Tensor) -> Tensor:
        """Those of the rows that the mask of the latest step lets move."""
        if self.among is None:
            return rows
        if self._movable is None or self._movable[0] is not self.among:
            chosen = torch.zeros(self.rows, dtype=torch.bool, device=self.among.device)
            self._movable = self.among, chosen.index_fill_(0, self.among, True)
        return rows[self._movable[1][rows]]

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
            state: its state tensors, real, of the shape that ``check`` wants.
            rows: which ones, with repetitions, none of them outside; ``None`` for all.
            touch: they are about to be updated by the step after ``now``.
            engine: as for a step.
        """
        rows = None if rows is None else rows.reshape(-1).long()
        if engine != "reference" and native.core is not None:
            stale = native.catch_up(self, param, state, rows, touch)
            if stale is not None:
                return stale
        return _bring(self, param, state, rows, touch)

    def check(self, param: Tensor, state: list[Tensor]) -> None:
        """Refuse what is not of the shape that the rows were counted in."""
        shape = param.shape
        wanted = [shape[:1] if kept.per_row else shape for kept in self.rule.state]
        if shape[0] != self.rows or [tensor.shape for tensor in state] != wanted:
            contract = (
                f"a parameter with rows that are behind must keep its shape, {self.rows} rows"
            )
            got = f"{tuple(shape)} with state {[tuple(t.shape) for t in state]}"
            raise InputError(sentence(contract, got, "Make a new optimizer for it"))

    def bring_all(self, param: Tensor, state: list[Tensor], engine: str = "auto") -> None:
        """Make every row current, of those that may move at all; forget the past."""
        if not self.history.steps:
            return
        self.check(param, state)
        self.bring(param, state, self.among, touch=False, engine=engine)
        self.history.begin_anew()
        self.stamp_all(self.history.now, fresh=self.last < 0)

    def stamp_all(self, step: int, *, fresh: Tensor) -> None:
        """Mark every row as current after a step; ``fresh`` are those without a gradient so far."""
        self.last.copy_(torch.where(fresh, ~step, step))  # in place: it outlives inference mode

    def stamp(self, rows: Tensor | None) -> None:
        """Mark rows as current after the step that is about to touch them; ``None`` for all."""
        step = self.history.now + 1
        if rows is None:
            self.last.fill_(step)
        else:
            self.last.index_fill_(0, rows.cpu(), step)


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
    """In torch, in float64: the oracle of the native kernel.

    What is known of a row is looked up on the CPU, then moved to where its entries are.
    """
    history, last = idling.history, idling.last
    rows = torch.arange(idling.rows, device="cpu") if rows is None else rows.cpu().unique()
    old = last[rows].long()
    fresh = old < 0
    since = torch.where(fresh, ~old, old) - history.base
    behind = since < history.steps
    stamp = history.now + 1 if touch else history.now
    last[rows] = torch.where(fresh, stamp if touch else ~stamp, stamp).to(torch.int32)
    rows, since, fresh = rows[behind], since[behind], fresh[behind]
    if not rows.numel() or not param.numel():
        return 0
    there = rows.to(param.device)
    wide = [t[there].double().reshape(len(there), -1) for t in (param, *state)]
    named = dict(zip((s.name for s in idling.rule.state), wide[1:], strict=True))
    moved = _moved(history, wide[0], named, since, param.dtype)
    faded = _faded(history, named, since, [tensor.dtype for tensor in state])
    stale = int(_is_stale(history, wide[0], moved, since, fresh).sum())
    written = list(zip(state, faded, strict=True))
    if stale or history.idle.along == "leader":  # else autograd is told of a change in vain
        written.append((param, moved))
    for tensor, new in written:
        tensor[there] = new.to(tensor.dtype).reshape(tensor[there].shape)
    return stale


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


def _column(of_rows: Tensor, entries: Tensor) -> Tensor:
    """Numbers of rows beside their entries."""
    return of_rows.to(entries.device)[..., None]


def _faded(
    history: History, state: dict[str, Tensor], since: Tensor, dtypes: list[torch.dtype]
) -> list[Tensor]:
    missed = history.steps - since
    factors = history.firsts[missed], history.seconds[missed]
    idle, result = history.idle, []
    for (name, old), dtype in zip(state.items(), dtypes, strict=True):
        new = old * _column(factors[idle.fades[name]], old) if name in idle.fades else old
        if idle.along == "sign" and name == idle.buffer and history.first:
            least = _LEAST.get(dtype, torch.finfo(dtype).smallest_normal)
            new = torch.where(new.abs() < least, old.sign() * least, new)
        result.append(new)
    return result


def _moved(
    history: History, param: Tensor, state: dict[str, Tensor], since: Tensor, dtype: torch.dtype
) -> Tensor:
    idle, n, grown = history.idle, history.steps, history.grown
    left = _column(history.growth[since] / grown, param)
    if idle.along == "leader":
        rested = history.sums[0, n] == history.sums[0, since]
        return torch.where(_column(rested, param), param, _leader(history, param, state))
    if idle.along == "nothing":
        return param * left
    buffer = state[idle.buffer]
    if idle.along == "sign":
        end = n if history.first else since + 1  # from where on there is no sign left
        drift = (history.sums[0, end] - history.sums[0, since]) / grown
        return param * left - buffer.sign() * _column(drift, param)
    sums = _column(history.sums[:, since] / grown, param)
    if idle.along == "buffer" and history.converges:
        return param * left - buffer * sums[0]
    if idle.along == "buffer":
        return param * left - buffer * _followed(history, torch.ones_like(buffer), since)
    root = state[idle.square].sqrt()
    small = torch.zeros_like(buffer, dtype=torch.bool)
    move = torch.zeros_like(buffer)
    if history.converges:
        missed = _column((n - since).clamp(max=history.reach).double(), param)
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
    where = torch.ones_like(root, dtype=torch.bool) if where is None else where
    rows = where.any(dim=1).nonzero().squeeze(1)
    since = since[rows.cpu()]
    for k in range(1, min(history.follow, n - int(since.min())) + 1 if since.numel() else 0):
        step = since + k
        on = step <= n
        step = step.clamp(max=n)
        size = history.sizes[step] * history.growth[step] / history.grown
        weight = _column(torch.where(on, size * history.firsts[k], 0.0), root)
        if quotient:
            roots = _column(history.roots[step], root)
            total[rows] += weight / (root[rows] * history.fade**k / roots + history.eps)
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
