"""Ids of strings: those of hashlib's BLAKE2b, whatever holds the strings."""

from __future__ import annotations

import struct
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsestep.errors import InputError
from sparsestep.nn import hash_strings
from sparsestep.nn import strings as module

np: Any = pytest.importorskip("numpy")


def expected(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


class ArrowArray(SimpleNamespace):
    """Strings as an array of Arrow has them."""

    def __init__(self, texts: list[Any], kind: str = "string", offset: int = 0) -> None:
        encoded = [each if isinstance(each, bytes) else (each or "").encode() for each in texts]
        ends = [sum(map(len, encoded[:n])) for n in range(len(encoded) + 1)]
        code = f"{len(ends)}{'q' if kind == 'large_string' else 'i'}"
        buffers = [None, struct.pack(code, *ends), b"".join(encoded) or None]
        shown, nulls = texts[offset:], texts[offset:].count(None)
        super().__init__(type=kind, offset=offset, null_count=nulls, texts=shown)
        self.buffers, self.to_pylist = lambda: buffers, lambda: shown

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Any:
        raise AssertionError("made an object for each string")


class ChunkedArray(SimpleNamespace):
    def to_pylist(self) -> list[Any]:
        raise AssertionError("made an object for each string")

    __iter__ = to_pylist


TEXTS = ["", "red", "ß", "\0", "日本", *(chr(97 + n % 26) * n for n in range(300)), "z" * 5000]


@pytest.mark.parametrize("has_core", [True, False])
def test_strings_have_the_same_id_everywhere(has_core: bool, monkeypatch: pytest.MonkeyPatch):
    if not has_core:
        monkeypatch.setattr(module, "ext", None)
    assert hash_strings([""]).item() == -5426141060434712860
    ids = [expected(text) for text in TEXTS]
    chunks = ChunkedArray(chunks=[ArrowArray(TEXTS[:7]), ArrowArray([]), ArrowArray(TEXTS[7:])])
    large = ArrowArray(["x", "yy", *TEXTS], "large_string", offset=2)
    view = ArrowArray(TEXTS, "string_view")
    arrays = (np.array(TEXTS, dtype=object), np.array(TEXTS[4:]))
    assert hash_strings(arrays[1]).tolist() == ids[4:]
    for given in (TEXTS, iter(TEXTS), tuple(TEXTS), arrays[0], chunks, large, view):
        assert hash_strings(given).tolist() == ids
    assert hash_strings([]).tolist() == hash_strings(ArrowArray([])).tolist() == []
    many = [f"user-{n}" for n in range(70_001)]  # more than one part, and than one thread's share
    assert hash_strings(many).tolist() == list(map(expected, many))


def test_what_is_no_string_is_refused():
    cases: list[tuple[Any, str]] = [
        (ArrowArray(["a", None]), "Got a NoneType at index 1"),
        (ArrowArray(["a", b"\xff"]), "UTF-8 form. Got other bytes at index 1"),
        (ArrowArray(["ab", b"\xed\xa0\x80"]), "UTF-8 form. Got other bytes at index 1"),
        (ChunkedArray(chunks=[ArrowArray(["a"]), ArrowArray([b"\xc3"])]), "at index 1"),
        (np.array([b"bytes"]), "Got a bytes at index 0"),
        (torch.tensor([1]), "Got an int at index 0"),
    ]
    for given, got in cases:
        with pytest.raises(InputError, match=got):
            hash_strings(given)
    # Half of a character in each of two strings: together they are one.
    for without_dims in (np.array("abc"), torch.tensor(5)):
        with pytest.raises(InputError, match="an array without dimensions"):
            hash_strings(without_dims)
    with pytest.raises(InputError, match="index 0"):
        hash_strings(ArrowArray([b"\xc3", b"\x9f"]))
    broken = ArrowArray(["abc"])
    broken.buffers = lambda: [None, struct.pack("2i", 0, 4), b"abc"]
    with pytest.raises(ValueError, match="no such strings"):
        hash_strings(broken)
