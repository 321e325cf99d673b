"""Embeddings whose gradients are never written out.

Torch's modules with compact gradients: one row for each row of the output, whatever the number of
ids. Training loops stay as they are.
"""

from sparsestep.nn import functional
from sparsestep.nn.collection import EmbeddingBagCollection
from sparsestep.nn.embedding import Embedding, EmbeddingBag
from sparsestep.nn.fuse import fuse, optimizer_for
from sparsestep.nn.grow import grow
from sparsestep.nn.ngram import NgramEmbedding
from sparsestep.nn.strings import hash_strings
from sparsestep.nn.train_rows import train_rows
from sparsestep.nn.vocabulary import Vocabulary

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "NgramEmbedding",
    "Vocabulary",
    "functional",
    "fuse",
    "grow",
    "hash_strings",
    "optimizer_for",
    "train_rows",
]


def __dir__() -> list[str]:
    return __all__
