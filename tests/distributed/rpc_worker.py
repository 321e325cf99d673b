"""One of two processes: a trainer, and whoever has the tables that it trains, over RPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc
from torch.optim import Optimizer

import sparsestep
import sparsestep.distributed
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.rules import OPTIMIZERS
from tests.distributed.pair import Results, main
from tests.torch_versions import COMPILES_DISTRIBUTED_OPTIMIZERS

ROWS, STEPS, TRAINER, SERVER = 12, 5, "trainer", "server"
TIMES = 10  # how often each of several threads steps
OPTIONS: dict[type[Optimizer], dict[str, Any]] = {sparsestep.SGD: {"lr": 0.01, "momentum": 0.9}}


class Tables(torch.nn.Module):
    """Two tables; a batch uses the first one, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.second = torch.nn.Embedding(ROWS, 4, sparse=True)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))

    def forward(self, ids: Tensor, both: bool) -> Tensor:
        return self.first(ids) * self.second(ids.flip(0)) if both else self.first(ids)

    def rrefs(self) -> list[Any]:
        return [rpc.RRef(param) for param in self.parameters()]

    def result(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


class Counter(torch.nn.Module):
    """A table that counts down, for SGD and a learning rate of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(200, 64, sparse=True)
        torch.nn.init.zeros_(self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)

    def rrefs(self) -> list[Any]:
        return [rpc.RRef(self.table.weight)]

    def result(self) -> Tensor:
        return self.table.weight.detach().clone()


def new_layer() -> torch.nn.Linear:
    layer = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
    return layer


def batch(step: int) -> Tensor:
    """Ids with repetitions; the last row never comes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, ROWS - 1, (8,), generator=generator)


def now_and_then(step: int) -> bool:
    """Whether a batch uses both tables."""
    return step % 2 == 0


def always(step: int) -> bool:
    return True


def options_of(cls: type[Optimizer]) -> dict[str, Any]:
    return OPTIONS.get(cls, {"lr": 0.01})


def alone(cls: type[RuleOptimizer], both: Callable[[int], bool]) -> list[Tensor]:
    """The same training in one process, with an ordinary optimizer."""
    tables, layer = Tables(), new_layer()
    opt = cls([*tables.parameters(), *layer.parameters()], **options_of(cls))
    for step in range(STEPS):
        opt.zero_grad()
        layer(tables(batch(step), both(step))).square().sum().backward()
        opt.step()
    return [*tables.result(), *(param.detach() for param in layer.parameters())]


def over_rpc(
    cls: type[RuleOptimizer], both: Callable[[int], bool], *, functional: bool
) -> list[Tensor]:
    """Tables there, layer here, one optimizer of both."""
    from torch.distributed.optim import DistributedOptimizer

    tables, layer = rpc.remote(SERVER, Tables), new_layer()
    rrefs = [*tables.rpc_sync().rrefs(), *(rpc.RRef(param) for param in layer.parameters())]
    opt = DistributedOptimizer(cls, rrefs, **options_of(cls))
    assert opt.is_functional_optim == functional
    for step in range(STEPS):
        with dist_autograd.context() as context:
            rows = tables.rpc_sync().forward(batch(step), both(step))
            dist_autograd.backward(context, [layer(rows).square().sum()])
            opt.step(context)
    return [*tables.rpc_sync().result(), *(param.detach() for param in layer.parameters())]


def at_once(engine: str, *, shared: bool) -> Tensor:
    """Two threads count down the same table, with one optimizer or with one each."""
    from torch.distributed.optim import DistributedOptimizer

    counter = rpc.remote(SERVER, Counter)
    ids = torch.arange(200).repeat(4)
    options = {"lr": 1.0, "engine": engine}
    opts = [
        DistributedOptimizer(sparsestep.SGD, counter.rpc_sync().rrefs(), **options)
        for _ in range(1 if shared else 2)
    ]
    failed = []

    def train(opt: DistributedOptimizer) -> None:
        try:
            for _ in range(TIMES):
                with dist_autograd.context() as context:
                    dist_autograd.backward(context, [counter.rpc_sync().forward(ids).sum() / 4])
                    opt.step(context)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(opt,)) for opt in (opts[0], opts[-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    result: Tensor = counter.rpc_sync().result()
    return result


def refusal() -> str:
    from torch.distributed.optim import DistributedOptimizer

    rrefs = rpc.remote(SERVER, Counter).rpc_sync().rrefs()
    try:
        DistributedOptimizer(sparsestep.SGD, rrefs, lr=-1.0)
    except ValueError as error:
        return str(error)
    return "none"


def refusal_of_a_step() -> str:
    """The gradient is sparse, which is not what ``differentiable`` can do."""
    from torch.distributed.optim import DistributedOptimizer

    counter = rpc.remote(SERVER, Counter)
    opt = DistributedOptimizer(sparsestep.SGD, counter.rpc_sync().rrefs(), differentiable=True)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [counter.rpc_sync().forward(torch.arange(3)).sum()])
        # An InputError is a ValueError; out of TorchScript, all errors come as this.
        expected = RuntimeError if COMPILES_DISTRIBUTED_OPTIMIZERS else ValueError
        try:
            opt.step(context)
        except expected as error:
            return str(error)
    return "none"


def train() -> Results:
    found: Results = {}
    # Torch then sets param.grad, and leaves it there for batches that do not use the table.
    found["not registered"] = (
        alone(sparsestep.SparseAdam, always),
        over_rpc(sparsestep.SparseAdam, always, functional=False),
    )
    sparsestep.distributed.register()
    for cls in OPTIMIZERS:
        found["trained", cls.__name__] = (
            alone(cls, now_and_then),
            over_rpc(cls, now_and_then, functional=True),
        )
    for engine in ("native", "reference"):
        for shared in (True, False):
            found["at once", engine, shared] = at_once(engine, shared=shared)
    found["refusal"] = refusal()
    found["refusal of a step"] = refusal_of_a_step()
    return found


def work(rank: int, meeting: str) -> Results:

    rpc.init_rpc(
        (TRAINER, SERVER)[rank],
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=meeting, num_worker_threads=4, rpc_timeout=60
        ),
    )
    found = train() if rank == 0 else {}
    rpc.shutdown()
    return found


if __name__ == "__main__":
    main(work)
