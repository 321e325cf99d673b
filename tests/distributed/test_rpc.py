"""DistributedOptimizer: tables in another process, trained over RPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import sparsestep
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from tests.ranks import on_ranks
from tests.table import each_optimizer, same_bits
from tests.torch_versions import COMPILES_DISTRIBUTED_OPTIMIZERS

if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
    pytest.skip("needs RPC", allow_module_level=True)

import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

pytestmark = pytest.mark.xdist_group(__name__)

Results = dict[Any, Any]
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


def work(rank: int, world: int, folder: Path) -> Results:
    rpc.init_rpc(
        (TRAINER, SERVER)[rank],
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=(folder / "rpc").as_uri(), num_worker_threads=4, rpc_timeout=60
        ),
    )
    found = train() if rank == 0 else {}
    rpc.shutdown()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the trainer has found."""
    results: list[Results] = on_ranks(2, work, tmp_path_factory.mktemp("rpc"))
    return results[0]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


@each_optimizer
def test_training_over_rpc_is_that_of_one_process(found: Results, optimizer: type[RuleOptimizer]):
    """Also of a table that only every other batch uses, and of a layer that is here."""
    alone, over_rpc = found["trained", optimizer.__name__]
    before = Tables().result()
    assert not any(same_bits(*pair) for pair in zip(before, over_rpc, strict=False))
    assert equal(over_rpc, alone)


def test_without_register_torch_steps_through_param_grad(found: Results):
    alone, over_rpc = found["not registered"]
    assert equal(over_rpc, alone)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "two optimizers"])
def test_no_update_of_trainers_at_once_is_lost(found: Results, engine: str, shared: bool):
    assert found["at once", engine, shared].unique().tolist() == [-2 * TIMES]


def test_what_the_other_process_refuses_is_said(found: Results):
    assert "SGD: Invalid learning rate: -1.0" in found["refusal"]
    assert "SGD: param 0 of group 0: differentiable=True" in found["refusal of a step"]


def test_there_are_batches_that_use_one_table_only():
    assert {now_and_then(step) for step in range(2)} == {True, False}
    assert len(batch(0).unique()) < len(batch(0))
