"""Compact: the gradient of an embedding as it comes, one row for each row of the output.

A bag of a hundred ids has one gradient, and so does its output; the ordinary gradient of the table
is a copy of it for each id. A Compact keeps the ids and the gradient of the output. Optimizers here
work from that (``touched``). For everyone else it is a sparse gradient like any other: autograd
adds it up, numbers scale it, and whoever asks for more gets the ordinary COO tensor.

It does so in two places, because torch asks in two: ``__torch_function__`` for calls from Python,
``__torch_dispatch__`` for those from torch's own C++. What it answers without being written out
is in ``compact_tensor.py`` and ``compact_clip.py``.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import (
    VALUES_OF_COO,
    cat,
    coo_indices,
    coo_values,
    graph_task_id,
    stack,
    tree_map_only,
    without_torch_function,
)
from sparsestep.errors import InputError, message
from sparsestep.grads.exchange import (
    GradSource,
    PendingGrad,
    UnscaledValues,
    dense_grad_error,
    exchange_grad_of,
)
from sparsestep.grads.indexed import IndexedGrad

_IN_PLACE = re.compile(r"(__i(add|sub|mul|truediv|floordiv|mod|pow)__|[a-z_0-9]*[a-z0-9]_)(\.\w+)?")


def is_in_place(func: Any) -> bool:
    """Whether it writes what it is called on."""
    return _IN_PLACE.fullmatch(getattr(func, "__name__", "")) is not None


# What modes that watch torch's operators call: these come to __torch_dispatch__ next.
OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]

# These have to do with the values, the other attributes of a tensor only with the tensor.
_OF_VALUES = {"data", "real", "imag", "T", "H", "mT", "mH", "layout", "is_sparse"}
_ATTRIBUTES = [
    attribute
    for name, attribute in vars(Tensor.__mro__[1]).items()
    if isinstance(attribute, types.GetSetDescriptorType) and name not in _OF_VALUES
]
# Methods for which the same holds, and those that have an answer.
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"),
    "__format__",
    *("is_floating_point", "is_complex", "is_conj", "is_neg", "is_inference", "is_signed"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
    "backward",
    *("detach", "detach_", "clone", "copy_", "zero_", "add", "add_", "__add__", "__radd__"),
    *("__iadd__", "mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply", "multiply_"),
    *("div", "div_", "__truediv__", "__div__", "__itruediv__", "__idiv__", "true_divide"),
    *("true_divide_", "divide", "divide_", "neg", "neg_", "__neg__", "negative", "negative_"),
    *(f"_foreach_{name}" for name in ("add", "add_", "mul", "mul_", "div", "div_", "neg", "neg_")),
    *("_foreach_zero_", "_foreach_copy_"),
)
# Those whose answer is in ``compact_clip.py``: it depends on all rows, summed.
_CLIPPING = (
    *("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"),
    *("_foreach_norm", "_foreach_clamp_min", "_foreach_clamp_min_"),
    *("_foreach_clamp_max", "_foreach_clamp_max_"),
    "_amp_foreach_non_finite_check_and_unscale_",
)


def _named(names: Iterable[str]) -> Iterator[Any]:
    for name in names:
        for owner in (Tensor, torch):
            if hasattr(owner, name):
                yield getattr(owner, name)


OF_ALL_VALUES: frozenset[Any] = frozenset(
    [*_named(_CLIPPING), torch.linalg.vector_norm, torch.linalg.norm]
)
UNCHANGED: frozenset[Any] = frozenset(
    [
        *(attribute.__get__ for attribute in _ATTRIBUTES),
        *(attribute.__set__ for attribute in _ATTRIBUTES),
        *_named(_METHODS),
    ]
)


class CompactGrad(Tensor):
    """A gradient that was never written out, in parts, each of which is an IndexedGrad.

    Asking for its values, or anything else that only an ordinary tensor has, *materializes* it:
    from then on it is that tensor, so that what is done to the values in place is done to the
    gradient.

    Example:
        >>> import sparsestep
        >>> bag = sparsestep.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> bag(torch.tensor([[3, 1, 3, 7]])).sum().backward()
        >>> grad = bag.weight.grad
        >>> type(grad).__name__, grad.is_sparse, grad.touched().values.shape
        ('CompactGrad', True, torch.Size([1, 16]))
        >>> grad.coalesce().values().shape
        torch.Size([3, 16])
    """

    _parts: tuple[Any, ...]  # each is an IndexedGrad, or PendingGrad where a table is sharded
    _materialized: Tensor | None
    source: ref[GradSource] | None = None  # where a sharded table's gradient came from
    is_sharded: bool = False  # whether other processes have other rows of it

    @property
    def is_materialized(self) -> bool:
        """Whether it has become an ordinary tensor."""
        return self._materialized is not None

    @property
    def is_pending(self) -> bool:
        """Whether a part of it is still to be sent to the process that has the rows."""
        return any(isinstance(part, PendingGrad) for part in self._parts)

    # Torch's own code is in C++ and sees a strided tensor; Python sees what it stands for.

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Whether it is sparse: it is, unless something dense was added."""
        return self._materialized is None or self._materialized.is_sparse

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        """The layout of the ordinary gradient."""
        return torch.sparse_coo if self._materialized is None else self._materialized.layout

    def touched(self) -> IndexedGrad:
        """The gradient in canonical form; no row is written out. Not once it is materialized."""
        parts = self.parts()
        return parts[0] if len(parts) == 1 else _joined(parts)

    def parts(self) -> tuple[IndexedGrad, ...]:
        """The same in parts, at least one: each lookup has left its own."""
        assert self._materialized is None
        if self.is_pending:
            exchange_grad_of(self)
        return self._parts or (_nothing(self),)

    def materialize_(self) -> Tensor:
        """The ordinary gradient that it is from now on."""
        if self._materialized is None:
            self._materialized = _written_out(self)
            self._parts = ()
        return self._materialized

    def assign_(self, other: Tensor) -> None:
        """Take the values of another gradient."""
        if isinstance(other, CompactGrad) and not other.is_materialized:
            self._parts, self._materialized = other._parts, None
        else:
            self._parts, self._materialized = (
                (),
                materialized(other).detach().to(self.dtype, copy=True),
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # Looking at a gradient does not change what it is.
        if self.is_pending:
            return f"tensor(..., size={tuple(self.shape)}, still to be exchanged)"
        return repr(_written_out(self) if self._materialized is None else self._materialized)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OF_ALL_VALUES:
            tree_map_only(CompactGrad, _check_not_recorded, (args, kwargs))
        elif func not in UNCHANGED and not isinstance(func, OPERATORS):
            if func == SET_DATA and isinstance(args[0], CompactGrad):
                return args[0].assign_(args[1])
            result = _on_materialized(func, args, kwargs or {})
            if func == VALUES_OF_COO and args[0].source is not None:
                return UnscaledValues.of(result, args[0].source)
            return result
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():  # a backward() in a function that is compiled
            return torch.compiler.disable(cls.__torch_dispatch__)(func, types, args, kwargs)
        answer = ANSWERS.get(func)
        if answer is not None:
            result = answer(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _on_materialized(func, args, kwargs or {})


if ext is not None:
    ext.set_compact_class(CompactGrad)


def compact(parts: Iterable[IndexedGrad], shape: torch.Size, like: Tensor) -> CompactGrad:
    """The gradient of a parameter that has these parts.

    Args:
        parts: in the order in which they are to be summed; with real numbers of slots and elements.
        shape: the parameter's.
        like: a tensor of its dtype, on its device.

    Example:
        >>> bag = IndexedGrad(torch.tensor([3, 1]), torch.ones(1, 2), 5, 2, torch.tensor([0, 0]))
        >>> compact([bag], torch.Size([5, 2]), bag.values)
        tensor(indices=tensor([[3, 1]]),
               values=tensor([[1., 1.],
                              [1., 1.]]),
               size=(5, 2), nnz=2, layout=torch.sparse_coo)
    """
    made: CompactGrad = Tensor._make_wrapper_subclass(
        CompactGrad, shape, dtype=like.dtype, device=like.device
    )
    made._parts = tuple(parts)
    made._materialized = None
    return made


# What torch may ask without materializing it, and who answers. An answer may be NotImplemented.
ANSWERS: dict[Any, Callable[..., Any]] = {}


def like(
    grad: Tensor, parts: tuple[IndexedGrad, ...], ordinary: Tensor | None = None
) -> CompactGrad:
    """Another gradient of the same parameter."""
    with without_torch_function():  # shape, dtype and device are torch's business
        made = compact(parts, grad.shape, grad)
    made._materialized = ordinary
    return made


# From parts to an ordinary gradient, and back


def _joined(parts: Sequence[IndexedGrad]) -> IndexedGrad:
    """All parts as one, over the smallest slots that any of them has."""
    slots = max(part.num_slots for part in parts)
    parts = [part if part.num_slots == slots else part.finer(slots) for part in parts]
    block = parts[0].slot_size
    values = [_rows(part) for part in parts]
    positions = cat([positions_of(part) for part in parts])
    source = scale = None
    if any(part.value_index is not None for part in parts):
        source = cat(_sources(parts, [len(rows) for rows in values]))
    if any(part.scale is not None for part in parts):
        scale = cat([_scale(part) for part in parts])
    return IndexedGrad(positions, cat(values), slots, block, source, scale)


def positions_of(part: IndexedGrad) -> Tensor:
    """The slot of each entry, as a vector."""
    assert part.indices is not None
    return part.indices.reshape(-1)


def _rows(part: IndexedGrad) -> Tensor:
    values, block = part.values, part.slot_size
    return values.reshape(values.numel() // block if block else len(values), block)


def _sources(parts: Sequence[IndexedGrad], rows: Sequence[int]) -> list[Tensor]:
    """The rows that each part's entries take, counted through all parts."""
    first, found = 0, []
    for part, count in zip(parts, rows, strict=True):
        own = part.value_index
        if own is None:
            own = torch.arange(count, device=part.values.device)
        found.append(own + first)
        first += count
    return found


def _scale(part: IndexedGrad) -> Tensor:
    if part.scale is not None:
        return part.scale
    ones: Tensor = part.values.new_ones(
        positions_of(part).numel(), dtype=part.values.dtype.to_real()
    )
    return ones


def _nothing(grad: CompactGrad) -> IndexedGrad:
    rows, *rest = grad.shape
    block = torch.Size(rest).numel()
    values = torch.empty(0, block, dtype=grad.dtype, device=grad.device)
    positions = torch.empty(0, dtype=torch.int64, device=grad.device)
    return IndexedGrad(positions, values, rows, block)


def _written_out(grad: CompactGrad) -> Tensor:
    """The COO gradient, with memory of its own: that of the output's gradient is not ours."""
    touched, shape = grad.touched(), grad.shape
    positions = positions_of(touched)
    if touched.value_index is None and touched.scale is None:
        values = touched.values.clone(memory_format=torch.contiguous_format)
    else:
        values = touched.expanded().values
    leading = 1 if touched.num_slots == shape[0] else grad.dim()
    if leading == 1:
        indices = positions[None].clone()
    elif touched.num_slots:
        indices = stack(torch.unravel_index(positions, shape))
    else:
        indices = positions.new_empty(leading, 0)
    values = values.reshape(positions.numel(), *shape[leading:])
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        device=values.device,
        is_coalesced=False,
        check_invariants=False,
    )


def parts_of(grad: Tensor) -> tuple[IndexedGrad, ...] | None:
    """A sparse gradient as parts, with memory of their own; ``None`` if it is dense."""
    if isinstance(grad, CompactGrad):
        if not grad.is_materialized:
            parts: tuple[IndexedGrad, ...] = grad._parts
            return parts
        grad = grad.materialize_()
    if not grad.is_sparse:
        return None
    shape, leading = grad.shape, grad.sparse_dim()
    if leading not in (1, grad.dim()):
        return None
    indices, values = coo_indices(grad), coo_values(grad).clone()
    positions = indices[0].clone()
    for row, size in zip(indices[1:], shape[1:], strict=False):
        positions.mul_(size).add_(row)
    slots = shape[:leading].numel()
    return (IndexedGrad(positions, values, slots, shape[leading:].numel()),)


def materialized(tensor: Any) -> Any:
    """A compact gradient as the ordinary one that it is from now on; anything else as it is."""
    return tensor.materialize_() if isinstance(tensor, CompactGrad) else tensor


# What is done to an ordinary gradient


def _on_materialized(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    asked: dict[int, CompactGrad] = {}

    def written_out(grad: CompactGrad) -> Tensor:
        _check_not_recorded(grad)
        found = grad.materialize_()
        asked[id(found)] = grad
        return found

    args, kwargs = tree_map_only(CompactGrad, written_out, (tuple(args), kwargs))
    result = func(*args, **kwargs)
    # What changes a tensor returns it: the gradient, not what is inside.
    if is_in_place(func) and id(result) in asked:
        return asked[id(result)]
    if graph_task_id() != -1 and asked:
        return _for_hooks(result, next(iter(asked.values())))
    return result


def _check_not_recorded(grad: CompactGrad) -> None:
    if grad.requires_grad and torch.is_grad_enabled():
        raise InputError(_NOT_TWICE)


def _for_hooks(result: Any, grad: CompactGrad) -> Any:
    """While backward runs, a sparse gradient stays what autograd has seen, strided.

    A hook gets this and may return what it made of it, but not another kind of tensor.
    """
    is_gradient = isinstance(result, Tensor) and result.is_sparse and result.shape == grad.shape
    return like(grad, (), result) if is_gradient and result.dtype == grad.dtype else result


_NOT_TWICE = message(
    "the gradient of an embedding cannot be differentiated again (create_graph=True)",
    "an operation on it that autograd would record",
    "Use torch.nn's module for that, or detach() the gradient",
)


_aten = torch.ops.aten


def _detach(grad: CompactGrad) -> CompactGrad:
    if grad._materialized is not None:
        return like(grad, (), grad._materialized.detach())
    return like(grad, grad._parts)


def _clone(grad: CompactGrad, *, memory_format: object = None) -> CompactGrad:
    if grad._materialized is not None:
        return like(grad, (), grad._materialized.clone())
    return like(grad, grad._parts)


def _empty(grad: CompactGrad, size: Sequence[int], *_: object, **options: Any) -> Any:
    """What autograd copies a gradient to that others hold as well."""
    if tuple(size) != tuple(grad.shape) or options.get("dtype") not in (None, grad.dtype):
        return NotImplemented
    return like(grad, ())


def _copy(to: Tensor, grad: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(to, CompactGrad):
        to.assign_(grad)
        return to
    grad = materialized(grad)
    return to.copy_(grad.to_dense() if grad.is_sparse and not to.is_sparse else grad)


def _zero(grad: CompactGrad) -> CompactGrad:
    if grad.is_sparse:
        grad._parts, grad._materialized = (), None  # sparse zeros are no entries at all
    else:
        grad.materialize_().zero_()
    return grad


def _is_number(factor: object) -> bool:
    if isinstance(factor, Tensor):
        return (
            not isinstance(factor, CompactGrad)
            and factor.dim() == 0
            and not factor.dtype.is_complex
        )
    return isinstance(factor, int | float)


def _times(operation: Callable[..., Tensor], *, in_place: bool) -> Callable[..., Any]:
    """An operation with a number, which may be done on the rows that the parts take."""

    def run(grad: Any, *factors: Any) -> Any:
        if not isinstance(grad, CompactGrad):  # number * gradient
            if in_place or not _is_number(grad) or operation is not torch.mul:
                return NotImplemented
            grad, factors = factors[0], (grad,)
        if grad.is_materialized or not all(map(_is_number, factors)):
            return NotImplemented
        parts = tuple(p._replace(values=operation(p.values, *factors)) for p in grad._parts)
        if any(part.values.dtype != grad.dtype for part in parts):
            return NotImplemented
        if not in_place:
            return like(grad, parts)
        grad._parts = parts
        return grad

    return run


def _sum(first: Any, second: Any, alpha: Any = 1) -> Any:
    """What two gradients add up to: compact or dense."""
    if not isinstance(second, Tensor) or first.shape != second.shape or alpha != 1:
        return NotImplemented
    if first.dtype == second.dtype:
        ours, theirs = parts_of(first), parts_of(second)
        if ours is not None and theirs is not None:
            return like(first, ours + theirs)
    if any(isinstance(grad, CompactGrad) and grad.is_pending for grad in (first, second)):
        raise dense_grad_error()
    first, second = materialized(first), materialized(second)
    return second + first if first.is_sparse else first + second  # torch has dense + sparse alone


def _add(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    return _sum(first, second, alpha)


def _add_in_place(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(first, CompactGrad):
        return NotImplemented
    total = _sum(first, second, alpha)
    if total is NotImplemented:
        return NotImplemented
    if isinstance(total, CompactGrad):
        first._parts, first._materialized = total._parts, None
    else:
        first._parts, first._materialized = (), total
    return first


ANSWERS |= {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten.new_empty_strided.default: _empty,
    _aten.copy_.default: _copy,
    _aten.zero_.default: _zero,
    _aten.mul.Tensor: _times(torch.mul, in_place=False),
    _aten.mul.Scalar: _times(torch.mul, in_place=False),
    _aten.mul_.Tensor: _times(torch.mul, in_place=True),
    _aten.mul_.Scalar: _times(torch.mul, in_place=True),
    _aten.div.Tensor: _times(torch.div, in_place=False),
    _aten.div.Scalar: _times(torch.div, in_place=False),
    _aten.div_.Tensor: _times(torch.div, in_place=True),
    _aten.div_.Scalar: _times(torch.div, in_place=True),
    _aten.neg.default: _times(torch.neg, in_place=False),
    _aten.neg_.default: _times(torch.neg, in_place=True),
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_in_place,
}


# Lists of tensors: one after the other


def one_by_one(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation on lists, as torch's ``_foreach`` functions, of which some are compact."""

    def run(tensors: Sequence[Tensor], *others: Any, **options: Any) -> Any:
        columns = [o if isinstance(o, list | tuple) else [o] * len(tensors) for o in others]
        return [operation(*row, **options) for row in zip(tensors, *columns, strict=True)]

    return run


def in_place(operation: Callable[..., Any]) -> Callable[..., None]:
    """The same for an operation that changes the first list and, like torch's, returns nothing."""
    every = one_by_one(operation)

    def run(*args: Any, **options: Any) -> None:
        every(*args, **options)

    return run


def answer_lists(name: str, answer: Callable[..., Any]) -> None:
    """Let ``answer`` stand for every form of torch's ``_foreach`` function of that name."""
    packet = getattr(_aten, f"_foreach_{name}", None)  # not every torch has all of them
    for overload in packet.overloads() if packet is not None else ():
        if not overload.endswith("out"):
            ANSWERS[getattr(packet, overload)] = answer


for _name in ("add", "mul", "div", "neg"):
    answer_lists(_name, one_by_one(getattr(torch, _name)))
for _name in ("add_", "mul_", "div_", "neg_", "zero_", "copy_"):
    answer_lists(_name, in_place(getattr(Tensor, _name)))
