"""Embeddings with dense gradients: a forgotten ``sparse=True``, which costs a pass over the table.

A large matrix whose dense gradient is zero in most rows is such an embedding. The weight of a
linear layer, as large as it may be, has a gradient in nearly every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsestep.grads.layouts import Gradient

REASON = "dense gradient for an embedding: pass sparse=True, or call sparsestep.nn.fuse(model)."

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


def warning(who: str, shape: torch.Size) -> str:
    """Return the text of the warning.

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
