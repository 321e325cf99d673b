"""Parameters that are DTensors, as FSDP2 makes them: each process updates its local shard.

Two ranks share each parameter. Four are two such pairs, with the same rows each: HSDP.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optim import OPTIMIZERS
from tests.ranks import Rank, ranks
from tests.table import same_bits
from tests.torch_versions import SUMS_SHARDED_GRADIENTS, needs_means_over_gloo

ROWS = 7  # not the same number for both
BY_ROW = (sparsestep.RowwiseAdagrad, sparsestep.RowwiseAdam)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))


def mesh_of(rank: Rank) -> Any:
    from torch.distributed.tensor import init_device_mesh

    names = ("replicate", "shard")[2 - rank.world // 2 :]
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def sharded(rank: Rank, optimizer: Any) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Model(), mesh=mesh_of(rank))
    return model, make(optimizer, model.parameters())


def make(optimizer: Any, params: Any) -> Any:
    return optimizer(params, lr=0.05, **({"momentum": 0.9} if optimizer is sparsestep.SGD else {}))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range, times: float = 1.0) -> None:
    """With ``times`` the gradient, a power of two."""
    for step in steps:
        opt.zero_grad()
        ids = torch.tensor([step % ROWS, (step * 3 + 1) % ROWS, 2])
        (times * model(ids).square().sum()).backward()
        opt.step()


def assert_bits_of_one_process(model: Any, opt: Any, optimizer: Any) -> None:
    """Ranks have the same batch: the mean of their gradients is each one, the sum is twice that."""
    from torch.distributed.tensor import DTensor

    plain = Model()
    theirs = make(optimizer, plain.parameters())
    train(plain, theirs, range(6), times=2.0 if SUMS_SHARDED_GRADIENTS else 1.0)
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.full_tensor().detach(), its.detach())
    state = opt.state[model.table.weight]
    shards = {key: value for key, value in state.items() if isinstance(value, DTensor)}
    assert shards, "the state is sharded like the parameter"
    for key, value in shards.items():
        assert same_bits(value.full_tensor(), theirs.state[plain.table.weight][key])


def check_folder(rank: Rank, optimizer: Any) -> None:
    """Half of the training, a distributed checkpoint in a folder, and a new model that goes on."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict

    path = rank.folder / optimizer.__name__
    model, opt = sharded(rank, optimizer)
    assert model.table.weight.to_local().shape[0] == (4, 3)[rank.index % 2]
    train(model, opt, range(3))
    found, of_opt = state_dict.get_state_dict(model, opt)
    checkpoint.save({"model": found, "optimizer": of_opt}, checkpoint_id=path)
    model, opt = sharded(rank, optimizer)
    found, of_opt = state_dict.get_state_dict(model, opt)  # before the first step
    everything = {"model": found, "optimizer": of_opt}
    checkpoint.load(everything, checkpoint_id=path)
    state_dict.set_state_dict(
        model, opt, model_state_dict=found, optim_state_dict=everything["optimizer"]
    )
    train(model, opt, range(3, 6))
    assert_bits_of_one_process(model, opt, optimizer)


def check_placements(rank: Rank, optimizers: Any) -> None:
    """Divided along either dim, or copied, with masks; and as torch's AdamW does it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, shapes = mesh_of(rank), [(ROWS,), (ROWS, 4)]
    for optimizer, placement in itertools.product(optimizers, (Replicate(), Shard(0), Shard(1))):
        draw, is_torchs = torch.Generator().manual_seed(0), optimizer is torch.optim.AdamW
        where = [Replicate()] * (mesh.ndim - 1) + [placement]
        plain = nn.Parameter(torch.ones(ROWS, 4))
        param = nn.Parameter(distribute_tensor(torch.ones(ROWS, 4), mesh, where))
        theirs = make(optimizer, [plain])
        opt = make(sparsestep.AdamW if is_torchs else optimizer, [param])
        if optimizer in BY_ROW and placement == Shard(1):  # such a rule would see half a row
            param.grad = distribute_tensor(torch.ones(ROWS, 4), mesh, where)
            with pytest.raises(sparsestep.InputError):
                opt.step()
            assert torch.equal(param.full_tensor().detach(), torch.ones(ROWS, 4))
            continue
        for step in range(6):
            if not is_torchs:  # also before there is state
                mask = None if step == 4 else torch.rand(shapes[step % 2], generator=draw) < 0.5
                theirs.set_mask(plain, mask)
                opt.set_mask(param, mask)
            grad = torch.randn(ROWS, 4, generator=draw)
            plain.grad, param.grad = grad, distribute_tensor(grad, mesh, where)
            theirs.step()
            opt.step()
            whole = param.full_tensor().detach()
            if is_torchs:
                torch.testing.assert_close(whole, plain.detach())
            else:
                assert same_bits(whole, plain.detach()), (optimizer, placement, step)


@ranks(2)
def test_a_distributed_checkpoint_and_parameters_divided_by_hand(rank: Rank):
    for optimizer in (sparsestep.AdamW, sparsestep.RowwiseAdagrad, sparsestep.SGD):
        check_folder(rank, optimizer)
    check_placements(rank, [*OPTIMIZERS, torch.optim.AdamW])


@needs_means_over_gloo
@ranks(4)
def test_a_mesh_of_copies_and_shards(rank: Rank):
    """HSDP: two pairs of processes, each of which shares the whole model."""
    check_folder(rank, sparsestep.RowwiseAdagrad)
    check_placements(rank, [sparsestep.AdamW, sparsestep.RowwiseAdagrad])


@ranks(2)
def test_a_sparse_gradient_is_that_of_the_local_rows(rank: Rank):
    """Passed by hand."""
    from torch.distributed.tensor import Shard, distribute_tensor

    table = nn.Parameter(distribute_tensor(torch.zeros(ROWS, 4), mesh_of(rank), [Shard(0)]))
    opt = sparsestep.FunctionalSGD([table], lr=1.0)
    opt.step([sparsestep.IndexedGrad(torch.tensor([0, 2, 0]), torch.ones(3, 4))])
    moved = [-2.0, 0.0, -1.0, 0.0, -2.0, 0.0, -1.0]
    assert table.full_tensor().tolist() == [[value] * 4 for value in moved]
