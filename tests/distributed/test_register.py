"""``register()``: torch makes our functional optimizers, also for tables in another process."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
import sparsestep.distributed
from sparsestep.distributed._functional_optim import make_functional
from sparsestep.optim import FUNCTIONAL
from tests.ranks import Rank, ranks
from tests.table import all_same_bits, same_bits
from tests.torch_versions import COMPILES_DISTRIBUTED_OPTIMIZERS, uses_torchscript

if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
    pytest.skip("needs RPC", allow_module_level=True)

import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc


def test_torch_makes_functional_optimizers(monkeypatch: pytest.MonkeyPatch):
    sparsestep.distributed.register()
    utils = importlib.import_module("torch.distributed.optim.utils")
    before = dict(utils.functional_optim_map)
    sparsestep.distributed.register()  # once more changes nothing
    assert utils.functional_optim_map == before
    assert before[torch.optim.AdamW] is utils._FunctionalAdamW
    for functional in FUNCTIONAL:
        for args, options in (((0.1,), {}), ((), {"lr": 0.1})):
            opt = utils.as_functional_optim(functional.optimizer_class, *args, **options)
            assert type(opt) is functional
            ours, theirs = torch.ones(6, 3), torch.ones(6, 3)
            theirs.grad = torch.ones(6, 3).to_sparse(1)
            opt.step_param(ours, theirs.grad)
            functional.optimizer_class([theirs], lr=0.1).step()
            assert same_bits(ours, theirs)
    with pytest.raises(ValueError, match="FunctionalSGD: optimizer got an empty parameter list"):
        utils.functional_optim_map[sparsestep.SGD]([], lr=0.1)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(sparsestep.InputError, match=r"built with torch\.distributed\. Got torch"):
        sparsestep.distributed.register()


class Holder(torch.nn.Module):
    """As DistributedOptimizer has it."""

    def __init__(self, optim: object) -> None:
        super().__init__()
        self.optim = optim

    @torch.jit.export
    def step(self, grads: list[Tensor | None]):
        self.optim.step(grads)


@uses_torchscript
def test_a_held_optimizer_lives_as_long_as_it_is_needed():
    made = []

    class Noted(sparsestep.FunctionalSGD):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    weight = torch.zeros(6, 3)
    opt: Any = Holder(make_functional(Noted, [weight], lr=1.0))
    if COMPILES_DISTRIBUTED_OPTIMIZERS:
        opt = torch.jit.script(opt)
    gc.collect()
    opt.step([torch.ones(6, 3)])
    opt.step([None])
    assert weight.unique().tolist() == [-1.0]
    del opt
    gc.collect()
    assert [each() for each in made] == [None]


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


# Tables in another process, trained over RPC

ROWS, STEPS = 12, 4
SERVER = "rank-1"


class Tables(torch.nn.Module):
    """Two tables; a batch uses the first one, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.second = torch.nn.Embedding(ROWS, 4, sparse=True)

    def forward(self, ids: Tensor, both: bool) -> Tensor:
        return self.first(ids) * self.second(ids.flip(0)) if both else self.first(ids)

    def rrefs(self) -> list[Any]:
        return [rpc.RRef(param) for param in self.parameters()]

    def result(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def new_layer() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 2)


def batch(step: int) -> Tensor:
    """Ids with repetitions; the last row never comes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS - 1, (8,), generator=generator)


def in_one_process(cls: Any, both: Callable[[int], bool]) -> list[Tensor]:
    tables, layer = Tables(), new_layer()
    opt = cls([*tables.parameters(), *layer.parameters()], lr=0.01)
    for step in range(STEPS):
        opt.zero_grad()
        layer(tables(batch(step), both(step))).square().sum().backward()
        opt.step()
    return [*tables.result(), *(param.detach() for param in layer.parameters())]


def over_rpc(cls: Any, both: Callable[[int], bool], *, functional: bool) -> list[Tensor]:
    """Tables there, layer here, one optimizer of both."""
    from torch.distributed.optim import DistributedOptimizer

    tables, layer = rpc.remote(SERVER, Tables), new_layer()
    rrefs = [*tables.rpc_sync().rrefs(), *(rpc.RRef(param) for param in layer.parameters())]
    opt = DistributedOptimizer(cls, rrefs, lr=0.01)
    assert opt.is_functional_optim == functional
    for step in range(STEPS):
        with dist_autograd.context() as context:
            rows = tables.rpc_sync().forward(batch(step), both(step))
            dist_autograd.backward(context, [layer(rows).square().sum()])
            opt.step(context)
    return [*tables.rpc_sync().result(), *(param.detach() for param in layer.parameters())]


def assert_errors_arrive() -> None:
    """Of a wrong option, and of a step: ``differentiable`` takes no sparse gradient."""
    from torch.distributed.optim import DistributedOptimizer

    tables = rpc.remote(SERVER, Tables)
    rrefs = tables.rpc_sync().rrefs()
    with pytest.raises(ValueError, match=r"SGD: Invalid learning rate: -1\.0"):
        DistributedOptimizer(sparsestep.SGD, rrefs, lr=-1.0)
    opt = DistributedOptimizer(sparsestep.SGD, rrefs, differentiable=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [tables.rpc_sync().forward(batch(0), False).sum()])
        # An InputError is a ValueError; out of TorchScript, all errors come as this.
        expected = RuntimeError if COMPILES_DISTRIBUTED_OPTIMIZERS else ValueError
        with pytest.raises(expected, match="SGD: param 0 of group 0: differentiable=True"):
            opt.step(context)


def assert_trains_alike(cls: Any, both: Callable[[int], bool], *, functional: bool) -> None:
    ours, theirs = over_rpc(cls, both, functional=functional), in_one_process(cls, both)
    assert all_same_bits(ours, theirs), cls
    assert not any(same_bits(*pair) for pair in zip(Tables().result(), ours, strict=False))


@ranks(2, fresh=True)  # on which register() has not been called
def test_training_over_rpc_is_that_of_one_process(rank: Rank):
    """Also of a table that only every other batch uses, and of a layer that is here."""
    where = (rank.folder / "rpc").as_uri()
    backend = rpc.TensorPipeRpcBackendOptions(
        init_method=where, num_worker_threads=4, rpc_timeout=60
    )
    name = f"rank-{rank.index}"
    rpc.init_rpc(name, rank=rank.index, world_size=2, rpc_backend_options=backend)
    try:
        if rank.index == 0:
            # Torch sets param.grad, and leaves it there for batches that do not use the table.
            assert_trains_alike(sparsestep.SparseAdam, lambda step: True, functional=False)
            sparsestep.distributed.register()
            for cls in (sparsestep.AdamW, sparsestep.RowwiseAdagrad):
                assert_trains_alike(cls, lambda step: step % 2 == 0, functional=True)
            assert_errors_arrive()
    finally:
        rpc.shutdown()
