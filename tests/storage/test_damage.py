"""Damaged, crafted and foreign files: refused and nothing changed, or harmless and equal."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.memory.formats import HEADER_BYTES
from sparsestep.storage import mapped
from tests.distributed.runs import said
from tests.storage.training import DIM, ROWS, adam, in_each_place, saved_run
from tests.table import all_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


class Saved:
    """A training with a checkpoint, trained on since; damaged copies are loaded into it."""

    kinds = ("base-", "rows-", "rest-", "manifest.json")
    version = 2
    # In place of a file: a link may lead out of the folder, and to open a pipe would wait forever.
    others: tuple[Callable[[Path], Any], ...] = (
        lambda path: path.symlink_to(path.parents[1] / "intact" / path.name),
        lambda path: path.symlink_to("nothing"),
        os.mkfifo,
        os.mkdir,
        lambda path: None,
    )

    def __init__(self, folder: Path, in_rows: bool = False) -> None:
        self.make(folder, in_rows)
        self.intact, self.folder = folder / "intact", folder / "saved"
        self.folder.rename(self.intact)
        self.names = sorted(path.name for path in self.intact.iterdir())
        self.now = self.state()

    def make(self, folder: Path, in_rows: bool) -> None:
        """Two journals follow the base."""
        self.run, self.checkpoint = saved_run(folder, in_rows)

    def state(self) -> Any:
        return self.run.now, self.run.files()

    def is_unchanged(self) -> bool:
        return all_same_bits(self.now[0], self.run.now) and self.run.files() == self.now[1]

    def load(self) -> None:
        self.run.load()

    def check_no_save(self) -> None:
        """A checkpoint is added to what is there, which is read."""
        with pytest.raises(sparsestep.InputError, match="manifest"):
            self.run.save()

    def fresh(self) -> Path:
        """An intact copy of the checkpoint, to be damaged."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.intact, self.folder)
        return self.folder

    def named(self, kind: str) -> list[str]:
        return [name for name in self.names if name.startswith(kind)]

    @property
    def manifest(self) -> Any:
        """Its fields; they may be changed."""
        return json.loads((self.intact / self.kinds[-1]).read_text())

    def sealed(self, content: Any, version: int | None = None) -> bytes:
        """A manifest with a valid checksum."""
        if version is not None:
            content["version"] = version
        if isinstance(content, dict) and "crc" in content:
            about = {key: value for key, value in content.items() if key not in ("crc", "version")}
            content["crc"] = zlib.crc32(json.dumps(about, sort_keys=True).encode())
        return json.dumps(content).encode()

    def says_the_same(self, text: bytes, expected: bytes) -> bool:
        """Whether a manifest differs in spaces alone."""
        try:
            return bool(json.loads(text) == json.loads(expected))
        except (ValueError, RecursionError):
            return False

    def must_refuse(self, at: tuple[Any, ...], content: Any) -> bool:
        """Whether a manifest that was changed somewhere is no checkpoint of the model any more."""
        intact = self.manifest
        return not (
            content == intact
            or at in (("id",), ("number",))  # which say where it comes from, not what is in it
            or (
                at[0] == "journals"
                and content.get("journals") in [[], *([each] for each in intact["journals"])]
            )
        )

    def write_manifest(self, content: Any) -> None:
        (self.folder / self.kinds[-1]).write_bytes(self.sealed(content))

    def rewrite(self, content: Any, name: str, data: bytes) -> None:
        """Write a file, of which a manifest has the right size and checksum."""
        (self.folder / name).write_bytes(data)
        for at in paths_of(content):
            entry = at_path(content, at)
            if isinstance(entry, dict) and entry.get("file") == name:
                entry.update(bytes=len(data), crc=zlib.crc32(data))
        self.write_manifest(content)

    def check_refused(self, what: str, match: str = "") -> None:
        refused = said(self.load)
        assert refused, f"{what}: loaded"
        is_named = str(self.folder) in refused or refused.startswith("load: model and optimizer")
        assert is_named, f"{what}: {refused}"
        assert match in refused, f"{what}: {refused}"
        assert self.is_unchanged(), f"{what}: something has changed"

    def check_loads(self) -> None:
        assert self.run.load() == 2
        assert all_same_bits(self.checkpoint, self.run.now)
        self.run.train()
        self.now = self.state()


class SavedByRanks(Saved):
    kinds = (".metadata", "__0_0.distcp", "sparsestep.json")
    others = (
        lambda path: path.symlink_to("nothing"),
        lambda path: shutil.copy(path.parents[1] / "later" / path.name, path),
        os.mkfifo,
        os.mkdir,
        lambda path: None,
    )

    def make(self, folder: Path, in_rows: bool) -> None:
        from tests.distributed.test_damaged_checkpoints import Training

        Training(1).save(folder / "saved")
        Training(1, steps=3).save(folder / "later")
        self.run = Training(2, steps=1)
        other = Training(3)
        other.load(folder / "saved")
        self.checkpoint = other.snapshot()

    def state(self) -> Any:
        return self.run.snapshot()

    def is_unchanged(self) -> bool:
        return self.state() == self.now

    def load(self) -> None:
        self.run.load(self.folder)

    def check_no_save(self) -> None:
        """A checkpoint replaces the one before."""

    @property
    def manifest(self) -> Any:
        return super().manifest["body"]

    def sealed(self, content: Any, version: int | None = None) -> bytes:
        from sparsestep.distributed.checkpoint import _manifest

        return _manifest._sealed(version or self.version, content)

    def says_the_same(self, text: bytes, expected: bytes) -> bool:
        return False  # every byte counts

    def must_refuse(self, at: tuple[Any, ...], content: Any) -> bool:
        return False

    def rewrite(self, content: Any, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)
        content["files"][name] = [len(data), zlib.crc32(data)]
        for _, _, chunks in content["tensors"].values():
            for chunk in chunks:
                if chunk[2] == name:
                    chunk[3:] = 0, len(data)
        self.write_manifest(content)

    def check_refused(self, what: str, match: str = "") -> None:
        super().check_refused(what, match)
        with pytest.raises(sparsestep.InputError):
            sparsestep.distributed.consolidate(self.folder)

    def check_loads(self) -> None:
        self.load()
        assert self.state() == self.checkpoint
        self.run.step(2, 1)
        self.now = self.state()


@pytest.fixture(scope="module", params=["apart", "in rows", "ranks"])
def saved(request, tmp_path_factory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("damage")
    if request.param == "ranks":
        pytest.importorskip("torch.distributed.checkpoint")
        found: Saved = SavedByRanks(folder)
    else:
        found = Saved(folder, request.param == "in rows")
    yield found
    vars(found).clear()  # pytest keeps it for longer than its files may stay open


def flipped(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ chance.randrange(1, 256)]) + data[at + 1 :]


def damages(data: bytes, header: int, payload: int, step: int) -> Iterator[tuple[str, bytes]]:
    """Every step-th byte of the header, random bytes of the payload, and other sizes."""
    chance = random.Random(0)
    places = [chance.randrange(len(data)) for _ in range(payload)]
    for at in (*range(0, min(header, len(data)), step), *places, len(data) - 1):
        yield f"byte {at}", flipped(data, at, chance)
    sizes = {0, 1, 63, HEADER_BYTES - 1, HEADER_BYTES, len(data) // 2, len(data) - 1}
    for size in sorted(size for size in sizes if size < len(data)):
        yield f"{size} bytes", data[:size]
    for more in (b"\0", b"}", bytes(5000)):
        yield f"{len(more)} bytes more", data + more


@pytest.mark.parametrize("payload", [5, pytest.param(400, marks=pytest.mark.slow)])
def test_damaged_files_of_a_checkpoint(saved: Saved, payload: int):
    """Other bytes and lengths, no file, a folder, links, pipes."""
    step = 101 if payload == 5 else 1
    for kind in saved.kinds:
        is_manifest = kind == saved.kinds[-1]
        for name in saved.named(kind)[:2]:
            path = saved.fresh() / name
            intact = path.read_bytes()
            for what, data in damages(intact, 1 << 20 if is_manifest else 512, payload, step):
                path.write_bytes(data)
                if not is_manifest or not saved.says_the_same(data, intact):
                    saved.check_refused(f"{name}: {what}")
            for make in saved.others:
                path.unlink()
                make(path)
                saved.check_refused(f"{name}: no regular file")
                path = saved.fresh() / name
            saved.check_loads()


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
@in_each_place
def test_damaged_headers_of_a_table(in_rows: bool, step: int, tmp_path: Path):
    """The rows of a working table have no checksum: they change with every step."""
    path, optimizer = tmp_path / "table", adam if in_rows else None
    mapped(path, (ROWS, DIM), optimizer=optimizer)
    gc.collect()
    intact = path.read_bytes()
    other_layout = intact.replace(b'"exp_avg": 96', b'"exp_avg": 97')
    crafted = [("other layout", other_layout)] if in_rows else []
    text = [(f"byte {at}", flipped(intact, at, random.Random(at))) for at in range(64)]
    for what, data in (*damages(intact, HEADER_BYTES, 0, step), *text, *crafted):
        if what == f"byte {len(intact) - 1}":
            continue  # of the last row
        path.write_bytes(data)
        with pytest.raises(sparsestep.InputError):
            mapped(path, (ROWS, DIM), optimizer=optimizer)
        assert path.read_bytes() == data, what
    path.write_bytes(intact)
    assert not mapped(path, (ROWS, DIM)).any()


TEXTS = [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"\0" * 100]
TEXTS += [b'{"version": 2, "version": 2}', b'{"version": ' + b"9" * 5000 + b"}", b"1" * 5000]


def test_manifests_that_are_none(saved: Saved):
    folder, name = saved.fresh(), saved.kinds[-1]
    changed = [{"number": 7}, {"id": "0" * 32}, {"journals": []}]
    texts = [json.dumps({**saved.manifest, **each}).encode() for each in changed]
    newer = saved.sealed(saved.manifest, saved.version + 1)
    for text in (*TEXTS, *texts, newer):
        (folder / name).write_bytes(text)
        is_newer = f"format {saved.version + 1}, written by a newer" if text is newer else name
        saved.check_refused(repr(text[:20]), is_newer)
        saved.check_no_save()


def paths_of(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON object is."""
    yield at
    if isinstance(content, dict | list):
        each = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in each:
            yield from paths_of(value, (*at, key))


def at_path(content: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        content = content[key]
    return content


VALUES = [None, True, -1, 2**63, 10**400, 1.5, "", "x", "../x", [], {}, [[]], {"x": 1}, torch.nan]


def crafted(content: Any, at: tuple[Any, ...], chance: random.Random) -> Any:
    """A manifest in which a value is replaced, dropped or repeated."""
    inner, key = at_path(content, at[:-1]), at[-1]
    change = chance.choice(["replace", "replace", "drop", "repeat"])
    if change == "replace":
        inner[key] = chance.choice(VALUES)
    elif change == "drop":
        del inner[key]
    elif isinstance(inner, list):
        inner.append(inner[key])
    else:
        inner[f"{key}2"] = inner[key]
    return content


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_crafted_manifests(saved: Saved, count: int):
    """They are refused, or loaded as a whole."""
    saved.fresh()
    chance, refused = random.Random(0), 0
    places = [at for at in paths_of(saved.manifest) if at and at != ("crc",)]
    fields = [at for at in places if len(at) == 1]
    for at in (*chance.choices(places, k=count), *chance.choices(fields, k=count)):
        content = crafted(saved.manifest, at, chance)
        saved.write_manifest(content)
        if saved.must_refuse(at, content):
            saved.check_refused(str(at))
            refused += 1
            continue
        if said(saved.load):
            refused += 1
            assert saved.is_unchanged(), at
        saved.now = saved.state()
        with contextlib.suppress(sparsestep.InputError, MemoryError):
            sparsestep.distributed.consolidate(saved.folder)
    assert refused > 0.45 * count


OUTSIDE = ["/etc/passwd", ".", "..", "", "a\\b.distcp", "C:x.distcp"]


def test_paths_stay_inside_the_folder(saved: Saved):
    folder, text = saved.fresh(), json.dumps(saved.manifest)
    for old in saved.names:
        shutil.copy(folder / old, folder.parent)  # so that it is there
        for name in (*OUTSIDE, f"../{old}", f"{old}/../{old}", f"{old}\0"):
            if json.dumps(old) in text:
                saved.write_manifest(json.loads(text.replace(json.dumps(old), json.dumps(name))))
                saved.check_refused(name, saved.kinds[-1])
                saved.check_no_save()
        (folder.parent / old).unlink()


class Exploit:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def test_no_file_executes_code(saved: Saved, tmp_path: Path):
    exploit, found = tmp_path / "exploit", tmp_path / "executed"
    for dump in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        dump(Exploit(found), exploit)
        for name in saved.names:
            saved.fresh()
            if name == saved.kinds[-1]:
                shutil.copy(exploit, saved.folder / name)
            else:
                saved.rewrite(saved.manifest, name, exploit.read_bytes())
            if name == ".metadata":
                saved.load()  # which does not read it
                saved.now = saved.state()
            else:
                saved.check_refused(name)
        assert not found.exists()
    pickle.loads(exploit.read_bytes())
    assert found.exists(), "the attack does work"


# What tables in files have alone


@pytest.fixture
def in_files(saved: Saved) -> Saved:
    if isinstance(saved, SavedByRanks):
        pytest.skip("a checkpoint of ranks has no such file")
    return saved


def test_journals_with_rows_that_no_table_has(in_files: Saved):
    for row in (-1, ROWS, 2**62):
        folder, content = in_files.fresh(), in_files.manifest
        last = content["journals"][-1]
        data = bytearray((folder / last["file"]["file"]).read_bytes())
        at = 64 + 8 * (last["parts"][0]["rows"] - 1 if row > 0 else 0)
        data[at : at + 8] = row.to_bytes(8, "little", signed=True)
        in_files.rewrite(content, last["file"]["file"], bytes(data))
        in_files.check_refused(f"row {row}", "rows outside")
    newer = data.replace(b"sparsestep rows 1\n", b"sparsestep rows 2\n")
    in_files.rewrite(content, last["file"]["file"], bytes(newer))
    in_files.check_refused("a newer journal", "Got format 2, written by a newer sparsestep")


def test_a_rest_that_holds_something_else(in_files: Saved):
    path = in_files.fresh() / in_files.named("rest-")[0]
    rest = torch.load(path, weights_only=True)
    contents: list[tuple[Any, str]] = [
        ([], "must hold"),
        ({}, "must hold"),
        ({**rest, "optimizer": {}}, "must hold"),
        ({**rest, "optimizer": {"state": [], "param_groups": []}}, "must hold"),
        ({**rest, "optimizer": {"state": {0: 1}, "param_groups": []}}, "must hold"),
        ({**rest, "model": []}, "must hold"),
        ({**rest, "version": 2}, "Got format 2, written by a newer sparsestep"),
    ]
    for content, match in contents:
        torch.save(content, path)
        in_files.rewrite(in_files.manifest, path.name, path.read_bytes())
        in_files.check_refused(str(type(content)), match)
