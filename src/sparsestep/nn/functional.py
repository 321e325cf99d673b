"""Functions of embeddings whose gradients are never written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsestep._torch import call_forward_pre_hooks
from sparsestep.errors import InputError, message
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.exchange import source_of
from sparsestep.nn.embedding import Embedding, EmbeddingBag
from sparsestep.nn.interop import excluded_from_compile, materialize_for_ddp, uses_torch_ops
from sparsestep.nn.lookup import (
    DOT,
    Lookup,
    check_ids,
    embed,
    first_derivative,
    grad_of_ids,
    look_up_checked,
    row_lookup,
)

__all__ = ["embedding_dot", "embedding_l2"]


def __dir__() -> list[str]:
    return __all__


class Weight:
    """A weight without a module."""

    padding_idx = max_norm = None
    norm_type = 2.0
    scale_grad_by_freq = False

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


@excluded_from_compile
def embedding_dot(
    left: nn.Module | Tensor,
    left_ids: Tensor,
    right: nn.Module | Tensor,
    right_ids: Tensor,
    *,
    diagonal: nn.Module | Tensor | None = None,
    diagonal_ids: Tensor | None = None,
) -> Tensor:
    r"""Dot products of rows of two tables: the scores of word2vec, node2vec, BPR or DistMult.

    .. math::
        y_{bk} = \sum_d L_{l_b d} \, D_{q_b d} \, R_{r_{bk} d}

    The same as ``(left(left_ids).unsqueeze(1) * right(right_ids)).sum(-1)``, without any tensor of
    pairs times columns, in the forward pass or the backward pass. Gradients of both tables are
    sparse and compact, and both tables may be the same.

    Args:
        left: a table: an embedding module, or its weight.
        left_ids: rows of ``left``, shape ``[B]``.
        right: a table, with as many columns.
        right_ids: rows of ``right``: ``[B]``, one for each; ``[B, K]``, several for each, as
            negative samples are; or ``[1, K]``, the same for all.
        diagonal: a table of factors, such as the relations of DistMult.
        diagonal_ids: rows of ``diagonal``, shape ``[B]``.

    Returns:
        The dot products, ``[B]`` or ``[B, K]``.

    Raises:
        InputError: tables or ids do not fit, or an id is out of range; nothing has changed.

    Example:
        >>> import sparsestep
        >>> words = sparsestep.nn.Embedding(1000, 16)
        >>> center, context = torch.tensor([3, 8]), torch.tensor([[5, 7, 9], [1, 3, 2]])
        >>> scores = sparsestep.nn.functional.embedding_dot(words, center, words, context)
        >>> scores.shape
        torch.Size([2, 3])
        >>> scores.sum().backward()
        >>> sparsestep.SparseAdam(words.parameters()).step()
    """
    rows = _rows_of(left, left_ids, "left")
    if (diagonal is None) != (diagonal_ids is None):
        missing = "diagonal" if diagonal is None else "diagonal_ids"
        raise _error("diagonal and diagonal_ids belong together", f"no {missing}")
    if diagonal is not None:
        factors = _rows_of(diagonal, diagonal_ids, "diagonal")
        if factors.shape != rows.shape:
            requirement = "diagonal must have a row for each row of left"
            raise _error(requirement, f"{tuple(factors.shape)} for {tuple(rows.shape)}")
        rows = rows * factors
    return _dot(rows, right, right_ids)


def _rows_of(table: nn.Module | Tensor, ids: Any, name: str) -> Tensor:
    if isinstance(ids, Tensor) and ids.dim() != 1:
        raise _error(f"{name}_ids must have shape [B]", tuple(ids.shape))
    _weight_of(table, name)
    return _look_up(table, ids, name)


def _look_up(table: nn.Module | Tensor, ids: Tensor, name: str) -> Tensor:
    """Rows for each id, by the module if there is one."""
    if not isinstance(table, nn.Module):
        return embed([row_lookup(Weight(table), ids)])[0]  # type: ignore[arg-type]
    found: Tensor = table(ids)
    if found.shape[:-1] != ids.shape:  # a bag is not a row
        requirement = f"{name} must be an embedding module, which returns a row for each id"
        raise _error(requirement, type(table).__name__)
    return found


def _dot(rows: Tensor, right: nn.Module | Tensor, ids: Any) -> Tensor:
    table: Any = right if isinstance(right, nn.Module) else Weight(right)
    weight = _weight_of(right, "right")
    count, dim = rows.shape
    if weight.shape[1] != dim or weight.dtype != rows.dtype:
        requirement = "both tables must have the same number of columns and dtype"
        raise _error(requirement, f"{dim} of {rows.dtype} and {weight.shape[1]} of {weight.dtype}")
    check_ids(table, weight, ids)
    if ids.dim() not in (1, 2) or (ids.shape[0] != count and ids.shape[:-1] != (1,)):
        requirement = f"right_ids must have shape [{count}], [{count}, K] or [1, K]"
        raise _error(requirement, tuple(ids.shape))
    is_plain = not isinstance(right, nn.Module) or type(right) in (Embedding, nn.Embedding)
    if ids.shape[0] != count:  # shared by all
        return rows @ _look_up(right, ids[0], "right").T
    if not is_plain or table.max_norm is not None or uses_torch_ops([weight]) or not weight.is_leaf:
        found = _look_up(right, ids, "right")
        return (rows.view(count, *[1] * (ids.dim() - 1), dim) * found).sum(-1)
    if isinstance(right, nn.Module):
        call_forward_pre_hooks(right, ids)
    bags = (ids if ids.dim() > 1 else ids.unsqueeze(1)).contiguous()
    needs_grad = weight.requires_grad and torch.is_grad_enabled()
    lookup = Lookup(weight, bags, None, False, rows.contiguous(), DOT, -1, needs_grad, table)
    found = embed([lookup])[0]
    return found if ids.dim() > 1 else found.squeeze(1)


_FORWARDS = {cls.forward for cls in (Embedding, EmbeddingBag, nn.Embedding, nn.EmbeddingBag)}


@excluded_from_compile
def embedding_l2(
    table: nn.Module | Tensor, ids: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    r"""L2 penalty on the rows that ids select: the sum of their squared entries.

    A penalty on the whole table, ``table.weight.square().sum()``, has a dense gradient, and makes
    every step as slow as the table is large. This one has a gradient in the rows of the batch only.
    Add it to the loss, times a factor.

    Each row counts once per call, however often its id occurs. With ``weights``, every id counts
    with its weight, so duplicates add up: :math:`\sum_i w_i \, |T_{id_i}|^2`. The row of
    ``padding_idx`` does not count. With ``max_norm``, rows are rescaled first, as in a lookup.

    Args:
        table: an ``Embedding`` or ``EmbeddingBag`` of torch or of this library, or its weight.
        ids: rows of the table, int64 or int32, of any shape.
        weights: a weight for each id, in the shape of the ids.

    Returns:
        A tensor with one element and no dims.

    Raises:
        InputError: an id is out of range, the table is none, or sharded, or the weights do not fit.
            Nothing has changed.

    Example:
        >>> import sparsestep
        >>> table = sparsestep.nn.Embedding(1000, 16)
        >>> ids = torch.tensor([[3, 8, 3], [5, 3, 3]])
        >>> l2 = sparsestep.nn.functional.embedding_l2(table, ids)
        >>> torch.allclose(l2, table.weight[[3, 5, 8]].square().sum())
        True
        >>> loss = table(ids).sum() + 1e-4 * l2
        >>> loss.backward()
        >>> table.weight.grad.is_sparse
        True
    """
    is_module = isinstance(table, nn.Module)
    module: Any = table if is_module else Weight(table)  # type: ignore[arg-type]
    part = getattr(module, "weight", None)
    if isinstance(part, Tensor) and source_of(part) is not None:
        got, remedy = "a sharded one", "Use decoupled weight decay"
        raise _error("table must be on this process", got, "embedding_l2", remedy)
    if is_module and type(module).forward not in _FORWARDS:
        requirement = "table must be an Embedding, an EmbeddingBag or a 2-D weight"
        raise _error(requirement, type(table).__name__, "embedding_l2")
    weight = _weight_of(table, "table", "embedding_l2")
    check_ids(module, weight, ids)
    if weights is not None:
        _check_l2_weights(weights, ids)
    if is_module:
        call_forward_pre_hooks(module, ids)
    ids = ids.reshape(-1)
    if module.padding_idx is not None:
        counts = ids != module.padding_idx
        ids = ids[counts]
        weights = None if weights is None else weights.reshape(-1)[counts]
    if weights is None:
        unique, factors = ids.unique(), None
    else:
        unique, inverse = ids.unique(return_inverse=True)
        factors = weight.new_zeros(len(unique), dtype=weight.dtype.to_real())
        factors = factors.index_add(0, inverse, weights.reshape(-1).to(factors))
    if factors is None and weight.is_leaf and not uses_torch_ops([weight]):
        materialize_for_ddp([weight])
        penalty: Tensor = _L2.apply(weight, unique, module)
        return penalty
    rows = embed([row_lookup(module, unique)])[0]
    squares = (torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows).square()
    return squares.sum() if factors is None else squares.sum(1) @ factors


class _L2(torch.autograd.Function):
    """The sum of the squares of distinct rows; the gradient is twice these rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: Any) -> Tensor:
        rows = look_up_checked([row_lookup(table, ids)])[0].output
        ctx.shape = weight.shape
        ctx.save_for_backward(ids, rows)
        return (torch.view_as_real(rows) if rows.is_complex() else rows).square().sum()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Any:
        ids, rows = ctx.saved_tensors
        part = grad_of_ids(ctx.shape, ids.long(), rows * (2 * grad))
        return CompactGrad.of([part], ctx.shape, rows), None, None


def _check_l2_weights(weights: Any, ids: Tensor) -> None:
    requirement = f"weights must be a float tensor of the shape of the ids, {tuple(ids.shape)}"
    if not isinstance(weights, Tensor):
        raise _error(requirement, type(weights).__name__, "embedding_l2")
    if not weights.is_floating_point() or weights.shape != ids.shape:
        got = f"a {weights.dtype} tensor of shape {tuple(weights.shape)}"
        raise _error(requirement, got, "embedding_l2")
    if weights.layout is not torch.strided or weights.device != ids.device:
        requirement = f"weights must be a strided tensor on the ids' device, {ids.device}"
        raise _error(requirement, f"{weights.layout} on {weights.device}", "embedding_l2")


def _weight_of(table: Any, name: str, who: str = "embedding_dot") -> Tensor:
    weight = getattr(table, "weight", None) if isinstance(table, nn.Module) else table
    requirement = f"{name} must be an embedding module or a 2-D weight"
    if not isinstance(weight, Tensor):
        raise _error(requirement, type(weight).__name__, who)
    if weight.dim() != 2:
        raise _error(requirement, f"shape {tuple(weight.shape)}", who)
    if weight.layout is not torch.strided:
        raise _error(requirement, weight.layout, who)
    return weight


def _error(
    requirement: str, got: object, who: str = "embedding_dot", remedy: str = ""
) -> InputError:
    return InputError(f"{who}: {message(requirement, got, remedy)}")
