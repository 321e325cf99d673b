"""What pyright is to find: a mistake in every line that is marked. It is not run."""

from __future__ import annotations

from torch import Tensor

import sparsestep


def mistakes(weight: Tensor) -> None:
    """Words that no option knows, names that no option has."""
    sparsestep.AdamW([weight], semantics="sparse")  # wrong
    sparsestep.Adam([weight], bias_correction="row")  # wrong
    sparsestep.SGD([weight], weight_deacy=0.1)  # wrong
    sparsestep.Lion([weight], bias_correction="global")  # wrong
    sparsestep.FunctionalAdam([weight], engine="fast")  # wrong
    sparsestep.functional.sgd_(weight, weight, engine="fast")  # wrong
    sparsestep.functional.lion_(weight, weight, weight, decoupled_weight_decay=True)  # wrong
    sparsestep.nn.Embedding("3", 2)  # wrong
    sparsestep.nn.EmbeddingBag(3, 2, mode="average")  # wrong
    sparsestep.nn.EmbeddingBagCollection([(3, 2)], paddin_idx=1)  # wrong
    sparsestep.rule(state="sum")  # wrong
