"""What backward gives a table: gradients of several kinds, memory that autograd shares."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from tests.nn.cases import OPTIMIZERS, each_optimizer, same, same_run
from tests.torch_versions import needs_gradients_that_autograd_lets_go

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_do_not_depend_on_threads(threads: int):
    results = []
    for count in (1, threads):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        table = sparsestep.nn.EmbeddingBag(500, 16, mode="mean")
        optimizer = sparsestep.Adam(table.parameters())
        for step in range(3):
            optimizer.zero_grad()
            ids = (
                500 * torch.rand(3000, 7, generator=torch.Generator().manual_seed(step)) ** 3
            ).long()
            table(ids).sin().sum().backward()
            optimizer.step()
        results.append(optimizer)
    assert same_run(*results)


def test_a_frozen_table_has_no_gradient():
    weight = torch.randn(5, 2)
    table = sparsestep.nn.EmbeddingBag.from_pretrained(weight, mode="sum")
    factors = torch.ones(1, 3, requires_grad=True)
    table(torch.tensor([[1, 2, 1]]), per_sample_weights=factors).sum().backward()
    assert table.weight.grad is None
    assert torch.allclose(factors.grad, weight[[1, 2, 1]].sum(1)[None])
    assert not table(torch.tensor([[1]])).requires_grad


@pytest.mark.parametrize("first", ["compact", "sparse", "dense"])
@pytest.mark.parametrize("second", ["compact", "sparse", "dense"])
@pytest.mark.parametrize("graphs", [1, 2])
@each_optimizer
def test_a_weight_with_gradients_of_several_kinds(first: str, second: str, graphs: int, name: str):
    """Such as a table that is the last layer's weight as well."""
    ids = [torch.tensor([1, 3, 1]), torch.tensor([3, 2])]

    def total(weight: Tensor, kind: str, which: int) -> Tensor:
        if kind == "dense":
            return (weight * torch.arange(1.0, 11).view(5, 2) * (which + 1)).sum()
        cls = sparsestep.nn.Embedding if kind == "compact" else nn.Embedding
        table = cls(5, 2, sparse=True)
        table.weight = weight
        return table(ids[which]).sin().sum()

    runs = []
    for kinds in ((first, second), ("dense", "dense")):
        weight = nn.Parameter(torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2))
        dense = nn.Parameter(weight.detach().clone())
        parts = [total(weight, kind, which) for which, kind in enumerate((first, second))]
        if kinds == (first, second):
            for part in [sum(parts)] if graphs == 1 else parts:
                part.backward()
        else:
            wanted = [
                total(dense, "sparse" if kind == "compact" else kind, which)
                for which, kind in enumerate((first, second))
            ]
            grads = [torch.autograd.grad(part, dense)[0] for part in wanted]
            weight.grad = sum(g.to_dense() for g in grads)
            if "dense" not in (first, second):
                weight.grad = weight.grad.to_sparse(1)
        optimizer = OPTIMIZERS[name]([weight])
        optimizer.step()
        runs.append((weight, optimizer))
    (ours, _), (theirs, _) = runs
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours.grad.is_sparse == theirs.grad.is_sparse
    assert torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-12)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("viewed", [True, False])
def test_memory_that_autograd_shares(kind: str, first: bool, viewed: bool):
    """A parameter is added to the output: its gradient may get the memory of the output's.

    The second backward adds to it in place. Torch's own sparse gradients are wrong here.
    """
    results = []
    for kinds in (sparsestep.nn, nn):
        torch.manual_seed(0)
        options = {"mode": "sum"} if kind == "EmbeddingBag" else {}
        table = getattr(kinds, kind)(5, 2, dtype=torch.float64, **options)
        other = nn.Parameter(torch.randn(6 if viewed else (3, 2), dtype=torch.float64))
        ids = torch.tensor([1, 2, 1])
        ids = ids[:, None] if kind == "EmbeddingBag" else ids
        factors = torch.arange(6.0, dtype=torch.float64).view(3, 2)
        for _ in range(2):
            total = table(ids) + other.view(3, 2) if first else other.view(3, 2) + table(ids)
            (total * factors).sum().backward()
        results.append((table.weight.grad.to_dense(), other.grad))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


@needs_gradients_that_autograd_lets_go
def test_the_gradient_of_an_output_that_nobody_shares_is_not_copied():
    table = sparsestep.nn.EmbeddingBag(5, 2, mode="sum")
    output = table(torch.tensor([[1, 2], [1, 3]]))
    seen = []
    output.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (output * torch.randn(2, 2)).sum().backward()
    assert [table.weight.grad.indexed().values.data_ptr()] == seen


def test_clipping_leaves_what_shares_memory_alone():
    results = []
    for cls in (sparsestep.nn.Embedding, nn.Embedding):
        torch.manual_seed(0)
        tables = [cls(5, 2, sparse=True) for _ in range(2)]
        ids = torch.tensor([1, 2, 1])
        added = tables[0](ids) + tables[1](ids)
        (added * torch.arange(6.0).view(3, 2)).sum().backward()
        for table, limit in zip(tables, (1.0, 2.0), strict=True):
            sparsestep.clip_grad_norm_(table.parameters(), limit)
        results.append([table.weight.grad.to_dense() for table in tables])
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


def test_ids_that_are_changed_before_backward_are_refused():
    for cls, ids in (
        (sparsestep.nn.Embedding, torch.tensor([1, 2])),
        (sparsestep.nn.EmbeddingBag, torch.tensor([[1, 2]])),
    ):
        output = cls(5, 2)(ids)
        ids.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_second_derivative_is_refused():
    table = sparsestep.nn.EmbeddingBag(5, 2)
    loss = table(torch.tensor([[1, 2]])).square().sum()
    (grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    with pytest.raises(sparsestep.InputError, match="cannot be differentiated again"):
        grad.to_dense()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad * 2).backward(torch.ones(5, 2))
    assert grad.detach().to_dense().shape == (5, 2)
