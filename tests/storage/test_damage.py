"""Damaged, crafted and foreign files: refused and nothing changed, or harmless and equal."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.memory.formats import HEADER_BYTES
from sparsestep.storage import mapped
from tests.storage.training import DIM, ROWS, adam, in_each_place, same, saved_run

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("base-", "rows-", "rest-", "manifest.json")


class Saved:
    """A run with a checkpoint of two journals, trained on since; damaged copies are loaded."""

    def __init__(self, folder: Path, in_rows: bool) -> None:
        self.run, self.checkpoint = saved_run(folder, in_rows)
        self.intact, self.folder = folder / "intact", folder / "saved"
        self.folder.rename(self.intact)
        self.names = sorted(path.name for path in self.intact.iterdir())
        self.now, self.files = self.run.now, self.run.files()

    def fresh(self) -> Path:
        """An intact copy of the checkpoint, to be damaged."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.intact, self.folder)
        return self.folder

    def named(self, kind: str) -> list[str]:
        return [name for name in self.names if name.startswith(kind)]

    @property
    def manifest(self) -> Any:
        return json.loads((self.intact / "manifest.json").read_text())

    def write_manifest(self, content: Any) -> None:
        """Write a manifest with a valid checksum."""
        if isinstance(content, dict) and "crc" in content:
            about = {key: value for key, value in content.items() if key not in ("crc", "version")}
            content["crc"] = zlib.crc32(json.dumps(about, sort_keys=True).encode())
        (self.folder / "manifest.json").write_text(json.dumps(content))

    def rewrite(self, entry: Any, data: bytes) -> None:
        """Write a file with a valid size and checksum in its entry of a manifest."""
        (self.folder / entry["file"]).write_bytes(data)
        entry.update(bytes=len(data), crc=zlib.crc32(data))

    def check_refused(self, what: str, match: str = "") -> None:
        refused = ""
        try:
            self.run.load()
        except sparsestep.InputError as error:
            refused = str(error)
        assert refused, f"{what}: loaded"
        is_named = str(self.folder) in refused or refused.startswith("load: model and optimizer")
        assert is_named, f"{what}: {refused}"
        assert match in refused
        assert same(self.now, self.run.now), f"{what}: something has changed"
        assert self.run.files() == self.files, f"{what}: files have changed"

    def check_loads(self) -> None:
        assert self.run.load() == 2
        assert same(self.checkpoint, self.run.now)
        self.run.train()
        self.now, self.files = self.run.now, self.run.files()


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "in rows"])
def saved(request, tmp_path_factory) -> Iterator[Saved]:
    found = Saved(tmp_path_factory.mktemp("damage"), request.param)
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


def says_the_same(text: bytes, expected: bytes) -> bool:
    """Whether a manifest differs in spaces alone."""
    try:
        return bool(json.loads(text) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize("payload", [5, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_of_a_checkpoint(saved: Saved, kind: str, payload: int):
    header = 1 << 20 if kind == "manifest.json" else 512
    step = 101 if payload == 5 else 1
    for name in saved.named(kind)[:2]:
        path = saved.fresh() / name
        intact = path.read_bytes()
        for what, data in damages(intact, header, payload, step):
            path.write_bytes(data)
            if kind != "manifest.json" or not says_the_same(data, intact):
                saved.check_refused(f"{name}: {what}")
        path.unlink()
        saved.check_refused(f"no {name}")
        path.write_bytes(intact)
        saved.check_loads()


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
@in_each_place
def test_damaged_headers_of_a_table(in_rows: bool, step: int, tmp_path: Path):
    """The rows of a working table have no checksum: they change with every step."""
    path, optimizer = tmp_path / "table", adam if in_rows else None
    mapped(path, (ROWS, DIM), optimizer=optimizer)
    gc.collect()
    intact = path.read_bytes()
    newer = intact.replace(b"sparsestep tensor 2", b"sparsestep tensor 3")
    other_layout = intact.replace(b'"exp_avg": 96', b'"exp_avg": 97')
    crafted = [("newer", newer), *([("other layout", other_layout)] if in_rows else [])]
    text = [(f"byte {at}", flipped(intact, at, random.Random(at))) for at in range(64)]
    for what, data in (*damages(intact, HEADER_BYTES, 0, step), *text, *crafted):
        if what == f"byte {len(intact) - 1}":
            continue  # of the last row
        path.write_bytes(data)
        match = "format 3, written by a newer sparsestep" if what == "newer" else "table"
        with pytest.raises(sparsestep.InputError, match=match):
            mapped(path, (ROWS, DIM), optimizer=optimizer)
        assert path.read_bytes() == data, what
    path.write_text("mine")
    with pytest.raises(sparsestep.InputError, match=r"must be a file that mapped\(\) has created"):
        mapped(path, (ROWS, DIM))
    path.write_bytes(intact)
    assert not mapped(path, (ROWS, DIM)).any()


def test_links_pipes_and_folders_in_place_of_files(saved: Saved):
    """A link may lead out of the folder, and to open a pipe would wait forever."""
    for kind in KINDS:
        name = saved.named(kind)[0]
        for make in (
            lambda path, name=name: path.symlink_to(saved.intact / name),
            lambda path: path.symlink_to("nothing"),
            os.mkfifo,
            os.mkdir,
        ):
            folder = saved.fresh()
            (folder / name).unlink()
            make(folder / name)
            saved.check_refused(f"{name}: no regular file")


TEXTS = [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"\0" * 100]
TEXTS += [b'{"version": 2, "version": 2}', b'{"version": ' + b"9" * 5000 + b"}"]


def test_manifests_that_are_none(saved: Saved):
    folder = saved.fresh()
    values: list[Any] = [{"number": 7}, {"id": "0" * 32}, {"journals": []}]
    changed = [json.dumps({**saved.manifest, **each}).encode() for each in values]
    for text in (*TEXTS, *changed):
        (folder / "manifest.json").write_bytes(text)
        saved.check_refused(repr(text[:20]), "manifest.json")
        with pytest.raises(sparsestep.InputError, match="manifest"):
            saved.run.save()


def paths_of(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON object is."""
    yield at
    if isinstance(content, dict | list):
        each = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in each:
            yield from paths_of(value, (*at, key))


VALUES = [None, True, -1, 2**63, 10**400, 1.5, "", "x", "../x", [], {}, [[]], {"x": 1}, torch.nan]


def crafted(intact: Any, at: tuple[Any, ...], chance: random.Random) -> Any:
    """A manifest in which a value is replaced, dropped or repeated."""
    content = json.loads(json.dumps(intact))
    inner = content
    for key in at[:-1]:
        inner = inner[key]
    key = at[-1]
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
    saved.fresh()
    intact, chance = saved.manifest, random.Random(0)
    places = [at for at in paths_of(intact) if at and at != ("crc",)]
    journals = [[], *([each] for each in intact["journals"])]
    for _ in range(count):
        at = chance.choice(places)
        content = crafted(intact, at, chance)
        is_valid = (
            content == intact
            or at in (("id",), ("number",))  # which say where it comes from, not what is in it
            or (at[0] == "journals" and content.get("journals") in journals)
        )
        if not is_valid:
            saved.write_manifest(content)
            saved.check_refused(str(at))


def test_paths_stay_inside_the_folder(saved: Saved):
    outside = saved.fresh().parent / "base-000001.0"
    outside.write_bytes(b"outside")
    names = ["../base-000001.0", "/etc/passwd", "base-000001.0/../x", "base-000001.0\0", ".", ""]
    for name in names:
        contents = [saved.manifest for _ in range(3)]
        contents[0]["tables"][0]["base"]["file"] = name
        contents[1]["journals"][0]["file"]["file"] = name
        contents[2]["rest"]["file"] = name
        for content in contents:
            saved.write_manifest(content)
            saved.check_refused(name, "manifest.json")
            with pytest.raises(sparsestep.InputError, match="manifest"):
                saved.run.save()
    assert outside.read_bytes() == b"outside"


def test_journals_with_rows_that_no_table_has(saved: Saved):
    for row in (-1, ROWS, 2**62):
        saved.fresh()
        content = saved.manifest
        last = content["journals"][-1]
        data = bytearray((saved.folder / last["file"]["file"]).read_bytes())
        at = 64 + 8 * (last["parts"][0]["rows"] - 1 if row > 0 else 0)
        data[at : at + 8] = row.to_bytes(8, "little", signed=True)
        saved.rewrite(last["file"], bytes(data))
        saved.write_manifest(content)
        saved.check_refused(f"row {row}", "rows outside")


def test_newer_versions_are_refused_by_name(saved: Saved):
    written_by = "Got format {}, written by a newer sparsestep"
    folder = saved.fresh()
    saved.write_manifest({"version": 3, "anything": "else"})
    saved.check_refused("a newer manifest", written_by.format(3))

    content = saved.manifest
    entry = content["journals"][0]["file"]
    data = (folder / entry["file"]).read_bytes()
    saved.rewrite(entry, data.replace(b"sparsestep rows 1\n", b"sparsestep rows 2\n"))
    saved.write_manifest(content)
    saved.check_refused("a newer journal", written_by.format(2))


def test_a_rest_that_would_execute_code_or_holds_something_else(saved: Saved):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(saved.run.folder / "executed"),))

    path = saved.fresh() / saved.named("rest-")[0]
    rest = torch.load(path, weights_only=True)
    contents: list[tuple[Any, str]] = [
        (Evil(), "must be unchanged"),
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
        manifest = saved.manifest
        saved.rewrite(manifest["rest"], path.read_bytes())
        saved.write_manifest(manifest)
        saved.check_refused(str(type(content)), match)
    assert not (saved.run.folder / "executed").exists()
