"""DistributedOptimizer: tables in another process, trained over RPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim import OPTIMIZERS
from tests.ranks import Rank, ranks
from tests.table import same_bits
from tests.torch_versions import COMPILES_DISTRIBUTED_OPTIMIZERS

if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
    pytest.skip("needs RPC", allow_module_level=True)

import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

ROWS, STEPS = 12, 5
SERVER = "rank-1"


class Tables(torch.nn.Module):
    """Two tables; a batch uses the first one, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.second = torch.nn.Embedding(ROWS, 4, sparse=True)
        fill(self)

    def forward(self, ids: Tensor, both: bool) -> Tensor:
        return self.first(ids) * self.second(ids.flip(0)) if both else self.first(ids)

    def rrefs(self) -> list[Any]:
        return [rpc.RRef(param) for param in self.parameters()]

    def result(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def fill(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
    return module


def batch(step: int) -> Tensor:
    """Ids with repetitions; the last row never comes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS - 1, (8,), generator=generator)


def options_of(cls: Any) -> dict[str, Any]:
    return {"lr": 0.01, **({"momentum": 0.9} if cls is sparsestep.SGD else {})}


def in_one_process(cls: Any, both: Callable[[int], bool]) -> list[Tensor]:
    tables, layer = Tables(), fill(torch.nn.Linear(4, 2))
    opt = cls([*tables.parameters(), *layer.parameters()], **options_of(cls))
    for step in range(STEPS):
        opt.zero_grad()
        layer(tables(batch(step), both(step))).square().sum().backward()
        opt.step()
    return [*tables.result(), *(param.detach() for param in layer.parameters())]


def over_rpc(cls: Any, both: Callable[[int], bool], *, functional: bool) -> list[Tensor]:
    """Tables there, layer here, one optimizer of both."""
    from torch.distributed.optim import DistributedOptimizer

    tables, layer = rpc.remote(SERVER, Tables), fill(torch.nn.Linear(4, 2))
    rrefs = [*tables.rpc_sync().rrefs(), *(rpc.RRef(param) for param in layer.parameters())]
    opt = DistributedOptimizer(cls, rrefs, **options_of(cls))
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
    assert all(map(same_bits, ours, theirs)), cls
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
            for cls in OPTIMIZERS:
                assert_trains_alike(cls, lambda step: step % 2 == 0, functional=True)
            assert_errors_arrive()
    finally:
        rpc.shutdown()
