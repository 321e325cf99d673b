"""Damaged, crafted and foreign files are refused, and nothing has changed then."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.memory.file_header import HEADER_BYTES
from sparsestep.storage import mapped
from tests.storage.training import DIM, ROWS, Run, same

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = ("base-", "rows-", "rest-", "manifest.json")


class Saved:
    """A model with a checkpoint of two journals, trained on since; damaged copies are loaded."""

    def __init__(self, folder: Path, together: bool) -> None:
        self.run = Run(folder, together=together)
        for number in range(3):
            self.run.train()
            self.run.save(extra=number)
        self.checkpoint = self.run.now
        self.run.train()
        self.intact, self.folder = folder / "intact", folder / "saved"
        self.folder.rename(self.intact)
        self.files = sorted(path.name for path in self.intact.iterdir())
        self.run.optimizer.state_dict()
        self.now, self.bytes = self.run.now, self.working_files()

    def working_files(self) -> dict[str, bytes]:
        """The table and its state as another process would read them."""
        return {path.name: path.read_bytes() for path in self.run.folder.glob("*table*")}

    def fresh(self) -> Path:
        """An intact copy of the checkpoint, to be damaged."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.intact, self.folder)
        return self.folder

    def files_like(self, kind: str) -> list[str]:
        return [name for name in self.files if name.startswith(kind)]

    def check_refused(self, what: str) -> None:
        refused = ""
        try:
            self.run.load()
        except sparsestep.InputError as error:
            refused = str(error)
        assert refused, f"{what}: loaded"
        is_named = str(self.folder) in refused or refused.startswith("load: model and optimizer")
        assert is_named, f"{what}: {refused}"
        assert same(self.now, self.run.now), f"{what}: something has changed"
        assert self.working_files() == self.bytes, f"{what}: files have changed"


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "together"])
def saved(request, tmp_path_factory) -> Iterator[Saved]:
    found = Saved(tmp_path_factory.mktemp("damage"), request.param)
    yield found
    vars(found).clear()  # pytest keeps it for longer than its files may stay open


def flip(path: Path, at: int, bits: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def offsets(size: int, head: int, chance: random.Random, count: int) -> list[int]:
    """All of the first bytes, or some of them, and some of the others."""
    first = range(min(size, head)) if count > 100 else chance.sample(range(min(size, head)), count)
    return [*first, *(chance.randrange(size) for _ in range(count)), size - 1]


@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_flipped_bytes(saved: Saved, kind: str, count: int):
    chance = random.Random(kind)
    folder = saved.fresh()
    for name in saved.files_like(kind):
        path = folder / name
        for at in offsets(path.stat().st_size, 512, chance, count):
            bits = chance.randrange(1, 256)
            flip(path, at, bits)
            saved.check_refused(f"{name}: byte {at} ^ {bits}")
            flip(path, at, bits)
    assert saved.run.load() == 2, "it was intact in between"
    assert same(saved.checkpoint, saved.run.now)
    restore(saved)


def restore(saved: Saved) -> None:
    """Train on from the checkpoint again, to where the damaged ones are loaded."""
    saved.run.train()
    saved.now, saved.bytes = saved.run.now, saved.working_files()


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bytes_of_the_manifest(saved: Saved, step: int):
    """A manifest whose spaces have changed still says the same."""
    folder, chance = saved.fresh(), random.Random(step)
    path = folder / "manifest.json"
    expected = json.loads(path.read_text())
    for at in range(0, path.stat().st_size, step):
        bits = chance.randrange(1, 256)
        flip(path, at, bits)
        try:
            is_same = json.loads(path.read_bytes()) == expected
        except (ValueError, RecursionError):
            is_same = False
        if not is_same:
            saved.check_refused(f"manifest: byte {at} ^ {bits}")
        flip(path, at, bits)


@pytest.mark.parametrize(("key", "value"), [("number", 7), ("id", "0" * 32), ("journals", [])])
def test_a_changed_manifest_that_is_still_valid(saved: Saved, key: str, value: Any):
    path = saved.fresh() / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    saved.check_refused(f"{key}: {value}")


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_extended_empty_and_missing_files(saved: Saved, kind: str):
    for name in saved.files_like(kind)[:2]:
        folder = saved.fresh()
        path = folder / name
        data = path.read_bytes()
        sizes = {0, 1, 63, HEADER_BYTES - 1, HEADER_BYTES, len(data) // 2, len(data) - 1}
        for size in sorted(size for size in sizes if size < len(data)):
            path.write_bytes(data[:size])
            saved.check_refused(f"{name}: {size} bytes")
        for more in (b"\0", b"}", bytes(5000)):
            path.write_bytes(data + more)
            saved.check_refused(f"{name}: {len(more)} bytes more")
        path.unlink()
        saved.check_refused(f"no {name}")


def test_swapped_files(saved: Saved):
    for kind in ("base-", "rows-"):
        names = saved.files_like(kind)
        if len(names) > 1:
            folder = saved.fresh()
            for name, other in zip(names[:2], reversed(names[:2]), strict=True):
                shutil.copy(saved.intact / other, folder / name)
            saved.check_refused(f"{names[:2]} swapped")
    folder = saved.fresh()
    shutil.copy(saved.intact / saved.files_like("rows-")[0], folder / saved.files_like("rest-")[0])
    saved.check_refused("a journal in place of the rest")


def test_what_is_no_regular_file(saved: Saved):
    """A link may lead out of the folder, and to open a pipe would wait forever."""
    for kind in KINDS:
        name = saved.files_like(kind)[0]
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


def write_manifest(path: Path, content: Any) -> None:
    """Write a manifest with a valid checksum."""
    if isinstance(content, dict) and "crc" in content:
        about = {key: value for key, value in content.items() if key not in ("crc", "version")}
        content["crc"] = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    path.write_text(json.dumps(content))


def paths_of(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON object is."""
    yield at
    if isinstance(content, dict | list):
        each = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in each:
            yield from paths_of(value, (*at, key))


def changed(content: Any, at: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    content = json.loads(json.dumps(content))
    inner = content
    for key in at[:-1]:
        inner = inner[key]
    change(inner, at[-1])
    return content


VALUES = [
    None,
    True,
    -1,
    2**63,
    10**400,
    1.5,
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    {"x": 1},
    float("nan"),
]


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_crafted_manifests(saved: Saved, count: int):
    folder, chance = saved.fresh(), random.Random(0)
    intact = json.loads((folder / "manifest.json").read_text())
    places = [at for at in paths_of(intact) if at and at != ("crc",)]
    for _ in range(count):
        at = chance.choice(places)
        value = chance.choice(VALUES)

        def put(inner: Any, key: Any, value: Any = value) -> None:
            inner[key] = value

        def drop(inner: Any, key: Any) -> None:
            del inner[key]

        def repeat(inner: Any, key: Any) -> None:
            if isinstance(inner, list):
                inner.append(inner[key])
            else:
                inner[f"{key}2"] = inner[key]

        content = changed(intact, at, chance.choice([put, put, drop, repeat]))
        is_valid = (
            content == intact
            or at in (("id",), ("number",))  # which say where it comes from, not what is in it
            or (
                at[0] == "journals"
                and content.get("journals") in ([], *([j] for j in intact["journals"]))
            )
        )
        if is_valid:
            continue
        write_manifest(folder / "manifest.json", content)
        saved.check_refused(f"{at}: {value}")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"version": 2, "version": 2}',
        b'{"version": ' + b"9" * 5000 + b"}",
        b"\0" * 100,
    ],
    ids=range(10),
)
def test_a_manifest_that_is_none(saved: Saved, text: bytes):
    folder = saved.fresh()
    (folder / "manifest.json").write_bytes(text)
    saved.check_refused(repr(text[:20]))
    with pytest.raises(sparsestep.InputError, match="manifest"):
        saved.run.save()


NAMES = ["../base-000001.0", "/etc/passwd", "base-000001.0/../x", "base-000001.0\0", ".", "", "x"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["base", "rows", "rest"])
def test_paths_stay_inside_the_folder(saved: Saved, kind: str, name: str):
    folder = saved.fresh()
    (folder.parent / "base-000001.0").write_bytes(b"outside")
    content = json.loads((folder / "manifest.json").read_text())
    if kind == "base":
        content["tables"][0]["base"]["file"] = name
    elif kind == "rows":
        content["journals"][0]["file"]["file"] = name
    else:
        content["rest"]["file"] = name
    write_manifest(folder / "manifest.json", content)
    saved.check_refused(name)
    with pytest.raises(sparsestep.InputError, match="lie in the folder"):
        saved.run.save()
    assert (folder.parent / "base-000001.0").read_bytes() == b"outside"


def test_rows_out_of_range(saved: Saved):
    """A journal with valid checksums, but rows that no table has."""
    for row in (-1, ROWS, 2**62):
        folder = saved.fresh()
        content = json.loads((folder / "manifest.json").read_text())
        about = content["journals"][-1]["file"]
        path = folder / about["file"]
        data = bytearray(path.read_bytes())
        at = 64 + 8 * (content["journals"][-1]["parts"][0]["rows"] - 1 if row > 0 else 0)
        data[at : at + 8] = row.to_bytes(8, "little", signed=True)
        path.write_bytes(data)
        about["crc"] = zlib.crc32(data)
        write_manifest(folder / "manifest.json", content)
        saved.check_refused(f"row {row}")


def test_newer_versions_are_refused_by_name(saved: Saved):
    folder = saved.fresh()
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"version": 3, "anything": "else"}))
    saved.check_refused("a newer manifest")
    match = "Got format {}, written by a newer sparsestep"
    with pytest.raises(sparsestep.InputError, match=match.format(3)):
        saved.run.load()

    path = folder / content["journals"][0]["file"]["file"]
    data = path.read_bytes().replace(b"sparsestep rows 1\n", b"sparsestep rows 2\n")
    path.write_bytes(data)
    content["journals"][0]["file"]["crc"] = zlib.crc32(data)
    write_manifest(folder / "manifest.json", content)
    with pytest.raises(sparsestep.InputError, match=match.format(2)):
        saved.run.load()

    folder = saved.fresh()
    path = folder / content["rest"]["file"]
    torch.save({**torch.load(path, weights_only=True), "version": 2}, path)
    content = json.loads((folder / "manifest.json").read_text())
    content["rest"].update(bytes=path.stat().st_size, crc=zlib.crc32(path.read_bytes()))
    write_manifest(folder / "manifest.json", content)
    with pytest.raises(sparsestep.InputError, match=match.format(2)):
        saved.run.load()
    saved.check_refused("a newer rest")


def test_a_rest_that_would_execute_code_or_holds_something_else(saved: Saved):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(saved.run.folder / "executed"),))

    rest = torch.load(saved.intact / saved.files_like("rest-")[0], weights_only=True)
    contents = [
        Evil(),
        [],
        {},
        {**rest, "optimizer": {}},
        {**rest, "optimizer": {"state": [], "param_groups": []}},
        {**rest, "optimizer": {"state": {0: 1}, "param_groups": []}},
        {**rest, "model": []},
    ]
    for content in contents:
        folder = saved.fresh()
        path = folder / saved.files_like("rest-")[0]
        torch.save(content, path)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["rest"].update(bytes=path.stat().st_size, crc=zlib.crc32(path.read_bytes()))
        write_manifest(folder / "manifest.json", manifest)
        saved.check_refused(str(type(content)))
    assert not (saved.run.folder / "executed").exists()


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_a_table_with_a_damaged_header_is_refused(together: bool, step: int, tmp_path: Path):
    """The rows of a working table have no checksum: they change with every step."""
    path = tmp_path / "table"
    optimizer = sparsestep.Adam if together else None
    mapped(path, (ROWS, DIM), optimizer=optimizer)
    gc.collect()
    data, chance = path.read_bytes(), random.Random(step)
    for at in range(0, HEADER_BYTES, step):
        flip(path, at, bits := chance.randrange(1, 256))
        with pytest.raises(sparsestep.InputError, match="table"):
            mapped(path, (ROWS, DIM), optimizer=optimizer)
        flip(path, at, bits)
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1, len(data) + 1):
        path.write_bytes(data[:size].ljust(size))
        with pytest.raises(sparsestep.InputError, match="table"):
            mapped(path, (ROWS, DIM), optimizer=optimizer)
    path.write_bytes(data.replace(b"sparsestep tensor 2", b"sparsestep tensor 3"))
    with pytest.raises(sparsestep.InputError, match="format 3, written by a newer sparsestep"):
        mapped(path, (ROWS, DIM))
    path.write_bytes(data)
    assert not mapped(path, (ROWS, DIM)).any()
