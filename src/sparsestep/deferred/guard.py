"""``optimizer.track(model, guard=True)``: deferred rows catch up before torch reads them.

A guarded parameter is the same object in the same memory, but torch calls its
``__torch_function__`` before each operation. Operations that read rows catch up these rows first,
others catch up all rows. A view reads nothing, but is guarded as well. The price is a call into
Python for every operation on the parameter, and no fast path in the optimizer.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsestep._torch import rebuild_parameter, without_torch_function
from sparsestep.deferred.rows import DeferredOptimizer, valid_rows

_NAME = "_sparsestep_guard"  # of the attribute of a tensor that has one


def _methods(*names: str) -> set[Any]:
    return {getattr(Tensor, name) for name in names if hasattr(Tensor, name)}


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


# Metadata: never reads the data.
_METADATA = (
    _getters("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn")
    | _getters("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_xla")
    | _getters("is_mps", "is_xpu", "is_hpu", "is_mkldnn", "is_sparse_csr", "is_ort", "is_vulkan")
    | _getters("ndim", "itemsize", "nbytes", "names", "_version", "output_nr", "retains_grad")
    | _getters("_base", "_grad", "_has_symbolic_sizes_strides")
    | _getters("_backward_hooks", "_post_accumulate_grad_hooks")
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
    _getters("data", "T", "mT", "H", "mH")
    | _methods("detach", "view", "view_as", "t", "transpose", "permute", "unsqueeze", "squeeze")
    | _methods("as_subclass", "swapaxes", "swapdims", "movedim")
    | {torch.t, torch.transpose, torch.permute, torch.unsqueeze, torch.squeeze, torch.detach}
    | {torch.view_as_real}
)


def _of(*names: str) -> Callable[..., tuple[Any, Any]]:
    """Reads a table and ids from the arguments of a function."""
    weight, ids = names.index("weight"), names.index("ids")

    def read(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if len(args) <= max(weight, ids):
            named = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            return named.get("weight"), named.get("input")
        return args[weight], args[ids]

    return read


def _selected(table: Any, dim: Any = None, index: Any = None) -> tuple[Any, Any]:
    return (table, index) if type(dim) is int and dim == 0 else (None, None)


# Functions that read rows: the table and the ids among their arguments.
_ROW_READS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    functional.embedding: _of("ids", "weight"),
    functional.embedding_bag: _of("ids", "weight"),
    torch.embedding: _of("weight", "ids"),
    Tensor.__getitem__: _of("weight", "ids"),
    torch.index_select: _selected,
    Tensor.index_select: _selected,
}


class ReadGuard:
    """Catches up deferred rows of a table before they are read."""

    def __init__(self, optimizer: DeferredOptimizer, table: Tensor) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # the table keeps the guard
        self._table: Any = weakref.ref(table)
        if not isinstance(table, GuardedParameter):
            setattr(table, _NAME, [])
            table.__class__ = GuardedParameter
        getattr(table, _NAME).append(self)  # several, where optimizers share the table

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Catch up the rows that a function is about to read."""
        optimizer, table = self._optimizer(), self._table()
        if optimizer is None or table is None:
            return
        deferred = optimizer.deferred.get(id(table))
        if deferred is None or deferred.in_step or not deferred.has_deferred:
            return
        rows, reads = None, _ROW_READS.get(func)
        if reads is not None:
            weight, ids = reads(*args, **kwargs)
            is_table = isinstance(weight, Tensor) and weight.shape == table.shape
            if is_table and _shares_storage(weight, table):
                rows = valid_rows(ids, table)
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
        for guard in getattr(self, _NAME):
            guard.before(None, (), {})
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
        for guard in getattr(self, _NAME):
            guard.before(None, (), {})
        with without_torch_function():
            plain = self.detach()
            return rebuild_parameter, (plain, self.requires_grad, OrderedDict())


def readable(table: Tensor, ids: Any) -> Tensor:
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
