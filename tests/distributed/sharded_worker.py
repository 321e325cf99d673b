"""One of the processes that share a model by FSDP2, so that its parameters are DTensors.

Two of them share each parameter. Four are two such pairs, with the same rows each: HSDP.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep
from sparsestep.rules import OPTIMIZERS
from tests.distributed import pair

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROWS = 7  # not the same number for both
HYBRID = [sparsestep.AdamW, sparsestep.RowwiseAdagrad, sparsestep.SGD]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def options_of(optimizer: type) -> dict[str, object]:
    return {"lr": 0.05, **({"momentum": 0.9} if optimizer is sparsestep.SGD else {})}


def train(
    model: nn.Module, opt: torch.optim.Optimizer, steps: range, *, times: float = 1.0
) -> None:
    """With ``times`` the gradient, a power of two."""
    for step in steps:
        opt.zero_grad()
        ids = torch.tensor([step % ROWS, (step * 3 + 1) % ROWS, 2])
        (times * model(ids).square().sum()).backward()
        opt.step()


def work(rank: int, meeting: str) -> pair.Results:
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    world = pair.world_size()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    names = ("replicate", "shard")[2 - world // 2 :]
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    found: pair.Results = {}
    for optimizer in OPTIMIZERS if world == 2 else HYBRID:
        model = fully_shard(Model(), mesh=mesh)
        opt = optimizer(model.parameters(), **options_of(optimizer))
        train(model, opt, range(3))
        saved = state_dict.get_optimizer_state_dict(model, opt)
        # A new optimizer goes on from the checkpoint of the old one.
        again = optimizer(model.parameters(), **options_of(optimizer))
        state_dict.set_optimizer_state_dict(model, again, saved)
        train(model, again, range(3, 6))
        record = again.state[model.table.weight]
        found[optimizer.__name__] = {
            "params": [p.full_tensor().detach() for p in model.parameters()],
            "state": {k: v.full_tensor() for k, v in record.items() if isinstance(v, DTensor)},
            "rows": model.table.weight.to_local().shape[0],
        }
    table = fully_shard(nn.Embedding(ROWS, 4), mesh=mesh).weight
    found["sparse"] = sparse_gradient(table)
    found["placed"] = placed(mesh)
    for optimizer in HYBRID:
        found["saved", optimizer.__name__] = saved_and_loaded(mesh, optimizer)
    dist.destroy_process_group()
    return found


def by_hand(step: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))


def placed(mesh: DeviceMesh) -> dict[str, list[Tensor]]:
    """Parameters that are divided along either dim, or copied; of all optimizers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    found = {}
    for placement in (Replicate(), Shard(0), Shard(1)):
        where = [Replicate()] * (mesh.ndim - 1) + [placement]
        whole = []
        for optimizer in OPTIMIZERS:
            param = nn.Parameter(distribute_tensor(torch.ones(ROWS, 4), mesh, where))
            opt = optimizer([param], **options_of(optimizer))
            for step in range(3):
                param.grad = distribute_tensor(by_hand(step), mesh, where)
                with contextlib.suppress(sparsestep.InputError):  # rules by rows need whole ones
                    opt.step()
            whole.append(param.full_tensor().detach())
        found[str(placement)] = whole
    return found


def saved_and_loaded(mesh: DeviceMesh, optimizer: type[torch.optim.Optimizer]) -> list[Tensor]:
    """Half of the training, a distributed checkpoint in a folder, and a new model that goes on."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    folder = Path(sys.argv[2]) / f"saved-{optimizer.__name__}"
    model = fully_shard(Model(), mesh=mesh)
    opt = optimizer(model.parameters(), **options_of(optimizer))
    train(model, opt, range(3))
    found, of_opt = state_dict.get_state_dict(model, opt)
    checkpoint.save({"model": found, "optimizer": of_opt}, checkpoint_id=folder)
    model = fully_shard(Model(), mesh=mesh)
    opt = optimizer(model.parameters(), **options_of(optimizer))
    found, of_opt = state_dict.get_state_dict(model, opt)  # before the first step
    everything = {"model": found, "optimizer": of_opt}
    checkpoint.load(everything, checkpoint_id=folder)
    state_dict.set_state_dict(
        model, opt, model_state_dict=found, optim_state_dict=everything["optimizer"]
    )
    train(model, opt, range(3, 6))
    return [param.full_tensor().detach() for param in model.parameters()]


def sparse_gradient(table: Tensor) -> Tensor:
    """A gradient for the rows that this process has, passed by hand."""
    with torch.no_grad():
        table.to_local().zero_()
    opt = sparsestep.FunctionalSGD([table], lr=1.0)
    opt.step([sparsestep.Touched(torch.tensor([0, 2, 0]), torch.ones(3, 4))])
    return table.full_tensor().detach()


if __name__ == "__main__":
    pair.main(work)
