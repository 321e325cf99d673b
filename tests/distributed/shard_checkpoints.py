"""Checkpoints that one number of ranks saves and another loads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sparsestep
from tests.distributed import pair
from tests.distributed.runs import Batch, Case, Tables, batch_of, collected, joined
from tests.table import EVERYTHING

HALF, WHOLE = range(2), range(2, 4)
GLOBAL = 3  # batches of each step, whatever the number of ranks

ALL = {
    "rows": Case("rows"),
    "tables": Case("tables", make=sparsestep.SparseAdam),
    "copy": Case("copy", make=sparsestep.RowwiseAdagrad),
    "dense": Case("rows", semantics="dense", make=sparsestep.AdamW),
    "per row": Case("rows", make=sparsestep.RowwiseAdam, options=(("bias_correction", "per_row"),)),
}
CASES = ALL if EVERYTHING else {name: ALL[name] for name in ("rows", "tables")}
# What a checkpoint of each is loaded into as well.
OTHER = {"rows": "tables", "tables": "rows", "copy": "rows", "dense": "copy", "per row": "rows"}


def share_of(step: int, rank: int, world: int) -> Batch:
    """A rank's part of the step's batches; the whole is the same for all numbers of ranks."""
    batches = [batch_of(step, number, 4) for number in range(GLOBAL)]
    if world == 1:
        return joined(batches)
    per = -(-GLOBAL // world)
    mine = batches[rank * per : (rank + 1) * per]
    return joined(mine) if mine else batch_of(step, 0, 0)


def go_on(case: Case, model: Tables, opt: Any, steps: range, rank: int, world: int) -> Any:
    norms = [case.step(model, opt, share_of(step, rank, world)) for step in steps]
    return collected(model, opt, norms)


def begin(case: Case, kind: str, mesh: Any = None) -> tuple[Tables, Any]:
    model = Tables(case.dtype)
    if kind != "plain":
        sparsestep.distributed.shard(model, mesh, kind, reduce=case.reduce, order=case.order)
    else:
        sparsestep.nn.fuse(model)
    return model, case.optimizer(model)


def save_half(folder: Path, rank: int, world: int, mesh: Any = None) -> None:
    """Train for half of the steps and save."""
    for name, case in CASES.items():
        model, opt = begin(case, case.kind, mesh)
        go_on(case, model, opt, HALF, rank, world)
        if name == "rows":  # training goes on while it is saved, and must not be seen
            saving = sparsestep.distributed.async_save(folder / f"{name}-{world}", model, opt)
            go_on(case, model, opt, WHOLE, rank, world)
            saving.result()
        else:
            sparsestep.distributed.save(folder / f"{name}-{world}", model, opt)


def load_half(
    folder: Path, rank: int, world: int, saved_by: int, mesh: Any = None
) -> dict[Any, Any]:
    """Load what others have saved, in two ways, and train to the end."""
    found: dict[Any, Any] = {}
    for name, case in CASES.items():
        for kind in (case.kind, OTHER[name]):
            model, opt = begin(case, kind, mesh)
            sparsestep.distributed.load(folder / f"{name}-{saved_by}", model, opt)
            found[name, kind, saved_by, world] = go_on(case, model, opt, WHOLE, rank, world)
    return found


def work(rank: int, meeting: str) -> dict[Any, Any]:
    """The first two of three ranks save, all load and save, the first two load."""
    folder = Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3)
    two = DeviceMesh("cpu", [0, 1])
    found: dict[Any, Any] = {}
    if rank < 2:
        save_half(folder, rank, 2, two)
    dist.barrier()
    save_half(folder, rank, 3)
    for saved_by in (1, 2, 3):
        found.update(load_half(folder, rank, 3, saved_by))
    if rank < 2:
        for saved_by in (1, 2, 3):
            found.update(load_half(folder, rank, 2, saved_by, two))
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    pair.main(work)
