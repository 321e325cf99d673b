"""A table with Adam's state in 30 GB of files, trained with 4 GB of memory.

    python -m benchmarks.mapped_tables --folder /some/local/disk
    python -m benchmarks.mapped_tables --folder /some/local/disk --only zipf --optimizer int8

Every contestant is a process of its own, in a memory cgroup (page cache included) where this
script may make one. Throughput is by the clock, of the last half of the batches.

A table is "apart", with its state in files beside it, or "together", with the state of a row after
the row.

*zipf*: 4,096 bags of 16 ids, an EmbeddingBag, three layers. The same loop in memory is on a
table that fits, with the same ids modulo its rows. Ids are by rank, as in a vocabulary that is
sorted by frequency, or shuffled.

*uniform*: 1,024 ids a batch, each somewhere else, beginning with a cold page cache: the files were
written to the disk and given up with posix_fadvise(POSIX_FADV_DONTNEED).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.memory.mapped_file import file_of
from sparsestep.optim.optimizer import RuleOptimizer

DIM, IN_MEMORY = 64, 2_000_000
OPTIMIZERS: dict[str, Callable[[Any], RuleOptimizer]] = {
    "adam": partial(sparsestep.Adam, lr=1e-3),
    "int8": partial(sparsestep.Adam, lr=1e-3, state_dtype=torch.int8),
    "rowwise": partial(sparsestep.RowwiseAdagrad, lr=1e-3),
}


def cgroup(limit: int) -> str:
    """Put this process into a memory cgroup; how the memory is limited."""
    base = Path("/sys/fs/cgroup")
    name = f"sparsestep-{os.getpid()}"
    for folder, file in ((base / "memory", "memory.limit_in_bytes"), (base, "memory.max")):
        try:
            if not (folder / "cgroup.procs").exists():
                continue
            (folder / name).mkdir()
            (folder / name / file).write_text(str(limit))
            (folder / name / "cgroup.procs").write_text(str(os.getpid()))
            return str(folder / name)
        except OSError:
            continue
    return ""


def peak(group: str) -> float:
    """The most memory that a cgroup has used, page cache included, in GB."""
    for file in ("memory.max_usage_in_bytes", "memory.peak"):
        path = Path(group) / file
        if group and path.exists():
            return int(path.read_text()) / 1e9
    return 0.0


def zipf(rows: int, exponent: float, shuffled: bool, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Ids by rank, drawn from the distribution's inverse; the same for everyone."""
    chance = torch.Generator().manual_seed(0)
    last = rows ** (1 - exponent)
    while True:
        drawn = torch.rand(shape, generator=chance, dtype=torch.float64)
        ids = (1 - drawn * (1 - last)).pow(1 / (1 - exponent)).long().clamp_(1, rows) - 1
        yield ids * 2_654_435_761 % rows if shuffled else ids


def fill(path: Path, value: float) -> None:
    """Write a file that mapped() has made all over, so that there is something to read."""
    block = torch.full((4 << 20,), value).numpy().tobytes()
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(4096)
        while file.tell() < size:
            file.write(block[: size - file.tell()])
        file.flush()
        os.fsync(file.fileno())


def chill(folder: Path) -> None:
    """Make the page cache cold, as far as these files go."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def tensors_of(optimizer: str, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of a table and its state, by the names of their files."""
    param = nn.Parameter(torch.zeros(1, DIM))
    made = OPTIMIZERS[optimizer]([param])
    made.materialize_state()
    state = {name: value for name, value in made.state[param].items() if value.dim()}
    tensors = {"table": param, **{f"table.{name}": value for name, value in state.items()}}
    return {name: ((rows, *value.shape[1:]), value.dtype) for name, value in tensors.items()}


def prepare(folder: Path, rows: int, kind: str, optimizer: str) -> None:
    if kind == "together":
        make = OPTIMIZERS[optimizer]
        sparsestep.storage.mapped(folder / kind, (rows, DIM), optimizer=make)
        fill(folder / kind, 1e-3)
        return
    for name, (shape, dtype) in tensors_of(optimizer, rows).items():
        sparsestep.storage.mapped(folder / name, shape, dtype)
        fill(folder / name, 1e-3)


def tables(kind: str, folder: Path, rows: int, optimizer: str) -> dict[str, Tensor]:
    """A table and its state, as a contestant has them, by name."""
    tensors = tensors_of(optimizer, rows)
    if kind.startswith("together"):
        table = sparsestep.storage.mapped(folder / "together", (rows, DIM))
        file = file_of(table)
        assert file is not None
        return {
            "table": table,
            **{f"table.{name}": file.tensor(name) for name in file.header.state},
        }
    if kind == "memory":
        return {n: torch.full(shape, 1e-3).to(dtype) for n, (shape, dtype) in tensors.items()}
    if kind.startswith("from_file"):
        found = {}
        for name, (shape, dtype) in tensors.items():
            size = (folder / name).stat().st_size
            whole = torch.from_file(str(folder / name), True, size, dtype=torch.uint8)
            found[name] = whole[4096:].view(dtype).view(shape)
            if kind == "from_file, random":
                advise_random(found[name])
        return found
    found = {n: sparsestep.storage.mapped(folder / n, *each) for n, each in tensors.items()}
    file = file_of(found["table"])
    assert file is not None
    for name, tensor in found.items():  # as an optimizer would link them
        beside = file_of(tensor)
        assert beside is not None
        if name != "table":
            file.state_files[name] = beside
    return found


def advise_random(tensor: Tensor) -> None:
    import ctypes

    page = 4096
    begin = tensor.data_ptr() // page * page
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(tensor.nbytes), 1)


def train(model: nn.Module, optimizer: Any, loader: Any, count: int) -> float:
    """Batches per second, of the last half."""
    begin = 0.0
    for index, ids in enumerate(loader):
        if index == count // 2:
            begin = time.perf_counter()
        if index == count:
            break
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    return (count - count // 2) / (time.perf_counter() - begin)


def work(options: argparse.Namespace) -> dict[str, Any]:
    """One contestant."""
    kind: str = options.worker
    group = "" if kind == "memory" else cgroup(options.gigabytes << 30)
    torch.set_num_threads(options.threads)
    rows = IN_MEMORY if kind == "memory" else options.rows
    found = tables(kind, Path(options.folder) / "tables", rows, options.optimizer)
    table = found.pop("table")
    torch.manual_seed(0)
    if options.case == "zipf":
        bag = sparsestep.nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum")
        layers = [nn.Linear(DIM, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()]
        model = nn.Sequential(bag, *layers, nn.Linear(256, 1))
        batches = zipf(options.rows, options.exponent, options.shuffled, (4096, 16))
    else:
        model = nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False, sparse=True))
        chance = torch.Generator().manual_seed(0)
        batches = iter(lambda: torch.randint(options.rows, (1024,), generator=chance), None)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters())
    record = {name.removeprefix("table."): value for name, value in found.items()}
    optimizer.state[next(model.parameters())] = {"step": torch.tensor(1.0), **record}
    loader: Any = (ids % rows for ids in batches)
    if kind.endswith("prefetch"):
        loader = sparsestep.storage.prefetching(loader, {table: lambda ids: ids}, ahead=2)
    speed = train(model, optimizer, loader, options.batches)
    return {"batches per second": speed, "peak GB": peak(group), "group": group}


def run(kind: str, case: str, batches: int, options: argparse.Namespace) -> dict[str, Any]:
    chill(Path(options.folder) / "tables")
    command = [sys.executable, __file__, "--worker", kind, "--case", case]
    for name in ("folder", "rows", "threads", "gigabytes", "exponent", "optimizer"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--batches", str(batches), *(["--shuffled"] if options.shuffled else [])]
    found: dict[str, Any] = json.loads(subprocess.check_output(command))
    if found["group"]:
        os.rmdir(found["group"])
    print(
        f"{case:8} {kind:18} {found['batches per second']:9.3f} batches/s, "
        f"at most {found['peak GB']:.1f} GB",
        flush=True,
    )
    return found


def compare_zipf(kind: str, options: argparse.Namespace) -> None:
    kinds = ("memory", f"{kind}, prefetch")
    speeds = [run(each, "zipf", options.batches, options) for each in kinds]
    there, here = (found["batches per second"] for found in speeds)
    print(f"zipf {options.exponent}, {kind}: {here / there:.2f} of the same loop in memory")


def compare_uniform(kind: str, options: argparse.Namespace) -> None:
    counts = {f"{kind}, prefetch": 60}
    if kind == "apart":
        counts = {"from_file": 2, "from_file, random": 20, "apart": 20, **counts}
    speeds = [run(each, "uniform", count, options) for each, count in counts.items()]
    if kind == "apart":
        ratio = speeds[-1]["batches per second"] / speeds[0]["batches per second"]
        print(f"uniform, cold: {ratio:.1f} times torch.from_file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rows", type=int, default=40_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gigabytes", type=int, default=4)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--only", choices=["zipf", "uniform"])
    parser.add_argument("--keep", action="store_true", help="leave the files, and use those there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options)))
        return
    folder = Path(options.folder) / "tables"
    for kind in ("apart", "together"):
        there = folder / ("table" if kind == "apart" else kind)
        if not (options.keep and there.exists()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            prepare(folder, options.rows, kind, options.optimizer)
        size = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) / 1e9
        print(f"{kind}: {size:.1f} GB on the disk", flush=True)
        if options.only != "uniform":
            compare_zipf(kind, options)
        if options.only != "zipf":
            compare_uniform(kind, options)
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
