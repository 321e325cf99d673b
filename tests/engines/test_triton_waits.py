"""How often the host waits for the device: once in a step, to check indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import sparsestep
from sparsestep.engines import triton as engine
from tests.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.table import needs_triton, same_bits

pytestmark = needs_triton

# What tells the host something about values, or has a size that depends on them.
WAITS = (
    *("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select"),
    *("aten::unique_consecutive", "aten::unique_dim", "aten::_unique2", "aten::_unique"),
    *("aten::equal", "aten::is_nonzero", "aten::repeat_interleave", "aten::bincount"),
)
# Sums in no particular order on a GPU.
UNORDERED = ("aten::index_add_", "aten::index_put_", "aten::scatter_add_")


class Watching(TorchDispatchMode):
    """Takes note of every operation on the other device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if any(isinstance(t, Elsewhere) for t in tensors):
            self.operations.append(name)
            to_host = name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu")
            if to_host or name in WAITS:
                self.waits.append(name)
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def _launched_here(monkeypatch: pytest.MonkeyPatch):
    """Kernels for the other device run in the interpreter."""
    call = engine._call

    def unwrapped(kernel: Any, grid: Any, given: Any, how: Any, warm_up: bool) -> None:
        given = tuple(t.inner if isinstance(t, Elsewhere) else t for t in given)
        call(kernel, grid, given, how, warm_up)

    monkeypatch.setattr(engine, "_call", unwrapped)


def trained(optimizer: Any, device: torch.device, **options: Any) -> tuple[list[Tensor], Watching]:
    """Two tables after three steps, and what the last one did."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(9, 4, generator=draw).to(device) for _ in range(2)]
    made = optimizer([torch.nn.Parameter(p) for p in params], **options)
    for _ in range(3):
        grads = [
            sparsestep.IndexedGrad(
                torch.randint(0, 9, (70,), generator=draw).to(device),
                torch.randn(70, 4, generator=draw).to(device),
            )
            for _ in params
        ]
        with Watching() as seen:
            made.step(grads)
    return params, seen


@pytest.mark.parametrize("name", ["Adagrad", "SparseAdam", "RowwiseAdagrad", "SGD"])
def test_a_step_waits_once_for_all_parameters_and_the_reference_engine_once_for_each(name: str):
    optimizer = getattr(sparsestep, f"Functional{name}")
    with elsewhere():
        there, seen = trained(optimizer, DEVICE, engine="triton")
        tables, others = trained(optimizer, DEVICE, engine="reference")
    assert seen.waits == ["aten::_to_copy"]
    assert others.waits == ["aten::_to_copy"] * len(tables)
    assert not set(seen.operations) & set(UNORDERED)
    assert not set(others.operations) & {"aten::index_add_", "aten::scatter_add_"}
    assert_trained_here(there, optimizer)


def assert_trained_here(there: list[Tensor], optimizer: Any) -> None:
    here, _ = trained(optimizer, torch.device("cpu"), engine="triton")
    for ours, wanted in zip(there, here, strict=True):
        assert isinstance(ours, Elsewhere)
        assert same_bits(ours.inner, wanted)


def capturable(params: Any, **options: Any) -> Any:
    """SGD, which has no count that a step would have to read, with an option of other classes."""
    optimizer = sparsestep.FunctionalSGD(params, **options)
    inner = optimizer.optimizer
    inner.option_names = (*inner.option_names, "capturable")
    optimizer.param_group["capturable"] = True
    return optimizer


def test_a_capturable_step_never_waits():
    with elsewhere():
        there, seen = trained(capturable, DEVICE, engine="triton")
    assert seen.waits == []
    assert_trained_here(there, sparsestep.FunctionalSGD)


def test_a_capturable_step_writes_nothing_if_an_index_is_bad(monkeypatch: pytest.MonkeyPatch):
    """Not even to the other parameter; on a device, the assertion fails later."""
    told: list[bool] = []
    monkeypatch.setattr(engine, "assert_async", lambda ok, words: told.append(bool(ok)))
    params = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    grads = [sparsestep.IndexedGrad(torch.tensor([0, i]), torch.ones(2, 3)) for i in (1, 4)]
    capturable(params, engine="triton").step(grads)
    assert told == [False]
    assert all(bool((param == 1).all()) for param in params)


def test_what_waits_is_seen():
    """Else the test above would say nothing."""
    with elsewhere():
        there = torch.tensor([1.0, 0.0]).to(DEVICE)
        for wait in (there.max().item, there.nonzero, there.cpu, lambda: bool(there.any())):
            with Watching() as seen:
                wait()
            assert seen.waits
