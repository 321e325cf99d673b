"""Folders of ``torch.distributed.checkpoint``, written by all ranks; in the background, too."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist

Path: TypeAlias = str | os.PathLike[str]


def write(entries: dict[str, Any], path: Path, **processes: Any) -> None:
    """Write what this rank has; all ranks at once."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with _quiet():
        save(entries, checkpoint_id=path, **processes)


def read(entries: dict[str, Any], path: Path, **processes: Any) -> None:
    """Read into tensors; all ranks at once."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with _quiet():
        load(entries, checkpoint_id=path, **processes)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that there is one process, and of its own storages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield


def write_in_background(entries: dict[str, Any], path: Path, **processes: Any) -> Future[None]:
    """Write what nobody changes meanwhile; all ranks at once.

    Some of the processes, where there are others, write it before this returns. Torch cannot make
    another group of these without the others: it takes the name from how many groups a process
    belongs to, which differs, and they wait for each other for ever.
    """
    group = processes.get("process_group")
    if group is not None and dist.get_world_size(group) < dist.get_world_size():
        write(entries, path, **processes)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    if "no_dist" not in processes:  # what two threads send must not meet
        processes = {"process_group": dist.new_group(backend="gloo")}
    writer = ThreadPoolExecutor(1, "sparsestep-save")
    saving = writer.submit(_write_apart, entries, path, processes)
    writer.shutdown(wait=False)
    return saving


def _write_apart(entries: dict[str, Any], path: Path, processes: dict[str, Any]) -> None:
    try:
        write(entries, path, **processes)
    finally:
        if "process_group" in processes:
            dist.destroy_process_group(processes["process_group"])
