"""Threads of pytorch/pytorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparsestep
from sparsestep.optim import OPTIMIZERS

IDS = torch.tensor([3, 1, 3, 7])
OTHERS = [0, 2, 4, 5, 6, 8, 9]


def table(*, sparse: bool = True, rows: int = 10) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(rows, 4, sparse=sparse)


def step(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def trained(embedding: nn.Embedding, optimizer: Any, steps: int = 5) -> Tensor:
    """The weight after some steps, each with other rows."""
    for number in range(steps):
        step(optimizer, embedding((IDS + number) % len(embedding.weight)).sin().sum())
    if isinstance(optimizer, sparsestep.Adam) and optimizer.semantics == "dense":
        optimizer.catch_up()
    return embedding.weight.detach()


def is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


class Recorded(TorchDispatchMode):
    """Torch's operations: their names, and the size of the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        given = {each.data_ptr() for each in args if is_strided(each)}
        if is_strided(result) and result.data_ptr() not in given:
            self.largest = max(self.largest, result.numel())
        return result


def operations(call: Callable[[], Any]) -> Recorded:
    with Recorded() as recorded:
        call()
    return recorded


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_pytorch_1285_every_optimizer_takes_sparse_gradients(make: Any):
    embedding = table()
    before = embedding.weight.detach().clone()
    optimizer = make(embedding.parameters())
    step(optimizer, embedding(IDS).sum())
    changed = (embedding.weight != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [1, 3, 7]


def test_pytorch_1285_or_has_the_results_of_dense_ones():
    dense, sparse = table(sparse=False), table()
    expected = trained(dense, torch.optim.Adam(dense.parameters(), lr=0.1))
    ours = sparsestep.Adam(sparse.parameters(), lr=0.1, semantics="dense")
    ours.track(sparse)
    torch.testing.assert_close(trained(sparse, ours), expected)


def test_pytorch_25484_sparse_adam_with_weight_decay():
    """Coupled: rows of the batch decay as if they were all there is; others keep their bits."""
    embedding, rows = table(), nn.Parameter(table().weight[[1, 3, 7]].detach())
    before = embedding.weight.detach().clone()
    ours = sparsestep.Adam(embedding.parameters(), lr=0.1, weight_decay=0.5)
    theirs = torch.optim.Adam([rows], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        step(ours, embedding(IDS).sin().sum())
        step(theirs, rows[[1, 0, 1, 2]].sin().sum())
    torch.testing.assert_close(embedding.weight[[1, 3, 7]], rows)
    assert torch.equal(embedding.weight[OTHERS], before[OTHERS])


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_pytorch_48482_sparse_adamw(semantics: Any):
    """Rows that are not in the batch do not decay, or decay as in torch's AdamW, as you choose."""
    sparse, dense = table(), table(sparse=False)
    ours = sparsestep.AdamW(sparse.parameters(), lr=0.1, weight_decay=0.5, semantics=semantics)
    theirs = torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=0.5)
    for embedding, optimizer in ((sparse, ours), (dense, theirs)):
        step(optimizer, embedding(IDS).sin().sum())
    ours.catch_up()
    torch.testing.assert_close(sparse.weight[IDS], dense.weight[IDS])
    expected = dense if semantics == "dense" else table()
    torch.testing.assert_close(sparse.weight[OTHERS], expected.weight[OTHERS])


def test_pytorch_81162_no_gradient_is_coalesced():
    """A lookup with duplicates, as of Node2Vec; coalescing them is what made torch's step slow."""
    embedding = table(rows=10_000)
    embedding(IDS).sum().backward()
    theirs = operations(torch.optim.SparseAdam(embedding.parameters()).step)
    assert "_coalesce" in theirs.names
    optimizer = sparsestep.SparseAdam(embedding.parameters())
    optimizer.step()
    ours = operations(optimizer.step)
    assert "_coalesce" not in ours.names
    assert ours.largest <= IDS.numel() * 4
    assert optimizer.metrics()["rows_touched"] == 3


def test_pytorch_4829_clipping_by_value_and_by_any_norm():
    for norm in (2.0, torch.inf, 1.0):
        sparse, dense = table(), table(sparse=False)
        for embedding in (sparse, dense):
            embedding(IDS).square().sum().backward()
        found = sparsestep.clip_grad_norm_(sparse.parameters(), 0.5, norm)
        expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.5, norm)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)
        sparsestep.clip_grad_value_(sparse.parameters(), 0.01)
        nn.utils.clip_grad_value_(dense.parameters(), 0.01)
        torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


def test_pytorch_35810_amp_with_sparse_gradients():
    scaled, plain = table(), table()
    ours = sparsestep.SparseAdam(scaled.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for factor in (1.0, torch.inf):  # with the second, the step is skipped
        ours.zero_grad()
        scaler.scale(factor * scaled(IDS).sin().sum()).backward()
        scaler.step(ours)
        scaler.update()
    assert torch.equal(scaled.weight, trained(plain, sparsestep.SparseAdam([plain.weight], 0.1), 1))
    assert ours.state[scaled.weight]["step"] == 1


def test_pytorch_101370_dense_gradients_that_are_mostly_zero():
    """Taken as they are, they move everything that has momentum; `to_sparse` says what to leave."""
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = sparsestep.SparseAdam([weight], lr=0.1)
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    before = weight.detach().clone()
    gradient = torch.zeros(4, 3)
    gradient[1, 2] = 5.0
    weight.grad = gradient.to_sparse()
    optimizer.step()
    assert (weight != before).nonzero().tolist() == [[1, 2]]
    weight.grad = gradient
    optimizer.step()
    assert (weight != before).all()


def test_pytorch_84537_a_minimal_example_and_what_is_not_supported():
    embedding = table()
    optimizer = sparsestep.SparseAdam(embedding.parameters(), lr=0.1)
    embedding(IDS).sum().backward()  # the gradient is sparse, the parameter is not
    optimizer.step()
    with pytest.raises(ValueError, match="requires dense parameter tensors"):
        sparsestep.SparseAdam([embedding.weight.detach().to_sparse().requires_grad_()])


def test_pytorch_29816_a_sparse_matrix_is_a_dense_one_with_a_mask():
    weight = nn.Parameter((torch.arange(200.0) % 7 == 3).float().view(20, 10))
    pattern = weight.detach() != 0
    optimizer = sparsestep.SparseAdam([weight], lr=0.01, mask=pattern)
    step(optimizer, torch.sparse.mm(weight.to_sparse(), torch.ones(10, 30)).sum())
    assert torch.equal(weight != 0, pattern)
    assert (weight[pattern] != 1).all()


def test_pytorch_104574_gradients_of_masked_operations():
    """Through every optimizer; what the mask leaves out keeps its bits."""
    mask = torch.tensor([[True, False, False], [False, True, True]])
    for cls in OPTIMIZERS:
        weight = nn.Parameter(torch.ones(2, 3))
        optimizer = cls([weight], lr=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MaskedTensor is a prototype of torch
            torch.masked.as_masked_tensor(weight, mask).pow(2).sum().backward()
            assert isinstance(weight.grad, torch.masked.MaskedTensor)
            optimizer.step()
        assert (weight[mask] < 1).all(), cls
        assert (weight[~mask] == 1).all(), cls


def test_pytorch_74588_adam_on_the_cpu_is_one_pass():
    """Offloaded parameters: torch's loop makes an operation of each line of the formula."""
    layers = nn.Linear(100, 100)
    layers(torch.randn(5, 100)).square().sum().backward()
    theirs = operations(torch.optim.Adam(layers.parameters(), foreach=False).step)
    formula = {"lerp_", "mul_", "addcmul_", "sqrt", "div", "addcdiv_"}
    assert len(formula & set(theirs.names)) > 3
    optimizer = sparsestep.Adam(layers.parameters())
    optimizer.step()
    ours = operations(optimizer.step)
    assert not formula & set(ours.names)
    assert ours.largest < 100
    assert optimizer.metrics()["native_params"] == 2
