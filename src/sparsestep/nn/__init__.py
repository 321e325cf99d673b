"""Embeddings whose gradients are never written out.

They are torch's modules with another gradient: one row for each row of the output, whatever the
number of ids. The usual loop stays the usual loop.

Under ``DistributedDataParallel``, which works in C++ and insists on a COO gradient, tell each
weight to write its gradient out as soon as it is there:

    weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", w.grad.ordinary()))
"""

from sparsestep.nn.bag import EmbeddingBag
from sparsestep.nn.collection import EmbeddingBagCollection
from sparsestep.nn.embedding import Embedding
from sparsestep.nn.fusing import fuse

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "fuse"]
