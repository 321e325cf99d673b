"""A load is complete or has changed nothing, and may be repeated after a kill at any moment."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsestep.errors import InputError
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import checkpoint, mapped
from tests.storage.training import (
    DIM,
    ROWS,
    Run,
    fork,
    full,
    in_each_place,
    raising,
    same,
    saved_run,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def fail_at(function: Callable[..., Any], nth: int, fail: Callable[[], Any]) -> Callable[..., Any]:
    """The function, which fails in its n-th call, before it does anything."""
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return fail() if calls == nth else function(*args, **kwargs)

    return failing


out_of_memory = raising(
    RuntimeError, "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
)
FAULTS: list[tuple[Any, str, int, Callable[[], None], type[BaseException]]] = [
    (os, "posix_fallocate", 1, full, OSError),
    (os, "pwrite", 1, full, OSError),
    (os, "fsync", 1, full, OSError),
    (os, "link", 1, full, OSError),
    (os, "dup2", 1, full, OSError),
    (os, "replace", 1, full, OSError),
    (os, "replace", 2, full, OSError),
    (os, "replace", 3, full, OSError),
    (checkpoint._Swap, "switch", 1, raising(MemoryError), MemoryError),
    (torch, "load", 1, out_of_memory, MemoryError),
    (torch, "empty", 1, out_of_memory, MemoryError),
    (torch.optim.Optimizer, "load_state_dict", 1, out_of_memory, MemoryError),
    (nn.Linear, "_load_from_state_dict", 1, raising(RuntimeError, "no"), InputError),
    (nn.Linear, "_load_from_state_dict", 1, raising(KeyboardInterrupt), KeyboardInterrupt),
]


@in_each_place
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[1]}-{fault[2]}")
def test_an_error_at_any_point_undoes_everything(fault, in_rows, tmp_path: Path, monkeypatch):
    where, name, nth, fail, expected = fault
    nth = 1 if in_rows else nth  # there is one file
    run, before = saved_run(tmp_path, in_rows)
    now, options = run.now, copy.deepcopy(run.optimizer.state_dict()["param_groups"])
    run.optimizer.param_groups[0]["lr"] = options[0]["lr"] = 0.5
    files = run.files()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail_at(getattr(where, name), nth, fail))
        with pytest.raises(expected):
            run.load()
    assert same(now, run.now)
    assert run.optimizer.state_dict()["param_groups"] == options
    assert run.files() == files
    assert {path.name for path in tmp_path.iterdir()} == {*files, "saved"}, "nothing is left over"
    run.train()
    if not in_rows:  # the tensors still belong to these files
        assert run.files()["table"].endswith(run.model[0].weight.detach().numpy().tobytes())
    run.load()
    assert same(before, run.now)
    assert run.optimizer.param_groups[0]["lr"] == 0.1


@in_each_place
def test_tensors_follow_the_file_and_the_old_one_is_gone(in_rows, tmp_path: Path):
    run, before = saved_run(tmp_path, in_rows)
    weight = run.model[0].weight
    address, file = weight.data_ptr(), file_of(weight)
    old = os.stat(tmp_path / "table").st_ino
    os.chmod(tmp_path / "table", 0o600)
    run.load()
    assert (weight.data_ptr(), file_of(weight)) == (address, file)
    about = os.stat(tmp_path / "table")
    assert about.st_ino != old
    assert about.st_mode & 0o777 == 0o600
    assert os.path.samestat(os.fstat(file.descriptor), about)
    if sys.platform == "linux":  # no descriptor keeps the space of the old file
        gc.collect()
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [link for link in links if "deleted" in link and str(tmp_path) in link]
    run.train()
    run.save()
    assert mapped(tmp_path / "table", (ROWS, DIM)).data_ptr() == address
    if not in_rows:
        assert run.files()["table"].endswith(weight.detach().numpy().tobytes())
    assert not same(before, run.now)


def test_a_table_behind_a_link_and_one_without_a_name(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    real = tmp_path / "disk" / "real"
    mapped(real, (ROWS, DIM))
    gc.collect()
    (tmp_path / "table").symlink_to(real)
    run, before = saved_run(tmp_path)
    run.load()
    assert same(before, run.now)
    assert (tmp_path / "table").is_symlink()
    run.train()
    assert real.read_bytes().endswith(run.model[0].weight.detach().numpy().tobytes())
    real.unlink()
    real.write_bytes(b"another file")
    run.load()
    assert same(before, run.now)
    assert real.read_bytes() == b"another file"
    assert os.listdir(tmp_path / "disk") == ["real"]


KILLED_AT = [
    (checkpoint.Replacements, "prepare", 1),
    (checkpoint._Swap, "rename", 2),
]


def load_and_die(run: Run, owner: Any, name: str, nth: int, _: int) -> None:
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    setattr(owner, name, fail_at(getattr(owner, name), nth, kill))
    run.load()


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
@pytest.mark.parametrize("where", KILLED_AT, ids=lambda at: at[1])
def test_a_process_killed_in_load(where, tmp_path: Path):
    """Files have their old or their new content, and a load in another process completes it."""
    run, before = saved_run(tmp_path)
    now = run.now
    pid, reader = fork(functools.partial(load_and_die, run, *where))
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    del run
    gc.collect()
    table = mapped(tmp_path / "table", (ROWS, DIM))
    assert any(same([table], [each]) for each in (now[0], before[0]))
    del table
    gc.collect()
    fresh = Run(tmp_path)
    fresh.load()
    assert same(before, fresh.now)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"table", "table.exp_avg", "table.exp_avg_sq", "saved"}


def test_errors_that_torch_hides_are_raised_even_while_another_is_handled(tmp_path, monkeypatch):
    run, _ = saved_run(tmp_path)

    def save_while_handling(**more: Any) -> None:
        try:
            raise MemoryError("of the caller")
        except MemoryError:
            run.save(**more)

    def hiding(*_: Any, **__: Any) -> None:
        try:
            full()
        finally:
            raise RuntimeError("unexpected pos")

    with pytest.raises(InputError, match="extra must hold only"):
        save_while_handling(extra=run)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_at(torch.save, 2, hiding))
        with pytest.raises(OSError, match="space"):
            save_while_handling()
