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

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import (
    VALUES_OF_COO,
    coo_indices,
    coo_values,
    graph_task_id,
    tree_map_only,
    without_torch_function,
)
from sparsestep.errors import InputError, sentence
from sparsestep.grads.compact_functions import (
    OF_ALL_VALUES,
    OPERATORS,
    SET_DATA,
    UNCHANGED,
    is_in_place,
)
from sparsestep.grads.exchange import Pending, Source, Unscaled, summon
from sparsestep.grads.indexed import Touched
from sparsestep.surroundings import cat, stack


class Compact(Tensor):
    """A gradient that was never written out, in parts, each of which is a Touched.

    Asking for its values, or anything else that only an ordinary tensor has, *materializes* it:
    from then on it is that tensor, so that what is done to the values in place is done to the
    gradient.

    Example:
        >>> import sparsestep
        >>> bag = sparsestep.nn.EmbeddingBag(1000, 16, mode="sum")
        >>> bag(torch.tensor([[3, 1, 3, 7]])).sum().backward()
        >>> grad = bag.weight.grad
        >>> type(grad).__name__, grad.is_sparse, grad.touched().values.shape
        ('Compact', True, torch.Size([1, 16]))
        >>> grad.coalesce().values().shape
        torch.Size([3, 16])
    """

    _parts: tuple[Any, ...]  # each is a Touched, or Pending where a table is sharded
    _materialized: Tensor | None
    arrived_from: ref[Source] | None = None  # where a sharded table's gradient came from
    is_divided: bool = False  # whether other processes have other rows of it

    @property
    def is_materialized(self) -> bool:
        """Whether it has become an ordinary tensor."""
        return self._materialized is not None

    @property
    def is_pending(self) -> bool:
        """Whether a part of it is still to be sent to the process that has the rows."""
        return any(isinstance(part, Pending) for part in self._parts)

    # Torch's own code is in C++ and sees a strided tensor; Python sees what it stands for.

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        """Whether it is sparse: it is, unless something dense was added."""
        return self._materialized is None or self._materialized.is_sparse

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        """The layout of the ordinary gradient."""
        return torch.sparse_coo if self._materialized is None else self._materialized.layout

    def touched(self) -> Touched:
        """The gradient in canonical form; no row is written out. Not once it is materialized."""
        parts = self.parts()
        return parts[0] if len(parts) == 1 else _joined(parts)

    def parts(self) -> tuple[Touched, ...]:
        """The same in parts, at least one: each lookup has left its own."""
        assert self._materialized is None
        if self.is_pending:
            summon(self)
        return self._parts or (_nothing(self),)

    def materialize_(self) -> Tensor:
        """The ordinary gradient that it is from now on."""
        if self._materialized is None:
            self._materialized = _written_out(self)
            self._parts = ()
        return self._materialized

    def assign_(self, other: Tensor) -> None:
        """Take the values of another gradient."""
        if isinstance(other, Compact) and not other.is_materialized:
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
            tree_map_only(Compact, _check_not_recorded, (args, kwargs))
        elif func not in UNCHANGED and not isinstance(func, OPERATORS):
            if func == SET_DATA and isinstance(args[0], Compact):
                return args[0].assign_(args[1])
            result = _on_materialized(func, args, kwargs or {})
            if func == VALUES_OF_COO and args[0].arrived_from is not None:
                return Unscaled.of(result, args[0].arrived_from)
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
    ext.set_compact_class(Compact)


def compact(parts: Iterable[Touched], shape: torch.Size, like: Tensor) -> Compact:
    """The gradient of a parameter that has these parts.

    Args:
        parts: in the order in which they are to be summed; with real numbers of slots and elements.
        shape: the parameter's.
        like: a tensor of its dtype, on its device.

    Example:
        >>> bag = Touched(torch.tensor([3, 1]), torch.ones(1, 2), 5, 2, torch.tensor([0, 0]))
        >>> compact([bag], torch.Size([5, 2]), bag.values)
        tensor(indices=tensor([[3, 1]]),
               values=tensor([[1., 1.],
                              [1., 1.]]),
               size=(5, 2), nnz=2, layout=torch.sparse_coo)
    """
    made: Compact = Tensor._make_wrapper_subclass(
        Compact, shape, dtype=like.dtype, device=like.device
    )
    made._parts = tuple(parts)
    made._materialized = None
    return made


# What torch may ask without materializing it, and who answers. An answer may be NotImplemented.
ANSWERS: dict[Any, Callable[..., Any]] = {}


def like(grad: Tensor, parts: tuple[Touched, ...], ordinary: Tensor | None = None) -> Compact:
    """Another gradient of the same parameter."""
    with without_torch_function():  # shape, dtype and device are torch's business
        made = compact(parts, grad.shape, grad)
    made._materialized = ordinary
    return made


# From parts to an ordinary gradient, and back


def _joined(parts: Sequence[Touched]) -> Touched:
    """All parts as one, over the smallest slots that any of them has."""
    slots = max(part.slots for part in parts)
    parts = [part if part.slots == slots else part.finer(slots) for part in parts]
    block = parts[0].block
    values = [_rows(part) for part in parts]
    positions = cat([positions_of(part) for part in parts])
    source = scale = None
    if any(part.source is not None for part in parts):
        source = cat(_sources(parts, [len(rows) for rows in values]))
    if any(part.scale is not None for part in parts):
        scale = cat([_scale(part) for part in parts])
    return Touched(positions, cat(values), slots, block, source, scale)


def positions_of(part: Touched) -> Tensor:
    """The slot of each entry, as a vector."""
    assert part.positions is not None
    return part.positions.reshape(-1)


def _rows(part: Touched) -> Tensor:
    values, block = part.values, part.block
    return values.reshape(values.numel() // block if block else len(values), block)


def _sources(parts: Sequence[Touched], rows: Sequence[int]) -> list[Tensor]:
    """The rows that each part's entries take, counted through all parts."""
    first, found = 0, []
    for part, count in zip(parts, rows, strict=True):
        own = part.source
        if own is None:
            own = torch.arange(count, device=part.values.device)
        found.append(own + first)
        first += count
    return found


def _scale(part: Touched) -> Tensor:
    if part.scale is not None:
        return part.scale
    ones: Tensor = part.values.new_ones(
        positions_of(part).numel(), dtype=part.values.dtype.to_real()
    )
    return ones


def _nothing(grad: Compact) -> Touched:
    rows, *rest = grad.shape
    block = torch.Size(rest).numel()
    values = torch.empty(0, block, dtype=grad.dtype, device=grad.device)
    positions = torch.empty(0, dtype=torch.int64, device=grad.device)
    return Touched(positions, values, rows, block)


def _written_out(grad: Compact) -> Tensor:
    """The COO gradient, with memory of its own: that of the output's gradient is not ours."""
    touched, shape = grad.touched(), grad.shape
    positions = positions_of(touched)
    if touched.source is None and touched.scale is None:
        values = touched.values.clone(memory_format=torch.contiguous_format)
    else:
        values = touched.expanded().values
    leading = 1 if touched.slots == shape[0] else grad.dim()
    if leading == 1:
        indices = positions[None].clone()
    elif touched.slots:
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


def parts_of(grad: Tensor) -> tuple[Touched, ...] | None:
    """A sparse gradient as parts, with memory of their own; ``None`` if it is dense."""
    if isinstance(grad, Compact):
        if not grad.is_materialized:
            parts: tuple[Touched, ...] = grad._parts
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
    return (Touched(positions, values, slots, shape[leading:].numel()),)


def materialized(tensor: Any) -> Any:
    """A compact gradient as the ordinary one that it is from now on; anything else as it is."""
    return tensor.materialize_() if isinstance(tensor, Compact) else tensor


# What is done to an ordinary gradient


def _on_materialized(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    asked: dict[int, Compact] = {}

    def written_out(grad: Compact) -> Tensor:
        _check_not_recorded(grad)
        found = grad.materialize_()
        asked[id(found)] = grad
        return found

    args, kwargs = tree_map_only(Compact, written_out, (tuple(args), kwargs))
    result = func(*args, **kwargs)
    # What changes a tensor returns it: the gradient, not what is inside.
    if is_in_place(func) and id(result) in asked:
        return asked[id(result)]
    if graph_task_id() != -1 and asked:
        return _for_hooks(result, next(iter(asked.values())))
    return result


def _check_not_recorded(grad: Compact) -> None:
    if grad.requires_grad and torch.is_grad_enabled():
        raise InputError(_NOT_TWICE)


def _for_hooks(result: Any, grad: Compact) -> Any:
    """While backward runs, a sparse gradient stays what autograd has seen, strided.

    A hook gets this and may return what it made of it, but not another kind of tensor.
    """
    is_gradient = isinstance(result, Tensor) and result.is_sparse and result.shape == grad.shape
    return like(grad, (), result) if is_gradient and result.dtype == grad.dtype else result


_NOT_TWICE = sentence(
    "the gradient of an embedding cannot be differentiated again (create_graph=True)",
    "an operation on it that autograd would record",
    "Use torch.nn's module for that, or detach() the gradient",
)
