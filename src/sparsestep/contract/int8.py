"""State stored as int8: a code for each element, and a scale for each row.

It is the *fourth root* of a value that is a code times the row's scale, so that small values beside
a large one keep their share of the codes: Adam divides each by a root of its own, and what rounding
does to a small one counts as much. (With a square root, a layer whose inputs were of very different
size learned worse.) There are two codes. ``"signed"`` is for a momentum, which has a sign: from
-127 to 127. ``"root"`` is for sums and averages of squares: from 0 to 255, less 128 to be stored. A
square above zero gets at least the code 1, so that no formula divides by zero because of the
storage.

Codes are rounded up or down at random, in proportion: an average that moves by a thousandth of
itself would otherwise never move. Row by row the largest value decides the scale, anew with every
update. The native twin is ``native/kernels/int8.h``; both give the same codes for the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract.rule import Rule, State
from sparsestep.errors import InputError, sentence

# Below this the reciprocal of a scale is infinite; such a row is taken for zero.
_LEAST = 1e-37


def stored_as_int8(rule: Rule) -> Rule:
    """The same rule with its state per element in int8.

    Its state is then first that per element, then that per row, then a scale for each of the first.

    Example:
        >>> def update(param, grad, mean, *, lr): ...
        >>> rule = stored_as_int8(Rule("mine", update, (State("mean", int8="signed"),)))
        >>> [(spec.name, spec.dtype) for spec in rule.state]
        [('mean', torch.int8), ('mean_scale', torch.float32)]
    """
    coded, rows, scales = [], [], []
    for spec in rule.state:
        if spec.per_row:
            rows.append(replace(spec, dtype=spec.dtype or torch.float32))
            continue
        if spec.int8 is None:
            contract = "state_dtype=torch.int8 needs a rule whose state tolerates 8 bits"
            remedy = "Use torch.bfloat16, or None"
            raise InputError(sentence(contract, f"{spec.name!r} of {rule.name!r}", remedy))
        root = spec.int8 == "root"
        coded.append(replace(spec, dtype=torch.int8, first=_first_root if root else None))
        scales.append(
            State(
                f"{spec.name}_scale",
                spec.initial,
                per_row=True,
                dtype=torch.float32,
                first=_first_scale if root else None,
            )
        )
    return replace(rule, state=(*coded, *rows, *scales))


def _first_root(value: float) -> float:
    return 127.0 if value else 0.0


def _first_scale(value: float) -> float:
    return math.sqrt(math.sqrt(value)) / 255


def count(state: Sequence[State]) -> int:
    """How many of a rule's tensors are codes."""
    return sum(spec.dtype is torch.int8 for spec in state)


def decoded(state: Sequence[State], tensors: list[Tensor]) -> list[Tensor]:
    """The values that codes stand for, without the scales; rows as ``[rows, block]``.

    Args:
        state: what a rule keeps.
        tensors: one for each.
    """
    coded = count(state)
    if not coded:
        return tensors
    scales = tensors[-coded:]
    values = [
        _values(spec, codes, scale)
        for spec, codes, scale in zip(state, tensors[:coded], scales, strict=False)
    ]
    return [*values, *tensors[coded:-coded]]


def _values(spec: State, codes: Tensor, scale: Tensor) -> Tensor:
    if spec.int8 == "signed":
        root = codes * scale
        square = root * root
        return torch.where(root < 0, -square, square) * square
    root = (codes + 128) * scale
    square = root * root
    return square * square


def encoded(state: Sequence[State], tensors: list[Tensor]) -> list[Tensor]:
    """Codes that are not rounded yet, and scales: the other way than ``decoded``."""
    coded = count(state)
    if not coded:
        return tensors
    found = [_codes(spec, values) for spec, values in zip(state, tensors[:coded], strict=False)]
    return [*(codes for codes, _ in found), *tensors[coded:], *(scale for _, scale in found)]


def _codes(spec: State, values: Tensor) -> tuple[Tensor, Tensor]:
    signed = spec.int8 == "signed"
    largest = values.abs().amax(1, keepdim=True).sqrt().sqrt()
    # A little more than there are codes, so that the largest value is below the last; in float32
    # as it is stored. One number that is none makes the whole row so.
    scale = (largest / (126.99 if signed else 254.99)).float()
    scale = torch.where(scale < _LEAST, 0.0, scale)
    scale = torch.where(values.isfinite().all(1, keepdim=True), scale, torch.nan)
    per_code = scale.to(values.dtype)
    inverse = torch.where(per_code == 0, 0.0, 1 / per_code)
    if signed:
        size = values.abs().sqrt().sqrt() * inverse
        return torch.where(values < 0, -size, size), scale
    return torch.where(values > 0, (values.sqrt().sqrt() * inverse).clamp(min=1), 0.0), scale


def rounded(spec: State, codes: Tensor, chance: Tensor | int) -> Tensor:
    """Codes as they are stored; zero for what is not a number.

    Args:
        spec: the state that they are of.
        codes: as ``encoded`` gives them.
        chance: from 0 to 65535, by which a code is rounded up; 32768 for the nearest.
    """
    steps = codes * 65536
    if spec.int8 == "signed":
        steps = steps + 128 * 65536
    code = (steps.nan_to_num(128 * 65536).long() + chance >> 16) - 128
    return code.to(torch.int8)


def recoded(rule: Rule, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's saved state as a rule keeps it: in int8, or no longer.

    Codes are rounded to nearest here.

    Args:
        rule: which is to go on with it.
        saved: its state, with codes and scales or without.
    """
    found = dict(saved)
    for spec in rule.state:
        value, scale = found.get(spec.name), found.get(f"{spec.name}_scale")
        if spec.int8 is None or not isinstance(value, Tensor) or value.numel() == 0:
            continue
        wants, has = spec.dtype is torch.int8, value.dtype is torch.int8
        if wants and not has and value.is_floating_point() and value.layout is torch.strided:
            codes, scale = _codes(spec, _as_rows(value))
            found[spec.name] = rounded(spec, codes, 1 << 15).view(value.shape)
            found[f"{spec.name}_scale"] = scale.view(value.shape[:1])
        elif has and not wants and isinstance(scale, Tensor) and scale.shape == value.shape[:1]:
            plain = _values(spec, _as_rows(value), scale.float().view(-1, 1))
            found[spec.name] = plain.view(value.shape)
            del found[f"{spec.name}_scale"]
    return found


def _as_rows(value: Tensor) -> Tensor:
    rows = value.shape[0] if value.dim() else 1
    return value.reshape(rows, -1).to(torch.float32)
