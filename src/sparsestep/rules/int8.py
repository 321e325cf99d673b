"""State stored as int8: a code for each element, and a scale for each row.

A code is a small floating-point number. A row is scaled by a power of two such that its largest
value comes to just below 2**17 (``"signed"``) or 2**33 (``"unsigned"``). Then 2 is added, and of
the float32 result the code has the last bits of the exponent and the first three of the mantissa.
So values are stored to 6 to 12 percent, down to the 65,536th part of the row's largest value or
less; smaller ones in equal steps, down to zero, which is exact. Adam divides each element by a root
of its own, so the relative error of small values matters as much as that of large ones: with one
bit less of exponent and one more of mantissa, the layers of a recommender learned worse.

``"signed"`` is for a momentum: a bit for its sign, seven for its size. ``"unsigned"`` is for sums
and averages of squares: eight bits for the size. A square above zero gets at least the code 1, so
that no formula divides by zero because of the storage.

Codes are rounded up or down at random, in proportion: an average that moves by a thousandth of
itself would otherwise never move. Row by row the largest value decides the scale, in every
update; since it is a power of two, what has not moved keeps its code. The C++ counterpart is
``native/kernels/int8.h``; both give the same codes for the same values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, message
from sparsestep.rules.rule import Rule, StateSpec

# Float32: the lowest bit of the exponent, and the number of low bits that a code drops.
_EXPONENT, DROPPED_BITS = 23, 20
_TWO = 0x40000000
# The exponent of the largest code, by which a scale is smaller than the largest value.
_MAX_EXPONENT = {"signed": 16, "unsigned": 32}


def with_int8_state(rule: Rule) -> Rule:
    """The same rule with its state per element in int8.

    Its state is then first that per element, then that per row, then a scale for each of the first.

    Example:
        >>> def update(param, grad, mean, *, lr): ...
        >>> rule = with_int8_state(Rule("mine", update, (StateSpec("mean", int8_format="signed"),)))
        >>> [(spec.name, spec.dtype) for spec in rule.state]
        [('mean', torch.int8), ('mean_scale', torch.float32)]
    """
    coded, rows, scales = [], [], []
    for spec in rule.state:
        if spec.per_row:
            rows.append(replace(spec, dtype=spec.dtype or torch.float32))
            continue
        if spec.int8_format is None:
            requirement = "state_dtype=torch.int8 needs a rule whose state tolerates 8 bits"
            remedy = "Use torch.bfloat16, or None"
            raise InputError(message(requirement, f"{spec.name!r} of {rule.name!r}", remedy))
        starts = spec.int8_format == "unsigned"
        code, half = (_initial_code, _initial_scale) if starts else (None, None)
        scale = StateSpec(f"{spec.name}_scale", spec.initial, True, torch.float32)
        coded.append(replace(spec, dtype=torch.int8, encode_initial=code))
        scales.append(replace(scale, encode_initial=half))
    return replace(rule, state=(*coded, *rows, *scales))


def _initial_code(value: float) -> float:
    return 8.0 if value else 0.0  # that of 2


def _initial_scale(value: float) -> float:
    return value / 2


def num_encoded(state: Sequence[StateSpec]) -> int:
    """Return the number of state tensors that are stored as codes."""
    return sum(spec.dtype is torch.int8 for spec in state)


def decode(state: Sequence[StateSpec], tensors: list[Tensor]) -> list[Tensor]:
    """The values that codes stand for, without the scales; rows as ``[rows, block]``."""
    coded = num_encoded(state)
    if not coded:
        return tensors
    scales = tensors[-coded:]
    values = [
        _decode(spec, codes, scale)
        for spec, codes, scale in zip(state, tensors[:coded], scales, strict=False)
    ]
    return [*values, *tensors[coded:-coded]]


def _decode(spec: StateSpec, codes: Tensor, scale: Tensor) -> Tensor:
    sizes = codes.to(torch.int32) & (0x7F if spec.int8_format == "signed" else 0xFF)
    values = ((sizes << DROPPED_BITS) | _TWO).view(torch.float32) - 2
    values = values * scale.float()
    return torch.where(codes < 0, -values, values) if spec.int8_format == "signed" else values


def encode(state: Sequence[StateSpec], tensors: list[Tensor]) -> list[Tensor]:
    """Codes that are not rounded yet, and scales: the inverse of ``decode``."""
    coded = num_encoded(state)
    if not coded:
        return tensors
    found = [_encode(spec, values) for spec, values in zip(state, tensors[:coded], strict=False)]
    return [*(codes for codes, _ in found), *tensors[coded:], *(scale for _, scale in found)]


def _encode(spec: StateSpec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes times ``2**DROPPED_BITS``, of which rounding takes whole ones, and scales."""
    assert spec.int8_format is not None
    last = _MAX_EXPONENT[spec.int8_format]
    sizes = values.float().abs()
    largest = sizes.amax(1, keepdim=True)
    # A quarter more, so that rounding up does not lead beyond the last code. A scale and its
    # reciprocal are normal numbers.
    exponent = (largest.view(torch.int32) + (1 << _EXPONENT - 2)) >> _EXPONENT
    exponent = exponent.clamp(min=last + 1)
    scale = ((exponent - last) << _EXPONENT).view(torch.float32)
    inverse = ((254 + last - exponent) << _EXPONENT).view(torch.float32)
    # A NaN or inf poisons the row.
    usable = largest.isfinite()
    scaled = torch.where(usable, sizes * inverse, 0.0) + 2
    steps = scaled.view(torch.int32).long() - _TWO
    if spec.int8_format == "signed":
        steps = torch.where(values.signbit(), ~steps, steps)  # zero has a sign, too
    else:
        steps = torch.where(usable & (sizes > 0), steps.clamp(min=1 << DROPPED_BITS), steps)
    return steps, torch.where(usable, scale, torch.nan)


def round_codes(spec: StateSpec, codes: Tensor, chance: Tensor | int) -> Tensor:
    """Round codes of ``encode`` as they are stored.

    They are rounded up by a ``chance`` from 0 to ``2**DROPPED_BITS - 1``, half of it for nearest.
    """
    bits = (torch.where(codes < 0, ~codes, codes) + chance) >> DROPPED_BITS
    if spec.int8_format == "signed":
        bits = torch.where(codes < 0, bits | 0x80, bits)
    return (bits - ((bits & 0x80) << 1)).to(torch.int8)  # the number that has these eight bits


def convert_saved(rule: Rule, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's saved state as a rule keeps it: in int8, rounded to nearest, or no longer."""
    found = dict(saved)
    for spec in rule.state:
        value, scale = found.get(spec.name), found.get(f"{spec.name}_scale")
        if spec.int8_format is None or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        wants, has = spec.dtype is torch.int8, value.dtype is torch.int8
        if wants and not has and value.is_floating_point() and value.layout is torch.strided:
            codes, scale = _encode(spec, _to_rows(value))
            found[spec.name] = round_codes(spec, codes, 1 << DROPPED_BITS - 1).view(value.shape)
            found[f"{spec.name}_scale"] = scale.view(value.shape[:1])
        elif has and not wants and isinstance(scale, Tensor) and scale.shape == value.shape[:1]:
            plain = _decode(spec, _to_rows(value), scale.float().view(-1, 1))
            found[spec.name] = plain.view(value.shape)
            del found[f"{spec.name}_scale"]
    return found


def _to_rows(value: Tensor) -> Tensor:
    return value.reshape(value.shape[0] if value.dim() else 1, -1).to(torch.float32)
