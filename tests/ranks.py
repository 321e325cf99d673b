"""Tests whose body runs on several ranks: ``@ranks(2, 3)``.

Ranks are started once per world size, and run the tests of all modules. They are forked from a
process that has imported torch, where the system can. A rank reads tasks from a pipe: which
function, with which arguments.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep import errors

HAS_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
_TIMEOUT = 120.0  # seconds, of process groups
_PRELOADED = ("tests.distributed.runs", "torch.distributed.checkpoint", "torch.distributed.fsdp")
_context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
sparsestep.SGD([torch.zeros(1)])  # torch imports its compiler now, not on every rank


@dataclass
class Rank:
    """First argument of a test on ranks."""

    index: int
    world: int
    folder: Path  # shared by the ranks of this test
    monkeypatch: pytest.MonkeyPatch

    @property
    def is_last(self) -> bool:
        return self.index == self.world - 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        if self.world > 1:
            torch.distributed.barrier()


def ranks(
    *worlds: int, timeout: float = _TIMEOUT, killed: int | None = None, fresh: bool = False
) -> Any:
    """Run a test on every rank of process groups of these sizes.

    The test takes a :class:`Rank` first, then parameters and fixtures that can be pickled. It fails
    if any rank fails. One rank is pytest's own process, without a process group.

    Args:
        worlds: the numbers of ranks.
        timeout: of the process group, in seconds. A test takes a little longer at most.
        killed: a rank that is expected to end by a signal.
        fresh: whether the test needs ranks of its own: it leaves them in a state that others
            cannot use, or needs them as they are after the start.
    """
    is_shared = killed is None and not fresh and timeout == _TIMEOUT

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def run(tmp_path: Path, world: int, **arguments: Any) -> None:
            if world == 1:
                with pytest.MonkeyPatch.context() as patch:
                    test(Rank(0, 1, tmp_path, patch), **arguments)
                return
            task = _Task(test.__module__, test.__qualname__, tmp_path, arguments)
            pool = _pool(world) if is_shared else _Pool(world, timeout)
            try:
                pool.run(task, killed)
            finally:
                if not is_shared:
                    pool.close()

        own = [p for name, p in inspect.signature(test).parameters.items() if name != "rank"]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        more = [inspect.Parameter(name, kind) for name in ("tmp_path", "world")]
        run.__signature__ = inspect.Signature([*more, *own])  # type: ignore[attr-defined]
        run = pytest.mark.parametrize("world", worlds)(run)
        run = pytest.mark.xdist_group(test.__module__)(run)
        return pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")(run)

    return decorate


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a function of a test module returns on each of several ranks; for fixtures."""
    if not HAS_GLOO:
        pytest.skip("needs gloo")
    task = _Task(function.__module__, function.__qualname__, None, arguments)
    return _pool(world).run(task)


@dataclass
class _Task:
    module: str
    name: str
    folder: Path | None  # None: no test, but a function that a fixture calls
    arguments: Any

    def run(self, index: int, world: int) -> Any:
        function = getattr(importlib.import_module(self.module), self.name)
        if self.folder is None:
            return function(index, world, *self.arguments)
        with pytest.MonkeyPatch.context() as patch:
            function.__wrapped__(Rank(index, world, self.folder, patch), **self.arguments)
        return None


# In pytest's process


class _Pool:
    """The ranks of one world size."""

    def __init__(self, world: int, timeout: float = _TIMEOUT) -> None:
        self.timeout, self.folder = timeout, tempfile.TemporaryDirectory(prefix="ranks-")
        self.ranks: list[Connection] = []
        self.processes: list[Any] = []
        _start_server()
        for rank in range(world):
            ours, theirs = _context.Pipe()
            where = Path(self.folder.name), rank, world, timeout
            process = _context.Process(target=_serve, args=(theirs, *where), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append(ours)
            self.processes.append(process)

    def run(self, task: _Task, killed: int | None = None) -> list[Any]:
        replies: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + self.timeout + 5
        for connection in self.ranks:
            connection.send(task)
        while len(replies) < len(self.ranks):
            missing = [c for n, c in enumerate(self.ranks) if n not in replies]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = self.ranks.index(connection)  # type: ignore[arg-type]
                try:
                    replies[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    replies[rank] = ("ended", None) if rank == killed else ("failed", "it ended")
                if replies[rank][0] == "failed":  # others may wait for it
                    deadline = min(deadline, time.monotonic() + 5)
            if not ready:
                break
        failed = {rank: text for rank, (kind, text) in replies.items() if kind == "failed"}
        if failed or len(replies) < len(self.ranks):
            self._fail(failed, [n for n in range(len(self.ranks)) if n not in replies])
        for kind, value in replies.values():
            if kind == "skipped":
                pytest.skip(value)
        return [replies[rank][1] for rank in range(len(self.ranks))]

    def _fail(self, failed: dict[int, Any], stuck: list[int]) -> None:
        world, texts = len(self.ranks), []
        for rank, text in failed.items():
            texts.append(f"rank {rank} of {world}:\n{text}{self._log(rank)}")
        for rank in stuck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5 if stuck else 0)  # for the stacks to be written
        texts += [f"rank {rank} of {world} did not finish:\n{self._log(rank)}" for rank in stuck]
        self.close()
        pytest.fail("\n".join(texts), pytrace=False)

    def _log(self, rank: int) -> str:
        return Path(self.folder.name, f"log{rank}").read_text()[-4000:]

    def close(self) -> None:
        """Let ranks that wait for a task end; kill others."""
        if _pools.get(len(self.ranks)) is self:
            del _pools[len(self.ranks)]
        for connection in self.ranks:
            connection.close()
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        self.folder.cleanup()


_pools: dict[int, _Pool] = {}


def _pool(world: int) -> _Pool:
    if world not in _pools:
        _pools[world] = _Pool(world)
    return _pools[world]


def _start_server() -> None:
    """Start the process that ranks are forked from, without threads of OpenMP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if loopback else ():
            patch.setenv(name, loopback[0])
        if sys.platform != "win32":
            _context.set_forkserver_preload([__name__, *_PRELOADED])
            forkserver.ensure_running()


# In other processes


def _serve(tasks: Connection, folder: Path, rank: int, world: int, timeout: float) -> None:
    """Be a rank."""
    log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("error")
    # Torch's parts warn each other of TorchScript, and of process groups without a frontend.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\b")
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # torch 2.7's own
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=(folder / "meeting").as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    gc.freeze()  # modules: each task ends with a collection, which need not go through them
    with contextlib.suppress(EOFError, OSError):  # pytest's process has closed the pipe
        while True:
            tasks.send(_reply(tasks.recv(), rank, world))
    torch.distributed.destroy_process_group()


def _reply(task: _Task, rank: int, world: int) -> tuple[str, Any]:
    _destroy_groups()
    errors._warned.clear()
    torch.manual_seed(0)
    try:
        return "done", task.run(rank, world)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except BaseException as error:
        text = traceback.TracebackException.from_exception(error, capture_locals=True, limit=-6)
        return "failed", "".join(text.format())
    finally:
        gc.collect()


def _destroy_groups() -> None:
    """Destroy the process groups of the task before, which has ended on all ranks."""
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)
