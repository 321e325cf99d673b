"""fuse: the embeddings of an existing model get compact gradients."""

from __future__ import annotations

from typing import TypeVar

import torch

from sparsestep.nn.bag import EmbeddingBag
from sparsestep.nn.embedding import Embedding

Model = TypeVar("Model", bound=torch.nn.Module)

# By exact type: a subclass may have ideas of its own.
_FUSED: dict[type, type[Embedding] | type[EmbeddingBag]] = {
    torch.nn.Embedding: Embedding,
    torch.nn.EmbeddingBag: EmbeddingBag,
}


def fuse(model: Model) -> Model:
    """Make every ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` of a model one of ours.

    The modules stay the same objects and keep their weights, hooks and options. So optimizers that
    were made before go on working, and so does whatever else refers to them. Subclasses of torch's
    modules are left alone.

    Args:
        model: the model, which may be a single embedding.

    Returns:
        The same model.

    Example:
        >>> import sparsestep
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16), torch.nn.Linear(16, 1))
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> sparsestep.nn.fuse(model)(torch.tensor([[3, 1, 3]])).sum().backward()
        >>> model[0].weight.grad.touched().values.shape
        torch.Size([1, 16])
        >>> optimizer.step()
    """
    for name, module in model.named_modules():
        ours = _FUSED.get(type(module))
        if ours is None or "forward" in vars(module):  # somebody has replaced its forward
            continue
        module.__class__ = ours
        module.sparse = True
        module.name = name
    return model
