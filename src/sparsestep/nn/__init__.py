"""Embeddings whose gradients are never written out.

They are torch's modules with another gradient: one row for each row of the output, whatever the
number of ids. The usual loop stays the usual loop.
"""

from sparsestep.nn.bag import EmbeddingBag
from sparsestep.nn.collection import EmbeddingBagCollection
from sparsestep.nn.embedding import Embedding
from sparsestep.nn.fusing import fuse

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "fuse"]
