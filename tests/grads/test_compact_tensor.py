"""A compact gradient is a sparse gradient like any other, to whoever looks at it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from tests.grads.compact_cases import SHAPE, example
from tests.nn.cases import plain, same
from tests.torch_versions import loads_sparse_tensors

ASKED: dict[str, Callable[[Any], Any]] = {
    "_values": lambda g: g._values(),
    "_indices": lambda g: g._indices(),
    "_nnz": lambda g: g._nnz(),
    "sparse_dim": lambda g: g.sparse_dim(),
    "dense_dim": lambda g: g.dense_dim(),
    "is_coalesced": lambda g: g.is_coalesced(),
    "coalesce": lambda g: g.coalesce().to_dense(),
    "values": lambda g: g.coalesce().values(),
    "indices": lambda g: g.coalesce().indices(),
    "to_dense": lambda g: g.to_dense(),
    "norm": lambda g: g.norm(),
    "sum": lambda g: g.sum(),
    "torch.sparse.sum": lambda g: torch.sparse.sum(g, dim=1).to_dense(),
    "pow": lambda g: g.coalesce().pow(2).to_dense(),
    "elementwise": lambda g: (g * torch.ones(6, 4)).to_dense(),
    "of a dense one": lambda g: torch.zeros(6, 4).add_(g, alpha=-0.5),
    "difference": lambda g: (g - g).to_dense(),
    "alpha": lambda g: torch.add(g, g, alpha=-2).to_dense(),
    "double": lambda g: g.double().to_dense(),
    "index_select": lambda g: g.index_select(0, torch.tensor([1, 3])).to_dense(),
    "converted": lambda g: g.to(torch.bfloat16).to_dense(),
    "concatenated": lambda g: torch.cat([g, g]).to_dense(),
    "type": lambda g: g.type(),
}


@pytest.mark.parametrize("name", ASKED)
def test_whoever_asks_for_more_gets_an_ordinary_tensor(name: str):
    grad = example()
    wanted = ASKED[name](plain(grad))
    found = ASKED[name](grad)
    assert not isinstance(found, CompactGrad)
    assert same(found, wanted) if isinstance(found, Tensor) else found == wanted
    assert (
        same(ASKED[name](grad) if name != "of a dense one" else found, found)
        if isinstance(found, Tensor)
        else True
    )


def test_attributes_do_not_settle_it():
    grad = example()
    assert (grad.shape, grad.dtype, grad.device.type) == (SHAPE, torch.float32, "cpu")
    assert (grad.size(0), grad.dim(), grad.ndim, grad.numel(), len(grad)) == (6, 2, 2, 24, 6)
    assert (grad.is_sparse, grad.layout, grad.is_sparse_csr) == (True, torch.sparse_coo, False)
    assert (grad.requires_grad, grad.grad_fn, grad.is_leaf, grad.grad) == (False, None, True, None)
    assert grad.is_floating_point()
    assert torch.is_floating_point(grad)
    assert not grad.is_complex()
    assert grad.is_cpu
    assert not grad.is_inference()
    assert "nnz=3" in repr(grad)
    assert "nnz=3" in f"{grad}"
    assert not grad.is_materialized


def test_values_are_changed_in_place():
    """As GradScaler does it: what is changed is the gradient."""
    grad = example()
    grad._values().mul_(2)
    assert same(grad.to_dense(), example().to_dense() * 2)
    grad.mul_(2)
    assert same(grad.to_dense(), example().to_dense() * 4)
    grad.add_(example())
    assert same(grad.to_dense(), example().to_dense() * 5)
    assert same((grad + example()).to_dense(), example().to_dense() * 6)
    assert grad.zero_() is grad
    assert grad._nnz() == 0


def test_other_changes_in_place():
    grad = example()
    assert grad.mul_(torch.full((6, 4), 2.0)) is grad
    assert same(grad.to_dense(), example().to_dense() * 2)
    grad -= example()
    assert isinstance(grad, CompactGrad)
    assert same(grad.to_dense(), example().to_dense())
    grad = example()
    grad.copy_(example() * 2)
    assert same(plain(grad).to_dense(), example().to_dense() * 2)
    grad.copy_(example().coalesce())
    assert same(grad.to_dense(), example().to_dense())
    grad.copy_(torch.ones(6, 4))
    assert not grad.is_sparse
    assert same(grad.to_dense(), torch.ones(6, 4))
    assert grad.zero_() is grad
    assert not grad.is_sparse  # what was dense stays so
    assert same(grad.to_dense(), torch.zeros(6, 4))
    grad = example()
    grad.data = example().coalesce() * 3
    assert same(grad.to_dense(), example().to_dense() * 3)
    target = torch.zeros(6, 4)
    assert same(target.copy_(example()), example().to_dense())


def test_what_is_materialized_is_not_the_memory_of_autograd():
    grad = example()
    (part,) = grad.parts
    held = CompactGrad.of([part._replace(indices=part.indices[:2], value_index=None, scale=None)],
                   SHAPE, part.values)  # fmt: skip
    before = part.values.clone()
    for each in (grad, held, grad.detach(), held.clone()):
        each._values().zero_()
        each._indices().zero_()
    assert same(part.values, before)
    assert part.indices.tolist() == [3, 1, 3]


@loads_sparse_tensors
@pytest.mark.parametrize("materialized", [False, True])
def test_copies(materialized: bool):
    grad, wanted = example(), example().to_dense()
    if materialized:
        grad.to_dense()
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(grad),
        pickle.loads(pickle.dumps(grad)),
        torch.load(file, weights_only=True),
    ):
        assert type(copied) is Tensor
        assert copied.layout is torch.sparse_coo
        assert same(copied.to_dense(), wanted)


def looked_up(weight: nn.Parameter) -> Tensor:
    table = sparsestep.nn.EmbeddingBag(6, 4, mode="sum", _weight=weight)
    table.weight = weight
    return table(torch.tensor([[1, 3, 1]])).sin().sum()


def test_hooks_see_it_and_may_replace_it():
    weight = nn.Parameter(torch.randn(6, 4))
    looked_up(weight).backward()
    wanted, weight.grad = weight.grad.to_dense(), None
    seen: list[Any] = []
    after = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    held = weight.register_hook(lambda grad: seen.append(grad))
    looked_up(weight).backward()
    looked_up(weight).backward()
    assert all(isinstance(grad, CompactGrad) for grad in seen)
    assert same(seen[0].to_dense(), wanted)
    assert torch.allclose(weight.grad.to_dense(), 2 * wanted)
    held.remove()
    for change in (Tensor.coalesce, Tensor.to_dense, lambda grad: grad * 1):
        weight.grad = None
        handle = weight.register_hook(change)
        looked_up(weight).backward()
        assert torch.allclose(weight.grad.to_dense(), wanted)
        handle.remove()
    after.remove()


def test_a_gradient_that_is_held_is_not_changed_by_the_next():
    """Nor by what is done to it."""
    weight = nn.Parameter(torch.randn(6, 4))
    kept = []
    weight.register_hook(lambda grad: kept.append(grad))
    looked_up(weight).backward()
    wanted = plain(kept[0]).to_dense()
    looked_up(weight).backward()
    weight.grad.mul_(2)
    weight.grad._values().zero_()
    assert same(plain(kept[0]).to_dense(), wanted)


def test_autograd_grad_and_assignment():
    weight = nn.Parameter(torch.randn(6, 4))
    loss = looked_up(weight)
    (grad,) = torch.autograd.grad(loss, weight)
    assert isinstance(grad, CompactGrad)
    weight.grad = grad.clone()
    looked_up(weight).backward()
    assert torch.allclose(weight.grad.to_dense(), 2 * grad.coalesce().to_dense())
    weight.grad = torch.ones(6, 4)
    looked_up(weight).backward()
    assert type(weight.grad) is Tensor
    weight.grad = None


def test_a_gradient_that_does_not_fit_its_parameter():
    grad = example()
    for param, message in (
        (torch.zeros(5, 4), "must have the parameter's shape, (5, 4). Got (6, 4)."),
        (
            torch.zeros(6, 4, dtype=torch.complex64),
            "must have a compatible dtype. Got torch.float32.",
        ),
        (torch.zeros(6, 4, device="meta"), "must be on the parameter's device, meta. Got cpu."),
    ):
        with pytest.raises(sparsestep.InputError) as error:
            sparsestep.functional.sgd_(param, grad, lr=0.1)
        assert message in str(error.value)


def test_gradients_by_hand():
    weight = torch.zeros(6, 4)
    sparsestep.functional.sgd_(weight, example(), lr=0.5)
    assert same(weight, -0.5 * example().to_dense())
    optimizer = sparsestep.FunctionalSGD([weight], lr=0.5)
    optimizer.step([example()])
    assert same(weight, -example().to_dense())
