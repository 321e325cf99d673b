"""Rows and gradients on the wire in fewer bytes than in the table.

``"bf16"`` has two bytes per element. ``"int8"`` has one, and a float32 scale for each row: a 127th
of the largest absolute value. Rows are rounded to the nearest code. Gradients are rounded up or
down at random, in proportion, so that they are right on average. The random bits are a hash of the
row's values, its sender and the table: without state, training that is resumed has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.errors import InputError, message

WireFormat: TypeAlias = Literal["bf16", "int8"]

_FORMATS: dict[str, int] = {"bf16": 0, "int8": 1}  # numbers of the extension
_HALF_BYTES, _SCALE_BYTES = 2, 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_wire(wire: Any) -> None:
    """Raise if it is no format."""
    if wire is not None and (not isinstance(wire, str) or wire not in _FORMATS):
        requirement = f"shard: wire must be None or one of {', '.join(_FORMATS)}"
        raise InputError(message(requirement, repr(wire)))


def row_bytes(wire: WireFormat | None, dim: int, item: int) -> int:
    """Bytes of a row on the wire, for a table with ``item`` bytes per element.

    Example:
        >>> [row_bytes(wire, dim=64, item=4) for wire in (None, "bf16", "int8")]
        [256, 128, 68]
    """
    if wire == "int8" and dim:
        return dim + _SCALE_BYTES
    return dim * (min(item, _HALF_BYTES) if wire == "bf16" else item)


@dataclass(frozen=True)
class Codec:
    """Encodes the rows of one table."""

    wire: WireFormat
    dim: int
    dtype: torch.dtype
    seed: int  # of gradients

    def encode(self, rows: Tensor, *, is_grad: bool) -> Tensor:
        """The bytes of rows."""
        assert ext is not None
        values = rows.detach().float().contiguous()
        num_rows = values.numel() // self.dim
        size = row_bytes(self.wire, self.dim, values.itemsize)
        codes = torch.empty(num_rows * size, dtype=torch.uint8)
        seed = self.seed if is_grad else None
        ext.encode_rows(_FORMATS[self.wire], values, self.dim, seed, codes)
        return codes

    def decode(self, codes: Tensor) -> Tensor:
        """The elements of rows, flat."""
        assert ext is not None
        size = row_bytes(self.wire, self.dim, torch.float32.itemsize)
        values = torch.empty(len(codes) // size * self.dim)
        ext.decode_rows(_FORMATS[self.wire], codes, self.dim, values)
        return values.to(self.dtype)


def codec_for(
    wire: WireFormat | None, dim: int, dtype: torch.dtype, who: str, seed: int
) -> Codec | None:
    """The codec of a table; ``None`` if rows are sent as they are."""
    if wire is None or not dim or (wire == "bf16" and dtype.itemsize == _HALF_BYTES):
        return None
    if dtype not in _DTYPES:
        requirement = f"{who} must be float32, bfloat16 or float16 to be sent as {wire!r}"
        raise InputError(message(requirement, dtype, "Use wire=None"))
    return Codec(wire, dim, dtype, seed)
