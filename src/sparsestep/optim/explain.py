"""``explain()``: which engine updates each parameter, why, and the size of its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparsestep.grads.layouts import Gradient
from sparsestep.memory.tensors import memory_of


@dataclass(frozen=True)
class ParamExplanation:
    """One parameter.

    Attributes:
        name: from ``named_parameters()`` where the optimizer was given names, else its place.
        shape: of the parameter.
        engine: what ran its latest update: ``"native"``, ``"torch"``, ``"reference"`` or
            ``"triton"``; ``None`` before the first.
        reason: why it was not the native engine, or why it is slow; empty if it is neither.
        state_bytes: the size of its state. Memory is used only for rows that were updated.
        rows_behind: with ``semantics="dense"``, how many rows wait for a catch-up.
    """

    name: str
    shape: tuple[int, ...]
    engine: str | None
    reason: str
    state_bytes: int
    rows_behind: int


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
        heads = ("parameter", "shape", "engine", "state", "rows behind")
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
    """Return names as a list; the table above has all of them."""
    shown = ", ".join(names[:_MAX_NAMES])
    return shown if len(names) <= _MAX_NAMES else f"{shown} and {len(names) - _MAX_NAMES} more"


_MAX_NAMES = 8


def _format_row(param: ParamExplanation) -> tuple[str, ...]:
    shape = " x ".join(f"{size:,}" for size in param.shape) or "one number"
    engine = param.engine or "no step yet"
    return (param.name, shape, engine, _format_bytes(param.state_bytes), f"{param.rows_behind:,}")


def _format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def explain_param(
    name: str,
    param: Tensor,
    param_state: Mapping[str, Any] | None,
    used: tuple[Tensor, str, str] | None,
    rows_behind: int,
) -> ParamExplanation:
    """Explain one parameter.

    Args:
        name: the parameter's name.
        param: the parameter.
        param_state: its state.
        used: the parameter, the engine of its latest update, and why not another.
        rows_behind: the number of rows that wait for a catch-up.
    """
    owner, engine, reason = used or (None, None, "")
    if owner is not param:
        engine, reason = None, ""
    tensors = (v for k, v in (param_state or {}).items() if k != "step" and isinstance(v, Tensor))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # A lazy parameter refuses to tell its shape; so far its memory has no elements.
    shape = memory_of(param).shape if is_lazy(param) else param.shape
    return ParamExplanation(name, tuple(shape), engine, reason, size, rows_behind)


# Embeddings with dense gradients: a forgotten ``sparse=True``, which costs a pass over the table.
# A large matrix whose dense gradient is zero in most rows is such an embedding. The weight of a
# linear layer, as large as it may be, has a gradient in nearly every row.

DENSE_EMBEDDING = (
    "dense gradient for an embedding: pass sparse=True, or call sparsestep.nn.fuse(model)."
)

# A smaller table is updated in some hundred microseconds either way.
_MIN_ROWS = 1 << 13
_MIN_ELEMENTS = 1 << 19
# Below this share of rows, a sparse step is at least twice as fast as a dense one.
_MOST_USED = 0.25
_SAMPLED_ROWS = 1 << 12


def looks_like_embedding(grad: Gradient) -> bool:
    """Return whether a gradient is dense, large, and zero in most rows, but not in all.

    It reads a sample of the rows. Only where that is zero, it reads the whole gradient.

    Example:
        >>> table, layer = torch.nn.Embedding(20_000, 32), torch.nn.Linear(32, 20_000)
        >>> layer(table(torch.tensor([1, 19_999]))).sum().backward()
        >>> looks_like_embedding(table.weight.grad), looks_like_embedding(layer.weight.grad)
        (True, False)
    """
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.dim() != 2:
        return False
    if len(grad) < _MIN_ROWS or grad.numel() < _MIN_ELEMENTS or grad.is_meta:
        return False
    with torch.no_grad():
        sample = grad[:: len(grad) // _SAMPLED_ROWS]
        used = int(sample.any(dim=1).sum())
        return used < _MOST_USED * len(sample) and (used > 0 or bool(grad.any()))


def embedding_warning(who: str, shape: torch.Size) -> str:
    """Return the text of the warning about an embedding with a dense gradient.

    Args:
        who: names the optimizer and the parameter.
        shape: of the parameter.
    """
    return (
        f"{who}: dense gradient for an embedding of shape {tuple(shape)}: the step updates every "
        "row, although most have no gradient. Pass sparse=True to nn.Embedding, or call "
        "sparsestep.nn.fuse(model): "
        "https://sparsestep.readthedocs.io/troubleshooting.html"
        "#my-gradient-is-dense-although-i-use-an-embedding"
    )
