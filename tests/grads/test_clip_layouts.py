"""Clipping of masked tensors; what cannot be clipped is refused before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.masked import masked_tensor
from torch.nn import utils

from sparsestep.errors import InputError
from sparsestep.grads.clip import clip_grad_norm_, clip_grad_value_
from tests.grads.clipping import NORM_TYPES, coo, with_grad
from tests.table import same_bits


def bits(params: list[Tensor]) -> list[Tensor]:
    grads = [param.grad for param in params]
    return [(grad._values() if grad.is_sparse else grad).clone() for grad in grads]


# All or nothing


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_non_finite_norm_is_an_error_if_asked_for(bad: float, norm_type: float):
    params = [with_grad(coo([[0, 0]], [1.0, bad], (3,))), with_grad(torch.ones(2))]
    before = bits(params)
    with pytest.raises(RuntimeError) as theirs:
        utils.clip_grad_norm_(with_grad(torch.tensor([bad])), 1.0, norm_type, True)
    with pytest.raises(RuntimeError) as ours:
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
    assert all(map(same_bits, bits(params), before))
    total = clip_grad_norm_(params, 1.0, norm_type)
    assert math.isnan(total) if math.isnan(bad) else math.isinf(total)


BAD = {
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "Got layout torch.sparse_csr"),
    "masked integer": (
        lambda: masked_tensor(torch.eye(3).long(), torch.eye(3) > 0),
        "Got torch.int64",
    ),
    "integer": (lambda: torch.eye(3).long().to_sparse(), "Got torch.int64"),
    "beyond": (lambda: coo([[0, 1], [1, 3]], [1.0, 1.0], (3, 3)), r"dim 1 .* Got 3\. Check"),
    "below": (lambda: coo([[0, -1]], torch.ones(2, 3), (3, 3)), r"dim 0 .* Got -1\. Check"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("function", [clip_grad_norm_, clip_grad_value_])
@pytest.mark.parametrize("kind", BAD)
def test_bad_gradients_are_refused_before_anything_is_changed(function: Callable, kind: str):
    make, message = BAD[kind]
    bad = make() if kind == "csr" else torch.zeros(3, 3).to(make().dtype)
    bad.grad = make()
    params = [with_grad(coo([[0, 0]], [2.0, 3.0], (3,))), with_grad(torch.ones(2))]
    before = bits(params)
    with pytest.raises(InputError, match=f"{function.__name__}: param 3: .*{message}"):
        function([*params, torch.zeros(1), bad], 0.1)
    assert all(map(same_bits, bits(params), before))


@pytest.mark.parametrize("clip_value", [-1.0, math.nan])
def test_what_is_not_held_cannot_be_moved(clip_value: float):
    with pytest.raises(InputError, match=f"clip_value must be at least 0.* Got {clip_value}"):
        clip_grad_value_(with_grad(coo([[0]], [1.0], (3,))), clip_value)


# Masked tensors


def masked_eye(layout: torch.layout) -> tuple[Tensor, Tensor]:
    """A masked gradient, and the dense one that it stands for; one of its two values is held."""
    data = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    mask = torch.tensor([[True, False], [False, False]])
    if layout is not torch.strided:
        data = torch.tensor([[3.0, 0.0], [4.0, 0.0]]).to_sparse(layout=layout)
        held = torch.tensor([True, False])
        if layout is torch.sparse_coo:
            mask = torch.sparse_coo_tensor(data.indices(), held, data.shape)
        else:
            mask = torch.sparse_csr_tensor(
                data.crow_indices(), data.col_indices(), held, data.shape
            )
    return masked_tensor(data, mask), torch.tensor([[3.0, 0.0], [0.0, 0.0]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_what_a_masked_tensor_holds_is_clipped(layout: torch.layout, norm_type: float):
    """Together with others; and the norm of what it holds decides, for it is not more."""
    for function, args in ((clip_grad_norm_, (0.5, norm_type)), (clip_grad_value_, (0.25,))):
        grad, dense = masked_eye(layout)
        ours, theirs = torch.zeros(2, 2), torch.zeros(2, 2)
        if layout is torch.sparse_csr:  # torch takes such a gradient for such a parameter alone
            ours = ours.to_sparse_csr()
        ours.grad, theirs.grad = grad, dense
        both = [[each, with_grad(torch.tensor([2.0, -1.0]))] for each in (ours, theirs)]
        found = function(both[0], *args)
        expected = getattr(utils, function.__name__)(both[1], *args)
        if expected is not None:
            torch.testing.assert_close(found, expected)
        assert ours.grad is grad
        torch.testing.assert_close(
            float(grad.get_data().to_dense()[0, 0]), float(theirs.grad[0, 0])
        )
        assert same_bits(both[0][1].grad, both[1][1].grad)
    with pytest.raises(InputError, match="param 0: clip_value must be at least 0"):
        clip_grad_value_(both[0], -1.0)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support is in beta state")
@pytest.mark.parametrize("function", [clip_grad_norm_, clip_grad_value_])
@pytest.mark.parametrize("convert", [Tensor.to_sparse_csr, lambda t: t.to_sparse_bsr((2, 2))])
def test_the_remedy_for_other_layouts_works(function: Callable, convert: Callable):
    param = convert(torch.eye(4))
    param.grad = convert(torch.eye(4))
    with pytest.raises(InputError, match=r"Convert it with \.to_sparse_coo\(\)"):
        function(param, 0.5)
    function(with_grad(param.grad.to_sparse_coo()), 0.5)
