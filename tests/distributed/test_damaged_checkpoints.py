"""Damaged and malicious checkpoint folders are refused, and nothing has changed."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import random
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint.filesystem import FileSystem

from sparsestep.distributed.checkpoint import _files, ignore_dcp_warnings
from sparsestep.distributed.checkpoint import _manifest as manifest
from tests.table import EVERYTHING

MANIFEST, METADATA, PART = "sparsestep.json", ".metadata", "__0_0.distcp"


class Training:
    """A model with a vocabulary and its optimizer."""

    def __init__(self, seed: int, steps: int = 2) -> None:
        torch.manual_seed(seed)
        self.ids = sparsestep.nn.Vocabulary(8, admit=2)
        table = nn.Embedding(8, 3, sparse=True)
        self.model = nn.ModuleDict({"ids": self.ids, "table": table, "head": nn.Linear(3, 2)})
        self.optimizer = sparsestep.Adam(
            [
                {"params": list(table.parameters()), "lr": 0.1 * (1 + seed)},
                {"params": list(self.model["head"].parameters()), "betas": (0.8, 0.9)},
            ]
        )
        self.ids.attach(table, self.optimizer)
        for step in range(steps):
            rows = self.ids(torch.tensor([seed, 100 + step, seed]))
            self.model["head"](table(rows)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> str:
        """Everything that a load may change."""
        return repr(_as_lists((self.model.state_dict(), self.optimizer.state_dict())))

    def save(self, folder: Path) -> None:
        sparsestep.distributed.save(folder, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        sparsestep.distributed.load(folder, self.model, self.optimizer)


def _as_lists(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _as_lists(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_as_lists(each) for each in value]
    return value


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    Training(1).save(folder)
    assert sorted(each.name for each in folder.iterdir()) == [METADATA, PART, MANIFEST]
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture(scope="module")
def here() -> Training:
    return Training(2, steps=1)


def refuse(here: Training, folder: Path, *names: str) -> str:
    """Load and consolidate; both must refuse, and name the file."""
    before = here.snapshot()
    with pytest.raises(sparsestep.InputError) as raised:
        here.load(folder)
    assert here.snapshot() == before
    with pytest.raises(sparsestep.InputError):
        sparsestep.distributed.consolidate(folder)
    for name in names:
        assert name in str(raised.value)
    return str(raised.value)


def positions(size: int, name: str) -> Iterator[int]:
    """Bytes to damage: all of a small file, else its ends and a sample."""
    if EVERYTHING or size < 300:
        return iter(range(size))
    sample = random.Random(name).sample(range(size), 40)
    return iter(sorted({*range(64), *range(size - 16, size), *sample}))


@pytest.mark.parametrize("name", [MANIFEST, METADATA, PART])
def test_a_flipped_byte_is_refused(name: str, folder: Path, here: Training):
    raw = (folder / name).read_bytes()
    before = here.snapshot()
    for number, at in enumerate(positions(len(raw), name)):
        changed = bytearray(raw)
        changed[at] ^= (0x01, 0x20, 0x80, 0xFF)[number % 4]
        (folder / name).write_bytes(changed)
        with pytest.raises(sparsestep.InputError, match=name):
            here.load(folder)
    assert here.snapshot() == before
    refuse(here, folder, name)
    (folder / name).write_bytes(raw)
    Training(3).load(folder)


@pytest.mark.parametrize("name", [MANIFEST, METADATA, PART])
def test_a_truncated_extended_or_missing_file_is_refused(name: str, folder: Path, here: Training):
    raw = (folder / name).read_bytes()
    for size in (0, 1, len(raw) // 2, len(raw) - 1):
        (folder / name).write_bytes(raw[:size])
        refuse(here, folder, name)
    (folder / name).write_bytes(raw + b"\n")
    refuse(here, folder, name)
    (folder / name).unlink()
    refuse(here, folder, name)
    (folder / name).mkdir()
    refuse(here, folder, name)


def test_files_of_two_saves_are_refused(folder: Path, here: Training, tmp_path: Path):
    other = tmp_path / "other"
    Training(1, steps=3).save(other)
    for name in (MANIFEST, METADATA, PART):
        kept = (folder / name).read_bytes()
        shutil.copy(other / name, folder / name)
        refuse(here, folder)
        (folder / name).write_bytes(kept)
    (folder / METADATA).rename(folder / "kept")
    (folder / PART).rename(folder / METADATA)
    (folder / "kept").rename(folder / PART)
    refuse(here, folder)


def test_a_folder_that_is_none_is_refused(here: Training, tmp_path: Path):
    refuse(here, tmp_path / "missing", "missing", MANIFEST)
    refuse(here, tmp_path, MANIFEST)
    (tmp_path / "file").touch()
    refuse(here, tmp_path / "file", MANIFEST)
    with pytest.raises(sparsestep.InputError, match="must be a str or"):
        here.load(None)  # type: ignore[arg-type]
    with pytest.raises(sparsestep.InputError, match="null"):
        here.save(f"{tmp_path}/\0")  # type: ignore[arg-type]


def test_a_checkpoint_of_torch_alone_is_refused(here: Training, tmp_path: Path):
    """It says nothing of param groups and vocabularies."""
    with ignore_dcp_warnings():
        torch.distributed.checkpoint.save(here.model.state_dict(), checkpoint_id=tmp_path / "dcp")
    refuse(here, tmp_path / "dcp", MANIFEST)


def test_torch_reads_the_tensors(folder: Path):
    weight = torch.empty(8, 3)
    with ignore_dcp_warnings():
        torch.distributed.checkpoint.load({"model.table.weight": weight}, checkpoint_id=folder)
    assert torch.equal(weight, sparsestep.distributed.consolidate(folder)["model"]["table.weight"])
    assert str(folder.parent).encode() not in (folder / METADATA).read_bytes()


# Crafted files, with the right checksums


def resealed(folder: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """Change the manifest, and have it agree with the files."""
    body = json.loads((folder / MANIFEST).read_bytes())["body"]
    for name in body["files"]:
        raw = (folder / name).read_bytes()
        body["files"][name] = [len(raw), zlib.crc32(raw)]
    change(body)
    (folder / MANIFEST).write_bytes(manifest._sealed(manifest.VERSION, body))


class Exploit:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("name", [METADATA, PART])
@pytest.mark.parametrize("seal", [False, True])
def test_no_file_executes_code(name: str, seal: bool, folder: Path, here: Training, tmp_path: Path):
    marker = tmp_path / "executed"
    if name == METADATA:
        (folder / name).write_bytes(pickle.dumps(Exploit(marker)))
    else:
        torch.save(Exploit(marker), folder / name)
    if not seal:
        refuse(here, folder, name)
    else:
        size = (folder / name).stat().st_size

        def change(body: dict[str, Any]) -> None:
            for _, _, chunks in body["tensors"].values():
                for chunk in chunks:
                    chunk[2:] = PART, 0, size if name == PART else chunk[4]

        resealed(folder, change if name == PART else lambda body: None)
        if name == PART:
            refuse(here, folder)
        else:
            Training(3).load(folder)  # which does not read it
    assert not marker.exists()
    if name == METADATA:  # the attack does work
        pickle.loads((folder / name).read_bytes())
        assert marker.exists()


def test_a_newer_format_is_refused_by_name(folder: Path, here: Training):
    document = json.loads((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_text(json.dumps({**document, "version": manifest.VERSION + 1}))
    said = refuse(here, folder, MANIFEST)
    assert "newer sparsestep (format 3)" in said
    assert "up to 2" in said


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b"[]", b"null", b"\xff", b'{"version":true}', b"1" * 5000, b"{}"]
)
def test_other_json_is_refused(raw: bytes, folder: Path, here: Training):
    (folder / MANIFEST).write_bytes(raw)
    refuse(here, folder, MANIFEST)


OUTSIDE = ["../other.distcp", "/etc/passwd", "a/b.distcp", "..", "", "a\\b.distcp", "C:x.distcp"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_the_folder(name: str, folder: Path, here: Training):
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(PART)
        for _, _, chunks in body["tensors"].values():
            for chunk in chunks:
                chunk[2] = name

    shutil.copy(folder / PART, folder.parent / "other.distcp")
    resealed(folder, change)
    refuse(here, folder, MANIFEST)


def test_an_id_leads_to_no_other_folder(folder: Path, here: Training):
    resealed(folder, lambda body: body.update(id="/../../x"))
    refuse(here, folder, MANIFEST)


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    yield path
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from places(each, *path, key)


VALUES = [None, -1, 0, 2**70, 1e308, float("nan"), "x", [], {}, [[]], {"tuple": 3}, True]


def test_a_crafted_manifest_is_refused_or_loaded_as_a_whole(folder: Path, here: Training):
    """Every value is replaced by others. What is no checkpoint any more is refused."""
    original = json.loads((folder / MANIFEST).read_bytes())["body"]
    chance, before = random.Random(0), here.snapshot()
    refused = 0
    everywhere = list(places(original))
    for path in everywhere if EVERYTHING else chance.sample(everywhere, 150):
        for value in VALUES if EVERYTHING else chance.sample(VALUES, 1):
            body = copy.deepcopy(original)
            if path:
                *parents, last = path
                at = body
                for each in parents:
                    at = at[each]
                at[last] = value
            else:
                body = value
            (folder / MANIFEST).write_bytes(manifest._sealed(manifest.VERSION, body))
            try:
                here.load(folder)
            except sparsestep.InputError:
                refused += 1
                assert here.snapshot() == before, (path, value)
            except BaseException as error:
                raise AssertionError(f"{path} = {value}") from error
            else:
                before = here.snapshot()
            try:
                sparsestep.distributed.consolidate(folder)
            except (sparsestep.InputError, MemoryError):
                pass
            except BaseException as error:
                raise AssertionError(f"consolidate: {path} = {value}") from error
    assert refused > 70


# Saving over an earlier checkpoint


class Faults:
    """Has the n-th call raise, of all calls of some functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self._monkeypatch, self._error = monkeypatch, error
        self._calls = self._failing = 0

    def add(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            if self._calls == self._failing:
                raise type(self._error)(*self._error.args)
            return function(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, call)

    def begin(self, n: int) -> None:
        self._calls, self._failing = 0, n

    def end(self) -> int:
        """The number of calls."""
        self._failing = 0
        return self._calls


class Stream:
    """A file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> Any:
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [FULL, MemoryError("none"), KeyboardInterrupt()], ids=repr)
def test_a_save_that_fails_leaves_the_earlier_checkpoint(
    error: BaseException, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    later, found = Training(4), Training(3)
    found.load(saved)
    expected, replaced = found.snapshot(), later.snapshot()
    faults = Faults(monkeypatch, error)
    faults.add(Stream, "write")
    faults.add(_files._Files, "create_stream")
    create_stream = FileSystem.create_stream

    @contextmanager
    def create(*args: Any) -> Iterator[Any]:
        with create_stream(*args) as stream:
            yield Stream(stream)

    monkeypatch.setattr(FileSystem, "create_stream", create)
    if error is FULL:
        for name in ("fsync", "replace", "stat", "open"):
            faults.add(os, name)
    faults.begin(0)
    later.save(Path(shutil.copytree(saved, tmp_path / "complete")))
    calls = faults.end()
    # Most calls write tensors, one like the other; the last ones put the checkpoint in place.
    sample = sorted({*range(1, calls + 1, 1 if EVERYTHING else 61), *range(calls - 15, calls + 2)})
    outcomes = []
    for n in sample:
        folder = Path(shutil.copytree(saved, tmp_path / str(n)))
        raised: BaseException | None = None
        faults.begin(n)
        try:
            later.save(folder)
        except BaseException as caught:
            raised = caught
        faults.end()
        found.load(folder)
        names = sorted(each.name for each in folder.iterdir())
        outcomes.append(raised is None)
        if raised is None:  # perhaps with a fault after the checkpoint was in place
            assert found.snapshot() == replaced
        else:
            assert type(raised) is type(error)
            assert found.snapshot() == expected
            assert names == [METADATA, PART, MANIFEST]
    assert outcomes == sorted(outcomes)  # it fails, then it does not
    assert not outcomes[0]
    assert outcomes[-1]
    assert len(names) == 3
    assert PART not in names


def test_a_process_that_ends_while_it_saves_leaves_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between the two files that change their names, it is the later one."""
    later, replace = Training(4), os.replace

    def killed(source: Any, target: Any) -> None:
        if Path(target).name == METADATA:
            raise SystemExit
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            later.save(folder)
    found = Training(3)
    found.load(folder)
    assert found.snapshot() == later.snapshot()
    (pending,) = folder.glob(f".*-*{METADATA}")
    pending.write_bytes(pending.read_bytes()[:-1])
    refuse(found, folder, pending.name)
    Training(5).save(folder)
    assert len(list(folder.iterdir())) == 3  # what was left is gone
    found.load(folder)
    assert found.snapshot() == Training(5).snapshot()


@pytest.mark.parametrize("at", [1, 5, 20])
def test_a_signal_while_loading_comes_before_or_after(
    at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where it is committed, tensor by tensor."""
    here = Training(2)
    copy_, calls = torch.Tensor.copy_, [0]

    def interrupting(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == at:
            signal.raise_signal(signal.SIGINT)
        return copy_(self, *args, **kwargs)

    before = here.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupting)
        with pytest.raises(KeyboardInterrupt):
            here.load(folder)
    after = Training(3)
    after.load(folder)
    assert here.snapshot() in (before, after.snapshot())


@pytest.mark.parametrize("error", [MemoryError("none"), KeyboardInterrupt(), FULL], ids=repr)
def test_an_error_while_loading_is_what_it_was(
    error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise error

    here = Training(2)
    before = here.snapshot()
    monkeypatch.setattr(torch, "load", failing)
    with pytest.raises(type(error)):
        here.load(folder)
    assert here.snapshot() == before


def test_options_of_any_kind_come_back(tmp_path: Path):
    weight = nn.Parameter(torch.zeros(2))
    model = nn.ParameterList([weight])
    kinds = {"name": "é", "levels": [1, (2.5, None)], "by": {3: True}, "dtype": torch.bfloat16}
    group = {"params": [weight], "lr": torch.tensor(0.1), "at": torch.arange(4).view(2, 2), **kinds}
    optimizer = sparsestep.Adam([group], betas=(0.5, 0.25))
    sparsestep.distributed.save(tmp_path / "saved", model, optimizer)
    (found,) = sparsestep.distributed.consolidate(tmp_path / "saved")["optimizer"]["param_groups"]
    assert {key: found[key] for key in kinds} == kinds
    assert found["betas"] == (0.5, 0.25)
    assert torch.equal(found["lr"], group["lr"])
    assert torch.equal(found["at"], group["at"])
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(sparsestep.InputError, match="options of param groups must be"):
        sparsestep.distributed.save(tmp_path / "odd", model, optimizer)
    assert not (tmp_path / "odd").exists()
