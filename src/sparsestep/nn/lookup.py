"""Lookups of rows and bags, in any number of tables, and their compact gradients.

The native core checks ids, reads rows and pools them in one pass, for all tables at once. It
declines anything that is unusual or wrong: then torch's operations do the lookup, after all checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sparsestep._native import ext, isa
from sparsestep._torch import (
    dispatch_modes,
    embedding_bag,
    embedding_bag_weights_backward,
    forward_level,
    uses,
    uses_of_memory,
)
from sparsestep.deferred.guard import readable
from sparsestep.errors import InputError, RangeError, message
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory.tensors import INDEX_DTYPES, memory_of, out_of_range
from sparsestep.nn.interop import materialize_for_ddp

_FEW = 256


def lookup_error(
    table: nn.Module,
    requirement: str,
    got: object,
    remedy: str = "",
    kind: type[InputError] = InputError,
) -> InputError:
    """Return the error of a table, with its name and size."""
    weight = table.weight
    assert isinstance(weight, Tensor)
    name = getattr(table, "name", "")
    size = " x ".join(map(str, weight.shape))
    who = (
        f"{type(table).__name__} {name!r} ({size})" if name else f"{type(table).__name__} ({size})"
    )
    return kind(f"{who}: {message(requirement, got, remedy)}")


def check_ids(table: nn.Module, weight: Tensor, ids: Any) -> None:
    """Raise RangeError for the first id outside the table, with its position."""
    if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
        raise lookup_error(table, "ids must be an int64 or int32 tensor", _describe(ids))
    if ids.layout not in (torch.strided, torch.jagged):
        raise lookup_error(table, "ids must be a strided or nested tensor", ids.layout)
    if ids.device != weight.device:
        raise lookup_error(table, f"ids must be on the table's device, {weight.device}", ids.device)
    rows = weight.shape[0]
    if out_of_range(ids, rows) is not None:
        raise _id_error(table, rows, ids)


def _id_error(table: nn.Module, rows: int, ids: Tensor) -> InputError:
    position = ((ids < 0) | (ids >= rows)).nonzero()[0].tolist()
    value = int(ids[tuple(position)])
    where = position[0] if len(position) == 1 else tuple(position)
    at = f" at position {where}" if position else ""  # a single id has no position
    remedy = "Map unknown ids to a row of their own, or make the table larger"
    return lookup_error(table, f"ids must be in [0, {rows})", f"{value}{at}", remedy, RangeError)


def check_offsets(table: nn.Module, ids: Tensor, offsets: Any, *, with_last: bool) -> None:
    """Raise InputError unless offsets cut the ids into bags."""
    if not isinstance(offsets, Tensor) or offsets.dtype not in INDEX_DTYPES or offsets.dim() != 1:
        requirement = "1-D ids need offsets, a 1-D int64 or int32 tensor of where each bag begins"
        remedy = "Pass 2-D ids for bags of equal length" if offsets is None else ""
        raise lookup_error(table, requirement, _describe(offsets), remedy)
    if offsets.device != ids.device:
        raise lookup_error(
            table, f"offsets must be on the ids' device, {ids.device}", offsets.device
        )
    id_count, count = ids.numel(), offsets.numel()
    if not count:
        if with_last or id_count:
            raise lookup_error(table, "offsets must begin with 0", "no offsets")
        return
    if count <= _FEW:  # in Python: three operations of torch would cost as much as the lookup
        values = offsets.tolist()
        first, last, rises = values[0], values[-1], values == sorted(values)
    else:
        first, last = int(offsets[0]), int(offsets[-1])
        rises = not bool((offsets[1:] < offsets[:-1]).any())
    if first != 0 or not rises or last > id_count or (with_last and last != id_count):
        raise _offset_error(table, id_count, offsets.tolist())


def _offset_error(table: nn.Module, id_count: int, offsets: list[int]) -> InputError:
    if offsets[0] != 0:
        return lookup_error(table, "offsets must begin with 0", f"{offsets[0]} at position 0")
    for position, (before, value) in enumerate(pairwise(offsets), 1):
        if value < before:
            got = f"{value} at position {position}, after {before}"
            return lookup_error(table, "offsets must not decrease", got)
    for position, value in enumerate(offsets):
        if value > id_count:
            requirement = f"offsets must be at most the number of ids, {id_count}"
            return lookup_error(table, requirement, f"{value} at position {position}")
    requirement = f"with include_last_offset the last offset must be the number of ids, {id_count}"
    return lookup_error(table, requirement, f"{offsets[-1]} at position {len(offsets) - 1}")


def check_per_sample_weights(
    table: nn.Module, weight: Tensor, ids: Tensor, weights: Any, mode: str
) -> None:
    """Raise InputError unless there is one weight for each id."""
    if mode != "sum":
        requirement = "per_sample_weights are for mode='sum'"
        raise lookup_error(table, requirement, f"mode={mode!r}")
    if not isinstance(weights, Tensor) or weights.dtype != weight.dtype:
        requirement = f"per_sample_weights must be a tensor of the table's dtype, {weight.dtype}"
        raise lookup_error(table, requirement, _describe(weights))
    if weights.shape != ids.shape:
        requirement = f"per_sample_weights must have the shape of the ids, {tuple(ids.shape)}"
        raise lookup_error(table, requirement, tuple(weights.shape))
    if weights.device != weight.device:
        requirement = f"per_sample_weights must be on the table's device, {weight.device}"
        raise lookup_error(table, requirement, weights.device)


def _describe(thing: object) -> str:
    if not isinstance(thing, Tensor):
        return "None" if thing is None else f"a {type(thing).__name__}"
    return f"a {thing.dtype} tensor of shape {tuple(thing.shape)}"


def part(
    weight: torch.Size,
    ids: Tensor,
    values: Tensor,
    value_index: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> IndexedGrad:
    """The part of a table's gradient that comes from one lookup.

    Args:
        weight: the table's shape.
        ids: which rows were looked up.
        values: the gradient of the output, a row for each id or bag.
        value_index: the row of ``values`` for each id, where that is not its own number.
        scale: a factor for each id.
        padding_idx: the id that gets no gradient; -1 if there is none.
        scale_grad_by_freq: whether each id's gradient is divided by how often it comes.
    """
    ids = ids.reshape(-1)
    if padding_idx >= 0:
        present = (ids != padding_idx).nonzero().squeeze(1)
        indices = ids[present].long()
        value_index = present if value_index is None else value_index[present]
        scale = None if scale is None else scale[present]
    else:
        # A copy in any case: ids may be a buffer that the next batch is read into.
        indices = _copy(ids, torch.int64)
    return part_of(
        weight, indices, values, value_index, scale, scale_grad_by_freq=scale_grad_by_freq
    )


def part_of(
    weight: torch.Size,
    indices: Tensor,
    values: Tensor,
    value_index: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    scale_grad_by_freq: bool = False,
) -> IndexedGrad:
    """The same from ids without padding, int64, a private copy."""
    rows, dim = weight
    if scale is not None:  # which may be a parameter that the same step updates
        scale = _copy(scale, scale.dtype)
    if scale_grad_by_freq:
        shares = _inverse_frequency(indices, values.dtype)
        scale = shares if scale is None else scale * shares
    return IndexedGrad(indices, values, rows, dim, value_index, scale)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _inverse_frequency(indices: Tensor, dtype: torch.dtype) -> Tensor:
    """One divided by how often each id comes."""
    _, which, counts = torch.unique(indices, return_inverse=True, return_counts=True)
    shares: Tensor = counts.to(dtype.to_real()).reciprocal()
    return shares[which]


def unshared(grad: Tensor) -> Tensor:
    """Return the gradient of an output, or a clone if its memory is shared.

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
    """The counts of a tensor that is not shared, which depend on the version of torch."""
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


class SavedTensors(NamedTuple):
    """The tensors of a lookup that its gradient needs."""

    ids: Tensor
    starts: Tensor | None = None  # where the bags are not of equal length
    bag_sizes: Tensor | None = None  # how many ids are no padding, in each bag
    max_index: Tensor | None = None
    per_sample_weights: Tensor | None = None
    weight: Tensor | None = None
    indices: Tensor | None = None  # the ids that are no padding, if they were written out
    value_index: Tensor | None = None  # and their bags; None: bags of one id


@dataclass(slots=True)
class LookupInfo:
    """What the gradient has to know of a lookup beside its tensors.

    Attributes:
        shape: of the weight.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        padding_idx: the id that does not count; -1 if there is none.
        scale_grad_by_freq: whether each id's gradient is divided by how often it comes.
        count: how many bags.
        length: how many ids each bag has, where that is the same for all; otherwise -1.
        include_last_offset: whether the saved starts have the end of the last bag as well.
    """

    shape: torch.Size
    mode: str
    padding_idx: int
    scale_grad_by_freq: bool
    count: int
    length: int
    include_last_offset: bool

    def part(self, saved: SavedTensors, grad: Tensor) -> IndexedGrad:
        """The part of the table's gradient that comes from this lookup."""
        if self.mode == "max":
            return _max_grad(self.shape, saved, grad)
        indices, scale_grad_by_freq = saved.indices, self.scale_grad_by_freq
        per_sample_weights = (
            None if saved.per_sample_weights is None else saved.per_sample_weights.reshape(-1)
        )
        if indices is not None and (per_sample_weights is None or self.padding_idx < 0):
            values = self._grad_per_bag(saved, None, grad)
            value_index = saved.value_index
            return part_of(
                self.shape,
                indices,
                values,
                value_index,
                per_sample_weights,
                scale_grad_by_freq=scale_grad_by_freq,
            )
        sizes = self._bag_sizes(saved)
        return part(
            self.shape,
            saved.ids,
            self._grad_per_bag(saved, sizes, grad),
            self._bag_index(sizes, saved.ids),
            per_sample_weights,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
        )

    def per_sample_weights_grad(self, saved: SavedTensors, grad: Tensor) -> Tensor:
        """The gradient of the weights per sample."""
        ids = saved.ids.reshape(-1)
        bags = self._bag_index(self._bag_sizes(saved), ids)
        if bags is None:
            bags = torch.arange(self.count, device=ids.device)
        found: Tensor = embedding_bag_weights_backward(
            grad, saved.weight, ids.long(), bags, bags, MODES[self.mode], self.padding_idx
        )
        return found.reshape(saved.ids.shape)

    def _grad_per_bag(self, saved: SavedTensors, sizes: Tensor | None, grad: Tensor) -> Tensor:
        """The gradient of the sum of each bag."""
        if self.mode == "sum":
            return unshared(grad)
        # Torch multiplies with the inverse, rounded to the gradient's dtype.
        bag_sizes = sizes if saved.bag_sizes is None else saved.bag_sizes
        if bag_sizes is None:
            return grad * _reciprocal(max(self.length, 1), grad)
        return grad * bag_sizes.clamp(min=1).to(grad.dtype).unsqueeze(1).reciprocal()

    def _bag_sizes(self, saved: SavedTensors) -> Tensor | None:
        """How many ids each bag has, where that differs."""
        if saved.starts is None:
            return None
        starts = saved.starts.long()
        return starts.diff() if self.include_last_offset else starts.diff(append=_number(saved.ids))

    def _bag_index(self, sizes: Tensor | None, ids: Tensor) -> Tensor | None:
        """``None`` where every bag has one id."""
        if sizes is not None:
            return torch.repeat_interleave(sizes, output_size=ids.numel())
        if self.length == 1:
            return None
        bags = torch.arange(self.count, device=ids.device)
        return bags.unsqueeze(1).expand(self.count, self.length).reshape(-1).contiguous()


def _number(ids: Tensor) -> Tensor:
    return torch.full((1,), ids.numel(), device=ids.device)


def _reciprocal(length: int, grad: Tensor) -> Tensor | float:
    # A number is rounded to float32 and no further; of numbers up to here, never wrongly.
    if grad.dtype in (torch.float32, torch.float64) and length < 1 << 24:
        return 1 / length
    return torch.full((1, 1), length, dtype=grad.dtype, device=grad.device).reciprocal()


def _max_grad(shape: torch.Size, saved: SavedTensors, grad: Tensor) -> IndexedGrad:
    """Under ``max`` each element of a bag that is not empty is that of one row."""
    assert saved.max_index is not None
    assert saved.bag_sizes is not None
    rows, dim = shape
    columns = torch.arange(dim, device=grad.device)
    bags = saved.bag_sizes.nonzero()
    indices = (saved.max_index[bags.squeeze(1)].long() * dim + columns).reshape(-1)
    value_index = (bags * dim + columns).reshape(-1)
    return IndexedGrad(indices, unshared(grad), rows * dim, 1, value_index)


ROWS = 0  # a row for each id
POOLING = {"sum": 1, "mean": 2, "max": 3}


class Lookup(NamedTuple):
    """What is looked up in a table.

    Attributes:
        weight: the table.
        ids: of any shape for single rows; for bags, 2-D or 1-D with ``starts``.
        starts: where each bag begins.
        include_last_offset: whether ``starts`` has the end of the last bag as well.
        per_sample_weights: what each row is multiplied with.
        pooling: what becomes of a bag: ``ROWS``, or as in ``POOLING``.
        padding_idx: the id that does not count; -1 if there is none.
        needs_grad: whether the weight is to get a gradient.
    """

    weight: Tensor
    ids: Tensor
    starts: Tensor | None
    include_last_offset: bool
    per_sample_weights: Tensor | None
    pooling: int
    padding_idx: int
    needs_grad: bool


class LookupResult(NamedTuple):
    """What was looked up, and what the gradient needs to know.

    Attributes:
        output: a row for each id or bag.
        indices: the ids that are no padding, int64; a private copy.
        value_index: the row of the output that each of them went to; ``None``: its own number.
        max_index: for the maximum, the id whose element it is.
        bag_sizes: how many ids of each bag are no padding.
    """

    output: Tensor
    indices: Tensor | None = None
    value_index: Tensor | None = None
    max_index: Tensor | None = None
    bag_sizes: Tensor | None = None


def look_up(requests: list[Lookup]) -> list[LookupResult] | None:
    """Look up all tables natively. Returns None if the core declines: then nothing has changed.

    Where something watches every operation (a dispatch mode) or carries derivatives forward, torch
    has to see the lookup.

    Example:
        >>> table, ids = torch.arange(10.0).view(5, 2), torch.tensor([[3, 1], [4, 4]])
        >>> request = Lookup(table, ids, None, False, None, POOLING["sum"], -1, True)
        >>> for found in look_up([request]) or []:
        ...     print(found.output.tolist(), found.indices.tolist(), found.value_index.tolist())
        [[8.0, 10.0], [16.0, 18.0]] [3, 1, 4, 4] [0, 0, 1, 1]
    """
    if ext is None or dispatch_modes() or forward_level() >= 0:
        return None
    found = ext.look_up(requests, torch.get_num_threads(), isa.index)
    return None if found is None else [LookupResult(*each) for each in found]


def takes_compact(weight: Tensor) -> bool:
    """Whether a compact gradient goes straight to the optimizer of the weight.

    A weight that is computed from others passes its gradient on to operations that know nothing of
    it.
    """
    return weight.is_leaf


@dataclass(slots=True)
class Bags:
    """What is to be looked up in a table, checked.

    Attributes:
        table: whose rows.
        weight: the table's, as it is now.
        ids: the ids of all bags, one after the other.
        starts: where each bag begins.
        include_last_offset: whether ``starts`` has the end of the last bag as well.
        count: how many bags.
        length: how many ids each bag has, where that is the same for all; otherwise -1.
        per_sample_weights: what each row is multiplied with.
    """

    table: torch.nn.EmbeddingBag
    weight: Tensor
    ids: Tensor
    starts: Tensor
    include_last_offset: bool
    count: int
    length: int
    per_sample_weights: Tensor | None

    @staticmethod
    def of(
        table: torch.nn.EmbeddingBag,
        ids: Any,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Bags:
        """What a table is asked for, or an error that says what is wrong with it.

        Args:
            table: the table.
            ids: 2-D, a bag in each row, or 1-D.
            offsets: where bags begin, for 1-D ids.
            per_sample_weights: one for each id.
            starts: where bags begin, for 2-D ids, if it is known already.
        """
        weight, include_last_offset = table.weight, table.include_last_offset
        if isinstance(ids, Tensor) and ids.is_nested:
            ids, offsets, per_sample_weights, include_last_offset = _flat(
                table, ids, per_sample_weights
            )
        check_ids(table, weight, ids)
        _check_mode(table)
        if per_sample_weights is not None:
            check_per_sample_weights(table, weight, ids, per_sample_weights, table.mode)
            per_sample_weights = per_sample_weights.reshape(-1).contiguous()
        if ids.dim() == 1:
            check_offsets(table, ids, offsets, with_last=include_last_offset)
            assert offsets is not None
            ids, starts = ids.contiguous(), offsets.contiguous()
            return Bags(
                table,
                weight,
                ids,
                starts,
                include_last_offset,
                len(starts) - include_last_offset,
                -1,
                per_sample_weights,
            )
        if ids.dim() != 2:
            raise lookup_error(table, "ids must be 1-D or 2-D", f"shape {tuple(ids.shape)}")
        if offsets is not None:
            requirement = "2-D ids are bags of equal length: offsets must be None"
            raise lookup_error(table, requirement, "offsets", "Flatten the ids to use offsets")
        count, length = ids.shape
        if starts is None:
            starts = _equal_offsets(ids)
        ids = ids.reshape(-1).contiguous()
        return Bags(table, weight, ids, starts, False, count, length, per_sample_weights)


def _equal_offsets(ids: Tensor) -> Tensor:
    """Where the bags of 2-D ids begin."""
    count, length = ids.shape
    if not length:
        return torch.zeros(count, dtype=ids.dtype, device=ids.device)
    return torch.arange(0, count * length, length, dtype=ids.dtype, device=ids.device)


def _flat(table: torch.nn.EmbeddingBag, ids: Tensor, per_sample_weights: Tensor | None) -> Any:
    """Flatten a nested tensor of bags: ids, offsets, per_sample_weights, include_last_offset."""
    if per_sample_weights is not None:
        if not per_sample_weights.is_nested:
            requirement = "with nested ids, per_sample_weights must be nested, too"
            raise lookup_error(table, requirement, "an ordinary tensor")
        per_sample_weights = per_sample_weights.values().reshape(-1)
    return ids.values().reshape(-1), ids.offsets(), per_sample_weights, True  # type: ignore[attr-defined]


def _is_refused(table: torch.nn.EmbeddingBag) -> bool:
    return table.mode not in MODES or (table.mode == "max" and table.scale_grad_by_freq)


def _check_mode(table: torch.nn.EmbeddingBag) -> None:
    if table.mode not in MODES:
        raise lookup_error(table, "mode has to be one of sum, mean or max", repr(table.mode))
    if _is_refused(table):
        requirement = "max mode does not support scaling the gradient by the frequency"
        raise lookup_error(table, requirement, "scale_grad_by_freq=True")


class BagLookup(NamedTuple):
    """What a caller wants of a table; nothing is checked."""

    table: torch.nn.EmbeddingBag
    ids: Any
    offsets: Any = None
    per_sample_weights: Any = None


class _Read(NamedTuple):
    """A lookup that was done: in which weight, what was found, what the gradient needs of it."""

    weight: Tensor
    per_sample_weights: Tensor | None
    output: Tensor
    looked: LookupInfo
    saved: SavedTensors


def embed_bags(asked: Sequence[BagLookup]) -> list[Tensor]:
    """A row for each bag of each table, or an error that says what is wrong."""
    done = _by_core(asked)
    return _by_operations(asked) if done is None else _recorded(done)


def _by_core(asked: Sequence[BagLookup]) -> list[_Read] | None:
    """All tables in one pass; ``None``, and nothing done, where anything is unusual or wrong."""
    is_recorded = torch.is_grad_enabled()
    requests = []
    for table, ids, offsets, per_sample_weights in asked:
        weight = table.weight
        pooling = 0 if _is_refused(table) else POOLING[table.mode]
        if not pooling or table.max_norm is not None or not takes_compact(weight):
            return None
        is_usual = type(ids) is Tensor and ids.layout is torch.strided
        if is_usual and not ids.is_contiguous():
            ids = ids.contiguous()
        needs_grad = is_recorded and weight.requires_grad
        include_last_offset, padding_idx = table.include_last_offset, _padding(table)
        memory = readable(weight, ids)
        requests.append(
            Lookup(
                memory,
                ids,
                offsets,
                include_last_offset,
                per_sample_weights,
                pooling,
                padding_idx,
                needs_grad,
            )
        )
    found = look_up(requests)
    if found is None:
        return None
    return [_read(*each) for each in zip(asked, requests, found, strict=True)]


def _read(asked: BagLookup, request: Lookup, found: LookupResult) -> _Read:
    table, ids, offsets, per_sample_weights = asked
    length = ids.shape[1] if ids.dim() == 2 else -1
    if found.indices is not None and per_sample_weights is None:
        offsets = None  # the bag of each id is known
    saved = SavedTensors(ids, offsets, found.bag_sizes, found.max_index, per_sample_weights)
    saved = saved._replace(indices=found.indices, value_index=found.value_index)
    looked = LookupInfo(
        *(request.weight.shape, table.mode, request.padding_idx, table.scale_grad_by_freq),
        *(len(found.output), length, request.include_last_offset),
    )
    return _Read(table.weight, per_sample_weights, found.output, looked, saved)


def _padding(table: torch.nn.EmbeddingBag) -> int:
    return -1 if table.padding_idx is None else table.padding_idx


def _by_operations(asked: Sequence[BagLookup]) -> list[Tensor]:
    """With torch's operations, and every check before anything is read or changed."""
    starts: dict[Any, Tensor] = {}  # bags of one length begin at the same places in all tables
    checked = [Bags.of(*each, _known_starts(starts, each.ids)) for each in asked]
    if not all(takes_compact(bags.weight) for bags in checked):
        if len(checked) > 1:
            return [found for each in asked for found in embed_bags([each])]
        (bags,) = checked
        return [
            torch_embedding_bag(
                bags.table, bags.ids, bags.starts, bags.per_sample_weights, bags.include_last_offset
            )
        ]
    with torch.no_grad():
        weights = [readable(bags.weight, bags.ids) for bags in checked]
        for bags, weight in zip(checked, weights, strict=True):
            limit = bags.table.max_norm
            if limit is not None:
                torch.embedding_renorm_(weight, bags.ids, limit, bags.table.norm_type)
        done = list(map(_by_operation, checked, weights))
    return _recorded(done)


def _known_starts(known: dict[Any, Tensor], ids: Any) -> Tensor | None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_nested:
        return None
    form = (ids.shape, ids.dtype, ids.device)
    if form not in known:
        known[form] = _equal_offsets(ids)
    return known[form]


def _by_operation(bags: Bags, weight: Tensor) -> _Read:
    table, padding_idx = bags.table, _padding(bags.table)
    mode, is_max = table.mode, table.mode == "max"
    ids = bags.ids
    if padding_idx < 0 and not is_max and not weight.is_contiguous():
        # Rows that lie apart, as in a file: torch would copy all of them.
        rows, inverse = ids.unique(return_inverse=True)
        weight, ids = weight.index_select(0, rows), inverse.to(ids.dtype)
    output, _, bag_sizes, max_index = embedding_bag(
        *(weight, ids, bags.starts, False, MODES[mode], False),
        *(bags.per_sample_weights, bags.include_last_offset, padding_idx),
    )
    saved = SavedTensors(
        bags.ids,
        bags.starts if bags.length < 0 else None,
        bag_sizes if is_max or (mode == "mean" and padding_idx >= 0) else None,
        max_index if is_max else None,
        bags.per_sample_weights,
    )
    looked = LookupInfo(
        *(bags.weight.shape, mode, padding_idx, table.scale_grad_by_freq),
        *(bags.count, bags.length, bags.include_last_offset),
    )
    return _Read(bags.weight, bags.per_sample_weights, output, looked, saved)


def torch_embedding_bag(
    table: torch.nn.EmbeddingBag,
    ids: Any,
    offsets: Any,
    per_sample_weights: Any,
    include_last_offset: bool,
) -> Tensor:
    """With torch's own gradient, a dense one."""
    return functional.embedding_bag(
        ids,
        table.weight,
        offsets,
        table.max_norm,
        table.norm_type,
        table.scale_grad_by_freq,
        table.mode,
        False,
        per_sample_weights,
        include_last_offset,
        table.padding_idx,
    )


def _recorded(done: Sequence[_Read]) -> list[Tensor]:
    """The outputs, for autograd to come back to."""
    weights, per_sample_weights = (
        [each.weight for each in done],
        [each.per_sample_weights for each in done],
    )
    tensors = [*weights, *per_sample_weights]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        for weight in weights:
            materialize_for_ddp(weight)
        return list(_Pooled.apply(done, *tensors))
    return [each.output for each in done]


class _Pooled(torch.autograd.Function):
    """All lookups at once; takes all weights, then all per_sample_weights."""

    @staticmethod
    def forward(ctx: Any, done: Sequence[_Read], *tensors: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.looked = [each.looked for each in done]
        wanted = ctx.needs_input_grad[1 + len(done) :]
        tensors_saved: list[Tensor | None] = []
        for each, per_sample_weights_grad in zip(done, wanted, strict=True):
            saved = each.saved
            if per_sample_weights_grad:
                saved = saved._replace(weight=memory_of(each.weight))
            tensors_saved += saved
        ctx.save_for_backward(*tensors_saved)
        return tuple([each.output for each in done])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return first_derivative(_gradients, ctx, *grads)


def _gradients(ctx: Any, *grads: Any) -> Any:
    tables, fields = len(ctx.looked), len(SavedTensors._fields)
    wanted = ctx.needs_input_grad[1:]
    everything = ctx.saved_tensors
    of_weights: list[Any] = [None] * tables
    per_sample_weights_grad: list[Any] = [None] * tables
    for index, (looked, grad) in enumerate(zip(ctx.looked, grads, strict=True)):
        if grad is None:
            continue
        saved = SavedTensors(*everything[fields * index : fields * (index + 1)])
        if wanted[index]:
            of_weights[index] = CompactGrad.of([looked.part(saved, grad)], looked.shape, grad)
        if wanted[tables + index]:
            per_sample_weights_grad[index] = looked.per_sample_weights_grad(saved, grad)
    return None, *of_weights, *per_sample_weights_grad
