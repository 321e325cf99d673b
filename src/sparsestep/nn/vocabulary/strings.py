"""Ids for strings."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence


def hash_strings(strings: Iterable[str]) -> Tensor:
    """Hash strings to ids, the same in every process and on every machine.

    An id is the BLAKE2b hash (digest size 8) of the string in UTF-8, as a little-endian signed
    64-bit integer. Among 100 million different strings, the chance that two share an id is one in
    3,700.

    Args:
        strings: the strings.

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
    contract = "hash_strings: strings must be a list of str"
    given: Any = strings
    if isinstance(given, str):
        raise InputError(sentence(contract, f"a single string, {given!r}"))
    if not isinstance(given, Iterable):
        raise InputError(sentence(contract, f"{given!r}, a {type(given).__name__}"))
    found = []
    for index, each in enumerate(given):
        if not isinstance(each, str):
            got = f"a {type(each).__name__} at index {index}"
            raise InputError(sentence(contract, got))
        try:
            encoded = each.encode()
        except UnicodeEncodeError as error:
            requirement = "hash_strings: strings must have a UTF-8 form"
            got = f"{each!r} at index {index} ({error.reason})"
            remedy = "For bytes decoded with errors='surrogateescape', use errors='replace'"
            raise InputError(sentence(requirement, got, remedy)) from None
        digest = blake2b(encoded, digest_size=8).digest()
        found.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(found, dtype=torch.int64)
