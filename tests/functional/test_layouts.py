"""The functions with dense gradients, and with every other layout."""

from __future__ import annotations

import pytest
import torch

from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import Gradient
from tests.functional.cases import (
    BASIC,
    MORE,
    SHAPE,
    STEPS,
    F,
    Function,
    assert_same_bits,
    each_variant,
    start,
)
from tests.table import each_engine, running_on, same_bits

TORCH = [f for f in [*BASIC, *MORE] if f.cls.has_torch_kernel]
TORCH = [f for f in TORCH if not f.options.keys() & set(f.cls.group_options)]


@pytest.mark.parametrize("function", TORCH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_engine
def test_dense_gradients_have_torchs_numbers_but_for_rounding(
    function: Function, dtype: torch.dtype, engine: str
):
    param, kept = start(dtype), torch.nn.Parameter(start(dtype))
    state = function.state(param)
    theirs = getattr(torch.optim, function.cls.__name__)
    opt = theirs([kept], **function.options, **function.class_only)
    generator = torch.Generator().manual_seed(2)
    with running_on(engine) as name:
        for step in range(1, STEPS + 1):
            kept.grad = torch.randn(SHAPE, generator=generator, dtype=dtype)
            function(param, kept.grad, state, step=step, engine=name)
            opt.step()
    few = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(param, kept.detach(), rtol=few, atol=few)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, opt.state[kept][name], rtol=few, atol=few)


@each_variant
@each_engine
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_every_layout_of_the_same_gradient(function: Function, engine: str):
    """Compressed, masked or by hand: what is touched decides, not how it is written down."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(4))
    where = torch.rand(SHAPE, generator=torch.Generator().manual_seed(5)) < 0.4
    sparse = (values * where).to_sparse_coo()
    flat = where.reshape(-1).nonzero().squeeze(1)
    layouts: dict[str, Gradient] = {
        "coo": sparse,
        "csr": sparse.to_sparse_csr(),
        "csc": sparse.to_sparse_csc(),
        "masked": torch.masked.masked_tensor(values, where),
        "by hand": IndexedGrad(flat, values.reshape(-1)[flat], 35, 1),
    }
    results = {}
    with running_on(engine) as name:
        for layout, grad in layouts.items():
            param = start()
            state = function.state(param)
            function(param, grad, state, engine=name)
            results[layout] = [param, *state.values()]
    for layout in layouts:
        assert_same_bits(results["coo"], results[layout])
    assert same_bits(results["coo"][0][~where], start()[~where])


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, False, True, True]])])
def test_one_slot_may_be_written_as_true(mask: torch.Tensor | None):
    param, total = torch.zeros(1, 4), torch.zeros(1, 4)
    grad = IndexedGrad(torch.tensor([0]), torch.ones(1, 4), True, 4)
    F.adagrad_(param, grad, total, step=1, lr=0.5, mask=mask)
    expected = -0.5 * torch.ones(1, 4) if mask is None else -0.5 * mask.float()
    torch.testing.assert_close(param, expected)
