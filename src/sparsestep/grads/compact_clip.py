"""How compact gradients answer torch's own clipping, and other code that clips as torch does.

Norms and bounds are of the summed rows, as ``sparsestep.clip_grad_norm_`` has them, and clipped
gradients are still compact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsestep._torch import cat, coo_values, foreach_unscale_
from sparsestep.errors import InputError, message
from sparsestep.grads.compact import (
    ANSWERS,
    CompactGrad,
    answer_lists,
    in_place,
    like,
    materialized,
    one_by_one,
    parts_of,
)
from sparsestep.grads.dedup import sums
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.norms import elements

_aten = torch.ops.aten


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
    if grad.is_sharded:
        requirement = "the norm of a sharded table's gradient needs the rows of all ranks"
        got = "a function that sees those of one rank"
        raise InputError(message(requirement, got, "Use sparsestep.clip_grad_norm_"))
    found = torch.linalg.vector_norm(elements(grad, float(ord)), ord)
    return found.to(grad.dtype.to_real() if dtype is None else dtype)


def clamped(grad: CompactGrad, low: float | None, high: float | None) -> CompactGrad:
    """The gradient with its sums between bounds, a row of its own for each slot.

    Args:
        grad: not materialized.
        low: at most 0, for what the gradient does not hold is 0; ``None`` for no bound.
        high: at least 0; ``None`` for no bound.

    Example:
        >>> import sparsestep
        >>> table = sparsestep.nn.Embedding(5, 2)
        >>> table(torch.tensor([1, 3, 1])).sum().backward()
        >>> clamped(table.weight.grad, None, 1.5)
        tensor(indices=tensor([[1, 3]]),
               values=tensor([[1.5000, 1.5000],
                              [1.0000, 1.0000]]),
               size=(5, 2), nnz=2, layout=torch.sparse_coo)
    """
    if grad.is_complex():
        requirement = "the gradient must be real, because complex numbers have no order"
        raise InputError(message(requirement, grad.dtype))
    if not ((low is None or low <= 0) and (high is None or high >= 0)):  # nor NaN
        requirement = (
            "0 must be within the bounds, so that entries outside a sparse gradient stay 0"
        )
        raise InputError(message(requirement, f"min={low}, max={high}"))
    touched = grad.touched()
    found = [(slots, total.clamp(low, high).to(grad.dtype)) for slots, total in sums(touched)]
    if not found:
        return like(grad, ())
    positions = cat([slots for slots, _ in found])
    values = cat([total for _, total in found])
    return like(grad, (IndexedGrad(positions, values, touched.num_slots, touched.slot_size),))


def _clamp(grad: Any, low: Any = None, high: Any = None) -> Any:
    bounds = [bound for bound in (low, high) if bound is not None]
    if not isinstance(grad, CompactGrad) or not all(isinstance(b, int | float) for b in bounds):
        return NotImplemented
    parts = parts_of(grad)
    return NotImplemented if parts is None else clamped(like(grad, parts), low, high)


def _clamp_in_place(grad: Any, low: Any = None, high: Any = None) -> Any:
    found = _clamp(grad, low, high)
    if found is NotImplemented:
        return NotImplemented
    grad.assign_(found)
    return grad


def _unscale(tensors: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """What GradScaler does to all gradients: it looks at every value, so these are written out."""
    strided = [coo_values(grad) if grad.is_sparse else materialized(grad) for grad in tensors]
    foreach_unscale_(strided, found_inf, inverse_scale)


ANSWERS |= {
    _aten.linalg_vector_norm.default: _norm,
    _aten.clamp.default: _clamp,
    _aten.clamp_.default: _clamp_in_place,
    _aten.clamp_min.default: _clamp,
    _aten.clamp_min_.default: _clamp_in_place,
    _aten.clamp_max.default: lambda grad, high: _clamp(grad, None, high),
    _aten.clamp_max_.default: lambda grad, high: _clamp_in_place(grad, None, high),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
answer_lists(
    "norm",
    one_by_one(lambda grad, ord=2, dtype=None: torch.linalg.vector_norm(grad, ord, dtype=dtype)),
)
for _name in ("clamp_min", "clamp_max"):
    answer_lists(_name, one_by_one(getattr(torch, _name)))
    answer_lists(f"{_name}_", in_place(getattr(Tensor, f"{_name}_")))
