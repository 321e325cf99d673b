"""Dense semantics where the parameter is not on the CPU, but its history is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.table import Variant, each_engine, running_on, same_bits

DECAY = {"weight_decay": 0.1, "decoupled_weight_decay": True}

# One for each way in which an idle row moves.
KINDS = [
    Variant(sparsestep.AdamW, {}),
    Variant(sparsestep.AdamW, {"eps": 1.0}),  # followed step by step
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.RowwiseAdam, {}),
    Variant(sparsestep.Adagrad, DECAY),
    Variant(sparsestep.SGD, {"momentum": 0.9, **DECAY}),
    Variant(sparsestep.SGD, {"momentum": 0.99999}),  # reaches back further than is kept
    Variant(sparsestep.Lion, {"weight_decay": 0.1}),
    Variant(sparsestep.Ftrl, {"l1": 0.1}),
]
each_kind = pytest.mark.parametrize("variant", KINDS, ids=str)


def trained(variant: Variant, device: torch.device, mask: Tensor | None = None) -> list[Tensor]:
    """Parameter and state after some steps, with sparse gradients and a dense one."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(9, 3, generator=generator).double().to(device))
    more: dict[str, Any] = {} if mask is None else {"mask": mask.to(device)}
    name = f"Functional{variant.cls.__name__}"
    options = {**variant.options, **more, "lr": 0.1, "semantics": "dense", "engine": "reference"}
    opt = getattr(sparsestep, name)([param], **options)
    for t in range(12):
        ids = torch.randint(0, 8, (4,), generator=generator)
        values = torch.randn(4, 3, generator=generator).double()
        opt.catch_up(param, ids if t % 2 else ids.to(device))  # wherever the ids are
        gradient: Any = sparsestep.IndexedGrad(ids.to(device), values.to(device))
        if t == 6:
            opt.catch_up()  # a dense gradient comes from reading all rows
            gradient = torch.zeros(9, 3).double().index_add_(0, ids, values).to(device)
        opt.step([gradient])
    opt.catch_up()
    return [param.detach(), *(v for k, v in opt.state[param].items() if k != "step")]


@each_kind
@pytest.mark.parametrize("masked", [False, True])
def test_a_parameter_elsewhere(variant: Variant, masked: bool):
    mask = torch.arange(9) % 3 > 0 if masked else None
    here = trained(variant, torch.device("cpu"), mask)
    with elsewhere():
        there = trained(variant, DEVICE, mask)
    assert len(here) == len(there)
    for ours, wanted in zip(there, here, strict=True):
        assert isinstance(ours, Elsewhere)
        # Not to the bit: the dense gradient is for torch's kernel, which is another one there.
        assert torch.allclose(ours.inner, wanted, rtol=1e-13, atol=1e-15)


def test_that_devices_do_not_mix_elsewhere():
    """Else the test above would say nothing."""
    with elsewhere():
        there, rows = torch.ones(3, 2).to(DEVICE), torch.tensor([0, 1])
        for mixed in (
            lambda: there[rows],
            lambda: torch.ones(3)[rows.to(DEVICE)],
            lambda: there + torch.ones(3, 2),
            lambda: torch.where(there > 0, torch.ones(3, 2), 0.0),
        ):
            with pytest.raises(AssertionError, match="mixes devices"):
                mixed()
        assert (there[rows.to(DEVICE)] + 1).cpu().tolist() == [[2.0, 2.0]] * 2


@each_engine
@each_kind
def test_another_default_device_changes_nothing(variant: Variant, engine: str):
    """Everything that is made is made where the parameter is, or on the CPU by name."""
    results = []
    for default in ("cpu", "meta"):
        with torch.device("cpu"):
            param = torch.nn.Parameter(torch.ones(6, 2))
            grads = [torch.sparse_coo_tensor([[t]], torch.ones(1, 2), (6, 2)) for t in range(5)]
            rows = [torch.tensor([t]) for t in range(5)]
        with running_on(engine) as name, torch.device(default):
            opt = variant([param], lr=0.1, semantics="dense", engine=name)
            for grad, row in zip(grads, rows, strict=True):
                opt.catch_up(param, row)
                param.grad = grad
                opt.step()
            opt.catch_up()
        results.append(param.detach())
    assert same_bits(*results)
