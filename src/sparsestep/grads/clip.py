"""Clipping of dense and sparse gradients together, as torch.nn.utils clips dense ones.

A gradient is clipped as the tensor that it represents: entries of the same slot are summed, in at
least float32, and missing entries are zero. Nothing is ever made dense.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
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
from sparsestep.errors import InputError, error_prefix, message, usable, warn
from sparsestep.grads.compact import (
    append_implicit_zero,
    check_has_order,
    clamp_sums,
    coo_like,
    norm_equivalent,
)
from sparsestep.grads.dedup import sum_duplicates
from sparsestep.grads.exchange import GradExchange, exchange_grads, sources_of
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import GradLayout, classify, stored_mask
from sparsestep.memory.tensors import check_has_values, has_internal_overlap

if TYPE_CHECKING:
    from sparsestep.distributed.grads import ShardedGradSource


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
    params = _list_params("clip_grad_norm_", parameters)
    sources = sources_of(each for each in params if isinstance(each, Tensor))
    arguments = params, sources, max_norm, norm_type, error_if_nonfinite, foreach
    clip = partial(_clip_grad_norm, *arguments)
    # A process that stops in the middle of an exchange keeps the others waiting.
    return uninterrupted(clip) if sources else clip()


def _clip_grad_norm(
    params: Sequence[Tensor],
    sources: Sequence[ShardedGradSource],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    name = "clip_grad_norm_"
    exchange = GradExchange(sources, lambda _: {"caller": name})
    grads, norms, rest, error = list[_NamedGrad](), list[Tensor](), list[_NamedGrad](), None
    try:
        with usable("clip_grad_norm_: max_norm and norm_type must be numbers"):
            norm_type, max_norm = float(norm_type), float(max_norm)
        if exchange.error is None:  # otherwise gradients are still pending
            grads = _collect_grads(name, params)
            norms, rest = _local_norms(grads, sources, norm_type, foreach)
    except BaseException as raised:  # other processes wait for this one
        error = raised
    # The norms travel with the agreement.
    totals = [torch.linalg.vector_norm(each, norm_type) for each in exchange.agree(error, norms)]
    # Torch's function does not write views that are lazily conjugate or negative.
    is_standard = all(
        each.layout is GradLayout.STRIDED and not each.grad.is_conj() and not each.grad.is_neg()
        for each in grads
    )
    if is_standard and not sources:
        with without_autocast(grads[0].grad.device.type if grads else "cpu"):
            return utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    if rest:
        norm = _total_norm(rest, norm_type, foreach)
        totals.append(norm.to("cpu", torch.float64) if sources else norm)
    total: Tensor = torch.linalg.vector_norm(stack(totals), norm_type) if sources else totals[0]
    # Torch's dtype for the caller; the factor comes from the norm as computed, which float16 might
    # not hold.
    dtypes = (each.grad.dtype.to_real() for each in grads)
    shown = total.to(functools.reduce(torch.promote_types, dtypes)) if grads else total.float()
    if error_if_nonfinite and not bool(shown.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    uninterrupted(partial(_scale_grads, grads, factor, foreach))
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
    params = _list_params("clip_grad_value_", parameters)
    exchange_grads([each for each in params if isinstance(each, Tensor)], "clip_grad_value_")
    grads = _collect_grads("clip_grad_value_", params)
    with usable("clip_grad_value_: clip_value must be a number"):
        bound = float(clip_value)
    dense, in_place, replaced = [], [], dict[Tensor, Tensor]()
    for each in grads:
        if each.layout is GradLayout.STRIDED:
            dense.append(each.param)
            continue
        with error_prefix(each.name):
            new = _clamp(each, bound)
        if new is None:
            in_place.append(each)
        else:
            replaced[each.grad] = new
    if dense:  # torch's function fails if there is no gradient at all
        utils.clip_grad_value_(dense, clip_value, foreach)
    for each in in_place:
        _stored_values(each).clamp_(-bound, bound)
    for grad, new in replaced.items():
        grad.data = new


class _NamedGrad(NamedTuple):
    """A parameter's gradient, and its name in messages."""

    name: str
    param: Tensor
    grad: Tensor
    layout: GradLayout


_PARAMETERS = "takes a tensor or an iterable of tensors"


def _list_params(function: str, parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    given: object = parameters
    if not isinstance(given, Iterable):
        raise InputError(message(f"{function} {_PARAMETERS}", f"a {type(given).__name__}"))
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not params and isinstance(parameters, types.GeneratorType):  # most likely an exhausted one
        warn(UserWarning, "`parameters` is an empty generator, no gradient clipping will occur.")
    return params


def _collect_grads(function: str, params: Sequence[object]) -> list[_NamedGrad]:
    """Return the gradients of the parameters that have one, checked."""
    grads = []
    for index, param in enumerate(params):
        if not isinstance(param, Tensor):
            got = f"a {type(param).__name__} at {index}"
            raise InputError(message(f"{function} {_PARAMETERS}", got))
        grad = param.grad
        if grad is None:
            continue
        found = _NamedGrad(f"{function}: param {index}", param, grad, classify(grad))
        if found.layout is not GradLayout.STRIDED:
            with error_prefix(found.name):
                _check_clippable(found)
        elif not grad.is_contiguous() and has_internal_overlap(grad):
            # Scaled in place, elements that share memory would be scaled more than once.
            param.grad = grad.clone(memory_format=torch.contiguous_format)
            found = found._replace(grad=param.grad)
        grads.append(found)
    return grads


def _check_clippable(named: _NamedGrad) -> None:
    grad = named.grad
    if named.layout in (GradLayout.COMPRESSED, GradLayout.UNSUPPORTED):
        requirement = "the gradient must be a strided or COO tensor, or a MaskedTensor"
        remedy = "Convert it with .to_sparse_coo()"
        raise InputError(message(requirement, f"layout {grad.layout}", remedy))
    if not grad.is_floating_point() and not grad.is_complex():
        requirement = "the gradient must have a floating-point or complex dtype"
        raise InputError(message(requirement, grad.dtype))
    if named.layout is GradLayout.COO:
        check_has_values("the gradient", coo_indices(grad))
        check_has_values("the gradient", coo_values(grad))


def _clamp(named: _NamedGrad, bound: float) -> Tensor | None:
    """Return the gradient with its sums clamped; None if its values may be clamped in place."""
    grad = named.grad
    check_has_order(grad)
    if not bound >= 0:  # nor NaN
        requirement = "clip_value must be at least 0, so that entries outside the gradient stay 0"
        raise InputError(message(requirement, bound))
    if named.layout is GradLayout.COMPACT:
        return clamp_sums(grad, -bound, bound)  # type: ignore[arg-type]
    if named.layout is GradLayout.MASKED:
        return None
    is_writable = _owns_values(named)  # first: the views below count as uses of the memory
    indices, values = coo_indices(grad), coo_values(grad)
    if not grad.is_coalesced():
        slots, total = sum_duplicates(IndexedGrad.from_coo(indices, values, grad.shape))
        assert slots is not None
        if len(slots) < len(values):
            shape = grad.shape[: grad.sparse_dim()]
            indices = stack(torch.unravel_index(slots, shape)) if shape else slots.new_empty(0, 1)
            values = total.clamp(-bound, bound).to(grad.dtype).reshape(-1, *values.shape[1:])
            return coo_like(grad, indices, values, coalesced=True)
    if is_writable:
        return None
    values = values.clamp(-bound, bound)
    return coo_like(grad, indices, values, coalesced=grad.is_coalesced())


def _local_norms(
    grads: Sequence[_NamedGrad],
    sources: Sequence[ShardedGradSource],
    norm_type: float,
    foreach: bool | None,
) -> tuple[list[Tensor], list[_NamedGrad]]:
    """Return the norm of each source's local gradients, and the gradients of no source."""
    if sources and not norm_type > 0:
        requirement = "clip_grad_norm_: with sharded tables norm_type must be greater than 0"
        raise InputError(message(requirement, norm_type))
    norms, rest = [], list(grads)
    for source in sources:
        sharded = [each for each in rest if source.is_sharded(each.param)]
        rest = [each for each in rest if not source.is_sharded(each.param)]
        norm = _total_norm(sharded, norm_type, foreach) if sharded else torch.zeros(())
        norms.append(norm)
    return norms, rest


def _total_norm(grads: Sequence[_NamedGrad], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of the norms of all gradients, on the device of the first, like torch's.

    A separate function, because its views of values must be gone before ``_owns_values``.
    """
    tensors = []
    for each in grads:
        with error_prefix(each.name):
            if each.layout is GradLayout.MASKED:
                values, mask = stored_mask(each.grad)
                values = values[mask].to(torch.promote_types(each.grad.dtype, torch.float32))
                found = append_implicit_zero(values, values.numel(), each.grad, norm_type)
            else:
                found = norm_equivalent(each.grad, norm_type)
        tensors.append(found)
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    if foreach is False or any(t.dtype != dtype for t, dtype in zip(tensors, wide, strict=True)):
        # In at least float32: an overflow of float16 would make every gradient zero.
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


def _scale_grads(grads: Sequence[_NamedGrad], factor: Tensor, foreach: bool | None) -> None:
    """Multiply all gradients; those that share memory get new values."""
    # In this order: shared memory is read before anything is written.
    in_place, replaced, compact = [], dict[Tensor, Tensor](), []
    for each in grads:
        grad = each.grad
        if each.layout is GradLayout.COMPACT:
            compact.append(grad)
        elif each.layout is GradLayout.STRIDED or _owns_values(each):
            in_place.append(each)
        else:
            replaced[grad] = replaced.get(grad, coo_values(grad)) * factor.to(grad.device)
    _foreach_mul([_stored_values(each) for each in in_place], factor, foreach)
    for grad, values in replaced.items():
        grad.data = coo_like(grad, coo_indices(grad), values, coalesced=grad.is_coalesced())
    for grad in compact:
        grad.mul_(factor.to(grad.device))  # gives it new rows


def _foreach_mul(tensors: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        # Torch's kernel for lists does not write conjugate or negative views.
        if foreach is False or tensor.is_conj() or tensor.is_neg():
            tensor.mul_(factor.to(tensor.device))
        else:
            by_device.setdefault(tensor.device, []).append(tensor)
    for device, some in by_device.items():
        foreach_mul_(some, factor.to(device))


def _stored_values(named: _NamedGrad) -> Tensor:
    if named.layout is GradLayout.MASKED:
        return stored_mask(named.grad)[0]
    return coo_values(named.grad) if named.layout is GradLayout.COO else named.grad


def _owns_values(named: _NamedGrad) -> bool:
    """Whether a COO gradient's values can be written without changing anything else.

    Autograd expands values, and gives two tables whose rows were added gradients in the same
    memory: in place, each would be scaled twice. A masked tensor has copied its own.
    """
    if named.layout is GradLayout.MASKED:
        return True
    if not coo_values(named.grad).is_contiguous():
        return False
    uses = uses_of_memory(coo_values(named.grad))
    return uses is not None and uses == _uses_if_unshared()


@functools.cache
def _uses_if_unshared() -> int | None:
    """The use count of a gradient's memory that is not shared, which depends on torch's version."""
    with torch.device("cpu"):
        indices = torch.zeros(1, 1, dtype=torch.int64)
        grad = torch.sparse_coo_tensor(indices, torch.zeros(1), (1,), check_invariants=False)
        return uses_of_memory(coo_values(grad))
