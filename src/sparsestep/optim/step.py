"""One step: all parameters are looked at, engines claim and prepare, then everything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._process import uninterrupted
from sparsestep._torch import disable_compiler
from sparsestep.deferred.pending import PendingCatchUps
from sparsestep.engines import SparseEngines, native_engine
from sparsestep.engines.base import ParamUpdate, Settings
from sparsestep.engines.finishing import finish
from sparsestep.engines.programs import Recorded
from sparsestep.engines.torch_fused import TorchKernels
from sparsestep.errors import InputError, SlowWarning, warn_once
from sparsestep.grads import masks
from sparsestep.grads.layouts import Gradient, touched
from sparsestep.memory.mapped_file import mapped_files, written
from sparsestep.optim import dense_embedding
from sparsestep.optim import state as states
from sparsestep.optim.announcing import announce, announce_checked
from sparsestep.optim.records import StateKeeper
from sparsestep.optim.updates import complete, examined
from sparsestep.rules.rule import State
from sparsestep.surroundings import labelled

Group = dict[str, Any]
Selections = list[masks.Selection | None]


class Plan:
    """The work of one step.

    Args:
        optimizer: whose step it is.
        recorded: formulas that were recorded for it already.

    Attributes:
        repeats: (group, parameter) of parameters that were given more than once.
    """

    def __init__(self, optimizer: StateKeeper, recorded: Sequence[Recorded] = ()) -> None:
        self._optimizer = optimizer
        self._native = native_engine(optimizer.engine)
        if recorded and self._native is not None:
            self._native.programs.reuse(recorded)
        self._torch: TorchKernels | None = None  # made when there is something for them
        self._catch_ups: PendingCatchUps | None = None
        if optimizer.semantics == "dense":
            self._catch_ups = PendingCatchUps(optimizer._clocks, optimizer.engine)
        self._updates: list[ParamUpdate] = []  # those of the sparse engines
        # Of parameters with a dense gradient: whether that is an embedding's.
        self._are_embeddings: list[tuple[ParamUpdate, bool]] = []
        self._seen: set[int] = set()  # ids: a tensor's own hash is a call into Python
        self._params_before = 0  # in the groups that were added so far
        self._calls: list[Callable[[], object]] = []  # of the commit, after engines have written
        self.repeats: list[tuple[int, int]] = []

    def add_group(
        self,
        group_index: int,
        group: Group,
        only: int | None = None,
        grads: Sequence[Gradient | None] | None = None,
    ) -> None:
        """Take the gradients of a param group.

        Args:
            group_index: of the group in the optimizer.
            group: the param group.
            only: the index of the one parameter to update.
            grads: gradients passed by hand, one for each parameter to update.
        """
        optimizer, params = self._optimizer, group["params"]
        first = 0 if only is None else only
        some = params if only is None else params[only : only + 1]
        if grads is not None:
            some = some[: len(grads)]  # others may be added meanwhile
        try:
            settings = optimizer._groups.settings_of(optimizer, group_index, group)
            selections = None
            if group.get("mask") is not None:
                selections = optimizer._groups.selections_of(optimizer, group, settings)
        except InputError as error:
            given = [param.grad for param in some] if grads is None else grads
            if all(grad is None for grad in given):
                self._params_before += len(params)
                return  # as with torch, options do not matter where there is no gradient
            who = f"{type(optimizer).__name__}: param group {group_index}"
            raise InputError(f"{who}: {error}") from None
        if mapped_files:
            chosen = None if selections is None else selections[first : first + len(some)]
            announce(optimizer.state, some, grads, chosen)
        for index in self._declined(group, settings, selections, first, some, grads):
            param = params[index]
            grad: Gradient | None = param.grad if grads is None else grads[index - first]
            if grad is None:
                continue
            if id(param) in self._seen:
                self.repeats.append((group_index, index))
                continue
            self._seen.add(id(param))
            selection = None if selections is None else selections[index]
            try:
                update = examined(optimizer, group, settings, index, param, grad)
                self._add(update, selection)
            except InputError as error:
                raise InputError(f"{settings.who(index)}: {error}") from None
        self._params_before += len(params)

    def skip_groups(self, groups: Sequence[Group]) -> None:
        """Pass over param groups; random bits depend on the number of parameters before."""
        self._params_before += sum(len(group["params"]) for group in groups)

    def _add(self, update: ParamUpdate, selection: masks.Selection | None) -> None:
        if selection is None and update.touched.positions is None:
            known = self._optimizer._embeddings.get(id(update.owner))
            if known is None or known[0] is not update.owner:
                is_embedding = dense_embedding.looks_like_embedding(update.grad)
                self._are_embeddings.append((update, is_embedding))
        if self._catch_ups is not None:
            self._catch_ups.add(update, selection)
        if selection is None and update.settings.uses_torch:
            if self._torch is None:
                kernel = self._optimizer._torch_kernel
                new_record = partial(_first_record, self._optimizer)  # no circle with the plan
                self._torch = TorchKernels(kernel, new_record, _state_dtype)
            if self._torch.claim(update):
                return
        complete(update, selection, self._params_before + update.index)
        self._updates.append(update)

    def _declined(
        self,
        group: Group,
        settings: Settings,
        selections: Selections | None,
        first: int,
        params: list[Tensor],
        grads: Sequence[Gradient | None] | None,
    ) -> Sequence[int]:
        """Let the core claim what is in its usual form; the indices of the other parameters."""
        optimizer, native = self._optimizer, self._native
        indices = range(first, first + len(params))
        if native is None or group.get("differentiable"):
            return indices
        for_core = None
        if selections is not None:
            if self._catch_ups is not None:  # what a mask excludes must not be brought up to date
                return indices
            for_core = [None if s is None else s.for_core for s in selections[first : indices.stop]]
        declined = native.try_claim(
            settings, params, optimizer.state, optimizer._known, self._seen, for_core, grads, first
        )
        if self._catch_ups is not None:
            given = [param.grad for param in params] if grads is None else grads
            left = set(declined)
            for index, param, grad in zip(indices, params, given, strict=True):
                if grad is not None and index not in left:
                    try:
                        self._catch_ups.add(
                            self._claimed(group, settings, index, param, grad), None
                        )
                    except InputError as error:
                        raise InputError(f"{settings.who(index)}: {error}") from None
        return declined

    def _claimed(
        self, group: Group, settings: Settings, index: int, param: Tensor, grad: Gradient
    ) -> ParamUpdate:
        """What the core has claimed; so it is an ordinary parameter."""
        record = self._optimizer.state.get(param)
        state = [record[spec.name] for spec in settings.rule.state] if record else []
        gradient = touched(param, grad)
        return ParamUpdate(settings, group, index, param, param, grad, gradient, record, state)

    @property
    def is_all_claimed(self) -> bool:
        """Whether the core has claimed every gradient at once, and nothing is left for others."""
        return not self._updates and not self._torch and not self._catch_ups

    def run(self) -> None:
        """Do what was planned: all of it, or raise and nothing."""
        if torch.compiler.is_compiling():  # the functional optimizers' steps are in no graph
            _uncompiled_run(self)
            return
        try:
            self.prepare()
            self.commit()
        except BaseException:
            self.cancel()
            raise

    def prepare(self) -> None:
        """Do everything that can raise. ``commit`` or ``cancel`` must follow."""
        if self.is_all_claimed:
            if self._native is not None:
                self._native.prepare()
        else:
            with labelled("sparsestep: prepare"):
                self._prepare()
        self._note_engines()

    def cancel(self) -> None:
        """Give up what was prepared."""
        if self._catch_ups is not None:
            self._catch_ups.cancel()

    def commit(self) -> None:
        """Write what was prepared."""
        if not self.is_all_claimed:
            with labelled("sparsestep: commit"):
                uninterrupted(self._commit)
        elif self._native is not None:
            self._native.commit()  # one call of the core, which counts the steps as well
        if mapped_files:
            finish((lambda: written(self._optimizer._all_params()),))

    def _warn_of_embeddings(self) -> None:
        """Warn of embeddings with dense gradients, once for each parameter."""
        for update, is_embedding in self._are_embeddings:
            if is_embedding:
                who = update.settings.who(update.index)
                warn_once(SlowWarning, dense_embedding.warning(who, update.owner.shape))
            self._optimizer._embeddings[id(update.owner)] = (update.owner, is_embedding)

    def _note_engines(self) -> None:
        """For ``explain()``: who did what. A step that is done again is the core's."""
        optimizer = self._optimizer
        for param in optimizer._all_params():
            if id(param) in self._seen:
                optimizer._ran[id(param)] = (param, "native", "")
        dense = [] if self._torch is None else self._torch.claimed
        for update in (*self._updates, *dense):
            engine = update.engine or "torch"
            reason = (
                update.reason if update.engine else "dense gradient: updated by torch's kernel."
            )
            if update.touched.positions is None:
                owner, is_embedding = optimizer._embeddings.get(id(update.owner), (None, False))
                if is_embedding and owner is update.owner:
                    reason = dense_embedding.REASON
            optimizer._ran[id(update.owner)] = (update.owner, engine, reason)

    def _prepare(self) -> None:
        """Do all that may raise."""
        self._engines = SparseEngines(
            self._optimizer.engine, self._native, self._optimizer._all_params
        )
        for update in self._updates:
            self._engines.claim(update)
        self._engines.check()
        if self._torch is not None:
            self._torch.prepare()
        if self._catch_ups is not None:
            with labelled("sparsestep: catch up"):
                self._catch_ups.prepare()
        self._engines.prepare()  # from values that are up to date
        if self._are_embeddings:
            self._warn_of_embeddings()
        if self._torch is not None:
            for update in self._torch.firsts:
                if update.record:
                    self._enter(self._optimizer.state, update.owner, update.record)
        for update in self._updates:
            self._prepare_count(update)
        dense = [] if self._torch is None else self._torch.claimed
        apart = [u.owner for u in (*self._updates, *dense) if u.owner is not u.param]
        if apart:
            self._calls.append(partial(increment_version, apart))
        if self._catch_ups is not None:
            for key, clock in self._catch_ups.new:
                self._enter(self._optimizer._clocks, key, clock)
            self._calls += self._catch_ups.calls

    def _commit(self) -> None:
        """Write everything; nothing can fail."""
        with torch.no_grad():
            if self._torch is not None:
                finish((self._torch.begin,))
                self._torch.commit()
            self._engines.commit()
            finish(self._calls)
            if self._torch is not None:  # state that a kernel has made itself
                for update in self._torch.firsts:
                    if update.record and update.owner not in self._optimizer.state:
                        self._optimizer.state[update.owner] = update.record

    def _enter(self, entries: dict[Any, Any], key: Any, value: Any) -> None:
        """Have the commit add new state to the optimizer's."""
        self._calls.append(partial(entries.__setitem__, key, value))

    def _prepare_count(self, update: ParamUpdate) -> None:
        """Have the step counted; with the first, the parameter gets its state."""
        optimizer, record, group = self._optimizer, update.record, update.group
        if record is None:
            assert update.state is not None
            rule = update.settings.rule
            record = optimizer._new_record(group, rule, update.owner, update.state)
            if record:  # as with torch's SGD, nothing may show that the parameter is known
                self._enter(optimizer.state, update.owner, record)
        count = record.get("step")
        if isinstance(count, Tensor):
            self._calls.append(partial(count.add_, 1))
        elif count is not None:
            self._calls.append(partial(record.__setitem__, "step", update.step))
        elif update.seed is not None:  # a state that came without a count
            self._enter(record, "step", optimizer._new_count(group, update.param, update.step))


_uncompiled_run = disable_compiler(Plan.run)


def _first_record(optimizer: StateKeeper, update: ParamUpdate) -> dict[str, Any]:
    """The state of a parameter whose first step this is."""
    group, rule = update.group, update.settings.rule
    dtype = update.settings.state_dtype
    update.state = states.new(rule, update.param, group, dtype)
    if mapped_files:
        announce_checked(update.param, update.state, update.touched)
    return optimizer._new_record(group, rule, update.owner, update.state)


_ANY = State("any")


def _state_dtype(param: Tensor, asked_for: torch.dtype | None) -> torch.dtype:
    return states.dtype_for(_ANY, param, asked_for)
