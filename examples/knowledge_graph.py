"""A model of PyKEEN, trained with dense and with compact gradients to the same losses.

PyKEEN's embeddings have dense gradients, so a step of Adam goes over the whole table. One call
makes the gradients of the same model compact, and an optimizer that trains it to the same numbers.
Needs ``pip install pykeen``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from pykeen.models import ComplEx, Model
from pykeen.training import SLCWATrainingLoop
from pykeen.triples import TriplesFactory

import sparsestep

ENTITIES, EPOCHS = 500, 5


def triples() -> TriplesFactory:
    """Two relations on a ring: the next entity, and the one after it."""
    rows = [
        (f"e{i}", f"plus {step}", f"e{(i + step) % ENTITIES}")
        for i in range(ENTITIES)
        for step in (1, 2)
    ]
    return TriplesFactory.from_labeled_triples(np.array(rows))


def train(make: Callable[[Model], sparsestep.Adam]) -> list[float]:
    """The mean loss of each epoch."""
    torch.manual_seed(0)
    known = triples()
    model = ComplEx(triples_factory=known, embedding_dim=16, random_seed=0)
    loop = SLCWATrainingLoop(model=model, triples_factory=known, optimizer=make(model))
    losses = loop.train(known, num_epochs=EPOCHS, batch_size=32, use_tqdm=False)
    assert losses is not None
    return losses


def main() -> int:
    """Train both ways; returns the exit code."""
    dense = train(lambda model: sparsestep.Adam(model.parameters(), lr=0.01))
    ours = train(lambda model: sparsestep.nn.optimizer_for(model, sparsestep.Adam, lr=0.01))
    for epoch, losses in enumerate(zip(dense, ours, strict=True), 1):
        print("epoch {}: loss {:.5f} with dense gradients, {:.5f} fused".format(epoch, *losses))
    return 0 if np.allclose(ours, dense, rtol=1e-3) and ours[-1] < ours[0] else 1


if __name__ == "__main__":
    sys.exit(main())
