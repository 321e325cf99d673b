"""What sharing tables costs: CPU time per step and rank, of sharded tables and of those alone.

Ranks on this machine, one thread each. ``alone`` is the same training in each rank by itself,
without any communication: what no sharding can be faster than. ``tables`` and ``rows`` are
sharded. ``ddp`` is torch's: DistributedDataParallel with sparse gradients and SparseAdam. Each step
is lookup, backward and update of all tables; contestants take turns.

Where TorchRec is installed, ``torchrec tables`` and ``torchrec rows`` take part with row-wise
Adagrad, beside ``rowwise tables`` and ``rowwise rows``, which are ours under that rule. (TorchRec
has no Adam on the CPU. ``pip install --no-deps torchrec fbgemm-gpu-cpu``, of the versions that fit
torch's.)
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsestep
from benchmarks.harness.contestants import import_peer

TABLES, ROWS, DIM, BATCH = 8, 100_000, 64, 2_048
MANY = 26, 100_000, 16, 256  # many tables and few samples: most of a step is what a table costs
WARM = 5  # steps of each that do not count
Step = Callable[[Sequence[Tensor]], None]


def collection() -> sparsestep.nn.EmbeddingBagCollection:
    torch.manual_seed(0)
    return sparsestep.nn.EmbeddingBagCollection([(ROWS, DIM)] * TABLES, mode="sum")


def touch_state(optimizer: torch.optim.Optimizer) -> None:
    """Have all state in memory: its first steps would otherwise be those of the system."""
    for record in list(optimizer.state.values()):
        for value in record.values():
            if isinstance(value, Tensor) and value.dim():
                value.add_(0)


def ours(kind: str | None, rule: Any = sparsestep.SparseAdam) -> Step:
    """Without a kind, each rank for itself."""
    model = collection()
    if kind is not None:
        sparsestep.distributed.shard(model, plan=kind)
    optimizer = rule(model.parameters())
    touch_state(optimizer)
    steps = itertools.count()

    def step(ids: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        found: Any = model(list(ids))
        torch.autograd.backward(found, [torch.ones_like(rows) for rows in found])
        optimizer.step()
        if next(steps) == WARM - 2:
            optimizer.store.huge_pages.move_all()  # which a long training gets in time

    return step


class Torchs(nn.Module):
    """Torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES)]
        self.bags = nn.ModuleList(bags)

    def forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Look all tables up."""
        return [bag(each) for bag, each in zip(self.bags, ids, strict=True)]


def theirs() -> Step:
    model = DistributedDataParallel(Torchs())
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    def step(ids: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        found = model(ids)
        torch.autograd.backward(found, [torch.ones_like(rows) for rows in found])
        optimizer.step()

    return step


def torchrecs(kind: str) -> Step:
    """TorchRec's, of the tables here."""
    step: Step = torchrec_step(kind, [(ROWS, DIM)] * TABLES, BATCH)
    return step


def torchrec_step(kind: str, sizes: Sequence[tuple[int, int]], batch: int) -> Any:
    """A step of TorchRec, which updates in backward; of random ids unless it gets some."""
    torchrec, types = import_peer("torchrec"), import_peer("torchrec.distributed.types")
    plans = import_peer("torchrec.distributed.sharding_plan")
    of_bags = import_peer("torchrec.distributed.embeddingbag")
    parallel = import_peer("torchrec.distributed.model_parallel")
    in_backward = import_peer("torchrec.optim.apply_optimizer_in_backward")
    world = dist.get_world_size()
    names = [f"t{n}" for n in range(len(sizes))]
    configs = [
        torchrec.EmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name]
        )
        for name, (rows, dim) in zip(names, sizes, strict=True)
    ]
    tables = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    rule = torchrec.optim.RowWiseAdagrad
    in_backward.apply_optimizer_in_backward(rule, tables.parameters(), {"lr": 1e-3})
    sharder = of_bags.EmbeddingBagCollectionSharder()
    where = {
        name: plans.table_wise(rank=n % world) if kind == "tables" else plans.row_wise()
        for n, name in enumerate(names)
    }
    plan = plans.construct_module_sharding_plan(
        tables, where, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    model = parallel.DistributedModelParallel(
        nn.ModuleDict({"tables": tables}),
        device=torch.device("cpu"),
        env=types.ShardingEnv.from_process_group(dist.group.WORLD),
        plan=types.ShardingPlan({"tables": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )

    some = [torch.randint(0, rows, (batch, 1)) for rows, _ in sizes]

    def step(ids: Sequence[Tensor] = some) -> None:
        lengths = torch.full((len(sizes) * batch,), ids[0].shape[1], dtype=torch.int32)
        values = torch.cat([each.flatten() for each in ids])
        keyed = torchrec.KeyedJaggedTensor(keys=names, values=values, lengths=lengths)
        found = model.module["tables"](keyed).values()
        found.backward(torch.ones_like(found))

    return step


def batch(length: int, draw: torch.Generator) -> list[Tensor]:
    """Ids of Zipf's law, in order of frequency."""
    uniform = torch.rand(TABLES, BATCH, length, generator=draw, dtype=torch.float64)
    return list((float(ROWS) ** uniform - 1).long().clamp_(0, ROWS - 1))


def contestants() -> dict[str, Step]:
    racers = {"alone": ours(None), "tables": ours("tables"), "rows": ours("rows"), "ddp": theirs()}
    if importlib.util.find_spec("torchrec") is not None:
        for kind in ("tables", "rows"):
            racers[f"rowwise {kind}"] = ours(kind, sparsestep.RowwiseAdagrad)
            racers[f"torchrec {kind}"] = torchrecs(kind)
    return racers


def use_many_tables() -> None:
    """The shape of ``--many`` from now on."""
    global TABLES, ROWS, DIM, BATCH
    TABLES, ROWS, DIM, BATCH = MANY


def run_rank(rank: int, world: int, meeting: str, length: int, rounds: int, is_many: bool) -> None:
    torch.set_num_threads(1)
    if is_many:
        use_many_tables()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    racers = contestants()
    draw = torch.Generator().manual_seed(rank)
    spent: dict[str, list[float]] = {name: [] for name in racers}
    for number in range(WARM + rounds):
        ids = batch(length, draw)
        for name, step in racers.items():
            dist.barrier()
            begun = time.process_time()
            step(ids)
            if number >= WARM:
                spent[name].append(time.process_time() - begun)
    mine = {name: median(times) for name, times in spent.items()}
    all_ranks: list[Any] = [None] * world
    dist.all_gather_object(all_ranks, mine)
    if rank == 0:
        report(length, all_ranks)
    dist.destroy_process_group()


def median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2] * 1e3


def report(length: int, all_ranks: Sequence[dict[str, float]]) -> None:
    mean = {name: sum(each[name] for each in all_ranks) / len(all_ranks) for name in all_ranks[0]}
    for name, each in mean.items():
        ratio = f"{mean['alone'] / each:5.2f} of alone"
        if name in ("tables", "rows"):
            ratio += f", {mean['ddp'] / each:5.1f} times DDP"
        if name.startswith("rowwise"):
            ratio += f", {mean[name.replace('rowwise', 'torchrec')] / each:5.1f} times TorchRec"
        print(f"{length:3} ids  {name:16} {each:8.1f} ms   {ratio}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    parser.add_argument("--rounds", type=int, default=30, help="how many steps of each")
    parser.add_argument("--many", action="store_true", help="26 small tables, small batches")
    parser.add_argument("--ids", type=int, nargs="+", default=[1, 20], help="ids in a bag")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start = multiprocessing.get_context("spawn").Process
    for length in options.ids:
        with tempfile.TemporaryDirectory() as folder:
            meeting = f"file://{folder}/meeting"
            several = (options.ranks, meeting, length, options.rounds, options.many)
            ranks = [start(target=run_rank, args=(r, *several)) for r in range(options.ranks)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()


if __name__ == "__main__":
    main()
