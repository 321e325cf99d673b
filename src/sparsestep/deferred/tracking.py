"""``optimizer.track(model)``: deferred rows catch up before the model reads them."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from sparsestep._torch import (
    METADATA,
    assume_constant_result,
    hook_averaged_models,
    is_exporting,
    is_transforming,
    outside_transforms,
    own_parameters,
    rebuild_parameter,
    unhook_averaged_models,
    unwrapped,
    version_of,
    without_torch_function,
)
from sparsestep.deferred.rows import valid_rows
from sparsestep.errors import InputError, StaleWarning, message, warn
from sparsestep.memory.tensors import memory_of

_handles: Any = WeakIdKeyDictionary()  # weak references to Tracking, by parameter


def _register(handle: Tracking, params: Iterable[Tensor]) -> Callable[[], None]:
    """Register the tracking of these parameters; returns the call that undoes it."""
    for param in params:
        _handles.setdefault(param, []).append(weakref.ref(handle))

    def unregister() -> None:
        for param in params:
            handles = _handles.get(param, [])
            handles[:] = [each for each in handles if each() not in (handle, None)]
            if not handles:
                _handles.pop(param, None)

    return unregister


def _tracking_of(param: Tensor) -> Iterator[Tracking]:
    for handle in _handles.get(param, ()) if _handles else ():
        found = handle()
        if found is not None:
            yield found


def catch_up_tracked(param: Tensor, ids: Any) -> None:
    """Catch up the rows that a lookup reads, if its table is tracked."""
    found = list(_tracking_of(param))
    if not found:  # it may alias a parameter, as ``functional_call`` passes them
        found = list({each for known in list(_handles) for each in _tracking_of(known)})
    for each in found:
        _catch_up_ids(each.optimizer, param, ids)


def _catch_up_ids(optimizer: Any, weight: Tensor, ids: Any) -> None:
    """Catch up the rows that a lookup reads."""
    if is_transforming():
        with outside_transforms():
            _catch_up_ids(optimizer, unwrapped(weight), unwrapped(ids))
        return
    param = _param_aliased_by(optimizer, weight)
    deferred = optimizer.deferred.get(id(param))
    if deferred is None or not deferred.has_deferred:
        return
    rows = valid_rows(ids, param)
    if rows is not None:  # else the lookup raises: an id is invalid
        optimizer.catch_up_rows(param, rows)


def version_for_readers(param: Tensor) -> int:
    """The version of a parameter, which changes if rows change that were current.

    A row that a lookup has read is current until the next step, whatever other lookups catch up.
    """
    version = version_of(memory_of(param))
    for each in _tracking_of(param):
        deferred = each.optimizer.deferred.get(id(param))
        if deferred is not None:
            version -= deferred.catch_up_writes
    return version


_read_in_graphs: Any = WeakIdKeyDictionary()  # parameters, by rows or as a whole
_hooked: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that keep them current


@assume_constant_result
def _catch_up_traced(module: nn.Module, is_exported: bool) -> None:
    """Catch up all rows that a module reads now and, unless it is exported, after each step.

    Called by the compiler when it traces the module: no code of ours runs in its graph.
    """
    params = module.parameters() if is_exported else own_parameters(module).values()
    for param in params:
        for tracking in () if param is None else _tracking_of(param):
            optimizer = tracking.optimizer
            optimizer.catch_up_rows(param, None)
            if not is_exported:
                _read_in_graphs[param] = True
                if optimizer not in _hooked:
                    _hooked.add(optimizer)
                    optimizer.register_step_post_hook(_catch_up_read_in_graphs)


def _catch_up_read_in_graphs(optimizer: Any, *_: Any) -> None:
    for param in optimizer.params():
        if param in _read_in_graphs:
            optimizer.catch_up_rows(param, None)


def recreated_from(optimizer_class: Any, params: Any, given: Mapping[str, Any]) -> Any:
    """The tracked optimizer that a constructor call creates again, or ``None``.

    Some frameworks do so before the first step: ``type(optimizer)(params, **options)``, with all
    options of a param group, or with ``optimizer.defaults``. A call that omits or changes an
    option, or passes ``semantics``, creates another optimizer.
    """
    if not _handles or not isinstance(params, list) or not all(map(torch.is_tensor, params)):
        return None
    for each in (each for param in params for each in _tracking_of(param)):
        other = each.optimizer
        if type(other) is not optimizer_class or other.used_engines:  # it has stepped
            continue
        if {*map(id, other.params())} != {*map(id, params)}:
            continue
        group = other.param_groups[0]
        has_all = all(given.get(name, other) is group.get(name) for name in other.option_names)
        if has_all and given.get("semantics", other.semantics) == other.semantics:
            return other
    return None


def move_tracking(old: Any, new: Any) -> None:
    """Let an optimizer track the models of another instead of that."""
    for handle in {each for param in new.params() for each in _tracking_of(param)}:
        if handle.optimizer is old:
            handle.optimizer = new
            for guard in handle.guards:
                guard.optimizer = new


def warn_if_tracked_elsewhere(name: str, params: Iterable[Tensor]) -> None:
    """Warn if parameters of an optimizer with masked semantics are tracked by another.

    Frameworks that recreate an optimizer from the options of its groups lose the semantics.
    """
    found = (each for param in params for each in _tracking_of(param))
    other = next((type(each.optimizer).__name__ for each in found), None)
    if other is not None:
        warn(
            StaleWarning,
            f"sparsestep: {name} has semantics='masked', but its parameters also belong to {other} "
            "with semantics='dense', which tracks the model. If your framework created it from the "
            "options of the other, pass semantics='dense' and call its track(model). Otherwise "
            "call remove() on the handle that track() returned.",
        )


class ModuleHooks:
    """Overrides ``train`` and ``__getstate__`` on a module instance. Copies are not hooked."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # the module keeps the hooks
        self._before: list[Callable[[nn.Module], None]] = []
        self._own = {"train": self._train, "__getstate__": self._state}
        self._others = {name: vars(module)[name] for name in self._own if name in vars(module)}

    @classmethod
    def of(cls, module: nn.Module) -> ModuleHooks | None:
        """The hooks of a module, if it has any."""
        found = getattr(vars(module).get("train"), "__self__", None)
        return found if isinstance(found, cls) else None

    @classmethod
    def add(cls, module: nn.Module, catch_up: Callable[[nn.Module], None]) -> Callable[[], None]:
        """Call a function before all of a module is read; returns the function that undoes it."""
        hooks = cls.of(module)
        if hooks is None:
            hooks = cls(module)
            vars(module).update(hooks._own)
        hooks._before.append(catch_up)
        return functools.partial(hooks._remove, catch_up)

    def _remove(self, catch_up: Callable[[nn.Module], None]) -> None:
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

    def __init__(self, optimizer: Any = None, model: Any = None, *, guard: bool = False) -> None:
        self.optimizer = optimizer  # None for a copy
        self._undo: list[Callable[[], None]] = []
        if optimizer is None:
            return
        known = set(map(id, optimizer.params()))
        _check_model(optimizer, model, known)
        tables = {id(p): p for p in _trackable_params(model) if id(p) in known}
        for param in tables.values():  # this optimizer may replace another
            for other in _tracking_of(param):
                other.optimizer.catch_up_rows(param, None)
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
        self._undo.append(_register(self, tables.values()))
        hook_averaged_models(_catch_up_tables)
        self._undo.append(weakref.finalize(self, unhook_averaged_models))  # called once at most
        self.guards = [
            ReadGuard(optimizer, table)
            for table in (tables.values() if guard else ())
            if type(table) in (nn.Parameter, GuardedParameter)  # not subclasses of others
        ]
        self._undo += [each.remove for each in self.guards]
        if "torch._dynamo" in sys.modules:  # compiled code does not call new hooks
            torch.compiler.reset()

    def _hook_forward(self, module: nn.Module, *, own: bool) -> None:
        if not own and not hasattr(type(module), "rows_read"):
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            # It renormalizes the rows that it reads.
            self._undo.append(module.register_forward_hook(self._after_renorm).remove)
        hook: Any = self._before_read
        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _hook_state_dict(self, module: nn.Module) -> None:
        # Loaded values are current: deferred updates must be applied before.
        self._undo += [
            module.register_state_dict_pre_hook(self._catch_up).remove,
            module.register_load_state_dict_pre_hook(self._catch_up).remove,
        ]

    def _before_read(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind, is_compiling = type(module), torch.compiler.is_compiling()
        has_ids = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        has_rows_read = hasattr(kind, "rows_read")
        if is_exporting():  # the graph has no code of ours, and its ids are not known
            if torch.compiler.is_dynamo_compiling():
                _catch_up_traced(module, True)
            else:
                self._catch_up_outside()
        elif hasattr(kind, "catches_up"):  # its arguments may be no ids
            pass
        elif is_compiling and hasattr(kind, "fits_graph") and module.fits_graph(*args, **kwargs):
            pass  # an operation of the graph catches up rows
        elif is_compiling and not has_rows_read and not (has_ids and module.sparse):
            _catch_up_traced(module, False)  # if torch's own, its rows are rarely deferred
        elif is_transforming() and (has_rows_read or not has_ids):
            self._catch_up_outside()  # the ids are those of one sample, without values
        elif has_rows_read or has_ids:
            if has_rows_read:
                reads = module.rows_read(*args, **kwargs)
            else:
                reads = [(module.weight, args[0] if args else kwargs.get("input"))]
            for weight, ids in reads if self.optimizer is not None else ():
                _uncompiled(_catch_up_ids)(self.optimizer, weight, ids)
        else:
            reader = kind.__name__ if torch.is_grad_enabled() else None
            _uncompiled(self._catch_up_module)(module, reader)

    def _catch_up_outside(self) -> None:
        if self.optimizer is not None:
            with outside_transforms():
                self.optimizer.catch_up()

    def _catch_up_module(self, module: nn.Module, reader: str | None = None) -> None:
        optimizer = self.optimizer
        for param in own_parameters(module).values():
            if param is not None and optimizer is not None:
                table = _param_aliased_by(optimizer, param)
                deferred = optimizer.deferred.get(id(table))
                if deferred is not None and deferred.has_deferred:
                    optimizer.catch_up_rows(table, None)
                    deferred.dense_reader = reader

    def _after_renorm(self, module: nn.Module, *_: Any) -> None:
        weight = module.weight
        if self.optimizer is not None and isinstance(weight, Tensor):
            deferred = self.optimizer.deferred.get(id(weight))
            if deferred is not None:
                deferred.note_write(weight)

    def _catch_up(self, module: nn.Module, *_: Any) -> None:
        if self.optimizer is None:
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self._catch_up_module(module)
        else:
            self.optimizer.catch_up()

    def remove(self) -> None:
        """Stop tracking."""
        for undo in self._undo:
            undo()
        self._undo = []

    @torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> Tracking:
        if self.optimizer is not None:
            self.optimizer.catch_up()
            for param in self.optimizer.params():
                if id(param) in memo:  # copied before it was current
                    memo[id(param)].copy_(param)
        return Tracking()

    def __reduce__(self) -> Any:
        if self.optimizer is not None:
            self.optimizer.catch_up()
        return Tracking, ()


def _uncompiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def _param_aliased_by(optimizer: Any, weight: Tensor) -> Tensor:
    """The optimizer's parameter that a tensor aliases, as ``functional_call`` passes them."""
    weight = unwrapped(weight)
    if not optimizer.deferred or id(weight) in optimizer.deferred or weight.is_meta:
        return weight
    address, params = weight.data_ptr(), optimizer.params()
    found = (p for p in params if address and p.data_ptr() == address and p.shape == weight.shape)
    return next(found, weight)


def _trackable_params(model: nn.Module) -> Iterator[Tensor]:
    """Parameters that may be read row by row.

    They belong to embeddings, or to modules of the user's own. Torch's other layers read their
    parameters as a whole, and have dense gradients.
    """
    for module in model.modules():
        by_rows = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if by_rows or not type(module).__module__.startswith("torch.nn."):
            yield from (param for param in own_parameters(module).values() if param is not None)
        elif hasattr(module, "parametrizations"):  # the weight is computed from others
            yield from module.parameters()


def _check_model(optimizer: Any, model: Any, known: set[int]) -> None:
    who = type(optimizer).__name__
    if not isinstance(model, nn.Module):
        requirement = f"{who}: track needs a model, an nn.Module"
        raise InputError(message(requirement, type(model).__name__))
    if optimizer.semantics != "dense":
        requirement = f"{who}: track needs semantics='dense': otherwise no update is deferred"
        remedy = "Remove the call, or create the optimizer with semantics='dense'"
        raise InputError(message(requirement, f"semantics={optimizer.semantics!r}", remedy))
    if not any(id(param) in known for param in model.parameters()):
        requirement = f"{who}: track needs a model with parameters of this optimizer"
        remedy = "Was the model copied or converted after you created the optimizer?"
        got = f"a {type(model).__name__} with none of them"
        raise InputError(f"{message(requirement, got)} {remedy}")


# The guard of ``track(model, guard=True)``
#
# A guarded parameter is the same object in the same memory, but torch calls its
# ``__torch_function__`` before each operation. Operations that read rows catch up these rows first,
# others catch up all rows. A view reads nothing, but is guarded as well. The price is a call into
# Python for every operation on the parameter, and no fast path in the optimizer.

_NAME = "_sparsestep_guard"  # of the attribute of a tensor that has one


def _methods(*names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}


# Metadata: never reads the data.
_METADATA = (
    {each.__get__ for each in METADATA.values()}
    | _methods("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset")
    | _methods("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_conj")
    | _methods("is_neg", "is_signed", "is_shared", "is_pinned", "is_set_to", "is_coalesced")
    | _methods("element_size", "get_device", "data_ptr", "__len__", "register_hook")
    | _methods("register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "has_names")
    | _methods("new_zeros", "new_empty", "new_ones", "new_full", "dim_order", "__hash__")
    | _methods("_is_view")
    | {getattr(Tensor, name).__set__ for name in ("grad", "_grad", "requires_grad")}
    | {getattr(Tensor, name).__delete__ for name in ("grad", "_grad")}
    | {torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like, torch.rand_like}
    | {torch.randn_like, torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference}
)
# Always views. Others may copy, and count as reads.
_VIEWS = (
    {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH")}
    | _methods("detach", "view", "view_as", "t", "transpose", "permute", "unsqueeze", "squeeze")
    | _methods("as_subclass", "swapaxes", "swapdims", "movedim")
    | {torch.t, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.detach}
    | {torch.view_as_real}
)


def _selected(input: Any, dim: Any, index: Any, **_: Any) -> tuple[Any, Any]:
    return (input, index) if type(dim) is int and dim == 0 else (None, None)


# Functions that read rows: the table and the ids among their arguments.
_ROW_READS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    functional.embedding: lambda input, weight, *_, **__: (weight, input),
    functional.embedding_bag: lambda input, weight, *_, **__: (weight, input),
    torch.embedding: lambda weight, indices, *_, **__: (weight, indices),
    Tensor.__getitem__: lambda table, index: (table, index),
    torch.index_select: _selected,
    Tensor.index_select: _selected,
}


class ReadGuard:
    """Catches up deferred rows of a table before they are read."""

    def __init__(self, optimizer: Any, table: Tensor) -> None:
        self.optimizer = optimizer  # kept, as the table may outlive the model
        self._table: Any = weakref.ref(table)
        if not isinstance(table, GuardedParameter):
            setattr(table, _NAME, [])
            table.__class__ = GuardedParameter
        getattr(table, _NAME).append(self)  # several, where optimizers share the table

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Catch up the rows that a function is about to read."""
        optimizer, table = self.optimizer, self._table()
        if table is None:
            return
        deferred = optimizer.deferred.get(id(table))
        if deferred is None or deferred.in_step or not deferred.has_deferred:
            return
        rows, reads = None, _ROW_READS.get(func)
        if reads is not None:
            weight, ids = reads(*args, **kwargs)
            weight, ids = unwrapped(weight), unwrapped(ids)
            is_table = isinstance(weight, Tensor) and weight.shape == table.shape
            if is_table and _shares_storage(weight, table):
                rows = valid_rows(ids, table)
        with outside_transforms() if is_transforming() else nullcontext():
            optimizer.catch_up_rows(table, rows)

    def remove(self) -> None:
        """Remove the guard."""
        table = self._table()
        if table is None:
            return
        guards = getattr(table, _NAME)  # views share the list
        guards.remove(self)
        if not guards:
            delattr(table, _NAME)
            table.__class__ = nn.Parameter


class _GuardedMixin:
    """``__torch_function__`` that calls the guards of its arguments."""

    def _catch_up(self) -> None:
        for guard in getattr(self, _NAME):
            guard.before(None, (), {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_torch_function():
            if func in _METADATA:
                return func(*args, **kwargs)
            guarded = list(_guarded((args, kwargs)))
            if func not in _VIEWS:
                for guard in (guard for tensor in guarded for guard in getattr(tensor, _NAME)):
                    guard.before(func, args, kwargs)
            result = func(*args, **kwargs)
            for tensor in guarded:
                result = _guard_views(result, tensor)
            return result


class GuardedView(_GuardedMixin, Tensor):
    """A view of a guarded table, as in a state dict. Copies of it are ordinary tensors."""

    def _current(self) -> Tensor:
        self._catch_up()
        with without_torch_function():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._current(), memo)
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._current().__reduce_ex__(protocol)


class GuardedParameter(_GuardedMixin, nn.Parameter):
    """A guarded table. Copies of it are ordinary parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.clone().detach(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._catch_up()
        with without_torch_function():
            plain = self.detach()
            return rebuild_parameter, (plain, self.requires_grad, OrderedDict())


def catch_up_guarded(table: Tensor, ids: Any) -> Tensor:
    """Return a table for code that reads the rows ``ids`` without torch's functions.

    Deferred rows of a guarded table catch up first. The result is a plain tensor, so that a guard
    does not rule out the fast path.
    """
    if type(table) is not GuardedParameter:
        return table
    with without_torch_function():
        for guard in getattr(table, _NAME):
            guard.before(functional.embedding, (ids, table), {})
        return table.detach()


def _guarded(found: Any) -> Iterator[Tensor]:
    """The guarded tensors among arguments."""
    if isinstance(found, _GuardedMixin):
        if hasattr(found, _NAME):
            assert isinstance(found, Tensor)
            yield found
    elif isinstance(found, tuple | list | dict):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _guarded(each)


def _shares_storage(one: Tensor, other: Tensor) -> bool:
    return (
        one.layout is torch.strided
        and unwrapped(one) is one
        and one.device == other.device
        and (one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
    )


def _guard_views(result: Any, tensor: Tensor) -> Any:
    """Results in the memory of a guarded tensor are guarded as well."""
    if isinstance(result, tuple | list) and type(result) in (tuple, list):
        return type(result)(_guard_views(each, tensor) for each in result)
    if type(result) is Tensor and _shares_storage(result, tensor):
        result.__class__ = GuardedView
        setattr(result, _NAME, getattr(tensor, _NAME))
    return result
