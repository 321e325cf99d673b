"""CompactGrad: the gradient of an embedding, with one row for each row of the output.

A bag of a hundred ids has one output row, hence one gradient row; the ordinary gradient of the
table is a copy of it for each id. A CompactGrad stores the ids and the gradient of the output,
which our optimizers read (``indexed``). For other code it is a sparse gradient: autograd adds
it up, numbers scale it, torch clips it, and any other operation converts it to a COO tensor.

Torch has two protocols for this: ``__torch_function__`` for calls from Python, and
``__torch_dispatch__`` for calls from torch's own C++.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import (
    METADATA,
    cat,
    coo_indices,
    coo_values,
    foreach_unscale_,
    graph_task_id,
    make_wrapper_subclass,
    stack,
    tree_map_only,
    without_torch_function,
)
from sparsestep.errors import InputError, message
from sparsestep.grads.dedup import iter_sums, norm_of_sums, slot_norms
from sparsestep.grads.exchange import (
    PendingGrad,
    UnscaledValues,
    dense_grad_error,
    exchange_grad_of,
)
from sparsestep.grads.indexed import IndexedGrad

if TYPE_CHECKING:
    from sparsestep.distributed.grads import ShardedGradSource

# Names of functions that write their first argument.
_IN_PLACE = re.compile(r"(__i(add|sub|mul|truediv|floordiv|mod|pow)__|[a-z_0-9]*[a-z0-9]_)(\.\w+)?")


# Operators called by dispatch modes: these come to __torch_dispatch__ next.
_OP_TYPES = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

# Without those that CompactGrad overrides.
_METADATA = [each for name, each in METADATA.items() if name not in ("layout", "is_sparse")]
# Methods that read metadata only, or have a handler.
_METHODS = """
    size dim ndimension numel nelement element_size get_device __len__ __format__ is_floating_point
    is_complex is_conj is_neg is_inference is_signed requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad backward detach detach_ clone copy_ zero_
    add add_ __add__ __radd__ __iadd__ mul mul_ __mul__ __rmul__ __imul__ multiply multiply_
    div div_ __truediv__ __div__ __itruediv__ __idiv__ true_divide true_divide_ divide divide_
    neg neg_ __neg__ negative negative_ _foreach_add _foreach_add_ _foreach_mul _foreach_mul_
    _foreach_div _foreach_div_ _foreach_neg _foreach_neg_ _foreach_zero_ _foreach_copy_
"""
# Methods whose handler needs the sums of all rows.
_CLIPPING = """
    clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_ _foreach_norm
    _foreach_clamp_min _foreach_clamp_min_ _foreach_clamp_max _foreach_clamp_max_
    _amp_foreach_non_finite_check_and_unscale_
"""


def _functions(names: str) -> set[Any]:
    owners = (Tensor, torch)
    return {getattr(o, name) for name in names.split() for o in owners if hasattr(o, name)}


_NEEDS_SUMS = _functions(_CLIPPING) | {torch.linalg.vector_norm, torch.linalg.norm}
_KEEPS_COMPACT = _functions(_METHODS)
_KEEPS_COMPACT |= {attribute.__get__ for attribute in _METADATA}
_KEEPS_COMPACT |= {attribute.__set__ for attribute in _METADATA}


class CompactGrad(Tensor):
    """A sparse gradient stored as IndexedGrads, one for each lookup of the table.

    Code that reads its values, or anything else that only an ordinary tensor has, *materializes*
    it: from then on it is that tensor, so that in-place changes of the values are changes of the
    gradient.

    Example:
        >>> import sparsestep
        >>> bag = sparsestep.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> bag(torch.tensor([[3, 1, 3, 7]])).sum().backward()
        >>> grad = bag.weight.grad
        >>> type(grad).__name__, grad.is_sparse, grad.indexed().values.shape
        ('CompactGrad', True, torch.Size([1, 16]))
        >>> grad.coalesce().values().shape
        torch.Size([3, 16])

    Attributes:
        parts: an IndexedGrad for each lookup, or a PendingGrad if the table is sharded. The native
            core reads them by this name.
    """

    parts: tuple[Any, ...]
    materialized: Tensor | None  # the ordinary gradient, once it has become one
    source: ref[ShardedGradSource] | None = None  # of a sharded table's gradient
    is_sharded: bool = False  # whether other ranks have other rows of it

    @staticmethod
    def of(parts: Iterable[Any], shape: torch.Size, like: Tensor) -> CompactGrad:
        """Create the gradient of a parameter of this shape, of the dtype and device of ``like``."""
        made: CompactGrad = make_wrapper_subclass(
            CompactGrad, shape, dtype=like.dtype, device=like.device
        )
        made.parts = tuple(parts)
        made.materialized = None
        return made

    @property
    def is_materialized(self) -> bool:
        """Whether it has become an ordinary tensor."""
        return self.materialized is not None

    @property
    def has_pending_parts(self) -> bool:
        """Whether a part of it is still to be sent to the rank that owns the rows."""
        return any(isinstance(part, PendingGrad) for part in self.parts)

    # Torch's C++ sees a strided tensor; Python sees the layout of the ordinary gradient.

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Whether it is sparse: it is, unless something dense was added."""
        return self.materialized is None or self.materialized.is_sparse

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        """The layout of the ordinary gradient."""
        return torch.sparse_coo if self.materialized is None else self.materialized.layout

    def indexed(self) -> IndexedGrad:
        """Return the canonical form, without copying values. Not for a materialized gradient."""
        parts = self.local_parts()
        return parts[0] if len(parts) == 1 else IndexedGrad.cat(parts)

    def local_parts(self) -> tuple[IndexedGrad, ...]:
        """Return the parts, at least one, after exchanging pending ones."""
        assert self.materialized is None
        if self.has_pending_parts:
            exchange_grad_of(self)
        return self.parts or (_empty_part(self),)

    def replace_parts(self, parts: Iterable[Any]) -> None:
        """Become the gradient that has these parts."""
        self.parts, self.materialized = tuple(parts), None

    def materialize_(self) -> Tensor:
        """Become an ordinary gradient, and return it."""
        if self.materialized is None:
            self.parts, self.materialized = (), _to_coo(self)
        return self.materialized

    def snapshot(self) -> dict[str, Any]:
        """Return the attributes that an exchange changes, for ``restore``."""
        names = ("parts", "materialized", "source", "is_sharded")
        return {name: getattr(self, name) for name in names}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Undo an exchange."""
        vars(self).update(snapshot)

    def copy_from_(self, other: Tensor) -> None:
        """Take the values of another gradient."""
        if isinstance(other, CompactGrad) and not other.is_materialized:
            self.replace_parts(other.parts)
        else:
            tensor = materialize(other).detach().to(self.dtype, copy=True)
            self.parts, self.materialized = (), tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Printing a gradient does not materialize it.
        if self.has_pending_parts:
            return f"tensor(..., size={tuple(self.shape)}, still to be exchanged)"
        return repr(_to_coo(self) if self.materialized is None else self.materialized)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NEEDS_SUMS:
            tree_map_only(CompactGrad, _check_no_double_backward, (args, kwargs))
        elif func not in _KEEPS_COMPACT and not isinstance(func, _OP_TYPES):
            if func == _SET_DATA and isinstance(args[0], CompactGrad):
                return args[0].copy_from_(args[1])
            result = _call_materialized(func, args, kwargs or {})
            if func == coo_values and args[0].source is not None:  # called by a GradScaler
                return UnscaledValues.of(result, args[0].source)
            return result
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a backward() in a function that is compiled
            return torch.compiler.disable(cls.__torch_dispatch__)(func, types, args, kwargs)
        handler, kwargs = _HANDLERS.get(getattr(func, "overloadpacket", None)), kwargs or {}
        if handler is not None and "out" not in kwargs:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _call_materialized(func, args, kwargs)


if ext is not None:
    ext.set_compact_class(CompactGrad)


def _like(grad: Tensor, parts: tuple[Any, ...], tensor: Tensor | None = None) -> CompactGrad:
    """Create another gradient of the same parameter, of parts or of an ordinary tensor."""
    with without_torch_function():  # shape, dtype and device as torch's C++ sees them
        made = CompactGrad.of(parts, grad.shape, grad)
    made.materialized = tensor
    return made


# Conversion


def _empty_part(grad: CompactGrad) -> IndexedGrad:
    rows, *rest = grad.shape
    slot_size = math.prod(rest)
    values = torch.empty(0, slot_size, dtype=grad.dtype, device=grad.device)
    indices = torch.empty(0, dtype=torch.int64, device=grad.device)
    return IndexedGrad(indices, values, rows, slot_size)


def _to_coo(grad: CompactGrad) -> Tensor:
    """Return the COO gradient, as a copy: the gradient of the output belongs to others."""
    indexed, shape = grad.indexed(), grad.shape
    flat, values = indexed.flat_indices, indexed.materialize_values().values
    if values is indexed.values:
        values = values.clone(memory_format=torch.contiguous_format)
    sparse_dim = 1 if indexed.num_slots == shape[0] else grad.dim()
    if sparse_dim == 1:
        indices = flat[None].clone()
    elif indexed.num_slots:
        indices = stack(torch.unravel_index(flat, shape))
    else:
        indices = flat.new_empty(sparse_dim, 0)
    return coo_like(grad, indices, values.reshape(flat.numel(), *shape[sparse_dim:]))


def coo_like(grad: Tensor, indices: Tensor, values: Tensor, *, coalesced: bool = False) -> Tensor:
    """Return the COO gradient of the same parameter that has these indices and values."""
    return torch.sparse_coo_tensor(
        indices,
        values,
        grad.shape,
        device=values.device,
        is_coalesced=coalesced,
        check_invariants=False,
    )


def parts_of(grad: Tensor) -> tuple[IndexedGrad, ...] | None:
    """Return a sparse gradient as parts with memory of their own; None if it is dense."""
    if isinstance(grad, CompactGrad):
        if not grad.is_materialized:
            return grad.parts
        grad = grad.materialize_()
    if not grad.is_sparse or grad.sparse_dim() not in (1, grad.dim()):
        return None
    indices, values = coo_indices(grad).clone(), coo_values(grad).clone()
    part = IndexedGrad.from_coo(indices, values, grad.shape)
    return (part._replace(indices=part.flat_indices),)


def materialize(tensor: Any) -> Any:
    """Materialize a CompactGrad; return anything else unchanged."""
    return tensor.materialize_() if isinstance(tensor, CompactGrad) else tensor


# Operations on the ordinary gradient


def _call_materialized(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    grads: dict[int, CompactGrad] = {}

    def ordinary(grad: CompactGrad) -> Tensor:
        _check_no_double_backward(grad)
        tensor = grad.materialize_()
        grads[id(tensor)] = grad
        return tensor

    args, kwargs = tree_map_only(CompactGrad, ordinary, (tuple(args), kwargs))
    result = func(*args, **kwargs)
    if id(result) in grads and _IN_PLACE.fullmatch(getattr(func, "__name__", "")):
        return grads[id(result)]
    if grads and graph_task_id() != -1 and isinstance(result, Tensor) and result.is_sparse:
        # In a backward, autograd must see the type of tensor that a hook was given.
        grad = next(iter(grads.values()))
        if result.shape == grad.shape and result.dtype == grad.dtype:
            return _like(grad, (), result)
    return result


def _check_no_double_backward(grad: CompactGrad) -> None:
    if grad.requires_grad and torch.is_grad_enabled():
        requirement = "the gradient of an embedding cannot be differentiated again"
        got = "an operation on it that autograd would record"
        remedy = "Use torch.nn's module for that, or detach() the gradient"
        raise InputError(message(f"{requirement} (create_graph=True)", got, remedy))


# Handlers of aten operators that keep the gradient compact. NotImplemented: materialize it instead.


def _detach(grad: CompactGrad) -> CompactGrad:
    tensor = grad.materialized
    return _like(grad, grad.parts, None if tensor is None else tensor.detach())


def _clone(grad: CompactGrad, *, memory_format: object = None) -> CompactGrad:
    tensor = grad.materialized
    return _like(grad, grad.parts, None if tensor is None else tensor.clone())


def _new_empty(grad: CompactGrad, size: Sequence[int], *_: object, **options: Any) -> Any:
    """New empty CompactGrad; autograd copies a shared gradient into it."""
    if tuple(size) != tuple(grad.shape) or options.get("dtype") not in (None, grad.dtype):
        return NotImplemented
    return _like(grad, ())


def _copy(to: Tensor, grad: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(to, CompactGrad):
        to.copy_from_(grad)
        return to
    grad = materialize(grad)
    return to.copy_(grad.to_dense() if grad.is_sparse and not to.is_sparse else grad)


def _zero(grad: CompactGrad) -> CompactGrad:
    if grad.is_sparse:
        grad.replace_parts(())  # a sparse zero has no entries
    else:
        grad.materialize_().zero_()
    return grad


def _is_real_scalar(factor: object) -> bool:
    if isinstance(factor, Tensor):
        return factor.dim() == 0 and not factor.dtype.is_complex
    return isinstance(factor, int | float)


def _elementwise(operation: Callable[..., Tensor]) -> Callable[..., Any]:
    """Handler of an operation with a number, which is applied to the values of the parts."""

    def run(grad: Any, *factors: Any, **options: Any) -> Any:
        if operation is torch.mul and _is_real_scalar(grad):  # number * gradient
            grad, factors = factors[0], (grad,)
        if grad.is_materialized or options or not all(map(_is_real_scalar, factors)):
            return NotImplemented
        parts = tuple(p._replace(values=operation(p.values, *factors)) for p in grad.parts)
        is_alike = all(part.values.dtype == grad.dtype for part in parts)
        return _like(grad, parts) if is_alike else NotImplemented

    return run


def _in_place(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Handler of the operation in place: the gradient becomes the result."""

    def run(grad: Any, *args: Any, **options: Any) -> Any:
        found = handler(grad, *args, **options) if isinstance(grad, CompactGrad) else NotImplemented
        if found is NotImplemented:
            return found
        is_compact = isinstance(found, CompactGrad)
        grad.parts, grad.materialized = (found.parts, None) if is_compact else ((), found)
        return grad

    return run


def _add(first: Any, second: Any, alpha: Any = 1) -> Any:
    """The sum of two gradients: compact or dense."""
    if not isinstance(second, Tensor) or first.shape != second.shape or alpha != 1:
        return NotImplemented
    if first.dtype == second.dtype:
        ours, theirs = parts_of(first), parts_of(second)
        if ours is not None and theirs is not None:
            return _like(first, ours + theirs)
    if any(isinstance(grad, CompactGrad) and grad.has_pending_parts for grad in (first, second)):
        raise dense_grad_error()
    first, second = materialize(first), materialize(second)
    return second + first if first.is_sparse else first + second  # torch has dense + sparse only


# Handlers for torch's clipping, and other code that clips as torch does. Norms and bounds are of
# the summed rows.


def norm_equivalent(grad: Tensor, order: float) -> Tensor:
    """Return a strided tensor with a gradient's norm: duplicates summed, in at least float32."""
    if isinstance(grad, CompactGrad) and grad.is_materialized:
        grad = grad.materialize_()
    if not grad.is_sparse:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    if isinstance(grad, CompactGrad):
        parts, by_row = grad.local_parts(), True
    elif grad.is_coalesced():
        values = coo_values(grad).to(wide)
        return append_implicit_zero(values, values.numel(), grad, order)
    else:
        values = coo_values(grad).resolve_neg()
        parts = (IndexedGrad.from_coo(coo_indices(grad), values, grad.shape),)
        by_row = grad.sparse_dim() == 1
    norms = slot_norms(parts, order) if by_row else None
    if norms is None and len(parts) > 1:
        parts = (IndexedGrad.cat(parts),)
        norms = slot_norms(parts, order)
    if norms is not None:
        # Orders below 1 are not native, so only an empty gradient needs the implicit zero.
        return (norms if norms.numel() or not grad.numel() else norms.new_zeros(1)).to(wide)
    sums, count = norm_of_sums(parts[0], order)
    return append_implicit_zero(sums, count, grad, order)


def append_implicit_zero(values: Tensor, count: int, grad: Tensor, order: float) -> Tensor:
    """Append one zero for the implicit elements if it can change the norm."""
    if count == grad.numel() or (count and 0 < order < math.inf):
        return values
    return cat([values.flatten(), values.new_zeros(1)])


def _norm(
    grad: CompactGrad,
    ord: float = 2,  # torch's name
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if keepdim or (dim is not None and len(dim) not in (0, grad.dim())):
        return NotImplemented
    if grad.has_pending_parts:
        exchange_grad_of(grad)  # which also says whether it is sharded
    if grad.is_sharded:
        requirement = "the norm of a sharded table's gradient needs the rows of all ranks"
        got = "a function that sees those of one rank"
        raise InputError(message(requirement, got, "Use sparsestep.clip_grad_norm_"))
    found = torch.linalg.vector_norm(norm_equivalent(grad, float(ord)), ord)
    return found.to(grad.dtype.to_real() if dtype is None else dtype)


def clamp_sums(grad: CompactGrad, low: float | None, high: float | None) -> CompactGrad:
    """Return a gradient that is not materialized with its sums clamped, one row for each slot."""
    check_has_order(grad)
    if not ((low is None or low <= 0) and (high is None or high >= 0)):  # nor NaN
        why = "so that entries outside a sparse gradient stay 0"
        raise InputError(message(f"0 must be within the bounds, {why}", f"min={low}, max={high}"))
    indexed = grad.indexed()
    chunks = [(slots, total.clamp(low, high).to(grad.dtype)) for slots, total in iter_sums(indexed)]
    if not chunks:
        return _like(grad, ())
    indices = cat([slots for slots, _ in chunks])
    values = cat([total for _, total in chunks])
    return _like(grad, (IndexedGrad(indices, values, indexed.num_slots, indexed.slot_size),))


def check_has_order(grad: Tensor) -> None:
    """Raise InputError for a complex gradient."""
    if grad.is_complex():
        requirement = "the gradient must be real, because complex numbers have no order"
        raise InputError(message(requirement, grad.dtype))


def _clamp(grad: Any, low: Any = None, high: Any = None) -> Any:
    bounds = [bound for bound in (low, high) if bound is not None]
    if not isinstance(grad, CompactGrad) or not all(isinstance(b, int | float) for b in bounds):
        return NotImplemented
    parts = parts_of(grad)
    return NotImplemented if parts is None else clamp_sums(_like(grad, parts), low, high)


def _unscale_(tensors: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Handler for GradScaler, which reads every value: all gradients are materialized."""
    strided = [coo_values(grad) if grad.is_sparse else materialize(grad) for grad in tensors]
    foreach_unscale_(strided, found_inf, inverse_scale)


def _vector_norm(grad: Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(grad, ord, dtype=dtype)


def _foreach(name: str) -> Callable[..., Any]:
    """Handler of an operation on lists, some of which are compact; in place, it returns None."""
    operation = _vector_norm if name == "norm" else getattr(Tensor, name)

    def run(tensors: Sequence[Tensor], *others: Any, **options: Any) -> Any:
        columns = [o if isinstance(o, list | tuple) else [o] * len(tensors) for o in others]
        found = [operation(*row, **options) for row in zip(tensors, *columns, strict=True)]
        return None if name.endswith("_") else found

    return run


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {  # of all overloads
    _aten.detach: _detach,
    _aten.alias: _detach,
    _aten.clone: _clone,
    _aten.new_empty_strided: _new_empty,
    _aten.copy_: _copy,
    _aten.zero_: _zero,
    _aten.linalg_vector_norm: _norm,
    _aten._amp_foreach_non_finite_check_and_unscale_: _unscale_,
}
_operators: dict[str, Callable[..., Any]] = {
    "add": _add,
    "mul": _elementwise(torch.mul),
    "div": _elementwise(torch.div),
    "neg": _elementwise(torch.neg),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda grad, high: _clamp(grad, None, high),
}
for _name, _handler in _operators.items():
    _HANDLERS[getattr(_aten, _name)] = _handler
    _HANDLERS[getattr(_aten, f"{_name}_")] = _in_place(_handler)
_IN_LISTS = """
    add mul div neg clamp_min clamp_max add_ mul_ div_ neg_ clamp_min_ clamp_max_ zero_ copy_ norm
"""
for _name in _IN_LISTS.split():
    _HANDLERS[getattr(_aten, f"_foreach_{_name}")] = _foreach(_name)
