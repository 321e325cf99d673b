"""What embeddings refuse, before anything is read or changed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep.errors import InputError, RangeError, sentence

_INTEGERS = (torch.int64, torch.int32)
_FEW = 256


def refusal(
    table: nn.Module,
    contract: str,
    got: object,
    remedy: str = "",
    kind: type[InputError] = InputError,
) -> InputError:
    """Phrase what a table refuses, with its name and size."""
    weight = table.weight
    assert isinstance(weight, Tensor)
    name = getattr(table, "name", "")
    size = " x ".join(map(str, weight.shape))
    who = (
        f"{type(table).__name__} {name!r} ({size})" if name else f"{type(table).__name__} ({size})"
    )
    return kind(f"{who}: {sentence(contract, got, remedy)}")


def check_ids(table: nn.Module, weight: Tensor, ids: Any) -> None:
    """Refuse what is no row of the table, and say where it is."""
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
        raise refusal(table, "ids must be an int64 or int32 tensor", _kind(ids))
    if ids.layout not in (torch.strided, torch.jagged):
        raise refusal(table, "ids must be a strided or nested tensor", ids.layout)
    if ids.device != weight.device:
        raise refusal(table, f"ids must be on the table's device, {weight.device}", ids.device)
    if ids.numel() == 0:
        return
    low, high = ids.aminmax()
    rows = weight.shape[0]
    if int(low) < 0 or int(high) >= rows:
        raise _bad_id(table, rows, ids)


def _bad_id(table: nn.Module, rows: int, ids: Tensor) -> InputError:
    position = ((ids < 0) | (ids >= rows)).nonzero()[0].tolist()
    value = int(ids[tuple(position)])
    where = position[0] if len(position) == 1 else tuple(position)
    at = f" at position {where}" if position else ""  # a single id has no position
    remedy = "Map unknown ids to a row of their own, or make the table larger"
    return refusal(table, f"ids must be in [0, {rows})", f"{value}{at}", remedy, RangeError)


def check_offsets(table: nn.Module, ids: Tensor, offsets: Any, *, with_last: bool) -> None:
    """Refuse offsets that do not cut the ids into bags."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in _INTEGERS or offsets.dim() != 1:
        contract = "1-D ids need offsets, a 1-D int64 or int32 tensor of where each bag begins"
        remedy = "Pass 2-D ids for bags of equal length" if offsets is None else ""
        raise refusal(table, contract, _kind(offsets), remedy)
    if offsets.device != ids.device:
        raise refusal(table, f"offsets must be on the ids' device, {ids.device}", offsets.device)
    id_count, count = ids.numel(), offsets.numel()
    if not count:
        if with_last or id_count:
            raise refusal(table, "offsets must begin with 0", "no offsets")
        return
    if count <= _FEW:  # in Python: three operations of torch would cost as much as the lookup
        values = offsets.tolist()
        first, last, rises = values[0], values[-1], values == sorted(values)
    else:
        first, last = int(offsets[0]), int(offsets[-1])
        rises = not bool((offsets[1:] < offsets[:-1]).any())
    if first != 0 or not rises or last > id_count or (with_last and last != id_count):
        raise _bad_offset(table, id_count, offsets.tolist())


def _bad_offset(table: nn.Module, id_count: int, offsets: list[int]) -> InputError:
    if offsets[0] != 0:
        return refusal(table, "offsets must begin with 0", f"{offsets[0]} at position 0")
    for position, (before, value) in enumerate(pairwise(offsets), 1):
        if value < before:
            got = f"{value} at position {position}, after {before}"
            return refusal(table, "offsets must not decrease", got)
    for position, value in enumerate(offsets):
        if value > id_count:
            contract = f"offsets must be at most the number of ids, {id_count}"
            return refusal(table, contract, f"{value} at position {position}")
    contract = f"with include_last_offset the last offset must be the number of ids, {id_count}"
    return refusal(table, contract, f"{offsets[-1]} at position {len(offsets) - 1}")


def check_weights(table: nn.Module, weight: Tensor, ids: Tensor, weights: Any, mode: str) -> None:
    """Refuse per_sample_weights that are not one for each id."""
    if mode != "sum":
        contract = "per_sample_weights are for mode='sum'"
        raise refusal(table, contract, f"mode={mode!r}")
    if not isinstance(weights, Tensor) or weights.dtype != weight.dtype:
        contract = f"per_sample_weights must be a tensor of the table's dtype, {weight.dtype}"
        raise refusal(table, contract, _kind(weights))
    if weights.shape != ids.shape:
        contract = f"per_sample_weights must have the shape of the ids, {tuple(ids.shape)}"
        raise refusal(table, contract, tuple(weights.shape))
    if weights.device != weight.device:
        contract = f"per_sample_weights must be on the table's device, {weight.device}"
        raise refusal(table, contract, weights.device)


def _kind(thing: object) -> str:
    if not isinstance(thing, Tensor):
        return "None" if thing is None else f"a {type(thing).__name__}"
    return f"a {thing.dtype} tensor of shape {tuple(thing.shape)}"
