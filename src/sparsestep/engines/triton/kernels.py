"""Functions of all printed kernels: addresses of rows, sums of runs, rounding.

Every GPU computes the same bits: divisions and roots are correctly rounded, no product is fused
with a sum (``enable_fp_fusion=False`` at each launch), and conversions to half precision work on
the bits, as in ``native/kernels/rows.h``. With ``TRITON_INTERPRET=1`` this code runs on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

RUN = tl.constexpr(64)  # entries that are summed one by one; ``block_sums`` sums longer runs
# The interpreter has no libdevice.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


# Entries. Indices are in ascending order, equal ones in order of appearance.


@triton.jit
def load_slots(indices, ok, n, ROWS: tl.constexpr):
    """The entries of a program, their slots, and whether each is the first of its slot."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = entry < n
    slot = entry
    if indices is not None:
        slot = tl.load(indices + entry, mask=first, other=-1)
        first &= slot != tl.load(indices + entry - 1, mask=first & (entry > 0), other=-1)
    if ok is not None:
        first &= tl.load(ok + tl.zeros_like(entry)) != 0
    return entry, slot, first


@triton.jit
def continues_run(indices, entry, slot, there, n):
    """Whether an entry exists and has the slot."""
    there &= entry < n
    return there & (tl.load(indices + entry, mask=there, other=-1) == slot)


@triton.jit
def load_rows(
    values,
    order,
    value_index,
    scale,
    entry,
    there,
    column,
    inside,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The rows of some entries, scaled; a product is rounded to the dtype of the values."""
    if order is not None:
        entry = tl.load(order + entry, mask=there, other=0)
    row = entry
    if value_index is not None:
        row = tl.load(value_index + entry, mask=there, other=0)
    found = tl.load(values + row[:, None] * C + column, mask=inside, other=0.0).to(T)
    if scale is not None:
        factor = tl.load(scale + entry, mask=there, other=0.0).to(T)
        found = rounded(factor[:, None] * found, values.dtype.element_ty).to(T)
    return found


@triton.jit
def select_elements(
    element_mask, order, value_index, entry, first, column, inside, C: tl.constexpr
):
    """The element mask of a slot."""
    if order is not None:
        entry = tl.load(order + entry, mask=first, other=0)
    if value_index is not None:
        entry = tl.load(value_index + entry, mask=first, other=0)
    return inside & (tl.load(element_mask + entry[:, None] * C + column, mask=inside, other=0) != 0)


# Sums of a run


@triton.jit
def gradient(
    values,
    indices,
    order,
    value_index,
    scale,
    blocks,
    n,
    entry,
    slot,
    first,
    column,
    inside,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The sum of each slot's rows, in order of appearance."""
    total = load_rows(values, order, value_index, scale, entry, first, column, inside, T, C)
    if order is not None:
        at = entry + 1
        more = continues_run(indices, at, slot, first, n)
        k = 1
        while (k < RUN) & (tl.max(more.to(tl.int32), axis=0) > 0):
            also = more[:, None] & inside
            row = load_rows(values, order, value_index, scale, at, more, column, also, T, C)
            total = tl.where(also, total + row, total)
            at += 1
            k += 1
            more = continues_run(indices, at, slot, more, n)
        if blocks is not None:
            while tl.max(more.to(tl.int32), axis=0) > 0:
                also = more[:, None] & inside
                row = tl.load(blocks + (at // RUN)[:, None] * C + column, mask=also, other=0.0)
                total = tl.where(also, total + row, total)
                at += RUN
                more = continues_run(indices, at, slot, more, n)
    return total


@triton.jit(do_not_specialize=["n", "steps"])
def block_sums(
    values,
    indices,
    order,
    value_index,
    scale,
    blocks,
    n: tl.int64,
    steps: tl.int32,
    T: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of each further ``RUN`` entries of longer runs, at the first entry's number / RUN.

    That is unique: two such entries are at least ``RUN`` apart.
    """
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(indices + entry, mask=entry < n, other=-1)
    deep = (entry >= RUN) & (entry < n)
    deep &= tl.load(indices + entry - RUN, mask=deep, other=-1) == slot
    if tl.max(deep.to(tl.int32), axis=0) > 0:
        low, high = tl.zeros_like(entry), entry  # where the run begins, by bisection
        for _ in range(steps):
            middle = (low + high) // 2
            reached = tl.load(indices + middle, mask=deep, other=-1) == slot
            low = tl.where(reached, low, tl.minimum(middle + 1, high))
            high = tl.where(reached, middle, high)
        first = deep & ((entry - high) % RUN == 0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = first[:, None] & (column < C)
        total = load_rows(values, order, value_index, scale, entry, first, column, inside, T, C)
        more = first
        for k in range(1, RUN):
            more = continues_run(indices, entry + k, slot, more, n)
            also = more[:, None] & inside
            row = load_rows(values, order, value_index, scale, entry + k, more, column, also, T, C)
            total = tl.where(also, total + row, total)
        tl.store(blocks + (entry // RUN)[:, None] * C + column, total, mask=inside)


# Operations of a program


@triton.jit
def number(value, T: tl.constexpr):
    """A constant of the program, in the dtype of the computation."""
    return tl.full([1, 1], value, T)


@triton.jit
def divided(a, b):
    """Correctly rounded, unlike the operator."""
    a, b = tl.broadcast(a, b)
    return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def inverse(a):
    return divided(tl.full(a.shape, 1.0, a.dtype), a)


@triton.jit
def root(a):
    """Correctly rounded, unlike the function."""
    return tl.sqrt_rn(a) if a.dtype == tl.float32 else tl.sqrt(a)


@triton.jit
def sign(a):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0)).to(a.dtype)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exponential(a):
    return tl.exp(a) if _INTERPRETED else libdevice.exp(a)


@triton.jit
def logarithm(a):
    return tl.log(a) if _INTERPRETED else libdevice.log(a)


@triton.jit
def power(a, b):
    a, b = tl.broadcast(a, b)
    return tl.exp2(b * tl.log2(a)) if _INTERPRETED else libdevice.pow(a, b)


@triton.jit
def halves(a, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first and the second half of the columns."""
    return tl.split(tl.trans(tl.reshape(a, [ROWS, 2, WIDTH // 2]), (0, 2, 1)))


@triton.jit
def largest(a, inside):
    return tl.reduce(tl.where(inside, a, float("-inf")), 1, larger, keep_dims=True)


# Rounding to a tensor's dtype


@triton.jit
def rounded(a, to: tl.constexpr, bits=None):
    """To nearest, or half precision up or down by random bits."""
    if to == tl.bfloat16:
        word = a.to(tl.float32).to(tl.uint32, bitcast=True)
        if bits is None:
            half = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        else:
            half = (word + (bits & 0xFFFF)) >> 16
        half = tl.where(a != a, 0x7FC0, half)
        return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif to == tl.float16:
        word = a.to(tl.float32).to(tl.uint32, bitcast=True)
        magnitude = word & 0x7FFFFFFF
        is_subnormal = magnitude < (113 << 23)
        if bits is None:
            normal = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
            # Adding 0.5 lets the adder round at half's last place.
            added = magnitude.to(tl.float32, bitcast=True) + 0.5
            subnormal = added.to(tl.uint32, bitcast=True) - 0x3F000000
            half = tl.where(is_subnormal, subnormal, normal)
            half = tl.where(magnitude >= 0x477FF000, 0x7C00, half)
        else:
            chance = bits & 0x1FFF
            normal = (magnitude - (112 << 23) + chance) >> 13
            # Subnormal results are multiples of 2^-24; larger values are not converted.
            few = tl.where(is_subnormal, magnitude, 0).to(tl.float32, bitcast=True)
            places = few * 16777216.0 + chance.to(tl.float32) * (1.0 / 8192.0)
            half = tl.where(is_subnormal, places.to(tl.int32).to(tl.uint32), normal)
            half = tl.where((magnitude >= 0x47800000) | (half > 0x7C00), 0x7C00, half)
        half = tl.where(magnitude > 0x7F800000, 0x7E00, half)
        return (half | ((word >> 16) & 0x8000)).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return a.to(to)


@triton.jit
def random_bits(seed, TENSOR: tl.constexpr, element):
    """As in ``rounding.py`` and ``native/kernels/rows.h``."""
    key = seed.to(tl.uint64) + TENSOR
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key ^= key >> 31
    bits = (element.to(tl.uint32) ^ key.to(tl.uint32)) * 0x9E3779B1
    bits ^= bits >> 15
    bits += (key >> 32).to(tl.uint32) + (element >> 32).to(tl.uint32) * 0x85EBCA77
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)
