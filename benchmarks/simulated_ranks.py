"""CPU that one rank of many needs for a training step, without a network.

A simulated process group has one real rank. Every other rank sends it what it would send itself:
the same status and counts, and messages of zeros. So what is measured is the work of rank 0:
requests, packing, lookups for all ranks, unpacking and the update. TorchRec takes part where it is
installed; it has one output for all tables, and updates them in backward.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import sparsestep
from benchmarks import sharding

BATCH, DIM = 256, 16
# Ranks, tables and the plan.
CASES = [
    *((ranks, 26, plan) for plan in ("tables", "rows") for ranks in (8, 64, 1024)),
    (64, 200, "tables"),
]


class Done:
    """Torch's handle of a collective that is over."""

    def wait(self, *arguments: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


class SimulatedRanks:
    """Collectives of rank 0 among ranks that all do the same."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_collectives = 0
        self.spent = 0.0  # seconds of CPU, which are the simulation's

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            before = time.process_time()
            self.num_collectives += 1
            collective(*arguments, **options)
            self.spent += time.process_time() - before
            return Done() if options.get("async_op") else None

        return timed

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # torch's names
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        """Each rank sends what this one sends to itself, and zeros in place of a payload."""
        incoming, outgoing = output_split_sizes, input_split_sizes
        if incoming is not None and outgoing is not None:
            own = input[: outgoing[0]]
            output.zero_()
            if len(set(incoming)) == 1 and len(own) <= incoming[0]:
                output.view(self.world_size, -1)[:, : len(own)] = own
            else:
                for end, size in zip(itertools.accumulate(incoming), incoming, strict=True):
                    output[end - size : end][: len(own)] = own[:size]
        else:
            output.view(self.world_size, -1).copy_(input.view(self.world_size, -1)[:1])

    def fill_zeros(self, output: Tensor, *others: Any, **options: Any) -> None:
        """What a collective gives of which only the size matters."""
        output.zero_()

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor, group: Any = None) -> None:
        """Gather a tensor of each rank."""
        for output in outputs:
            output.copy_(given)

    def all_gather_object(self, outputs: list[Any], given: Any, group: Any = None) -> None:
        """Gather an object of each rank."""
        outputs[:] = [given] * self.world_size

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace torch's collectives."""
        ours: dict[str, Callable[..., Any]] = {
            "all_to_all_single": self.all_to_all_single,
            "all_gather": self.all_gather,
            "all_gather_object": self.all_gather_object,
            "reduce_scatter_tensor": self.fill_zeros,
            "all_gather_into_tensor": self.fill_zeros,
        }
        torchs = {name: getattr(dist, name) for name in ours}
        dist.init_process_group("fake", rank=0, world_size=self.world_size, store=FakeStore())
        try:
            for name, collective in ours.items():
                setattr(dist, name, self._timed(collective))
            yield
        finally:
            for name, collective in torchs.items():
                setattr(dist, name, collective)
            dist.destroy_process_group()


Step = Callable[[], None]


def ours(ranks: int, tables: int, plan: Any) -> Step:
    """Lookup, backward and update of all tables, with one id per sample."""
    rows = max(1000, 20 * ranks)
    model = sparsestep.nn.EmbeddingBagCollection([(rows, DIM)] * tables, mode="sum")
    sparsestep.distributed.shard(model, plan=plan)
    optimizer = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.01)
    batch = [torch.randint(0, rows, (BATCH, 1)) for _ in range(tables)]

    def step() -> None:
        optimizer.zero_grad()
        output: Any = model(batch)
        torch.autograd.backward(output, [torch.ones_like(each) for each in output])
        optimizer.step()

    return step


def torchrecs(ranks: int, tables: int, plan: str) -> Step:
    """The same in TorchRec."""
    step: Step = sharding.torchrec_step(plan, [(max(1000, 20 * ranks), DIM)] * tables, BATCH)
    return step


def measure(make: Callable[..., Step], ranks: int, tables: int, plan: Any, seconds: float) -> Any:
    """Milliseconds of CPU and collectives of a step: the fewest of several.

    Args:
        make: makes the step.
        ranks: how many there are.
        tables: of the collection, each looked up with one id per sample.
        plan: as in ``shard``.
        seconds: how long to repeat it.
    """
    simulated = SimulatedRanks(ranks)
    with simulated.installed():
        torch.manual_seed(0)
        step = make(ranks, tables, plan)
        found: list[float] = []
        end = time.monotonic() + seconds
        while len(found) < 6 or time.monotonic() < end:
            before, simulated.num_collectives, simulated.spent = time.process_time(), 0, 0.0
            step()
            found.append(1e3 * (time.process_time() - before - simulated.spent))
        return min(found[4:]), simulated.num_collectives


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    contestants: dict[str, Callable[..., Step]] = {"sparsestep": ours}
    if importlib.util.find_spec("torchrec") is not None:
        contestants["torchrec"] = torchrecs
    print("ranks  tables  plan                CPU ms  collectives")
    for ranks, tables, plan in CASES:
        for name, make in contestants.items():
            cpu, collectives = measure(make, ranks, tables, plan, options.seconds)
            line = f"{ranks:5}  {tables:6}  {plan:6}  {name:10}  {cpu:6.1f}  {collectives:11}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
