"""What register() puts into torch's map, and what it leaves alone."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
import weakref
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
import sparsestep.distributed
from sparsestep.distributed._functional_optim import make_functional
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from tests.table import same_bits
from tests.torch_versions import COMPILES_DISTRIBUTED_OPTIMIZERS, uses_torchscript

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)


@pytest.fixture(scope="module")
def utils() -> ModuleType:
    """Torch's module that has the map, after register()."""
    sparsestep.distributed.register()
    return importlib.import_module("torch.distributed.optim.utils")


def gradient(step: int) -> Tensor:
    """Of a parameter of shape [6, 3]; row 5 is never touched, and row 1 twice."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.tensor([[1, step % 5, 1, 3]])
    return torch.sparse_coo_tensor(rows, torch.randn(4, 3, generator=generator), (6, 3))


@pytest.mark.parametrize("functional", FUNCTIONAL, ids=lambda cls: cls.__name__)
def test_torch_makes_functional_optimizers(
    utils: ModuleType, functional: type[FunctionalOptimizer]
):
    """Their steps have the bits of the ordinary optimizer's."""
    for args, options in (((0.1,), {}), ((), {"lr": 0.1})):
        opt = utils.as_functional_optim(functional.optimizer_class, *args, **options)
        assert type(opt) is functional
        ours, theirs = [torch.ones(6, 3) for _ in range(2)], [torch.ones(6, 3) for _ in range(2)]
        ordinary = functional.optimizer_class(theirs, lr=0.1)
        for number in range(3):
            grads = [gradient(number), gradient(number + 10).to_dense()]
            for mine, its, grad in zip(ours, theirs, grads, strict=True):
                its.grad = grad
                opt.step_param(mine, grad)
            ordinary.step()
        assert all(map(same_bits, ours, theirs))


class Holder(torch.nn.Module):
    """As DistributedOptimizer has it."""

    def __init__(self, optim: object) -> None:
        super().__init__()
        self.optim = optim

    @torch.jit.export
    def step(self, grads: list[Tensor | None]):
        self.optim.step(grads)


def held(optim: object) -> Any:
    """As this torch has it: compiled or not."""
    holder = Holder(optim)
    return torch.jit.script(holder) if COMPILES_DISTRIBUTED_OPTIMIZERS else holder


@uses_torchscript
def test_a_held_optimizer_lives_as_long_as_it_is_needed():
    made = []

    class Noted(sparsestep.FunctionalSGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    weight = torch.zeros(6, 3)
    opt = held(make_functional(Noted, [weight], lr=1.0))
    gc.collect()
    opt.step([torch.ones(6, 3)])
    opt.step([None])
    assert weight.unique().tolist() == [-1.0]
    del opt
    gc.collect()
    assert [each() for each in made] == [None]


def test_no_parameters_are_refused_as_torch_does(utils: ModuleType):
    with pytest.raises(ValueError, match="FunctionalSGD: optimizer got an empty parameter list"):
        utils.functional_optim_map[sparsestep.SGD]([], lr=0.1)


def test_registering_again_changes_nothing(utils: ModuleType):
    before = dict(utils.functional_optim_map)
    sparsestep.distributed.register()
    assert utils.functional_optim_map == before
    ours = {cls.optimizer_class for cls in FUNCTIONAL}
    others = {key: value for key, value in before.items() if key not in ours}
    assert others[torch.optim.AdamW] is utils._FunctionalAdamW
    assert all(key.__module__.startswith("torch.") for key in others)


def test_optimizers_of_the_same_parameters_wait_for_each_other():
    """Without that, some updates of the reference engine are lost; here in either order."""
    weights = [torch.zeros(200, 64), torch.zeros(200, 64)]
    grad = torch.sparse_coo_tensor(torch.arange(200)[None], torch.ones(200, 64), (200, 64))
    opts = [
        make_functional(sparsestep.FunctionalSGD, order, lr=1.0, engine="reference")
        for order in (weights, weights[::-1])
    ]
    threads = [
        threading.Thread(target=lambda opt=opt: [opt.step([grad, grad]) for _ in range(100)])
        for opt in opts
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert torch.stack(weights).unique().tolist() == [-200.0]


def test_a_torch_without_distributed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(sparsestep.InputError, match=r"built with torch\.distributed\. Got torch"):
        sparsestep.distributed.register()


def test_importing_it_imports_little():
    code = """
import sys, torch
before = set(sys.modules)
import sparsestep.distributed
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch.distributed")))
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
