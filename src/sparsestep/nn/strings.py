"""Ids for strings."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence


def hash_strings(strings: Iterable[str]) -> Tensor:
    """An id for each string, the same in every process and on every machine.

    It is the first 64 bits of BLAKE2b (digest size 8) of the string in UTF-8, as a little-endian
    signed number. Among 100 million different strings, two have the same id with a chance of one
    in 3,700.

    Args:
        strings: what to hash.

    Returns:
        int64, one for each string.

    Raises:
        InputError: one of them is no string.

    Example:
        >>> import sparsestep
        >>> sparsestep.nn.hash_strings(["red", "green", "red"])
        tensor([-6681078847286810355, -1701537906916135348, -6681078847286810355])
    """
    if isinstance(strings, str):
        contract = "hash_strings: strings must be a list of str"
        raise InputError(sentence(contract, f"a single one, {strings!r}"))
    found = []
    each: Any
    for place, each in enumerate(strings):
        if not isinstance(each, str):
            got = f"a {type(each).__name__} at position {place}"
            raise InputError(sentence("hash_strings: strings must be a list of str", got))
        digest = blake2b(each.encode(), digest_size=8).digest()
        found.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(found, dtype=torch.int64)
