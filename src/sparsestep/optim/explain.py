"""``explain()`` and ``metrics()``: engines, sizes of state, and rows of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import cat
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.layouts import Gradient, GradLayout, classify, rows_of
from sparsestep.grads.masks import MaskSelection
from sparsestep.memory.tensors import memory_of


@dataclass(frozen=True)
class ParamExplanation:
    """One parameter.

    Attributes:
        name: from ``named_parameters()`` where the optimizer was given names, else its place.
        shape: of the parameter.
        engine: what ran its latest update: ``"native"``, ``"torch"``, ``"reference"`` or
            ``"triton"``; ``None`` before the first.
        reason: why it was not the native engine, why it is slow, or why a dense gradient would be
            faster; empty if it is none of these.
        state_bytes: the size of its state. Memory is used only for rows that were updated.
        deferred_rows: with ``semantics="dense"``, how many rows wait for a catch-up.
    """

    name: str
    shape: tuple[int, ...]
    engine: str | None
    reason: str
    state_bytes: int
    deferred_rows: int


@dataclass(frozen=True)
class Explanation:
    """What ``explain()`` returns: prints as a table, and iterates over its rows.

    Attributes:
        params: one entry for each parameter, in the order of the param groups.
    """

    params: tuple[ParamExplanation, ...]

    def __iter__(self) -> Iterator[ParamExplanation]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __str__(self) -> str:
        heads = ("parameter", "shape", "engine", "state", "deferred rows")
        lines = [heads, *map(_format_row, self.params)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        names: dict[str, list[str]] = {}
        for each in self.params:
            if each.reason:
                names.setdefault(each.reason, []).append(each.name)
        return "\n".join([*table, *(f"{_list_names(who)}: {why}" for why, who in names.items())])

    __repr__ = __str__


def _list_names(names: list[str]) -> str:
    """Return the first names as a list; the table above has all."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


_MAX_NAMES = 8


def _format_row(param: ParamExplanation) -> tuple[str, ...]:
    shape = " x ".join(f"{size:,}" for size in param.shape) or "one number"
    engine = param.engine or "no step yet"
    return (param.name, shape, engine, _format_bytes(param.state_bytes), f"{param.deferred_rows:,}")


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def state_bytes(param_state: Mapping[str, Any] | None) -> int:
    """Return the size of a parameter's state tensors."""
    tensors = (v for k, v in (param_state or {}).items() if k != "step" and isinstance(v, Tensor))
    return sum(tensor.nbytes for tensor in tensors)


# Embeddings with dense gradients, which cost a pass over the table: a forgotten ``sparse=True``, or
# an L2 penalty in the loss, which makes any gradient dense. A large matrix is such an embedding if
# its dense gradient is zero in most rows, or the same multiple of the matrix. The weight of a
# linear layer has an unrelated gradient in nearly every row, however large it is.

DENSE_EMBEDDING = (
    "dense gradient for an embedding: pass sparse=True, or call sparsestep.nn.fuse(model)."
)
PENALIZED_EMBEDDING = (
    "dense gradient for an embedding, from an L2 penalty in the loss: use decoupled weight decay, "
    "or sparsestep.nn.functional.embedding_l2."
)

# A smaller table is updated in some hundred microseconds either way.
_MIN_ROWS = 1 << 13
_MIN_ELEMENTS = 1 << 19
# Below this share of rows, a sparse step is at least twice as fast as a dense one.
_MOST_USED = 0.25
# Above this share, a dense one is faster: measured between 45 and 65 %. Rows that catch up before
# they are read cost twice as much.
_DENSE_IS_FASTER = 0.5
_DENSE_IS_FASTER_DEFERRED = 0.25
_SAMPLED_ROWS = 1 << 12
# Two numbers per row decide about a penalty, so fewer rows will do. Its gradient is rounded a few
# times: once for each factor, and once for each penalty that is added.
_COMPARED_ROWS = 1 << 8
_ROUNDINGS = 8


def explain_density(param: Tensor, *, is_deferred: bool) -> str:
    """Return that a dense gradient would be faster; nothing if it would not.

    ``is_deferred``: rows without an entry are not left alone, but catch up later.
    """
    if getattr(param.grad, "is_sparse", False) is not True:
        return ""
    rows, _, touched = count_rows(param, None)
    share = touched / max(rows, 1)
    if is_deferred and share > _DENSE_IS_FASTER_DEFERRED:
        return (
            "sparse gradient in more than a quarter of the rows: with semantics='dense', a dense "
            "one (torch.nn.Embedding, sparse=False) is faster."
        )
    if share > _DENSE_IS_FASTER:
        return (
            "sparse gradient in more than half of the rows: a dense one (torch.nn.Embedding, "
            "sparse=False) is faster, but moves all rows."
        )
    return ""


def _may_be_embedding(grad: Gradient) -> TypeGuard[Tensor]:
    """Whether a gradient is dense and that of a large matrix."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.dim() != 2:
        return False
    return len(grad) >= _MIN_ROWS and grad.numel() >= _MIN_ELEMENTS and not grad.is_meta


def looks_like_embedding(grad: Gradient) -> bool:
    """Return whether a gradient is dense, large, and zero in most rows, but not in all.

    It reads a sample of the rows. Only where that is zero, it reads the whole gradient.
    """
    if not _may_be_embedding(grad):
        return False
    with torch.no_grad():
        sample = grad[:: len(grad) // _SAMPLED_ROWS]
        used = int(sample.any(dim=1).sum())
        return used < _MOST_USED * len(sample) and (used > 0 or bool(grad.any()))


def looks_penalized(param: Tensor, grad: Gradient) -> bool:
    """Return whether a dense, large gradient is the same multiple of the parameter in most rows.

    That is the gradient of an L2 penalty in rows without any other. It reads a sample of the rows.
    """
    if not _may_be_embedding(grad) or param.shape != grad.shape:
        return False
    with torch.no_grad():
        every = len(grad) // _COMPARED_ROWS
        values, slopes = param[::every], grad[::every]
        if values.is_complex():
            values, slopes = (torch.view_as_real(t).flatten(1) for t in (values, slopes))
        values, slopes = values.double(), slopes.double()
        factors = (values * slopes).sum(1) / values.square().sum(1)
        factor = factors.nanmedian()
        allowed = _ROUNDINGS * torch.finfo(grad.dtype).eps * (factor * values).abs()
        same = ((slopes - factor * values).abs() <= allowed).all(1)
        return bool(factor != 0) and int(same.sum()) > (1 - _MOST_USED) * len(same)


def explain_dense_gradient(param: Tensor, grad: Gradient) -> str:
    """Return what makes the gradient of an embedding dense; nothing if it is none."""
    if looks_like_embedding(grad):
        return DENSE_EMBEDDING
    return PENALIZED_EMBEDDING if looks_penalized(param, grad) else ""


_TROUBLESHOOTING = "https://sparsestep.readthedocs.io/en/latest/troubleshooting.html"


def embedding_warning(who: str, shape: torch.Size, reason: str) -> str:
    """Return the text of the warning about an embedding with a dense gradient."""
    if reason == PENALIZED_EMBEDDING:
        return (
            f"{who}: dense gradient for an embedding of shape {tuple(shape)}: an L2 penalty on the "
            "whole table is in the loss, so the step updates every row. Use decoupled weight decay "
            "(AdamW, or decoupled_weight_decay=True) instead, or a penalty on the rows of the "
            "batch, sparsestep.nn.functional.embedding_l2(table, ids): "
            f"{_TROUBLESHOOTING}#my-gradient-is-dense-because-of-an-l2-penalty"
        )
    return (
        f"{who}: dense gradient for an embedding of shape {tuple(shape)}: the step updates every "
        "row, although most have no gradient. Pass sparse=True to nn.Embedding, or call "
        "sparsestep.nn.fuse(model): "
        f"{_TROUBLESHOOTING}#my-gradient-is-dense-although-i-use-an-embedding"
    )


# Rows and entries of gradients, for ``metrics()``.


class RowCounts(NamedTuple):
    """Rows of a parameter, entries of its gradient, and the distinct rows among them."""

    rows: int
    entries: int
    touched: int


def count_rows(param: Tensor, selection: MaskSelection | None) -> RowCounts:
    """Count what the gradient of a parameter updates, from its indices alone."""
    memory = memory_of(param)
    rows = len(memory) if memory.dim() else 1
    row_mask = None if selection is None or selection.mask.dim() != 1 else selection
    indices = _row_indices(memory, param.grad)
    if indices is None:
        count = rows if row_mask is None else row_mask.refresh().indices.numel()
        return RowCounts(rows, count, count)
    if row_mask is not None:
        indices = indices[row_mask.mask[indices]]
    return RowCounts(rows, indices.numel(), _count_distinct(indices, rows))


def _row_indices(param: Tensor, grad: Any) -> Tensor | None:
    """Return the row of each entry of the gradient; ``None`` if it is dense."""
    if classify(grad) not in (GradLayout.COO, GradLayout.COMPACT):
        return None
    if isinstance(grad, CompactGrad) and grad.has_pending_parts:  # an exchange takes all ranks
        return torch.empty(0, dtype=torch.long, device=param.device)
    found = [rows for rows in rows_of(param, grad) if rows is not None]
    return cat(found) if found else None


def _count_distinct(indices: Tensor, rows: int) -> int:
    if ext is None or not indices.is_cpu:
        return int(indices.unique().numel())
    indices = indices.long().contiguous()
    return max(ext.unique(indices, rows, torch.empty_like(indices), torch.empty_like(indices)), 0)
