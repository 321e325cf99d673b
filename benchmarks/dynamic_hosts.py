"""Hosts train a vocabulary in files that is larger than their memory; one of them is cut off.

Four hosts, network namespaces with addresses of their own, share a table whose ids are of any
value. Each has its rows in a file, and a limit of memory that includes cached pages of files, by a
cgroup. After the cut, all ranks raise, and all hosts start again from the last checkpoint. In the
end every host must have the bits of a run that was not interrupted. It takes root, and minutes::

    python -m benchmarks.dynamic_hosts
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep
from sparsestep.memory import disk
from sparsestep.memory.mapped_file import file_of

ROOT = Path(__file__).parents[1]
PORT = 29_517


@dataclass(frozen=True)
class Run:
    """A size of the table, and a training."""

    rows: int  # of all hosts together
    dim: int
    batch: int  # ids of each host in a step
    steps: int
    every: int  # steps from one checkpoint to the next
    cut_before: int  # the step
    timeout: int  # seconds
    memory: int = 0  # bytes for each host; 0: no limit
    hosts: int = 4

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows of all hosts."""
        return self.rows * self.dim * 4

    def train(self, names: list[str], folder: Path, *, is_cut_off: bool) -> list[str]:
        """Train on hosts, twice if one is cut off; what each has in the end."""
        folder.mkdir()
        ends = self._attempt(names, folder, is_cut_off=is_cut_off)
        if is_cut_off:
            assert not any(code == 0 for code, _ in ends), "nobody noticed the cut"
            ip = ["ip", "-n", names[-1], "link", "set", "eth0", "up"]
            subprocess.run(ip, check=True)
            ends = self._attempt(names, folder, is_cut_off=False)
        for code, output in ends:
            assert code == 0, output
        return [output.splitlines()[-1] for _, output in ends]

    def _attempt(
        self, names: list[str], folder: Path, *, is_cut_off: bool
    ) -> list[tuple[int, str]]:
        with memory_limits(len(names), self.memory) as groups:
            started = [
                self._start(name, rank, folder, group, is_cut_off=is_cut_off)
                for rank, (name, group) in enumerate(zip(names, groups, strict=True))
            ]
            outputs = [each.communicate()[0] for each in started]
        return list(zip([each.returncode for each in started], outputs, strict=True))

    def _start(
        self, name: str, rank: int, folder: Path, group: str, *, is_cut_off: bool
    ) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.dynamic_hosts"]
        command += [json.dumps(asdict(self)), str(rank), str(folder), str(int(is_cut_off))]
        script = f'{group and f"echo $$ > {group}/cgroup.procs; "}exec "$@"'
        return subprocess.Popen(
            ["sh", "-c", script, "sh", *command],
            cwd=ROOT,
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "MALLOC_ARENA_MAX": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


class NamespaceError(Exception):
    """This machine, or this user, cannot make network namespaces."""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        text = f"no network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}"
        raise NamespaceError(text)


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Names of namespaces that a bridge connects; host ``n`` has the address 10.77.0.(n + 1)."""
    if shutil.which("ip") is None:
        raise NamespaceError("needs iproute2")
    names = [f"sparsestep{os.getpid()}-{n}" for n in range(count + 1)]
    *found, switch = names
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for n, name in enumerate(found):
            port = f"port{n}"
            ends = ["eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch]
            ip("link", "add", *ends)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{n + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def memory_limits(count: int, size: int) -> Iterator[list[str]]:
    """Groups of processes with that much memory each, page cache included; "" without a limit."""
    root = Path("/sys/fs/cgroup")
    is_v2 = (root / "cgroup.controllers").exists()
    parent = root if is_v2 else root / "memory"
    groups = [parent / f"sparsestep{os.getpid()}-{n}" for n in range(count if size else 0)]
    try:
        for group in groups:
            group.mkdir()
            limit = group / ("memory.max" if is_v2 else "memory.limit_in_bytes")
            limit.write_text(str(size))
            with suppress(OSError):  # without swap, there is no such file
                name = "memory.swap.max" if is_v2 else "memory.memsw.limit_in_bytes"
                (group / name).write_text("0" if is_v2 else str(size))
        yield list(map(str, groups)) if size else [""] * count
        for group in groups:
            peak = group / ("memory.peak" if is_v2 else "memory.max_usage_in_bytes")
            if peak.exists():
                print(f"  most memory of {group.name}: {int(peak.read_text()) / 1e6:.0f} MB")
    finally:
        for group in groups:
            with suppress(OSError):
                group.rmdir()


# On a host


def ids_of(run: Run, step: int, rank: int) -> Tensor:
    """Most of them were never seen before, an eighth was."""
    draw = torch.Generator().manual_seed(step * run.hosts + rank)
    old = run.batch // 8
    new = run.batch - old
    first = (step * run.hosts + rank) * new
    again = torch.randint(0, max(1, step * run.hosts * new), (old,), generator=draw)
    return torch.cat([torch.arange(first, first + new), again]).unsqueeze(1) * 0x9E3779B97F4A7C1


class Model(nn.Module):
    """A table in a file, and its vocabulary."""

    def __init__(self, run: Run, folder: Path) -> None:
        super().__init__()
        file = sparsestep.storage.mapped(
            folder / "items", (run.rows, run.dim), optimizer=sparsestep.RowwiseAdagrad
        )
        table = nn.EmbeddingBag.from_pretrained(file, freeze=False, mode="sum")
        ids = sparsestep.nn.Vocabulary(run.rows, evict="lru")
        self.tables: Any = sparsestep.nn.EmbeddingBagCollection(
            {"item": table}, vocabularies={"item": ids}
        )


def train(run: Run, rank: int, folder: Path, *, is_cut_off: bool) -> str:
    own, saved = folder / f"disk{rank}", folder / "checkpoint"
    own.mkdir(exist_ok=True)
    model = Model(run, own)
    sparsestep.distributed.shard(model, reduce="sum", order="global")
    optimizer = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.1)
    model.tables.attach(optimizer, init=nn.init.zeros_)
    first = 0
    if (saved / "sparsestep.json").exists():
        sparsestep.distributed.load(saved, model, optimizer)
        weight = model.tables.tables["item"].weight
        first = int(optimizer.state[weight]["step"])
    for step in range(first, run.steps):
        if is_cut_off and step == run.cut_before and rank == run.hosts - 1:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        optimizer.zero_grad()
        found = model.tables({"item": ids_of(run, step, rank)})["item"]
        (found - 1).square().sum().backward()
        optimizer.step()
        if (step + 1) % run.every == 0:
            sparsestep.distributed.save(saved, model, optimizer)
    return digest(model)


def digest(model: Model) -> str:
    """What this host has: the checksum of its file, and its ids."""
    file = file_of(model.tables.tables["item"].weight)
    assert file is not None
    file.flush_to_disk()
    vocabulary: Any = model.tables.vocabularies["item"]
    known = {name: crc32(each.numpy()) for name, each in vocabulary.state_dict().items()}
    return f"rows {disk.checksum(file.descriptor):08x}, ids {json.dumps(known)}"


def main() -> None:
    warnings.simplefilter("ignore")
    run, rank, folder = Run(**json.loads(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://10.77.0.1:{PORT}",
        rank=rank,
        world_size=run.hosts,
        timeout=timedelta(seconds=run.timeout),
    )
    print(train(run, rank, folder, is_cut_off=sys.argv[4] == "1"), flush=True)
    dist.destroy_process_group()


def report() -> None:
    run = Run(
        rows=410_000,
        dim=4096,
        batch=64,
        steps=1_920,
        every=640,
        cut_before=1_600,
        timeout=60,
        memory=320 << 20,
    )
    joint = run.memory * run.hosts
    print(
        f"table: {run.table_bytes / 1e9:.2f} GB, memory of all hosts: {joint / 1e9:.2f} GB", end=""
    )
    print(f", {run.table_bytes / joint:.1f} times as much")
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        with namespaces(run.hosts) as names:
            found = []
            for is_cut_off in (False, True):
                start = time.perf_counter()
                folder_of_run = folder / str(int(is_cut_off))
                found.append(run.train(names, folder_of_run, is_cut_off=is_cut_off))
                kind = "one host cut off" if is_cut_off else "uninterrupted"
                used = sum(p.stat().st_blocks * 512 for p in folder_of_run.glob("disk*/*"))
                print(f"{kind}: {time.perf_counter() - start:.0f} s, {used / 1e9:.2f} GB in files")
                shutil.rmtree(folder_of_run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("the same bits" if found[0] == found[1] else f"DIFFERENT: {found}")


if __name__ == "__main__":
    main() if len(sys.argv) > 2 else report()
