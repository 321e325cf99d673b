"""A small GPT with a memory of n-grams, trained by several processes of one machine.

    python examples/ngram_ranks.py --layers DDP --table sharded
    python examples/ngram_ranks.py --layers FSDP2 --table shared

The layers are copied to all processes (DDP) or sharded (FSDP2). The table is sharded as well, or it
is in shared memory, with its state, and each process updates the rows of its own batch without
waiting for others (Hogwild). ``ngram_memory.py`` measures what such a memory gains.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from functools import partial
from multiprocessing import get_context
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import sparsestep
from sparsestep.nn import NgramEmbedding

WIDTH, CONTEXT, BATCH = 64, 128, 8
ROWWISE = partial(sparsestep.RowwiseAdam, lr=1e-2, betas=(0.0, 0.999))


class GPT(nn.Module):
    """Predicts the next byte from the bytes before it and from what the memory holds of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor, found: Tensor) -> Tensor:
        """Scores of the next byte, for every position."""
        time = torch.arange(tokens.shape[1])
        x = self.bytes(tokens) + self.positions(time) + found
        later = time[:, None] < time  # no attention to these
        scores: Tensor = self.head(self.block(x, src_mask=later))
        return scores


def batch(text: Tensor, step: int) -> Tensor:
    """Pieces of the text."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def train(
    rank: int,
    options: argparse.Namespace,
    folder: str,
    memory: NgramEmbedding,
    of_memory: sparsestep.RowwiseAdam | None,
) -> None:
    """Train on one rank; ``of_memory`` is the optimizer of a table in shared memory."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=options.ranks)
    if of_memory is None:
        sparsestep.distributed.shard(nn.ModuleList([memory]), plan="rows")
    layers: nn.Module = GPT()
    if options.layers == "DDP":
        layers = DistributedDataParallel(layers)
    else:
        fully_shard(layers, mesh=init_device_mesh("cpu", (options.ranks,)))
    of_layers = sparsestep.AdamW(layers.parameters(), lr=2e-3)
    optimizers = of_layers, of_memory or ROWWISE(memory.parameters())
    text = torch.tensor(list("\n".join(topics.values()).encode()))  # Python's manual
    for step in range(options.steps):
        tokens = batch(text, step * options.ranks + rank)
        scores = layers(tokens[:, :-1], memory(tokens[:, :-1]))
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach() / options.ranks
        dist.all_reduce(mean)
        if rank == 0 and step in (0, options.steps - 1):
            tokens_seen = (step + 1) * options.ranks * BATCH * (tokens.shape[1] - 1)
            print(f"{tokens_seen:9,} tokens: loss {mean.item():.3f}", flush=True)
    dist.barrier()
    # When a process that has used DDP ends, torch 2.13 may wait forever for a thread of gloo.
    os._exit(0)


def main() -> int:
    """Start the processes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", choices=["DDP", "FSDP2"], default="DDP")
    parser.add_argument("--table", choices=["sharded", "shared"], default="sharded")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    memory = NgramEmbedding(
        options.rows, WIDTH, orders=(2, 3, 4), weight=torch.zeros(options.rows, WIDTH)
    )
    of_memory = None
    if options.table == "shared":
        memory.share_memory()
        of_memory = ROWWISE(memory.parameters())
        of_memory.share_memory()
    with tempfile.TemporaryDirectory() as folder:
        given = options, folder, memory, of_memory
        start = get_context("spawn").Process
        workers = [start(target=train, args=(rank, *given)) for rank in range(options.ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if options.table == "shared":
        moved = int(memory.weight.detach().any(dim=1).sum())
        print(f"{moved:,} of {options.rows:,} rows have moved in this process's memory, too")
    return max(abs(worker.exitcode or 0) for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
