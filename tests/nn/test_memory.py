"""A row for each id is never written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsestep
from sparsestep.nn import EmbeddingBag, EmbeddingBagCollection


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor of numbers that torch has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if type(made) is Tensor and made.is_floating_point():
                stored = made._values() if made.is_sparse else made
                elements = stored.untyped_storage().nbytes() // stored.element_size()
                self.elements = max(self.elements, elements)
        return result


ROWS, DIM, BAGS, PER_BAG = 2000, 64, 40, 800  # 80 times as many ids as bags, and 2M elements


def ids(seed: int) -> Tensor:
    return torch.randint(ROWS, (BAGS, PER_BAG), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("more", [{}, {"padding_idx": 3}])
def test_nothing_is_larger_than_the_table_or_a_chunk(mode: str, more: dict[str, Any]):
    table = EmbeddingBag(ROWS, DIM, mode=mode, **more)
    optimizer = sparsestep.Adam(table.parameters())
    factors = torch.rand(BAGS, PER_BAG, requires_grad=True) if mode == "sum" else None
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 0)
        with Largest() as largest:
            for part in range(2):
                table(ids(2 * step + part), None, factors).sin().sum().backward()
            if step == 1:
                sparsestep.clip_grad_norm_([table.weight], 1.0)
            if step == 2:
                table.weight.grad.mul_(0.5)
            optimizer.step()
        assert 0 < largest.elements <= max(ROWS * DIM, 1 << 20)
        assert largest.elements < BAGS * PER_BAG * DIM


def test_the_same_of_a_collection():
    tables = EmbeddingBagCollection([(ROWS, DIM), (ROWS, 2 * DIM)], mode="sum")
    optimizer = sparsestep.RowwiseAdagrad(tables.parameters())
    with Largest() as largest:
        found = tables([ids(0), ids(1)])
        sum(output.sin().sum() for output in found).backward()
        optimizer.step()
    assert 0 < largest.elements <= ROWS * 2 * DIM


def test_an_ordinary_gradient_would_be_noticed():
    """So that the tests above can fail."""
    table = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    with Largest() as largest:
        table(ids(0)).sin().sum().backward()
    assert largest.elements == BAGS * PER_BAG * DIM
