"""Lookups by the core: ids are checked, rows read and pooled in one pass, for all tables at once.

The core declines anything that is unusual or wrong. Then torch's own operations do the lookup, with
all special cases and all messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparsestep._native import ext, isa
from sparsestep._torch import (
    dispatch_modes,
    embedding_bag_weights_backward,
    forward_level,
    uses,
    uses_of_memory,
)
from sparsestep.errors import InputError, RangeError, message
from sparsestep.grads.indexed import IndexedGrad

_INTEGERS = (torch.int64, torch.int32)
_FEW = 256


def refusal(
    table: nn.Module,
    requirement: str,
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
    return kind(f"{who}: {message(requirement, got, remedy)}")


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
        requirement = "1-D ids need offsets, a 1-D int64 or int32 tensor of where each bag begins"
        remedy = "Pass 2-D ids for bags of equal length" if offsets is None else ""
        raise refusal(table, requirement, _kind(offsets), remedy)
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
            requirement = f"offsets must be at most the number of ids, {id_count}"
            return refusal(table, requirement, f"{value} at position {position}")
    requirement = f"with include_last_offset the last offset must be the number of ids, {id_count}"
    return refusal(table, requirement, f"{offsets[-1]} at position {len(offsets) - 1}")


def check_weights(table: nn.Module, weight: Tensor, ids: Tensor, weights: Any, mode: str) -> None:
    """Refuse per_sample_weights that are not one for each id."""
    if mode != "sum":
        requirement = "per_sample_weights are for mode='sum'"
        raise refusal(table, requirement, f"mode={mode!r}")
    if not isinstance(weights, Tensor) or weights.dtype != weight.dtype:
        requirement = f"per_sample_weights must be a tensor of the table's dtype, {weight.dtype}"
        raise refusal(table, requirement, _kind(weights))
    if weights.shape != ids.shape:
        requirement = f"per_sample_weights must have the shape of the ids, {tuple(ids.shape)}"
        raise refusal(table, requirement, tuple(weights.shape))
    if weights.device != weight.device:
        requirement = f"per_sample_weights must be on the table's device, {weight.device}"
        raise refusal(table, requirement, weights.device)


def _kind(thing: object) -> str:
    if not isinstance(thing, Tensor):
        return "None" if thing is None else f"a {type(thing).__name__}"
    return f"a {thing.dtype} tensor of shape {tuple(thing.shape)}"


def part(
    weight: torch.Size,
    ids: Tensor,
    values: Tensor,
    source: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    padding: int = -1,
    by_frequency: bool = False,
) -> IndexedGrad:
    """The part of a table's gradient that comes from one lookup.

    Args:
        weight: the table's shape.
        ids: which rows were looked up.
        values: the gradient of the output, a row for each id or bag.
        source: the row of ``values`` for each id, where that is not its own number.
        scale: a factor for each id.
        padding: the id that gets no gradient; -1 if there is none.
        by_frequency: whether each id's gradient is divided by how often it comes.
    """
    ids = ids.reshape(-1)
    if padding >= 0:
        present = (ids != padding).nonzero().squeeze(1)
        positions = ids[present].long()
        source = present if source is None else source[present]
        scale = None if scale is None else scale[present]
    else:
        # A copy in any case: ids may be a buffer that the next batch is read into.
        positions = _copy(ids, torch.int64)
    return part_of(weight, positions, values, source, scale, by_frequency=by_frequency)


def part_of(
    weight: torch.Size,
    positions: Tensor,
    values: Tensor,
    source: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    by_frequency: bool = False,
) -> IndexedGrad:
    """The same from ids without padding that nobody else has, int64."""
    rows, dim = weight
    if scale is not None:  # which may be a parameter that the same step updates
        scale = _copy(scale, scale.dtype)
    if by_frequency:
        shares = _shares(positions, values.dtype)
        scale = shares if scale is None else scale * shares
    return IndexedGrad(positions, values, rows, dim, source, scale)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _shares(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """One divided by how often each id comes."""
    _, which, counts = torch.unique(positions, return_inverse=True, return_counts=True)
    shares: Tensor = counts.to(dtype.to_real()).reciprocal()
    return shares[which]


def unshared(grad: Tensor) -> Tensor:
    """The gradient of an output, or a copy if others may come to write to its memory.

    Autograd passes the same tensor to whatever was added up. A view of it may become the gradient
    of a parameter, to which the next backward adds in place, before the optimizer reads it here.
    """
    if not grad.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    users = _users(grad)
    return grad if users is not None and users == _users_when_alone() else grad.clone()


def _users(tensor: Tensor) -> tuple[int, int] | None:
    """How many hold the tensor, and how many its memory; ``None`` if this torch does not tell."""
    of_tensor, of_memory = uses(tensor), uses_of_memory(tensor)
    return None if of_tensor is None or of_memory is None else (of_tensor, of_memory)


@functools.cache
def _users_when_alone() -> tuple[int, int] | None:
    """What ``_users`` says of a tensor that nobody else has: that depends on torch's version."""
    return _users(torch.zeros(1, device="cpu"))


def first_derivative(backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    """Run a backward function whose result cannot be differentiated once more.

    Torch's ``once_differentiable`` makes trying that an error. It is costly, and not needed where
    gradients are not recorded, which is the usual case. Where ``backward()`` is called in a
    function that is compiled, the compiler comes across it, and is to leave it as it is.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(first_derivative)(backward, ctx, *grads)
    if torch.is_grad_enabled():
        return once_differentiable(backward)(ctx, *grads)
    return backward(ctx, *grads)


MODES = {"sum": 0, "mean": 1, "max": 2}


class Saved(NamedTuple):
    """The tensors of a lookup that its gradient needs."""

    ids: Tensor
    starts: Tensor | None = None  # where the bags are not of equal length
    counted: Tensor | None = None  # how many ids are no padding, in each bag
    winners: Tensor | None = None
    factors: Tensor | None = None
    weight: Tensor | None = None
    positions: Tensor | None = None  # the ids that are no padding, if they were written out
    source: Tensor | None = None  # and their bags; None: bags of one id


@dataclass(slots=True)
class Looked:
    """What the gradient has to know of a lookup beside its tensors.

    Attributes:
        shape: of the weight.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding: the id that does not count; -1 if there is none.
        by_frequency: whether each id's gradient is divided by how often it comes.
        count: how many bags.
        length: how many ids each bag has, where that is the same for all; otherwise -1.
        ends: whether the saved starts have the end of the last bag as well.
    """

    shape: torch.Size
    mode: str
    padding: int
    by_frequency: bool
    count: int
    length: int
    ends: bool

    def part(self, saved: Saved, grad: Tensor) -> IndexedGrad:
        """The part of the table's gradient that comes from this lookup."""
        if self.mode == "max":
            return _won(self.shape, saved, grad)
        positions, by_frequency = saved.positions, self.by_frequency
        factors = None if saved.factors is None else saved.factors.reshape(-1)
        if positions is not None and (factors is None or self.padding < 0):
            values = self._pushed(saved, None, grad)
            source = saved.source
            return part_of(
                self.shape, positions, values, source, factors, by_frequency=by_frequency
            )
        sizes = self._sizes(saved)
        return part(
            self.shape,
            saved.ids,
            self._pushed(saved, sizes, grad),
            self._bag_of_each_id(sizes, saved.ids),
            factors,
            padding=self.padding,
            by_frequency=by_frequency,
        )

    def of_factors(self, saved: Saved, grad: Tensor) -> Tensor:
        """The gradient of the weights per sample."""
        ids = saved.ids.reshape(-1)
        bags = self._bag_of_each_id(self._sizes(saved), ids)
        if bags is None:
            bags = torch.arange(self.count, device=ids.device)
        found: Tensor = embedding_bag_weights_backward(
            grad, saved.weight, ids.long(), bags, bags, MODES[self.mode], self.padding
        )
        return found.reshape(saved.ids.shape)

    def _pushed(self, saved: Saved, sizes: Tensor | None, grad: Tensor) -> Tensor:
        """The gradient of the sum of each bag."""
        if self.mode == "sum":
            return unshared(grad)
        # Torch multiplies with the inverse, rounded to the gradient's dtype.
        counted = sizes if saved.counted is None else saved.counted
        if counted is None:
            return grad * _inverse(max(self.length, 1), grad)
        return grad * counted.clamp(min=1).to(grad.dtype).unsqueeze(1).reciprocal()

    def _sizes(self, saved: Saved) -> Tensor | None:
        """How many ids each bag has, where that differs."""
        if saved.starts is None:
            return None
        starts = saved.starts.long()
        return starts.diff() if self.ends else starts.diff(append=_number(saved.ids))

    def _bag_of_each_id(self, sizes: Tensor | None, ids: Tensor) -> Tensor | None:
        """``None`` where every bag has one id."""
        if sizes is not None:
            return torch.repeat_interleave(sizes, output_size=ids.numel())
        if self.length == 1:
            return None
        bags = torch.arange(self.count, device=ids.device)
        return bags.unsqueeze(1).expand(self.count, self.length).reshape(-1).contiguous()


def _number(ids: Tensor) -> Tensor:
    return torch.full((1,), ids.numel(), device=ids.device)


def _inverse(length: int, grad: Tensor) -> Tensor | float:
    # A number is rounded to float32 and no further; of numbers up to here, never wrongly.
    if grad.dtype in (torch.float32, torch.float64) and length < 1 << 24:
        return 1 / length
    return torch.full((1, 1), length, dtype=grad.dtype, device=grad.device).reciprocal()


def _won(shape: torch.Size, saved: Saved, grad: Tensor) -> IndexedGrad:
    """Under ``max`` each element of a bag that is not empty is that of one row."""
    assert saved.winners is not None
    assert saved.counted is not None
    rows, dim = shape
    columns = torch.arange(dim, device=grad.device)
    bags = saved.counted.nonzero()
    positions = (saved.winners[bags.squeeze(1)].long() * dim + columns).reshape(-1)
    source = (bags * dim + columns).reshape(-1)
    return IndexedGrad(positions, unshared(grad), rows * dim, 1, source)


ROWS = 0  # a row for each id
POOLING = {"sum": 1, "mean": 2, "max": 3}


class Request(NamedTuple):
    """What is looked up in a table.

    Attributes:
        weight: the table.
        ids: of any shape for single rows; for bags, 2-D or 1-D with ``starts``.
        starts: where each bag begins.
        ends: whether ``starts`` has the end of the last bag as well.
        factors: what each row is multiplied with.
        pooling: what becomes of a bag: ``ROWS``, or as in ``POOLING``.
        padding: the id that does not count; -1 if there is none.
        has_gradient: whether the weight is to get a gradient.
    """

    weight: Tensor
    ids: Tensor
    starts: Tensor | None
    ends: bool
    factors: Tensor | None
    pooling: int
    padding: int
    has_gradient: bool


class Found(NamedTuple):
    """What was looked up, and what the gradient needs to know.

    Attributes:
        output: a row for each id or bag.
        positions: the ids that are no padding, int64; a copy that nobody else has.
        source: the row of the output that each of them went to; ``None``: its own number.
        winners: for the maximum, the id whose element it is.
        counted: how many ids of each bag are no padding.
    """

    output: Tensor
    positions: Tensor | None = None
    source: Tensor | None = None
    winners: Tensor | None = None
    counted: Tensor | None = None


def look_up(requests: list[Request]) -> list[Found] | None:
    """All of them, or ``None`` where the core declines; nothing has changed in either case.

    Where something watches every operation (a dispatch mode) or carries derivatives forward, torch
    has to see the lookup.

    Example:
        >>> table, ids = torch.arange(10.0).view(5, 2), torch.tensor([[3, 1], [4, 4]])
        >>> request = Request(table, ids, None, False, None, POOLING["sum"], -1, True)
        >>> for found in look_up([request]) or []:
        ...     print(found.output.tolist(), found.positions.tolist(), found.source.tolist())
        [[8.0, 10.0], [16.0, 18.0]] [3, 1, 4, 4] [0, 0, 1, 1]
    """
    if ext is None or dispatch_modes() or forward_level() >= 0:
        return None
    found = ext.look_up(requests, torch.get_num_threads(), isa.index)
    return None if found is None else [Found(*each) for each in found]
