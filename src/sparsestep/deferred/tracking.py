"""``optimizer.track(model)``: deferred rows catch up before the model reads them."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sparsestep._torch import (
    assume_constant_result,
    hook_averaged_models,
    is_exporting,
    own_parameters,
    unhook_averaged_models,
)
from sparsestep.deferred.guard import GuardedParameter, ReadGuard
from sparsestep.deferred.rows import DeferredOptimizer, valid_rows
from sparsestep.errors import InputError, StaleWarning, message, warn

_trackers: Any = WeakIdKeyDictionary()  # weak references to optimizers, by parameter


def _register_tracker(owner: DeferredOptimizer, params: Iterable[Tensor]) -> Callable[[], None]:
    """Register the optimizer that tracks these parameters; returns the call that undoes it."""
    for param in params:
        _trackers.setdefault(param, []).append(weakref.ref(owner))

    def unregister() -> None:
        for param in params:
            owners = _trackers.get(param, [])
            owners[:] = [each for each in owners if each() not in (owner, None)]
            if not owners:
                _trackers.pop(param, None)

    return unregister


def catch_up_tracked(param: Tensor, ids: Any) -> None:
    """Catch up the rows of a parameter that an operation of a graph reads, if it is tracked."""
    owners = _trackers.get(param) if _trackers else None
    inside = None if owners is None else valid_rows(ids, param)
    if owners is None or inside is None:  # the operation raises if an id is invalid
        return
    for owner in owners:
        optimizer = owner()
        if optimizer is not None:
            optimizer.catch_up_rows(param, inside)


_read_in_graphs: Any = WeakIdKeyDictionary()  # parameters, by rows or as a whole
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that keep them current


@assume_constant_result
def _keep_current(module: nn.Module) -> None:
    """Catch up all rows that a module reads now and after each step.

    Called by the compiler when it traces the module: no code of ours runs in its graph.
    """
    for param in own_parameters(module).values():
        for owner in () if param is None else _trackers.get(param, ()):
            optimizer: Any = owner()
            if optimizer is not None:
                optimizer.catch_up_rows(param, None)
                _read_in_graphs[param] = True
                if optimizer not in _hooked:
                    _hooked.add(optimizer)
                    optimizer.register_step_post_hook(_catch_up_read_in_graphs)


def _catch_up_read_in_graphs(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in _read_in_graphs:
                optimizer.catch_up_rows(param, None)


def warn_if_tracked_elsewhere(name: str, params: Iterable[Tensor]) -> None:
    """Warn if parameters of an optimizer with masked semantics are tracked by another.

    Frameworks that recreate an optimizer from the options of its groups lose the semantics.
    """
    if not _trackers:
        return
    others = (owner() for param in params for owner in _trackers.get(param, ()))
    other = next((type(other).__name__ for other in others if other is not None), None)
    if other is not None:
        warn(
            StaleWarning,
            f"sparsestep: {name} has semantics='masked', but its parameters also belong to {other} "
            "with semantics='dense', which tracks the model. If your framework created it from the "
            "options of the other, pass semantics='dense' and call its track(model). Otherwise "
            "call remove() on the handle that track() returned.",
        )


CatchUpFn = Callable[[nn.Module], None]


class ModuleHooks:
    """Overrides ``train`` and ``__getstate__`` on a module instance. Copies are not hooked."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module keeps the hooks
        self._before: list[CatchUpFn] = []
        self._own = {"train": self._train, "__getstate__": self._state}
        self._others = {name: vars(module)[name] for name in self._own if name in vars(module)}

    @classmethod
    def of(cls, module: nn.Module) -> ModuleHooks | None:
        """The hooks of a module, if it has any."""
        found = getattr(vars(module).get("train"), "__self__", None)
        return found if isinstance(found, cls) else None

    @classmethod
    def add(cls, module: nn.Module, catch_up: CatchUpFn) -> Callable[[], None]:
        """Call a function before all of a module is read; returns the function that undoes it."""
        hooks = cls.of(module)
        if hooks is None:
            hooks = cls(module)
            vars(module).update(hooks._own)
        hooks._before.append(catch_up)
        return functools.partial(hooks._remove, catch_up)

    def _remove(self, catch_up: CatchUpFn) -> None:
        self._before.remove(catch_up)
        module = self._module()
        if module is not None and not self._before:
            for name in self._own:
                vars(module).pop(name, None)
            vars(module).update(self._others)

    def catch_up(self) -> nn.Module:
        """Catch up the module's tables."""
        module = self._module()
        assert module is not None
        for before in self._before:
            before(module)
        return module

    def _train(self, mode: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None
        if not mode:
            self.catch_up()
        train = self._others.get("train", functools.partial(type(module).train, module))
        result: nn.Module = train(mode)
        return result

    def _state(self) -> Any:
        """The state to pickle or copy: current, and without the hooks."""
        module = self.catch_up()
        own = getattr(type(module), "__getstate__", lambda module: vars(module))
        state = self._others.get("__getstate__", functools.partial(own, module))()
        if not isinstance(state, dict):
            return state
        return {**{k: v for k, v in state.items() if k not in self._own}, **self._others}


def _catch_up_tables(model: nn.Module) -> None:
    for module in model.modules():
        hooks = ModuleHooks.of(module)
        if hooks is not None:
            hooks.catch_up()


class Tracking:
    """The handle of ``optimizer.track(model)``; ``remove()`` undoes it.

    A copy of the model is current but not tracked: its weights are not this optimizer's.
    """

    def __init__(
        self, optimizer: DeferredOptimizer | None, model: nn.Module, *, guard: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._undo: list[Callable[[], None]] = []
        if optimizer is None:
            return
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        _check_model(optimizer, model, known)
        tables = {id(p): p for p in _trackable_params(model) if id(p) in known}
        self._hook_state_dict(model)
        for module in model.modules():
            own = any(id(p) in tables for p in own_parameters(module).values())
            # Other modules may read the rows of a sharded table.
            for reader in getattr(module, "looked_up_by", (module,)):
                self._hook_forward(reader, own=own)
            if not own:
                continue
            if module is not model:  # it may be saved and loaded alone
                self._hook_state_dict(module)
            self._undo.append(ModuleHooks.add(module, self._catch_up))
        self._undo.append(_register_tracker(optimizer, tables.values()))
        hook_averaged_models(_catch_up_tables)
        self._undo.append(weakref.finalize(self, unhook_averaged_models))  # called once at most
        if guard:
            self._undo += [
                ReadGuard(optimizer, table).remove
                for table in tables.values()
                if type(table) in (nn.Parameter, GuardedParameter)  # not subclasses of others
            ]
        if "torch._dynamo" in sys.modules:  # compiled code does not call new hooks
            torch.compiler.reset()

    def _hook_forward(self, module: nn.Module, *, own: bool) -> None:
        if hasattr(type(module), "catches_up"):  # its arguments may be no ids
            return
        if hasattr(type(module), "rows_read"):
            before: Any = self._before_declared_reads
        elif not own:
            return
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            before = self._before_lookup
            if module.max_norm is not None:  # renormalizes the rows that it reads
                self._undo.append(module.register_forward_hook(self._after_renorm).remove)
        else:
            before = self._before_dense_read
        self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)

    def _hook_state_dict(self, module: nn.Module) -> None:
        # Loaded values are current: deferred updates must be applied before.
        self._undo += [
            module.register_state_dict_pre_hook(self._catch_up).remove,
            module.register_load_state_dict_pre_hook(self._catch_up).remove,
        ]

    def _before_lookup(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if _is_in_graph(module, args, kwargs):
            return
        if torch.compiler.is_compiling() and not is_exporting() and not module.sparse:
            _keep_current(module)  # torch's own, whose rows are rarely behind
            return
        weight = module.weight
        assert isinstance(weight, Tensor)
        self._read(weight, args[0] if args else kwargs.get("input"))

    def _before_declared_reads(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if _is_in_graph(module, args, kwargs):
            return
        for weight, ids in module.rows_read(*args, **kwargs):
            self._read(weight, ids)

    def _before_dense_read(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() and not is_exporting():
            _keep_current(module)
            return
        reader = type(module).__name__ if torch.is_grad_enabled() else None
        self._catch_up_module(module, reader)

    def _catch_up_module(self, module: nn.Module, reader: str | None = None) -> None:
        optimizer = self._optimizer
        for param in own_parameters(module).values():
            if param is not None and optimizer is not None:
                table = _param_aliased_by(optimizer, param)
                deferred = optimizer.deferred.get(id(table))
                if deferred is not None and deferred.has_deferred:
                    optimizer.catch_up_rows(table, None)
                    deferred.dense_reader = reader

    def _after_renorm(self, module: nn.Module, *_: Any) -> None:
        weight = module.weight
        if self._optimizer is not None and isinstance(weight, Tensor):
            deferred = self._optimizer.deferred.get(id(weight))
            if deferred is not None:
                deferred.note_write(weight)

    def _read(self, weight: Tensor, ids: Any) -> None:
        if torch.compiler.is_compiling():
            torch.compiler.disable(self._catch_up_ids)(weight, ids)
        else:
            self._catch_up_ids(weight, ids)

    def _catch_up_ids(self, weight: Tensor, ids: Any) -> None:
        # The module raises if an id is invalid.
        if self._optimizer is not None:
            inside = valid_rows(ids, weight)
            if inside is not None:
                self._optimizer.catch_up_rows(_param_aliased_by(self._optimizer, weight), inside)

    def _catch_up(self, module: nn.Module, *_: Any) -> None:
        if self._optimizer is None:
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self._catch_up_module(module)
        else:
            self._optimizer.catch_up()

    def remove(self) -> None:
        """Stop tracking."""
        for undo in self._undo:
            undo()
        self._undo = []

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> Tracking:
        if self._optimizer is not None:
            self._optimizer.catch_up()
            for group in self._optimizer.param_groups:
                for param in group["params"]:
                    if id(param) in memo:  # copied before it was current
                        memo[id(param)].copy_(param)
        return _untracked()

    def __reduce__(self) -> Any:
        if self._optimizer is not None:
            self._optimizer.catch_up()
        return _untracked, ()


def _is_in_graph(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a lookup is an operation of a graph, which catches up rows itself."""
    if not torch.compiler.is_compiling() or is_exporting():
        return False
    return hasattr(type(module), "fits_graph") and bool(module.fits_graph(*args, **kwargs))


def _param_aliased_by(optimizer: DeferredOptimizer, weight: Tensor) -> Tensor:
    """The optimizer's parameter that a tensor aliases, as ``functional_call`` passes them."""
    if not optimizer.deferred or id(weight) in optimizer.deferred or weight.is_meta:
        return weight
    address = weight.data_ptr()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.data_ptr() == address and param.shape == weight.shape and address:
                found: Tensor = param
                return found
    return weight


def _trackable_params(model: nn.Module) -> Iterator[Tensor]:
    """Parameters that may be read row by row.

    Those of embeddings, and those that a module of the user's own holds: torch's other layers read
    theirs as a whole, and their gradients are dense.
    """
    for module in model.modules():
        by_rows = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if by_rows or not type(module).__module__.startswith("torch.nn."):
            yield from (param for param in own_parameters(module).values() if param is not None)
        elif hasattr(module, "parametrizations"):  # what the weight is computed from
            yield from module.parameters()


def _check_model(optimizer: DeferredOptimizer, model: Any, known: set[int]) -> None:
    who = type(optimizer).__name__
    if not isinstance(model, nn.Module):
        requirement = f"{who}: track needs a model, an nn.Module"
        raise InputError(message(requirement, type(model).__name__))
    if optimizer.semantics != "dense":
        requirement = f"{who}: track needs semantics='dense': otherwise no row is ever behind"
        remedy = "Remove the call, or create the optimizer with semantics='dense'"
        raise InputError(message(requirement, f"semantics={optimizer.semantics!r}", remedy))
    if not any(id(param) in known for param in model.parameters()):
        requirement = f"{who}: track needs a model with parameters of this optimizer"
        remedy = "Was the model copied or converted after you created the optimizer?"
        got = f"a {type(model).__name__} with none of them"
        raise InputError(f"{message(requirement, got)} {remedy}")


def _untracked() -> Tracking:
    return Tracking(None, nn.Module())
