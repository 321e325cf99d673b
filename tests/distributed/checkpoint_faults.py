"""Two ranks save and load, and something goes wrong on one of them."""

from __future__ import annotations

import datetime
import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sparsestep
from sparsestep.distributed import contents, files, manifest, writing
from sparsestep.torch_internals import group_timeout
from tests.distributed import pair
from tests.distributed.runs import Case, Tables, batch_of

CASE = Case("rows")
SECONDS = 150


class Training:
    """A sharded model and its optimizer."""

    def __init__(self, steps: int, rank: int) -> None:
        self.model = Tables(CASE.dtype)
        sparsestep.distributed.shard(self.model, None, "rows")
        self.optimizer = CASE.optimizer(self.model)
        for step in range(steps):
            CASE.step(self.model, self.optimizer, batch_of(step, rank, 4))

    def save(self, path: Path) -> None:
        sparsestep.distributed.save(path, self.model, self.optimizer)

    def save_later(self, path: Path) -> None:
        sparsestep.distributed.async_save(path, self.model, self.optimizer).result()

    def load(self, path: Path) -> None:
        sparsestep.distributed.load(path, self.model, self.optimizer)

    def snapshot(self) -> dict[Any, Any]:
        found: dict[Any, Any] = {**self.model.state_dict()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found.update({(index, key): value for key, value in state.items()})
        return {key: torch.as_tensor(value).tolist() for key, value in found.items()}


def outcome(work: Callable[[], None]) -> tuple[str, str]:
    """What it has raised."""
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


class Broken:
    """While it lasts, a function raises on one rank."""

    def __init__(self, is_here: bool, owner: Any, name: str, error: BaseException) -> None:
        self._is_here, self._owner, self._name, self._error = is_here, owner, name, error

    def __enter__(self) -> None:
        self._function = getattr(self._owner, self._name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            raise self._error

        if self._is_here:
            setattr(self._owner, self._name, failing)

    def __exit__(self, *args: Any) -> None:
        setattr(self._owner, self._name, self._function)


def work(rank: int, meeting: str) -> dict[str, Any]:
    shared = Path(sys.argv[2])
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timeout)
    earlier, later = Training(1, rank), Training(2, rank)
    path, found = shared / "checkpoint", dict[str, Any]()
    earlier.save(path)

    # Disks that ranks do not share
    own = shared / f"disk{rank}"
    found["unshared save"] = outcome(lambda: earlier.save(own))
    found["unshared async_save"] = outcome(lambda: earlier.save_later(own))
    found["left"] = sorted(each.name for each in own.iterdir())
    half = path if rank == 0 else own
    found["unshared load"] = outcome(lambda: later.load(half))

    # A save that fails on one rank
    full = OSError(errno.ENOSPC, "No space left on device")
    cases: dict[str, tuple[int, Any, str, BaseException]] = {
        "disk full on 1": (1, files._Summed, "write", full),
        "disk full on 0": (0, files._Summed, "write", full),
        "disk full at the end": (0, manifest.Manifest, "encode", full),
        "interrupted": (1, files._Files, "create_stream", KeyboardInterrupt()),
        "out of memory": (1, files._Files, "create_stream", MemoryError("none")),
        "out of memory before": (1, contents.About, "pack", MemoryError("none")),
    }
    before = sorted(each.name for each in path.iterdir())
    for name, (where, owner, function, error) in cases.items():
        for method in (later.save, later.save_later):
            with Broken(rank == where, owner, function, error):
                found[f"{name}, {method.__name__}"] = outcome(lambda m=method: m(path))
    dist.barrier()
    found["names"] = before == sorted(each.name for each in path.iterdir())
    other = Training(0, rank)
    other.load(path)
    found["earlier"] = other.snapshot() == earlier.snapshot()

    # A load that fails on one rank
    expected = later.snapshot()
    for name, error in {
        "load interrupted": KeyboardInterrupt(),
        "load out of memory": MemoryError("none"),
        "load unreadable": OSError(errno.EIO, "Input/output error"),
    }.items():
        with Broken(rank == 1, torch, "load", error):
            found[name] = outcome(lambda: later.load(path))
    with Broken(rank == 1, sparsestep.Adam, "load_state_dict", MemoryError("none")):
        found["load refused"] = outcome(lambda: later.load(path))
    part = path / "__1_0.distcp"
    raw = part.read_bytes()
    dist.barrier()
    if rank == 0:
        part.write_bytes(raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:])
    dist.barrier()
    found["damaged"] = outcome(lambda: later.load(path))
    dist.barrier()
    if rank == 0:
        part.unlink()
    dist.barrier()
    found["missing"] = outcome(lambda: later.load(path))
    found["unchanged"] = later.snapshot() == expected

    # A later checkpoint in the same folder
    dist.barrier()
    later.save_later(path)
    other.load(path)
    found["later"] = other.snapshot() == later.snapshot()
    found["count"] = len(list(path.iterdir()))

    # The group that saves in the background
    groups, write = [], writing.write

    def watching(content: Any, folder: Path, peers: Any) -> None:
        groups.append(peers.group)
        write(content, folder, peers)
        found["timeout"] = group_timeout(peers.group).total_seconds()

    writing.write = watching
    later.save_later(path)
    writing.write = write
    found["own group"] = groups[0] is not dist.group.WORLD
    CASE.step(later.model, later.optimizer, batch_of(5, rank, 4))  # ranks still agree
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    pair.main(work)
