"""The rows of a parameter whose updates are deferred, and their catch-up as a phase of a step.

Under ``semantics="dense"`` a missing entry is a gradient of zero: momentum, averages and weight
decay go on. That update is deferred. Each row has the step after which it is current, and catches
up with all later steps at once before it is read or updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext, isa
from sparsestep._process import uninterrupted
from sparsestep._torch import version_of
from sparsestep.deferred import history as histories
from sparsestep.deferred.history import StepHistory, catch_up_native, catch_up_reference
from sparsestep.engines.base import GroupSettings, ParamUpdate, finish, reserve
from sparsestep.engines.native import CachedPlan
from sparsestep.errors import InputError, SlowWarning, StaleWarning, message, warn_once
from sparsestep.grads import masks
from sparsestep.grads.indexed import check_indices
from sparsestep.memory import lazy
from sparsestep.memory.mapped_file import about_to_write, file_of, mapped_files, written
from sparsestep.memory.tensors import INDEX_DTYPES, memory_of, out_of_range
from sparsestep.rules.derived_idle import derive_idle_update
from sparsestep.rules.rule import Rule


def valid_rows(ids: Any, weight: Tensor) -> Tensor | None:
    """The rows of a table that ids select, flat; ``None`` if any id is invalid."""
    if (
        not isinstance(ids, Tensor)
        or ids.dtype not in INDEX_DTYPES
        or ids.device != weight.device
        or ids.layout is not (torch.jagged if ids.is_nested else torch.strided)
        or not weight.dim()
    ):
        return None
    rows = (ids.values() if ids.is_nested else ids).reshape(-1)
    return rows if out_of_range(rows, weight.shape[0]) is None else None


_MAX_COUNT = 2**31 - 1  # last steps are int32


class DeferredRows:
    """Deferred updates of one parameter: the last step of each row, and the steps since."""

    def __init__(self, settings: GroupSettings, num_rows: int, done: int, *, new: bool) -> None:
        check_count(done)
        rule = settings.rule
        idle = rule.idle_update or derive_idle_update(rule, done + 1, settings.hyperparams)
        self.rule: Rule = rule
        self.num_rows: int = num_rows
        self._fixed_hyperparams = _fixed_hyperparams(settings)
        self._settings: GroupSettings | None = settings
        # The steps since the oldest ``last_step``.
        hyperparams = {**settings.hyperparams, "lr": 0.0}
        self.history: StepHistory = StepHistory(idle, hyperparams, done, settings.constraint)
        self.movable_rows: Tensor | None = None  # selected by a mask; None for all
        self.param: Tensor | None = None  # a strong reference, so that its id stays taken
        self._movable_mask: Tensor | None = None  # a copy of the mask
        self._mask: tuple[Tensor, int | None] | None = None  # and its version
        # Int32, on the CPU, xored with the initial value: zeros take no memory before first use.
        self.stored_steps = lazy.zeros(torch.Size([num_rows]), torch.int32, torch.device("cpu"))
        self.initial_step = ~done if new else done
        self._min_step = done  # the step that every row has reached
        self._sweep_position: tuple[int, int] | None = None  # next row, steps when it began
        self._version: tuple[int, int] | None = None  # of the parameter after our latest write
        # How often a catch-up has changed the parameter's version; it leaves current rows alone.
        self.catch_up_writes: int = 0
        self.in_step: bool = False  # a step or a catch-up is running, which may read deferred rows
        self.caught_up_by_user: bool = False  # by ``catch_up``, since the latest step
        self.dense_reader: str | None = None  # module that read all rows since the latest step

    @property
    def last_step(self) -> Tensor:
        """For each row the step after which it is current, int32, on the CPU.

        ``~step`` for a row that has never had a gradient: it has missed no momentum.
        """
        return self.stored_steps ^ self.initial_step

    @property
    def has_deferred(self) -> bool:
        """Whether any row may be deferred."""
        return self.history.now > self._min_step

    def num_deferred(self) -> int:
        """Count the deferred rows."""
        if not self.has_deferred:
            return 0
        last = self.last_step
        return int((torch.where(last < 0, ~last, last) < self.history.now).sum())

    def _all_current(self, stored: Tensor) -> Tensor:
        """The stored steps of rows, as they are once these rows are current."""
        now = self.history.now
        return torch.where((stored ^ self.initial_step) < 0, ~now, now) ^ self.initial_step

    def matches(self, settings: GroupSettings) -> bool:
        """Whether deferred rows may go on under these settings."""
        if settings is not self._settings:
            is_same = self._fixed_hyperparams == _fixed_hyperparams(settings)
            self._settings = settings if is_same else None
        if self._settings is None:
            return False
        fits = self.history.idle_update.fits
        return fits is None or fits(self.history.now + 1, settings.hyperparams)

    def state_tensors(self, param_state: Mapping[str, Any] | None) -> list[Tensor] | None:
        """State tensors of the rule whose updates are deferred; ``None`` if they were cleared."""
        found = [param_state.get(spec.name) if param_state else None for spec in self.rule.state]
        tensors = [memory_of(tensor) for tensor in found if tensor is not None]
        return tensors if len(tensors) == len(found) else None

    def has_mask(self, selection: masks.MaskSelection | None) -> bool:
        """Whether the mask of the latest step selected the same rows."""
        if selection is None or self._mask is None:
            return selection is None and self._mask is None
        version = selection.version
        return self._mask[0] is selection.mask and version == self._mask[1] and version != -1

    def set_mask(self, selection: masks.MaskSelection | None) -> None:
        """Let only the rows move that a mask selects, while all rows are current."""
        if not self.has_mask(selection):
            copied = None if selection is None else selection.mask.detach().reshape(-1).clone()
            self._movable_mask = copied  # from here on, nothing can fail
            self._mask = None if selection is None else (selection.mask, selection.version)
            self.movable_rows = None if selection is None else selection.indices

    def movable(self, rows: Tensor) -> Tensor:
        """The subset of rows that the mask of the latest step lets move."""
        return rows if self._movable_mask is None else rows[self._movable_mask[rows]]

    def prepare_step(
        self, param: Tensor, state: list[Tensor], rows: Tensor, engine: str = "auto"
    ) -> int:
        """Catch up the rows of the next step, and set ``in_step``; see ``catch_up``.

        If the step fails, these rows are current earlier than necessary, and that is all.
        """
        self.warn_if_modified(param)
        if self.dense_reader is not None:
            warn_once(
                SlowWarning,
                f"{self.dense_reader} holds a table of {self.num_rows} rows, so each call "
                "catches up all rows (semantics='dense'), but only some got a gradient. If it "
                "reads only those, give it a method rows_read that yields the weight and the ids "
                "that a call reads.",
            )
        if self.history.is_half_full:
            self._sweep(param, state, engine)
        stale = self.catch_up(param, state, rows, engine=engine)
        self.in_step = True
        return stale

    def prepare_commit(self, settings: GroupSettings, param: Tensor | None) -> Callable[[], None]:
        """Allocate for one more step; returns a call that appends it, and may be repeated.

        Without the parameter, writes of other code until the next catch-up go unnoticed.
        """
        options, idle, step = settings.hyperparams, self.history.idle_update, self.history.now + 1
        size, root = idle.size(step, options)
        middle = root
        if idle.num_sums > 1 and idle.fits is None:  # or later steps may have another form
            middle = idle.size(step - 1 + self.history.center_lag, options)[1]
        shrink = settings.decay_factor * (idle.shrink(step, options) if idle.shrink else 1.0)
        self.history.reserve()

        def commit() -> None:
            version = None if param is None else _write_version(param)
            self.history.append(size, root, shrink, middle)
            if options.get("lr"):  # FTRL rests where the latest rate put it
                self.history.hyperparams = options
            self._version = version
            self.in_step = self.caught_up_by_user = False
            self.dense_reader = None

        return commit

    def prepare_replay(
        self, settings: GroupSettings, param: Tensor
    ) -> tuple[tuple[Tensor, Tensor, int, int], Callable[[], None]] | None:
        """Prepare another step under the same settings, in which no row has to catch up.

        Returns the arguments of the core, which checks and advances the last steps, and a call that
        appends the step; ``None`` if the step has to be planned.
        """
        history = self.history
        if (
            self.param is not param
            or history.idle_update.fits is not None
            or (self._settings is not settings and not self.matches(settings))
            or self.movable_rows is not None
            or self.dense_reader is not None
            or history.is_half_full
            or history.now + 1 >= _MAX_COUNT
            or self._version != _write_version(param)
        ):
            return None
        last_steps = param, self.stored_steps, self.initial_step, history.now
        return last_steps, self.prepare_commit(settings, param)

    def catch_up(
        self, param: Tensor, state: list[Tensor], rows: Tensor | None, *, engine: str = "auto"
    ) -> int:
        """Make valid rows current, or all; returns the number of rows whose parameter was not.

        Parameter and state are real tensors, of the shapes that ``check`` requires.
        """
        rows = None if rows is None else rows.reshape(-1).long()
        if mapped_files:
            about_to_write(param, state, rows)
        in_step, self.in_step = self.in_step, True
        before = version_of(param)
        self._version = None  # in case an exception comes between the write and the new version
        try:
            stale = None
            if engine != "reference":
                stale = catch_up_native(self, param, state, rows)
            if stale is None:
                stale = catch_up_reference(self, param, state, rows)
            self._version = _write_version(param)
            self.catch_up_writes += self._version[0] - before
            if mapped_files:
                written([param])
            return stale
        finally:
            self.in_step = in_step

    def catch_up_all(self, param: Tensor, state: list[Tensor], engine: str = "auto") -> int:
        """Make every row current that may move, and clear the history; may be interrupted."""
        if not self.history.steps:
            return 0
        self.check(param, state)
        stale = 0
        self._sweep_position = None
        if self.has_deferred:
            rows = self._rows_to_catch_up(param)
            stale = self.catch_up(param, state, rows, engine=engine)
            if rows is not None or not param.numel():  # the other rows do not move
                steps = self._all_current(self.stored_steps)
                finish((partial(self.stored_steps.copy_, steps),))
        self.history.clear()
        self._min_step = self.history.now
        return stale

    def _rows_to_catch_up(self, param: Tensor) -> Tensor | None:
        """The rows that may have missed something; ``None`` for all.

        Without decay or constraint, a row that never had a gradient does not move. Writing it takes
        no longer, but in a file it would take up disk space.
        """
        moves_all = (
            self.history.idle_update.recomputes
            or self.history.constraint is not None
            or self.history.latest_inverse_decay != 1.0
            or any(spec.initial and spec.name in self.history.decays for spec in self.rule.state)
        )
        if moves_all or file_of(param) is None:
            return self.movable_rows
        return self.movable((self.last_step >= 0).nonzero().squeeze(1))

    def _sweep(self, param: Tensor, state: list[Tensor], engine: str) -> None:
        """Catch up a few more rows, so that the oldest steps can be dropped without a long wait."""
        row, began = self._sweep_position or (0, self.history.steps)
        end = min(self.num_rows, row - (-self.num_rows // max(1, histories.MAX_STEPS // 4)))
        device = param.device if self.movable_rows is None else self.movable_rows.device
        rows = self.movable(torch.arange(row, end, device=device))
        self.catch_up(param, state, rows, engine=engine)
        some = self.stored_steps[row:end]
        some.copy_(self._all_current(some))  # also of rows that may not move
        self._sweep_position = end, began
        if end == self.num_rows:
            self.history.drop_oldest(began)
            self._sweep_position = None

    def was_modified(self, param: Tensor) -> bool:
        """Whether other code has modified the parameter since our last write."""
        return self._version is not None and self._version != _write_version(param)

    def note_write(self, param: Tensor) -> None:
        """Accept a write to rows that are current."""
        self._version = _write_version(param)

    def warn_if_modified(self, param: Tensor) -> None:
        """Warn if other code has modified the parameter while rows were deferred."""
        if self.caught_up_by_user or not self.has_deferred or not self.was_modified(param):
            return
        warn_once(
            StaleWarning,
            "a parameter was modified while updates of some rows were deferred "
            "(semantics='dense'), by another optimizer or by your own code, so the new values "
            "come from outdated ones. "
            "Call optimizer.catch_up() first, or optimizer.track(model, guard=True) once.",
        )

    def check(self, param: Tensor, state: list[Tensor]) -> None:
        """Refuse a parameter or state of another shape."""
        shape = param.shape
        required = [shape[:1] if spec.per_row else shape for spec in self.rule.state]
        if shape[0] != self.num_rows or [tensor.shape for tensor in state] != required:
            requirement = (
                f"a parameter with deferred rows must keep its shape, {self.num_rows} rows"
            )
            got = f"{tuple(shape)} with state {[tuple(t.shape) for t in state]}"
            raise InputError(message(requirement, got, "Create a new optimizer for it"))

    def prepare_last_step(self, rows: Tensor | None) -> Callable[[], object]:
        """Allocate to mark rows as current after the next step (``None``: all); returns a call."""
        step = self.history.now + 1
        check_count(step)
        if rows is None:
            return partial(self._set_all_last_steps, step)
        rows = rows.reshape(-1).cpu().long()
        return partial(self.stored_steps.index_fill_, 0, rows, step ^ self.initial_step)

    def _set_all_last_steps(self, step: int) -> None:
        self.stored_steps.fill_(step ^ self.initial_step)
        self._min_step = step

    def with_settings(self, settings: GroupSettings) -> DeferredRows:
        """The same rows under another rule or other options, for when all are current."""
        rows = DeferredRows(settings, self.num_rows, self.history.now, new=False)
        rows.stored_steps, rows.initial_step = self.stored_steps, self.initial_step
        rows.param = self.param
        return rows

    def prepare_growth(self, num_rows: int) -> Callable[[], None]:
        """Allocate for more rows, while all rows are current; the result commits the growth."""
        now = self.history.now
        steps = torch.full((num_rows,), ~now, dtype=torch.int32, device="cpu")
        steps[: self.num_rows] = self._all_current(self.stored_steps) ^ self.initial_step
        return partial(
            vars(self).update,
            num_rows=num_rows,
            stored_steps=steps,
            initial_step=0,
            _movable_mask=None,
            _sweep_position=None,
            _min_step=now,
        )

    def prepare_reset(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The write that resets rows (int64 on the CPU): the tensor, the rows, their new value."""
        value = ~self.history.now ^ self.initial_step
        return self.stored_steps, rows, torch.full((1,), value, dtype=torch.int32, device="cpu")


def _write_version(param: Tensor) -> tuple[int, int]:
    """Changes with every write to the parameter, and with its memory."""
    return version_of(param), param.data_ptr()


def check_count(steps: int) -> None:
    """Refuse more steps than rows can count."""
    if steps >= _MAX_COUNT:
        requirement = f"semantics='dense' counts at most {_MAX_COUNT - 1} steps"
        raise InputError(message(requirement, f"{steps} steps", "Reset the state's 'step'"))


def _fixed_hyperparams(settings: GroupSettings) -> tuple[Any, ...]:
    """The options that must not change while rows are deferred; lr and decay may."""
    if settings.rule.idle_update is None:
        # A derived idle update is compared in every step.
        return settings.rule, settings.constraint
    fixed = {k: v for k, v in settings.hyperparams.items() if k not in ("lr", "lr_decay")}
    return settings.rule.name, settings.constraint, fixed


class _Pending(NamedTuple):
    """An update whose rows catch up first."""

    update: ParamUpdate
    indices: Tensor | None  # of its gradient, before a mask makes that smaller
    state: list[Tensor] | None  # before a first step creates it
    selection: masks.MaskSelection | None

    @property
    def num_rows(self) -> int:
        shape = self.update.param.shape
        return shape[0] if shape else 1


class _Found(NamedTuple):
    """The deferred rows of an update."""

    deferred: DeferredRows
    stale: int
    rows: Tensor | None  # those that the step updates
    set_last_step: Callable[[], object]


class StepCatchUp:
    """The catch-up of one step: prepared and committed like an engine's updates."""

    def __init__(self, deferred: dict[int, DeferredRows], engine: str) -> None:
        self._deferred = deferred
        self._engine = engine
        self._pending: list[_Pending] = []
        self._prepared: list[DeferredRows] = []
        self.new: list[tuple[int, DeferredRows]] = []  # for ``deferred``, when the step is done
        # Append the step; to be called last, because they read the parameters' versions.
        self.calls: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(
        self,
        update: ParamUpdate,
        selection: masks.MaskSelection | None,
        *,
        is_claimed: bool = False,
    ) -> None:
        """Catch up the rows of an update before it is computed; the core checks what it claims."""
        pending = _Pending(update, update.indexed.indices, update.state, selection)
        if pending.indices is not None and not is_claimed:
            check_indices(pending.indices, pending.num_rows)
        self._pending.append(pending)

    def prepare(self) -> None:
        """Catch up the rows; values keep their meaning if the step is not done after all."""
        # What can be refused is, before the first row catches up.
        found = [self._find_rows(pending) for pending in self._pending]
        pairs = zip(self._pending, found, strict=True)
        if sum(self._prepare(pending, rows) for pending, rows in pairs if rows is not None):
            warn_once(
                StaleWarning,
                "some rows that got a gradient were read before they had caught up "
                "(semantics='dense'). Call optimizer.track(model) once, or "
                "optimizer.catch_up(param, rows) before each lookup.",
            )

    def cancel(self) -> None:
        """End a step that is not done."""
        for rows in self._prepared:
            rows.in_step = False

    def _find_rows(self, pending: _Pending) -> _Found | None:
        """Find the deferred rows of one update; ``None`` if there are none."""
        update, indices = pending.update, pending.indices
        idle, is_known = update.settings.rule.idle_update, id(update.key) in self._deferred
        if indices is None and not is_known and idle is not None and not idle.recomputes:
            return None  # as long as gradients are dense, no row is deferred
        try:
            deferred, stale = self._rows_for(pending)
            self._prepared.append(deferred)
            rows = deferred.movable_rows if indices is None else deferred.movable(indices.flatten())
            return _Found(deferred, stale, rows, deferred.prepare_last_step(rows))
        except InputError as error:
            raise update.error(error) from None

    def _prepare(self, pending: _Pending, found: _Found) -> int:
        """Catch up the rows of one update, and allocate for its commit; number of stale rows."""
        update, (deferred, stale, rows, set_last_step) = pending.update, found
        has_state = pending.state is not None or not deferred.rule.state
        if rows is None or pending.indices is None or not has_state:
            deferred.in_step = True  # all are current, or there is no state: nothing was missed
        else:
            real = as_real_rows(update.param, pending.state or [])
            stale = deferred.prepare_step(*real, rows, engine=self._engine)
        key = id(update.key)
        if self._deferred.get(key) is not deferred:
            self.new.append((key, deferred))
        self.calls += [set_last_step, deferred.prepare_commit(update.settings, update.param)]
        return stale

    def _rows_for(self, pending: _Pending) -> tuple[DeferredRows, int]:
        """The parameter's deferred rows, and how many were stale if all had to catch up."""
        update, state, stale = pending.update, None, 0
        rows = self._deferred.get(id(update.key))
        if rows is not None and rows.param is update.key and rows.num_rows == pending.num_rows:
            state = rows.state_tensors(update.param_state)
        if rows is None or state is None:  # the parameter or its state was replaced
            done, param_state = 0, update.param_state
            if param_state and "step" in param_state:
                done = update.steps_taken()
            # State that was created in advance has seen no gradient either.
            new = param_state is None or (update.settings.rule.counts_steps and not done)
            rows = DeferredRows(update.settings, pending.num_rows, done, new=new)
            rows.param = update.key
            rows.set_mask(pending.selection)
            return rows, 0
        is_dense, matches = pending.indices is None, rows.matches(update.settings)
        # Raises, before anything is written, if no update can be deferred under these settings.
        current = rows if matches else rows.with_settings(update.settings)
        has_other_mask = not rows.has_mask(pending.selection)
        if not matches or has_other_mask or rows.history.is_full or is_dense:
            # Under the rule whose updates are deferred, with its own state.
            caught_up = rows.catch_up_all(*as_real_rows(update.param, state), engine=self._engine)
            stale = caught_up if is_dense else 0  # a dense gradient: all rows were read
        current.set_mask(pending.selection)
        return current, stale


def replay_dense_step(
    groups: list[dict[str, Any]],
    cached: CachedPlan,
    state: dict[Tensor, Any],
    addresses: dict[int, tuple[Any, ...]],
    deferred: dict[int, DeferredRows],
) -> bool:
    """Repeat a step with new gradients if no row of them has to catch up; see ``replay_step``."""
    assert ext is not None
    last_steps: list[tuple[Tensor, Tensor | None, int, int]] = []
    calls: list[Callable[[], None]] = []
    for group, settings, known in zip(groups, cached.settings, cached.cached_groups, strict=False):
        if not all(map(is_, group.values(), known[0])):
            return False
        for param in group["params"]:
            if param.grad is None:
                continue
            rows = deferred.get(id(param))
            if rows is None:
                last_steps.append((param, None, 0, 0))  # a dense gradient, or the core declines
                continue
            prepared = rows.prepare_replay(settings, param)
            if prepared is None:
                return False
            last_steps.append(prepared[0])
            calls.append(prepared[1])
    reserve()
    work, threads = ext.NativeStep(isa.index), torch.get_num_threads()
    if not work.prepare_dense_replay(
        groups, cached.cached_groups, state, addresses, threads, last_steps
    ):
        return False

    def commit() -> None:
        work.commit()
        finish(calls)

    uninterrupted(commit)
    return True


def as_real_rows(param: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its state as real tensors whose first dim are the rows."""
    if param.dim() and not param.is_complex():
        return param, state

    def real(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return tensor if param.dim() else tensor.unsqueeze(0)

    return real(param), [real(tensor) for tensor in state]
