"""Node2Vec of PyTorch Geometric, on a graph of two communities.

Two things differ from PyG's own example: the optimizer, in one line, and the loss, in three. PyG's
loss writes the rows of all pairs to memory; ``embedding_dot`` writes none. Needs
``torch-geometric`` and, for random walks, ``pyg-lib``.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch_geometric.nn import Node2Vec

import sparsestep
from sparsestep.nn.functional import embedding_dot

NODES = 200
EPS = 1e-15  # as in PyG's loss


def two_communities() -> Tensor:
    """Edges between nodes of the same half, and a few across."""
    generator = torch.Generator().manual_seed(0)
    inside = torch.randint(0, NODES // 2, (2, 1_500), generator=generator)
    across = torch.randint(0, NODES, (2, 60), generator=generator)
    edges = torch.cat([inside, inside + NODES // 2, across], dim=1)
    return torch.cat([edges, edges.flip(0)], dim=1)


def train(epochs: int) -> Tensor:
    """A vector for each node."""
    model = Node2Vec(
        two_communities(),
        embedding_dim=16,
        walk_length=8,
        context_size=4,
        walks_per_node=5,
        num_nodes=NODES,
        sparse=True,
    )
    table = sparsestep.nn.fuse(model).embedding
    optimizer = sparsestep.SparseAdam(model.parameters(), lr=0.05)  # was: torch.optim.SparseAdam
    for epoch in range(1, epochs + 1):
        total = 0.0
        for walks, random_walks in model.loader(batch_size=50, shuffle=True):
            optimizer.zero_grad()
            # was: loss = model.loss(walks, random_walks)
            true = embedding_dot(table, walks[:, 0], table, walks[:, 1:])
            wrong = embedding_dot(table, random_walks[:, 0], table, random_walks[:, 1:])
            loss = -(true.sigmoid() + EPS).log().mean() - (1 - wrong.sigmoid() + EPS).log().mean()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        print(f"epoch {epoch}: loss {total / 4:.4f}")
    return model().detach()


def main() -> int:
    """Train, and see whether the halves are found; returns the exit code."""
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(train(epochs=10))
    same = vectors @ vectors.T
    first = torch.arange(NODES) < NODES // 2
    inside, across = same[first][:, first].mean(), same[first][:, ~first].mean()
    print(f"mean cosine: {inside:.2f} within a community, {across:.2f} across")
    return 0 if inside > across + 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
