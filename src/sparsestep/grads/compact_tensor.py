"""What may be done to a compact gradient that stays compact.

Torch's own code asks in its operators; each has its answer here. Parts are never written to: they
may share the memory of what autograd has given others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsestep.grads.compact import ANSWERS, Compact, like, materialized, parts_of
from sparsestep.grads.exchange import read_otherwise

_aten = torch.ops.aten


def _detach(grad: Compact) -> Compact:
    if grad._materialized is not None:
        return like(grad, (), grad._materialized.detach())
    return like(grad, grad._parts)


def _clone(grad: Compact, *, memory_format: object = None) -> Compact:
    if grad._materialized is not None:
        return like(grad, (), grad._materialized.clone())
    return like(grad, grad._parts)


def _empty(grad: Compact, size: Sequence[int], *_: object, **options: Any) -> Any:
    """What autograd copies a gradient to that others hold as well."""
    if tuple(size) != tuple(grad.shape) or options.get("dtype") not in (None, grad.dtype):
        return NotImplemented
    return like(grad, ())


def _copy(to: Tensor, grad: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(to, Compact):
        to.assign_(grad)
        return to
    grad = materialized(grad)
    return to.copy_(grad.to_dense() if grad.is_sparse and not to.is_sparse else grad)


def _zero(grad: Compact) -> Compact:
    if grad.is_sparse:
        grad._parts, grad._materialized = (), None  # sparse zeros are no entries at all
    else:
        grad.materialize_().zero_()
    return grad


def _is_number(factor: object) -> bool:
    if isinstance(factor, Tensor):
        return not isinstance(factor, Compact) and factor.dim() == 0 and not factor.dtype.is_complex
    return isinstance(factor, int | float)


def _times(operation: Callable[..., Tensor], *, in_place: bool) -> Callable[..., Any]:
    """An operation with a number, which may be done on the rows that the parts take."""

    def run(grad: Any, *factors: Any) -> Any:
        if not isinstance(grad, Compact):  # number * gradient
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
    if any(isinstance(grad, Compact) and grad.is_pending for grad in (first, second)):
        raise read_otherwise()
    first, second = materialized(first), materialized(second)
    return second + first if first.is_sparse else first + second  # torch has dense + sparse alone


def _add(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    return _sum(first, second, alpha)


def _add_in_place(first: Any, second: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(first, Compact):
        return NotImplemented
    total = _sum(first, second, alpha)
    if total is NotImplemented:
        return NotImplemented
    if isinstance(total, Compact):
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
