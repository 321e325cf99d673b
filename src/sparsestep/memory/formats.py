"""Checks of JSON that was read from a file: a file is input like any other, and may be damaged.

Every function raises ``ValueError`` with the requirement and the value; callers add the file.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

# Sizes and counts stay below this, so that sums and products of two fit into 64 bits or are caught.
LIMIT = 1 << 62

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def parse(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuses duplicate keys.

    Example:
        >>> parse(b'{"rows": 3}')
        {'rows': 3}
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it must not be nested deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it must be UTF-8") from None
    if not isinstance(found, dict):
        raise ValueError(f"it must be a JSON object, got {_shown(found)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("keys must be unique")
    return found


def fields(name: str, value: Any, names: Collection[str]) -> dict[str, Any]:
    """Require a JSON object with exactly these keys.

    Example:
        >>> try:
        ...     fields("a table", {"shape": []}, ("shape", "dtype"))
        ... except ValueError as error:
        ...     print(error)
        a table must have the keys dtype, shape, got shape
    """
    if not isinstance(value, dict) or value.keys() != set(names):
        keys = ", ".join(sorted(names))
        got = ", ".join(sorted(value)) if isinstance(value, dict) else _shown(value)
        raise ValueError(f"{name} must have the keys {keys}, got {got}")
    return value


def integer(name: str, value: Any, low: int = 0, high: int = LIMIT) -> int:
    """Require an integer in ``[low, high]``."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {_shown(value)}")
    return value


def string(name: str, value: Any) -> str:
    """Require a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a string that is not empty, got {_shown(value)}")
    return value


def items(name: str, value: Any) -> list[Any]:
    """Require a list."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {_shown(value)}")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Require a JSON object, whatever its keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, got {_shown(value)}")
    return value


def shape(name: str, value: Any, dtype: torch.dtype) -> list[int]:
    """Require a list of sizes of a tensor that can be addressed."""
    total = dtype.itemsize
    for size in items(name, value):
        total *= integer(f"each size in {name}", size, low=1)
        if total > LIMIT:
            raise ValueError(f"{name} must be that of a tensor below 2**62 bytes, got more")
    return list(value)


def dtype(name: str, value: Any) -> torch.dtype:
    """Require the name of a torch dtype, and return the dtype.

    Example:
        >>> dtype("dtype", "float32")
        torch.float32
    """
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"{name} must be the name of a torch dtype, got {_shown(value)}")
    return DTYPES[value]


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}…"
