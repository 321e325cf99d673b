from __future__ import annotations

import importlib.util
import re

from tests.integrations.running import example, in_the_gallery, needs, run

pytestmark = needs("torch_geometric")

# Random walks are pyg-lib's, which is not on PyPI; without it, these few lines walk.
WALKS = """
import torch, torch_geometric.nn.models.node2vec as module

def walk(pointers, targets, starts, length, p, q):
    path = [starts]
    for _ in range(length):
        first, end = pointers[path[-1]], pointers[path[-1] + 1]
        path.append(targets[first + (torch.rand(len(starts)) * (end - first)).long()])
    return torch.stack(path, dim=1)

module.WITH_PYG_LIB = True
torch.ops.pyg.random_walk = walk

import node2vec
assert node2vec.main() == 0
"""


def test_node2vec_finds_the_communities():
    has_walks = importlib.util.find_spec("pyg_lib")
    printed = example("node2vec.py") if has_walks else run("-c", WALKS)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert in_the_gallery("node2vec", printed)
