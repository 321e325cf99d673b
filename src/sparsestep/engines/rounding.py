"""Stochastic rounding of half-precision tensors.

Round-to-nearest loses updates below half an ulp. Stochastic rounding is unbiased: it rounds up with
a probability equal to the distance from the lower neighbor. The random bits are a function of seed
and element, the same for any order, threads, instruction set and engine. The C++ counterpart is
``native/kernels/rows.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


class RowStride(NamedTuple):
    """Rows of a sharded table: row ``i`` of the shard is row ``i * step + first`` of the table.

    Example:
        >>> RowStride(length=2, step=3, first=1).rows(torch.arange(3)).tolist()
        [1, 4, 7]
        >>> RowStride(length=2, step=3, first=1).elements(torch.arange(4)).tolist()
        [2, 3, 8, 9]
    """

    length: int  # elements of a row
    step: int  # number of shards
    first: int  # row of this shard

    def elements(self, here: Tensor) -> Tensor:
        """Return the indices of a shard's elements in the table."""
        rows = self.rows(here.div(self.length, rounding_mode="floor"))
        return rows * self.length + here % self.length

    def rows(self, here: Tensor) -> Tensor:
        """Return the indices of a shard's rows in the table."""
        return here * self.step + self.first


def _splitmix64(key: int) -> int:
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 & _LONG
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB & _LONG
    return key ^ (key >> 31)


def step_seed(seed: int, param_index: int, step: int) -> int:
    """Return the seed of one update of one parameter."""
    return _splitmix64(_splitmix64(_splitmix64(seed & _LONG) + param_index & _LONG) + step & _LONG)


def random_bits(seed: int, tensor: int, elements: Tensor) -> Tensor:
    """Return 32 random bits, in int64, for each element of a tensor."""
    key = _splitmix64(seed + (tensor + 1) * 0x9E3779B97F4A7C15 & _LONG)
    first, second = key & _WORD, key >> 32
    bits = ((elements & _WORD) ^ first) * 0x9E3779B1 & _WORD
    bits = bits ^ (bits >> 15)
    bits = bits + second + (elements >> 32) * 0x85EBCA77 & _WORD
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _WORD
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _WORD
    return bits ^ (bits >> 16)


_STARTS, _APART, _TILE = 64, 16, 512


def int8_random_bits(seed: int, tensor: int, rows: Tensor, block: int) -> Tensor:
    """Return 20 random bits, in int64, for each element of rows, as ``int8.h`` makes them."""
    table = random_bits(0, 0, torch.arange(_STARTS * _APART + _TILE, device=rows.device)) >> 12
    tiles = -(-block // _TILE)
    columns = torch.arange(block, device=rows.device)
    own = random_bits(seed, tensor, rows[:, None] * tiles + columns // _TILE)
    return table[own % _STARTS * _APART + columns % _TILE] ^ (own >> 12)


def round_stochastic(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round values to half precision by the random bits."""
    values = values.float()
    word = values.view(torch.int32).long() & _WORD
    if dtype == torch.bfloat16:
        half = (word + (bits & 0xFFFF)) >> 16
        half = torch.where(values.isnan(), 0x7FC0, half)
    else:
        half = _round_float16(word, bits & 0x1FFF)
    # Reinterpret as int16.
    return (half - ((half & 0x8000) << 1)).to(torch.int16).view(dtype)


def _round_float16(word: Tensor, chance: Tensor) -> Tensor:
    sign, magnitude = (word >> 16) & 0x8000, word & 0x7FFFFFFF
    subnormal = magnitude < (113 << 23)
    few = torch.where(subnormal, magnitude, 0).to(torch.int32).view(torch.float32)
    places = (few * 16777216.0 + chance.float() * (1.0 / 8192.0)).long()
    half = torch.where(subnormal, places, (magnitude - (112 << 23) + chance) >> 13)
    half = torch.where((magnitude >= 0x47800000) | (half > 0x7C00), 0x7C00, half)
    half = torch.where(magnitude > 0x7F800000, 0x7E00, half)
    return half | sign
