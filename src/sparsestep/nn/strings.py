"""hash_strings: ids of strings, the same everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import cat
from sparsestep.errors import InputError, message

_STR_REQUIREMENT = "hash_strings: strings must be a list of str"
_UTF8_REQUIREMENT = "hash_strings: strings must have a UTF-8 form"
_ARROW_TYPES = ("string", "large_string")


def hash_strings(strings: Iterable[str]) -> Tensor:
    """Hash strings to ids, the same in every process and on every machine.

    An id is the BLAKE2b hash (digest size 8) of the string in UTF-8, as a little-endian signed
    64-bit integer. Among 100 million different strings, the chance that two share an id is one in
    3,700.

    Args:
        strings: the strings: a list, a NumPy or Arrow array, or any iterable of ``str``.

    Returns:
        An int64 tensor with an id for each string.

    Raises:
        InputError: ``strings`` is not a list of strings, or one of them has no UTF-8 form, as with
            a lone surrogate.

    Example:
        >>> import sparsestep
        >>> sparsestep.nn.hash_strings(["red", "green", "red"])
        tensor([-6681078847286810355, -1701537906916135348, -6681078847286810355])
    """
    given: Any = strings
    _check_iterable(given)
    if hasattr(given, "to_pylist"):  # of Arrow
        return _hash_arrow(given)
    return _hash_sequence(given if type(given) in (list, tuple) else listed(given))


def _check_iterable(given: Any) -> None:
    if isinstance(given, str):
        raise InputError(message(_STR_REQUIREMENT, f"a single string, {given!r}"))
    if getattr(given, "ndim", 1) == 0:  # of NumPy or torch
        raise InputError(message(_STR_REQUIREMENT, f"an array without dimensions, {given!r}"))
    if not isinstance(given, Iterable):
        raise InputError(message(_STR_REQUIREMENT, f"{given!r}, a {type(given).__name__}"))


def listed(strings: Any) -> list[Any]:
    """Strings as objects of Python: arrays make them faster than they are iterated over."""
    _check_iterable(strings)
    for name in ("to_pylist", "tolist"):  # of Arrow, of NumPy
        if hasattr(strings, name):
            return list(getattr(strings, name)())
    return list(strings)


def _hash_sequence(strings: Sequence[Any], first: int = 0) -> Tensor:
    ids = torch.empty(len(strings), dtype=torch.int64)
    if ext is None or ext.hash_strings(strings, ids, torch.get_num_threads()) >= 0:
        found = [_hash_string(each, index) for index, each in enumerate(strings, first)]
        ids = torch.tensor(found, dtype=torch.int64)
    return ids


def _hash_string(string: Any, index: int) -> int:
    """Hash one string without the core; raises if it is invalid."""
    if not isinstance(string, str):
        got = f"a {type(string).__name__} at index {index}"
        raise InputError(message(_STR_REQUIREMENT, got))
    try:
        encoded = string.encode()
    except UnicodeEncodeError as error:
        got = f"{string!r} at index {index} ({error.reason})"
        remedy = "For bytes decoded with errors='surrogateescape', use errors='replace'"
        raise InputError(message(_UTF8_REQUIREMENT, got, remedy)) from None
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "little", signed=True)


def _hash_arrow(array: Any, first: int = 0) -> Tensor:
    """An array of Arrow, or several in chunks, without a Python object for each string."""
    if hasattr(array, "chunks"):
        ends = itertools.accumulate(map(len, array.chunks), initial=0)
        return cat([torch.empty(0, dtype=torch.int64), *map(_hash_arrow, array.chunks, ends)])
    kind = str(array.type)
    if ext is None or kind not in _ARROW_TYPES or array.null_count or not len(array):
        return _hash_sequence(array.to_pylist(), first)
    _, offsets, text = array.buffers()
    ids = torch.empty(len(array), dtype=torch.int64)
    is_large, text = kind == "large_string", b"" if text is None else text
    threads = torch.get_num_threads()
    index = ext.hash_arrow(offsets, is_large, text, array.offset, ids, threads)
    if index >= 0:
        raise InputError(message(_UTF8_REQUIREMENT, f"other bytes at index {first + index}"))
    return ids
