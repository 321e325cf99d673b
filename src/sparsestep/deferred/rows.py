"""Dense semantics at sparse cost: a row catches up with missed steps when it is next needed.

Under ``semantics="dense"`` a missing entry counts as a gradient of zero: its momentum keeps moving
it, its averages decay, its weight decays. None of that is done right away. A row remembers the step
up to which it is current, and catches up with all later steps at once before it is read or updated.
``history.py`` has the sums that make this possible, and the rule's motion (``rules/idle.py``)
applies them to a row, in torch operations and in the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsestep._torch import version_of
from sparsestep.deferred import catch_up as kernel
from sparsestep.deferred import history as histories
from sparsestep.deferred import reference
from sparsestep.deferred.history import History
from sparsestep.engines.base import GroupSettings, ParamUpdate
from sparsestep.engines.finishing import finish
from sparsestep.errors import InputError, SlowWarning, StaleWarning, message, warn_once
from sparsestep.grads import masks
from sparsestep.grads.indexed import check_indices
from sparsestep.memory import lazy as pages
from sparsestep.memory.mapped_file import about_to_write, file_of, mapped_files, written
from sparsestep.memory.tensors import memory_of
from sparsestep.rules._derive_idle import derive_idle_update
from sparsestep.rules.rule import Rule


class Owner(Protocol):
    """Whose rows are behind."""

    param_groups: list[dict[str, Any]]
    deferred: dict[int, RowClock]
    semantics: str

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Bring rows up to date; all by default."""
        ...

    def catch_up_rows(self, param: Tensor, rows: Tensor | None) -> None:
        """The same of one parameter, for rows that are known to be right."""
        ...


_INTEGERS = (torch.int64, torch.int32)  # what embeddings take


def rows_in(ids: Any, weight: Tensor) -> Tensor | None:
    """The rows of a table that ids name, if they are ids of rows at all."""
    if (
        not isinstance(ids, Tensor)
        or ids.dtype not in _INTEGERS
        or ids.device != weight.device
        or not (ids.layout is torch.strided or ids.is_nested)
        or not weight.dim()
    ):
        return None
    inside = (ids.values() if ids.is_nested else ids).reshape(-1)
    if inside.numel():
        low, high = inside.aminmax()
        if int(low) < 0 or int(high) >= weight.shape[0]:
            return None
    return inside


# Rows whose stamps share a page of memory. What a table's first step writes is a page for each row
# that it touches, as with all memory that the operating system provides on first touch.
_PER_PAGE = 1024
_FEW = 1 << 18  # below this, writing all of them at once is cheaper than looking which are needed


class Stamps:
    """A number for each row, all of them the same in the beginning.

    Attributes:
        last: the numbers, int32, in the CPU's memory; right for rows that have ``begun``.

    Example:
        >>> stamps = Stamps(2_000_000, -1)
        >>> stamps.begin(torch.tensor([1_999_999, 5]))
        >>> stamps.last[[5, 1_999_999]], stamps.pages_left
        (tensor([-1, -1], dtype=torch.int32), 1952)
    """

    def __init__(self, rows: int, initial: int) -> None:
        self._initial = initial
        self._begun: Tensor | None = None
        self.pages_left: int = 0
        self.last: Tensor
        if rows < _FEW:
            self.last = torch.full((rows,), initial, dtype=torch.int32, device="cpu")
            return
        count = -(-rows // _PER_PAGE)
        cpu = torch.device("cpu")
        self._pages = pages.zeros(torch.Size([count, _PER_PAGE]), torch.int32, cpu)
        self.last = self._pages.view(-1)[:rows]
        if initial:
            self._begun = torch.zeros(count, dtype=torch.bool, device=cpu)
            self.pages_left = count

    def begin(self, rows: Tensor | None) -> None:
        """Have the numbers of these rows in ``last``; ``None`` for all."""
        begun = self._begun
        if begun is None:
            return
        if rows is None:
            self._pages[~begun] = self._initial
            self.pages_left = 0
        else:
            pages = rows.to("cpu") // _PER_PAGE
            new = pages[~begun[pages]].unique()
            if new.numel():
                self._pages[new] = self._initial
                begun[new] = True
                self.pages_left -= new.numel()
        if not self.pages_left:
            self._begun = None


_MOST_COUNTED = 2**31 - 1  # the stamps of rows are int32


class RowClock:
    """A parameter whose idle rows are behind.

    Attributes:
        rows: how many there are.
        last: for each row the step up to which it is current; ``~step`` for a row that has never
            had a gradient, so that momentum it does not have is not missed. In the CPU's memory,
            like the history.
        among: the rows that a mask lets move; ``None`` for all.
        owner: the parameter. Held on to, so that no other can come to have its id.
        busy: a step or a catch-up is under way, which may read rows that are behind.
        announced: somebody has called ``catch_up`` by hand since the latest step, as one does
            before writing rows.
        read_by: what has read all rows since the latest step, as far as is known.
    """

    def __init__(self, settings: GroupSettings, rows: int, done: int, *, new: bool) -> None:
        check_count(done)
        rule = settings.rule
        motion = rule.idle_update or derive_idle_update(rule, done + 1, settings.hyperparams)
        self.rule: Rule = rule
        self.rows: int = rows
        self.constants: tuple[Any, ...] = constants(settings)
        self._latest: GroupSettings | None = settings
        self.history: History = History(motion, {**settings.hyperparams, "lr": 0.0}, done)
        self.among: Tensor | None = None
        self.owner: Tensor | None = None
        self._movable: tuple[Tensor, Tensor] | None = None
        self._stamps = Stamps(rows, ~done if new else done)
        self._whole = done  # the step that every row has reached
        self._swept: tuple[int, int] | None = None  # see _sweep
        self._mark: tuple[int, int] | None = None  # of the parameter after our latest write
        self.busy: bool = False
        self.announced: bool = False
        self.read_by: str | None = None

    @property
    def last(self) -> Tensor:
        """The stamps; of rows that were never asked for, not all are written yet."""
        return self._stamps.last

    @property
    def is_behind(self) -> bool:
        """Whether any row may be behind."""
        return self.history.now > self._whole

    def count_behind(self) -> int:
        """How many rows are."""
        if not self.is_behind:
            return 0
        self._stamps.begin(None)
        last = self.last
        return int((torch.where(last < 0, ~last, last) < self.history.now).sum())

    def advance(self, settings: GroupSettings, param: Tensor | None = None) -> None:
        """Take note of a step that was just done, with these settings, on this parameter.

        Without the parameter, what others write to it until the next catch-up goes unnoticed. If
        memory runs out, nothing has changed and it can be called again.
        """
        mark = None if param is None else _mark_of(param)
        hyper, motion, step = settings.hyperparams, self.history.motion, self.history.now + 1
        size, root = motion.size(step, hyper)
        shrink = settings.decay_factor * (motion.shrink(step, hyper) if motion.shrink else 1.0)
        self.history.advance(size, root, shrink)
        if hyper.get("lr"):  # FTRL rests where the latest rate put it
            self.history.hyper = hyper
        self._mark = mark
        self.busy = self.announced = False
        self.read_by = None

    def is_under(self, settings: GroupSettings) -> bool:
        """Whether rows that are behind may go on under these settings."""
        if settings is not self._latest:
            self._latest = settings if self.constants == constants(settings) else None
        if self._latest is None:
            return False
        fits = self.history.motion.fits
        return fits is None or fits(self.history.now + 1, settings.hyperparams)

    def state_in(self, record: Mapping[str, Any] | None) -> list[Tensor] | None:
        """The state of the rule under which rows are behind.

        Args:
            record: what the optimizer keeps for the parameter.

        Returns:
            ``None`` where it is gone: whoever clears it wants the parameter to begin anew.
        """
        found = [record.get(spec.name) if record else None for spec in self.rule.state]
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

    def begin_step(
        self, param: Tensor, state: list[Tensor], rows: Tensor, engine: str = "auto"
    ) -> int:
        """Make rows current that the next step touches; ``advance`` or ``cancel_step`` is its end.

        Nothing changes its meaning by that: should the step not be done after all, rows are current
        that would have been so sooner or later.
        """
        self.notice(param)
        self._say_what_is_slow()
        if self.history.is_half_full:
            self._sweep(param, state, engine)
        stale = self.catch_up_rows(param, state, rows, engine=engine)
        self.busy = True
        return stale

    def cancel_step(self) -> None:
        """The step that was begun is not done."""
        self.busy = False

    def catch_up_rows(
        self, param: Tensor, state: list[Tensor], rows: Tensor | None, *, engine: str = "auto"
    ) -> int:
        """Make rows current; returns how many of them were not: of whose parameter.

        Args:
            param: the parameter, real.
            state: its state tensors, real, of the shape that ``check`` wants.
            rows: which ones, with repetitions, none of them outside; ``None`` for all.
            engine: as for a step.
        """
        rows = None if rows is None else rows.reshape(-1).long()
        if mapped_files:
            about_to_write(param, state, rows)
        busy, self.busy = self.busy, True
        self._mark = None  # in case an exception comes between the write and the new mark
        try:
            self._stamps.begin(rows)
            missed = self.history, self.rule, self.last
            stale = None
            if engine != "reference":
                stale = kernel.catch_up(*missed, param, state, rows)
            if stale is None:
                stale = reference.catch_up(*missed, param, state, rows)
            self._mark = _mark_of(param)
            if mapped_files:
                written([param])
            return stale
        finally:
            self.busy = busy

    def _sweep(self, param: Tensor, state: list[Tensor], engine: str) -> None:
        """Bring some more rows up to date, so that the older part of a history can be forgotten.

        A few in each step, all of them within a quarter of the steps that a history may have: so no
        step ever waits for the whole table.
        """
        row, began = self._swept or (0, self.history.steps)
        end = min(self.rows, row - (-self.rows // max(1, histories._MOST_STEPS // 4)))
        device = param.device if self.among is None else self.among.device
        rows = self.that_may_move(torch.arange(row, end, device=device))
        self.catch_up_rows(param, state, rows, engine=engine)
        self._stamps.begin(torch.arange(row, end, device="cpu"))
        some, now = self.last[row:end], self.history.now
        some.copy_(torch.where(some < 0, ~now, now))  # those that may not move as well
        self._swept = end, began
        if end == self.rows:
            self.history.forget(began)
            self._swept = None

    def was_written(self, param: Tensor) -> bool:
        """Whether another hand has written the parameter since our latest write.

        Rows that were behind were read for it, if they were read at all, as they should not be.
        """
        return self._mark is not None and self._mark != _mark_of(param)

    def notice(self, param: Tensor) -> None:
        """Say so if rows were behind when another hand wrote the parameter."""
        if (
            self._mark is None
            or self.announced
            or not self.is_behind
            or not self.was_written(param)
        ):
            return
        warn_once(
            StaleWarning,
            "a parameter was modified while some of its rows were behind (semantics='dense'), by "
            "another optimizer or by your own code, so the new values come from outdated ones. "
            "Call optimizer.catch_up() first, or optimizer.track(model, guard=True) once.",
        )

    def _say_what_is_slow(self) -> None:
        if self.read_by is not None:
            warn_once(
                SlowWarning,
                f"{self.read_by} holds a table of {self.rows} rows, so calling it brought all of "
                "them up to date (semantics='dense'), but only some got a gradient. If it reads "
                "only those, give it a method rows_read that yields the weight and the ids that a "
                "call reads.",
            )

    def written(self, param: Tensor) -> None:
        """Take note of a write that only concerned rows that are current."""
        self._mark = _mark_of(param)

    def check(self, param: Tensor, state: list[Tensor]) -> None:
        """Refuse what is not of the shape that the rows were counted in."""
        shape = param.shape
        wanted = [shape[:1] if spec.per_row else shape for spec in self.rule.state]
        if shape[0] != self.rows or [tensor.shape for tensor in state] != wanted:
            requirement = (
                f"a parameter with rows that are behind must keep its shape, {self.rows} rows"
            )
            got = f"{tuple(shape)} with state {[tuple(t.shape) for t in state]}"
            raise InputError(message(requirement, got, "Create a new optimizer for it"))

    def catch_up_all(self, param: Tensor, state: list[Tensor], engine: str = "auto") -> int:
        """Make every row current, of those that may move at all; forget the past.

        Returns:
            How many rows were not where they should have been.
        """
        if not self.history.steps:
            return 0
        self.check(param, state)
        stale = 0
        if self.is_behind:
            stale = self.catch_up_rows(param, state, self._that_miss(param), engine=engine)
        now = self.history.now
        stamps = torch.where(self.fresh, ~now, now)
        finish((self.history.begin_anew, partial(self.last.copy_, stamps)))
        self._whole, self._swept = now, None
        return stale

    def _that_miss(self, param: Tensor) -> Tensor | None:
        """The rows that may have missed something; ``None`` for all.

        Without decay, a row that never had a gradient stays where it is. To write it all the same
        takes no longer, but in a file it would take room from then on.
        """
        moves_all = (
            self.history.motion.recomputes
            or self.history.latest_inverse_decay != 1.0
            or any(spec.initial and spec.name in self.history.decays for spec in self.rule.state)
        )
        if moves_all or file_of(param) is None:
            return self.among
        return self.that_may_move((~self.fresh).nonzero().squeeze(1))

    @property
    def fresh(self) -> Tensor:
        """Which rows have never had a gradient."""
        self._stamps.begin(None)
        return self.last < 0

    def stamp_all(self, step: int, *, fresh: Tensor) -> None:
        """Mark every row as current after a step; ``fresh`` are those without a gradient so far."""
        self._stamps.begin(None)
        self.last.copy_(torch.where(fresh, ~step, step))  # in place: it outlives inference mode
        self._whole = step

    def stamp(self, rows: Tensor | None) -> None:
        """Mark rows as current after the step that touches them; ``None`` for all."""
        self.prepare_stamp(rows)()

    def prepare_stamp(self, rows: Tensor | None) -> Callable[[], object]:
        """The call that does what ``stamp`` says, with everything allocated that it needs."""
        step = self.history.now + 1
        check_count(step)
        if rows is None:
            self._stamps.begin(None)
            return partial(self._stamp_whole, step)
        rows = rows.reshape(-1).cpu().long()
        self._stamps.begin(rows)
        return partial(self.last.index_fill_, 0, rows, step)

    def _stamp_whole(self, step: int) -> None:
        self.last.fill_(step)
        self._whole = step

    def prepare_to_grow(self, rows: int) -> Callable[[], None]:
        """Allocate for more rows, while all rows are current; the result commits the growth."""
        fresh, now = torch.ones(rows, dtype=torch.bool, device="cpu"), self.history.now
        fresh[: self.rows] = self.fresh
        stamps = Stamps(rows, 0)
        stamps.last.copy_(torch.where(fresh, ~now, now))
        return partial(
            vars(self).update, rows=rows, _stamps=stamps, _movable=None, _swept=None, _whole=now
        )

    def reset_of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What to write where, for rows that are current now and never had a gradient.

        Args:
            rows: int64 of one dim, on the CPU.

        Returns:
            A tensor, the rows, and their new value.
        """
        self._stamps.begin(rows)
        value = torch.full((1,), ~self.history.now, dtype=self.last.dtype, device="cpu")
        return self.last, rows, value


def _mark_of(param: Tensor) -> tuple[int, int]:
    """Changes whenever somebody writes the parameter, or gives it other memory."""
    return version_of(param), param.data_ptr()


def check_count(steps: int) -> None:
    """Refuse more steps than rows can remember."""
    if steps >= _MOST_COUNTED:
        requirement = f"semantics='dense' counts at most {_MOST_COUNTED - 1} steps"
        raise InputError(message(requirement, f"{steps} steps", "Reset the state's 'step'"))


def constants(settings: GroupSettings) -> tuple[Any, ...]:
    """The options that must not change while rows are behind; lr and decay may."""
    if settings.rule.idle_update is None:
        return (settings.rule,)  # what is derived of a rule is looked at in every step
    varying = {"lr", "lr_decay"}
    hyper = {k: v for k, v in settings.hyperparams.items() if k not in varying}
    return settings.rule.name, tuple(sorted(hyper.items(), key=lambda item: item[0]))


Clocks = dict[int, RowClock]  # by id of the parameter


class PendingCatchUps:
    """The catch-ups of one step: prepared and committed like an engine's updates.

    Args:
        clocks: the optimizer's.
        engine: as for a step.

    Attributes:
        new: what ``clocks`` does not hold yet, and has to when the step is done.
        calls: take note of the step; to be made in the end, for they remember how often parameters
            were written.
    """

    def __init__(self, clocks: Clocks, engine: str) -> None:
        self._clocks = clocks
        self._engine = engine
        self._pending: list[PendingCatchUp] = []
        self.new: list[tuple[int, RowClock]] = []
        self.calls: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, update: ParamUpdate, selection: masks.MaskSelection | None) -> None:
        """Have the rows current that an update touches, before it is computed."""
        self._pending.append(PendingCatchUp(update, selection))

    def prepare(self) -> None:
        """Bring them up to date.

        Nothing changes its meaning by that: should the step not be done after all, rows are current
        that would have been so sooner or later.
        """
        stale = 0
        for pending in self._pending:
            stale += pending.prepare(self._clocks, self._engine)
            key, clock = id(pending.update.key), pending.clock
            if clock is not None and self._clocks.get(key) is not clock:
                self.new.append((key, clock))
            self.calls += pending.calls
        if stale:
            warn_once(
                StaleWarning,
                "some rows that got a gradient were read before they were brought up to date "
                "(semantics='dense'). Call optimizer.track(model) once, or "
                "optimizer.catch_up(param, rows) before each lookup.",
            )

    def cancel(self) -> None:
        """The step is not done."""
        for pending in self._pending:
            pending.cancel()


class PendingCatchUp:
    """A parameter under dense semantics, before its step.

    Attributes:
        update: of the parameter.
        clock: what is known of its rows, once it is prepared.
        calls: take note of the step, once it is prepared.
    """

    def __init__(self, update: ParamUpdate, selection: masks.MaskSelection | None) -> None:
        self.update = update
        self._selection = selection
        # As they are now: a mask makes the gradient smaller, and a first step makes state.
        self._positions, self._state = update.indexed.indices, update.state
        self.clock: RowClock | None = None
        self.calls: tuple[Callable[[], object], ...] = ()
        self._stale = 0
        if self._positions is not None:
            check_indices(self._positions, self.rows)

    def prepare(self, clocks: Clocks, engine: str) -> int:
        """Bring the rows that the step touches up to date; returns how many were stale."""
        try:
            self.clock = clock = self._known(clocks, engine) or self._anew()
        except InputError as error:
            raise self.update.error(error) from None
        rows = None if self._positions is None else self._positions.reshape(-1)
        rows = clock.among if rows is None else clock.that_may_move(rows)
        try:
            stamp = clock.prepare_stamp(rows)
        except InputError as error:
            raise self.update.error(error) from None
        self.calls = (stamp, partial(clock.advance, self.update.settings, self.update.param))
        if rows is None or self._positions is None or (self._state is None and clock.rule.state):
            clock.busy = True
            stale = self._stale  # all are current, or nothing is kept yet, so nothing was missed
        else:
            real = rows_of(self.update.param, self._state or [])
            stale = clock.begin_step(*real, rows, engine=engine)
        clock.history.reserve()
        return stale

    def cancel(self) -> None:
        """The step is not done."""
        if self.clock is not None:
            self.clock.cancel_step()

    @property
    def rows(self) -> int:
        """How many it has."""
        shape = self.update.param.shape
        return shape[0] if shape else 1

    @property
    def _among(self) -> Tensor | None:
        return None if self._selection is None else self._selection.indices

    def _known(self, clocks: Clocks, engine: str) -> RowClock | None:
        """What is known of its rows; ``None`` where the parameter is new, or begins anew."""
        clock = clocks.get(id(self.update.key))
        if clock is None or clock.owner is not self.update.key or clock.rows != self.rows:
            return None  # the parameter was replaced
        # What was missed is made up for by the rule that was missed, with its own state.
        missed, among = clock.state_in(self.update.param_state), self._among
        if missed is None:
            return None
        other = not clock.is_under(self.update.settings)
        if other or clock.among is not among or clock.history.is_full or self._positions is None:
            stale = clock.catch_up_all(*rows_of(self.update.param, missed), engine=engine)
            if self._positions is None:  # a gradient for all rows, so all were read
                self._stale = stale
        if other:
            now, fresh = clock.history.now, clock.fresh
            clock = RowClock(self.update.settings, clock.rows, now, new=False)
            clock.stamp_all(now, fresh=fresh)
            clock.owner = self.update.key
        clock.among = among
        return clock

    def _anew(self) -> RowClock:
        record, done = self.update.param_state, 0
        if record and "step" in record:
            done = self.update.steps_taken()
        # State that was made in advance has seen no gradient either.
        new = record is None or (self.update.settings.rule.counts_steps and not done)
        clock = RowClock(self.update.settings, self.rows, done, new=new)
        clock.owner = self.update.key
        clock.among = self._among
        return clock


def rows_of(param: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its state as real tensors whose first dim are the rows."""
    if param.dim() and not param.is_complex():
        return param, state

    def real(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return tensor if param.dim() else tensor.unsqueeze(0)

    return real(param), [real(tensor) for tensor in state]
