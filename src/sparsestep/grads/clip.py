"""Clipping of dense and sparse gradients together, as torch.nn.utils clips dense ones.

A gradient is clipped as the mathematical tensor that it stands for: entries of the same slot are
summed, in at least float32, and what it does not hold is zero. Nothing is ever made dense.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.masked import MaskedTensor
from torch.nn import utils

from sparsestep._process import uninterrupted
from sparsestep._torch import (
    coo_indices,
    coo_values,
    foreach_mul_,
    foreach_norm,
    stack,
    uses_of_memory,
    without_autocast,
)
from sparsestep.errors import InputError, message, usable, warn
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.compact_clip import clamped
from sparsestep.grads.exchange import exchange_grads, norm_over_ranks, sources_of
from sparsestep.grads.norms import coo_sums, elements, held_by
from sparsestep.memory.tensors import has_internal_overlap


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, which it calls if all gradients are dense, but it also
    takes sparse COO gradients and masked tensors. Their stored values are scaled; indices, order
    and duplicates stay. The work is proportional to the number of stored values. The gradients of
    ``sparsestep.nn`` stay compact: their rows are summed a chunk at a time.

    Args:
        parameters: the parameters; those without a gradient are skipped.
        max_norm: the largest total norm.
        norm_type: any order of ``torch.linalg.vector_norm``, including ``inf`` and ``-inf``.
        error_if_nonfinite: if the norm is infinite or NaN, raise an error and change nothing.
        foreach: whether to use torch's kernels for lists of tensors; ``None`` means yes.

    Returns:
        The norm before clipping.

    Raises:
        InputError: a gradient is neither strided nor COO nor a MaskedTensor, or has an out-of-range
            index; nothing has changed.

    Example:
        >>> table = torch.nn.Embedding(5, 2, sparse=True)
        >>> table(torch.tensor([1, 1])).sum().backward()  # row 1 twice, so its gradient is 2
        >>> clip_grad_norm_(table.parameters(), max_norm=1.0)
        tensor(2.8284)
        >>> table.weight.grad.to_dense()[1].norm()
        tensor(1.0000)
    """
    params, held = _gradients("clip_grad_norm_", parameters)
    with usable("clip_grad_norm_: max_norm and norm_type must be numbers"):
        norm_type, max_norm = float(norm_type), float(max_norm)
    sources = sources_of(params)
    grads = [each.grad for each in held]
    # Torch's function does not write views that are lazily conjugate or negative.
    unusual = any(not _is_dense(grad) or grad.is_conj() or grad.is_neg() for grad in grads)
    if not unusual and not sources:
        with without_autocast(grads[0].device.type if grads else "cpu"):
            return utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    total = norm_over_ranks(held, sources, norm_type, lambda some: _norm(some, norm_type, foreach))
    # Torch's dtype for the caller; the factor comes from the norm as computed, which float16 might
    # not hold.
    dtypes = (each.grad.dtype.to_real() for each in held)
    shown = total.to(functools.reduce(torch.promote_types, dtypes)) if held else total.float()
    if error_if_nonfinite and not bool(shown.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    uninterrupted(partial(_scale, [each.grad for each in held], factor, foreach))
    return shown


@torch.no_grad()
def clip_grad_value_(
    parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    """Clamp every element of every gradient to ``[-clip_value, clip_value]``.

    Like ``torch.nn.utils.clip_grad_value_``, which it calls for dense gradients, but it also takes
    sparse COO gradients and masked tensors. Duplicates are summed before they are clamped, so a
    gradient with duplicates is coalesced; others keep their indices and order. The gradients of
    ``sparsestep.nn`` get one row for each row that was looked up.

    Args:
        parameters: the parameters; those without a gradient are skipped.
        clip_value: the largest absolute value of an element.
        foreach: whether to use torch's kernels for lists of tensors on the dense gradients.

    Raises:
        InputError: a gradient is neither strided nor COO nor a MaskedTensor, or is sparse and
            complex, or has an out-of-range index; nothing has changed.

    Example:
        >>> table = torch.nn.Embedding(5, 2, sparse=True)
        >>> table(torch.tensor([1, 3, 1])).sum().backward()
        >>> clip_grad_value_(table.parameters(), 1.5)
        >>> table.weight.grad
        tensor(indices=tensor([[1, 3]]),
               values=tensor([[1.5000, 1.5000],
                              [1.0000, 1.0000]]),
               size=(5, 2), nnz=2, layout=torch.sparse_coo)
    """
    _, held = _gradients("clip_grad_value_", parameters)
    with usable("clip_grad_value_: clip_value must be a number"):
        bound = float(clip_value)
    in_place, apart = [], dict[Tensor, Tensor]()
    for each in held:
        grad = each.grad
        if _is_dense(grad):
            continue
        with _said_of(each):
            new = _clamped(grad, bound)
        if new is None:
            in_place.append(grad)
        else:
            apart[grad] = new
    dense = [each.param for each in held if _is_dense(each.grad)]
    if dense:  # torch's function fails where there is no gradient at all
        utils.clip_grad_value_(dense, clip_value, foreach)
    for grad in in_place:
        _values(grad).clamp_(-bound, bound)
    for grad, new in apart.items():
        grad.data = new


def _clamped(grad: Tensor, bound: float) -> Tensor | None:
    """A gradient with its sums clamped; ``None`` where its values may be clamped as they are."""
    _check_clampable(grad, bound)
    if _is_compact(grad):
        return clamped(grad, -bound, bound)
    merged = None if isinstance(grad, MaskedTensor) else _clamped_sums(grad, bound)
    if merged is not None or _alone(grad):
        return merged
    values = coo_values(grad).clamp(-bound, bound)
    return _coo(grad, coo_indices(grad), values, grad.is_coalesced())


class _Held(NamedTuple):
    """A gradient, whose it is, and how a message calls the two."""

    who: str
    param: Tensor
    grad: Tensor


def _gradients(
    function: str, parameters: Tensor | Iterable[Tensor]
) -> tuple[list[Tensor], list[_Held]]:
    """All parameters, and the gradients of those that have one, checked."""
    given: object = parameters
    if not isinstance(given, Iterable):
        requirement = f"{function} takes a tensor or an iterable of tensors"
        raise InputError(message(requirement, f"a {type(given).__name__}"))
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not params and isinstance(parameters, types.GeneratorType):  # most likely an exhausted one
        warn(UserWarning, "`parameters` is an empty generator, no gradient clipping will occur.")
    exchange_grads(params, function)
    held = []
    for index, param in enumerate(params):
        if not isinstance(param, Tensor):
            requirement = f"{function} takes a tensor or an iterable of tensors"
            raise InputError(message(requirement, f"a {type(param).__name__} at {index}"))
        grad = param.grad
        if grad is not None:
            held.append(_Held(f"{function}: param {index}", param, grad))
            with _said_of(held[-1]):
                _check(grad)
            if _is_dense(grad) and not grad.is_contiguous() and has_internal_overlap(grad):
                # Scaled in place, elements that share memory would be scaled more than once.
                param.grad = grad.clone(memory_format=torch.contiguous_format)
                held[-1] = held[-1]._replace(grad=param.grad)
    return params, held


@contextlib.contextmanager
def _said_of(held: _Held) -> Iterator[None]:
    """Whose gradient a refusal is about."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{held.who}: {error}") from None


def _is_dense(grad: Tensor) -> bool:
    # The mask first: such a tensor's is_sparse is a method, hence always true.
    return not isinstance(grad, MaskedTensor) and not grad.is_sparse


def _is_compact(grad: Tensor) -> TypeGuard[CompactGrad]:
    return isinstance(grad, CompactGrad) and not grad.is_materialized


def _check(grad: Tensor) -> None:
    if _is_dense(grad):
        if grad.layout is not torch.strided:
            requirement = "the gradient must be a strided or COO tensor, or a MaskedTensor"
            remedy = "Convert it with .to_sparse_coo()"
            raise InputError(message(requirement, f"layout {grad.layout}", remedy))
    elif not (grad.is_floating_point() or grad.is_complex()):
        requirement = "the gradient must have a floating-point or complex dtype"
        raise InputError(message(requirement, grad.dtype))


def _check_clampable(grad: Tensor, bound: float) -> None:
    if grad.is_complex():
        requirement = "the gradient must be real, because complex numbers have no order"
        raise InputError(message(requirement, grad.dtype))
    if not bound >= 0:  # nor NaN
        requirement = "clip_value must be at least 0, so that entries outside the gradient stay 0"
        raise InputError(message(requirement, bound))


def _norm(held: Sequence[_Held], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of the norms of all gradients, on the device of the first, like torch's.

    This is a function because the views of values that it takes must be gone before ``_alone``.
    """
    tensors = []
    for each in held:
        with _said_of(each):
            tensors.append(elements(each.grad, norm_type))
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    if foreach is False or any(t.dtype != dtype for t, dtype in zip(tensors, wide, strict=True)):
        # In at least float32: what float16 cannot hold would make every gradient zero.
        norms = [
            torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
            for tensor, dtype in zip(tensors, wide, strict=True)
        ]
    else:
        norms = list(foreach_norm(tensors, norm_type))
    dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms))
    together = stack([norm.to(tensors[0].device, dtype) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together, norm_type)
    return total


def _scale(grads: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    """Multiply gradients of all kinds, those in shared memory by themselves."""
    # In this order: what shares its memory is read before anything is written.
    in_place, apart, compacts = [], dict[Tensor, Tensor](), []
    for grad in grads:
        if _is_compact(grad):
            compacts.append(grad)
        elif _is_dense(grad) or _alone(grad):
            in_place.append(grad)
        else:
            apart[grad] = apart.get(grad, coo_values(grad)) * factor.to(grad.device)
    _multiply([_values(grad) for grad in in_place], factor, foreach)
    for grad, values in apart.items():
        grad.data = _coo(grad, coo_indices(grad), values, grad.is_coalesced())
    for grad in compacts:
        grad.mul_(factor.to(grad.device))  # gives it new rows


def _clamped_sums(grad: Tensor, bound: float) -> Tensor | None:
    """The gradient coalesced and clamped, or ``None`` if it has no duplicates."""
    slots, values = coo_sums(grad)
    if slots is None or len(slots) == grad._nnz():
        return None
    leading = grad.shape[: grad.sparse_dim()]
    indices = stack(torch.unravel_index(slots, leading)) if leading else slots.new_empty(0, 1)
    values = values.clamp(-bound, bound).to(grad.dtype)
    return _coo(grad, indices, values.reshape(len(slots), *coo_values(grad).shape[1:]), True)


def _coo(grad: Tensor, indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices,
        values,
        grad.shape,
        device=values.device,
        is_coalesced=coalesced,
        check_invariants=False,
    )


def _multiply(tensors: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, some in by_device.items():
        # Torch's kernel for lists does not write conjugate or negative views.
        listed = []
        for tensor in some:
            if foreach is False or tensor.is_conj() or tensor.is_neg():
                tensor.mul_(factor.to(device))
            else:
                listed.append(tensor)
        if listed:
            foreach_mul_(listed, factor.to(device))


def _values(grad: Tensor) -> Tensor:
    """The values that a gradient stores, for writing."""
    if isinstance(grad, MaskedTensor):
        return held_by(grad)[0]
    return coo_values(grad) if grad.is_sparse else grad


def _alone(grad: Tensor) -> bool:
    """Whether a COO gradient's values can be written without changing anything else.

    Autograd expands values, and where the rows of two tables were added it gives both gradients the
    same memory: scaled in place, each would be scaled by the factor of the other as well. A masked
    tensor has copied its own.
    """
    if isinstance(grad, MaskedTensor):
        return True
    if not coo_values(grad).is_contiguous():
        return False
    users = uses_of_memory(coo_values(grad))
    return users is not None and users == _users_when_alone()


@functools.cache
def _users_when_alone() -> int | None:
    """How many that is of a gradient that shares nothing: that depends on torch's version."""
    with torch.device("cpu"):
        indices = torch.zeros(1, 1, dtype=torch.int64)
        grad = torch.sparse_coo_tensor(indices, torch.zeros(1), (1,), check_invariants=False)
        return uses_of_memory(coo_values(grad))
