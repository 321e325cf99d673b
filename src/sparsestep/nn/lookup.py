"""Lookups of rows and bags, in any number of tables, and their compact gradients.

The native core checks ids, reads rows and pools them in one pass, for all tables at once. It
declines anything that is unusual or wrong: then torch's operations do the lookup, after all checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from sparsestep.deferred.tracking import catch_up_guarded, version_for_readers
from sparsestep.errors import InputError, RangeError, message
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory.tensors import INDEX_DTYPES, memory_of, out_of_range
from sparsestep.nn.interop import materialize_for_ddp, uses_torch_ops

ROWS, SUM, MEAN, MAX, DOT = range(5)  # a row for each id, one for each bag, or a dot product
MODES = {"sum": SUM, "mean": MEAN, "max": MAX}


class Lookup(NamedTuple):
    """A lookup in one table, as requested. The native core reads the first eight fields."""

    weight: Tensor
    ids: Tensor  # of any shape for single rows; for bags, 2-D, or 1-D with offsets
    offsets: Tensor | None
    include_last_offset: bool
    per_sample_weights: Tensor | None  # for DOT, the row that a bag is multiplied by
    mode: int  # -1 if the module has another one
    padding_idx: int  # -1 if there is none
    needs_grad: bool  # whether the weight gets a gradient
    table: Any = None  # the module, for its other options and its name

    @property
    def flat_ids(self) -> Tensor:
        """The ids of all bags, one after the other."""
        return self.ids.reshape(-1)

    @property
    def num_bags(self) -> int:
        """The number of bags, or of ids if every id is a row of the output."""
        if self.offsets is None:
            return self.ids.numel() if self.mode == ROWS else self.ids.shape[0]
        return len(self.offsets) - self.include_last_offset

    @property
    def bag_length(self) -> int:
        """The number of ids of each bag; -1 if it differs."""
        if self.offsets is not None:
            return -1
        return 1 if self.mode == ROWS else self.ids.shape[1]

    def bag_sizes(self) -> Tensor | None:
        """Return the number of ids of each bag; None if it is the same for all."""
        if self.offsets is None:
            return None
        offsets = self.offsets.long()
        if self.include_last_offset:
            return offsets.diff()
        return offsets.diff(append=offsets.new_full((1,), self.ids.numel()))

    def bag_index(self) -> Tensor | None:
        """Return the bag of each id; None if every bag has one id."""
        sizes, ids = self.bag_sizes(), self.ids
        if sizes is not None:
            return torch.repeat_interleave(sizes, output_size=ids.numel())
        if self.bag_length == 1:
            return None
        bags = torch.arange(self.num_bags, device=ids.device)
        return bags.unsqueeze(1).expand(ids.shape).reshape(-1).contiguous()


class LookupResult(NamedTuple):
    """The output of a lookup, and the indices of its gradient."""

    output: Tensor  # a row for each id or bag
    indices: Tensor | None = None  # a copy of the ids without padding; None: see the lookup
    value_index: Tensor | None = None  # the row of the output for each; None: its own number
    max_index: Tensor | None = None  # for MAX, the row that each element comes from
    bag_sizes: Tensor | None = None  # without padding, if MEAN or MAX need them


def row_lookup(table: nn.Embedding, input: Any) -> Lookup:
    """Return a lookup of single rows; arguments as for the module."""
    weight, padding_idx = table.weight, table.padding_idx
    padding_idx = -1 if padding_idx is None else padding_idx
    needs_grad = weight.requires_grad and torch.is_grad_enabled()
    return Lookup(weight, input, None, False, None, ROWS, padding_idx, needs_grad, table)


def bag_lookup(
    table: nn.EmbeddingBag, input: Any, offsets: Any = None, per_sample_weights: Any = None
) -> Lookup:
    """Return a lookup of bags; arguments as for the module."""
    weight, padding_idx = table.weight, table.padding_idx
    return Lookup(
        weight,
        input,
        offsets,
        table.include_last_offset,
        per_sample_weights,
        MODES.get(table.mode, -1),
        -1 if padding_idx is None else padding_idx,
        weight.requires_grad and torch.is_grad_enabled(),
        table,
    )


def embed(lookups: list[Lookup]) -> list[Tensor]:
    """Look up all tables, recorded by autograd. Atomic: on error, nothing has changed."""
    weights = [lookup.weight for lookup in lookups]
    if uses_torch_ops(weights):
        alone = len(lookups) == 1
        return [embed_with_torch(each) if alone else embed([each])[0] for each in lookups]
    results = _look_up_natively(lookups)
    if results is None:
        if lookups[0].mode == ROWS and is_nested(lookups[0].ids):
            return [_embed_nested(lookups[0])]
        lookups = [check_lookup(lookup) for lookup in lookups]
        if not all(lookup.weight.is_leaf for lookup in lookups):
            # A weight computed from others gets torch's gradient, which these operations can take.
            return [
                embed([each])[0] if each.weight.is_leaf else embed_with_torch(each)
                for each in lookups
            ]
        results = _look_up_with_torch(lookups)
    tensors = [*weights, *[lookup.per_sample_weights for lookup in lookups]]
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                materialize_for_ddp(weights)
                return list(_Embed.apply(lookups, results, *tensors))
    return [result.output for result in results]


def _embed_nested(lookup: Lookup) -> Tensor:
    """Look up rows by nested ids, as a nested tensor."""
    ids: Any = lookup.ids
    _check_nested(lookup.table, "ids", ids)
    rows = embed([lookup._replace(ids=ids.values())])[0]
    return torch.nested.nested_tensor_from_jagged(rows, ids.offsets())


def embed_with_torch(lookup: Lookup) -> Tensor:
    """Look up with torch's own gradient, a dense one. Nothing is checked."""
    table = lookup.table
    if lookup.mode == ROWS:
        return functional.embedding(
            lookup.ids,
            lookup.weight,
            table.padding_idx,
            table.max_norm,
            table.norm_type,
            table.scale_grad_by_freq,
        )
    return functional.embedding_bag(
        lookup.ids,
        lookup.weight,
        lookup.offsets,
        table.max_norm,
        table.norm_type,
        table.scale_grad_by_freq,
        table.mode,
        False,
        lookup.per_sample_weights,
        lookup.include_last_offset,
        table.padding_idx,
    )


def _look_up_natively(lookups: list[Lookup]) -> list[LookupResult] | None:
    requests = []
    for lookup in lookups:
        weight, ids, table = lookup.weight, lookup.ids, lookup.table
        is_invalid = lookup.mode < 0 or (lookup.mode == MAX and table.scale_grad_by_freq)
        if is_invalid or table.max_norm is not None or not weight.is_leaf:
            return None
        memory = catch_up_guarded(weight, ids)
        if type(ids) is Tensor and ids.layout is torch.strided and not ids.is_contiguous():
            lookup = lookup._replace(ids=ids.contiguous())
        requests.append(lookup if memory is weight else lookup._replace(weight=memory))
    return look_up(requests)


def look_up_checked(lookups: list[Lookup]) -> list[LookupResult]:
    """Look up all tables without autograd; all weights are leaves."""
    results = _look_up_natively(lookups)
    if results is None:
        results = _look_up_with_torch([check_lookup(lookup) for lookup in lookups])
    return results


def look_up(lookups: list[Lookup]) -> list[LookupResult] | None:
    """Look up all tables natively. Returns None if the core declines: then nothing has changed.

    It does so under dispatch modes and forward derivatives, where torch has to see the lookup.
    """
    if ext is None or dispatch_modes() or forward_level() >= 0:
        return None
    found = ext.look_up(lookups, torch.get_num_threads(), isa.index)
    return None if found is None else [LookupResult(*each) for each in found]


def _look_up_with_torch(lookups: list[Lookup]) -> list[LookupResult]:
    with torch.no_grad():
        weights = [catch_up_guarded(lookup.weight, lookup.ids) for lookup in lookups]
        for lookup, weight in zip(lookups, weights, strict=True):
            table = lookup.table
            if table.max_norm is not None:
                ids = lookup.ids.contiguous()
                torch.embedding_renorm_(weight, ids, table.max_norm, table.norm_type)
        return [_pool(*each) for each in zip(lookups, weights, strict=True)]


def _pool(lookup: Lookup, weight: Tensor) -> LookupResult:
    ids, offsets, mode, padding_idx = lookup.ids, lookup.offsets, lookup.mode, lookup.padding_idx
    if mode == ROWS:
        return LookupResult(torch.embedding(weight, ids))
    if mode == DOT:
        assert lookup.per_sample_weights is not None
        return LookupResult((weight[ids] * lookup.per_sample_weights.unsqueeze(1)).sum(-1))
    if offsets is None:
        count, length = ids.shape
        offsets = torch.arange(count, dtype=ids.dtype, device=ids.device) * length
        ids = ids.reshape(-1)
    if padding_idx < 0 and mode != MAX and not weight.is_contiguous():
        # Rows that are not adjacent, as in a file: torch would copy the whole table.
        rows, inverse = ids.unique(return_inverse=True)
        weight, ids = weight.index_select(0, rows), inverse.to(ids.dtype)
    options = lookup.per_sample_weights, lookup.include_last_offset, padding_idx
    output, _, bag_sizes, max_index = embedding_bag(
        weight, ids, offsets, False, mode - 1, False, *options
    )
    if mode == MAX:
        return LookupResult(output, max_index=max_index, bag_sizes=bag_sizes)
    has_sizes = mode == MEAN and padding_idx >= 0
    return LookupResult(output, bag_sizes=bag_sizes if has_sizes else None)


# Checks


def check_lookup(lookup: Lookup) -> Lookup:
    """Raise InputError for an invalid lookup. Returns it with contiguous, unnested tensors."""
    weight, ids, offsets, include_last_offset, weights, *_ = lookup
    table = lookup.table
    if lookup.mode in (ROWS, DOT):
        check_ids(table, weight, ids)
        return lookup
    if is_nested(ids):
        nested: Any = ids
        _check_nested(table, "ids", nested)
        if nested.dim() != 2:
            raise lookup_error(table, "nested ids of bags must be 2-D", f"{nested.dim()}-D ones")
        if weights is not None:
            weights = _flat_like(table, nested, weights)
        ids, offsets, include_last_offset = nested.values(), nested.offsets(), True
    check_ids(table, weight, ids)
    if lookup.mode < 0:
        raise lookup_error(table, "mode has to be one of sum, mean or max", repr(table.mode))
    if lookup.mode == MAX and table.scale_grad_by_freq:
        requirement = "max mode does not support scaling the gradient by the frequency"
        raise lookup_error(table, requirement, "scale_grad_by_freq=True")
    if weights is not None:
        _check_per_sample_weights(table, weight, ids, weights)
        weights = weights.reshape(-1).contiguous()
    if ids.dim() == 1:
        _check_offsets(table, ids, offsets, with_last=include_last_offset)
        assert offsets is not None
        offsets = offsets.contiguous()
    elif ids.dim() != 2:
        raise lookup_error(table, "ids must be 1-D or 2-D", f"shape {tuple(ids.shape)}")
    elif offsets is not None:
        requirement = "2-D ids are bags of equal length: offsets must be None"
        raise lookup_error(table, requirement, "offsets", "Flatten the ids to use offsets")
    else:
        include_last_offset = False
    return lookup._replace(
        ids=ids.contiguous(),
        offsets=offsets,
        include_last_offset=include_last_offset,
        per_sample_weights=weights,
    )


def is_nested(ids: Any) -> bool:
    """Whether ids are a nested tensor."""
    return isinstance(ids, Tensor) and ids.is_nested


def _check_nested(table: nn.Module, name: str, tensor: Any) -> None:
    if tensor.layout is not torch.jagged:
        raise lookup_error(table, f"nested {name} must have layout=torch.jagged", tensor.layout)
    if not tensor.is_contiguous():  # its values may have gaps
        requirement = f"nested {name} must be contiguous"
        raise lookup_error(table, requirement, "others", "Call contiguous() on them")


def _flat_like(table: nn.Module, ids: Any, weights: Any) -> Tensor:
    """The values of nested per_sample_weights, which must have the lengths of the ids."""
    if not is_nested(weights):
        requirement = "with nested ids, per_sample_weights must be nested, too"
        raise lookup_error(table, requirement, "an ordinary tensor")
    _check_nested(table, "per_sample_weights", weights)
    if not torch.equal(weights.offsets(), ids.offsets()):
        requirement = "nested per_sample_weights must have the lengths of the ids"
        raise lookup_error(table, requirement, "others")
    values: Tensor = weights.values()
    return values


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
    name, size = getattr(table, "name", ""), " x ".join(map(str, weight.shape))
    who = f"{type(table).__name__} {name!r}" if name else type(table).__name__
    return kind(f"{who} ({size}): {message(requirement, got, remedy)}")


def check_strided(table: nn.Module, name: str, tensor: Tensor) -> None:
    """Raise InputError for a sparse or nested tensor."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested one" if tensor.is_nested else tensor.layout
        raise lookup_error(table, f"{name} must be a strided tensor", got)


def check_ids(table: nn.Module, weight: Tensor, ids: Any) -> None:
    """Raise RangeError for the first id outside the table, with its position."""
    if not isinstance(ids, Tensor) or ids.dtype not in INDEX_DTYPES:
        raise lookup_error(table, "ids must be an int64 or int32 tensor", describe(ids))
    check_strided(table, "ids", ids)
    if ids.device != weight.device:
        raise lookup_error(table, f"ids must be on the table's device, {weight.device}", ids.device)
    rows = weight.shape[0]
    if out_of_range(ids, rows) is not None:
        position = ((ids < 0) | (ids >= rows)).nonzero()[0].tolist()
        got = str(int(ids[tuple(position)]))
        if position:  # a single id has none
            got += f" at position {position[0] if len(position) == 1 else tuple(position)}"
        remedy = "Map unknown ids to a row of their own, or make the table larger"
        raise lookup_error(table, f"ids must be in [0, {rows})", got, remedy, RangeError)


def _check_offsets(table: nn.Module, ids: Tensor, offsets: Any, *, with_last: bool) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype not in INDEX_DTYPES or offsets.dim() != 1:
        requirement = "1-D ids need offsets, a 1-D int64 or int32 tensor of where each bag begins"
        remedy = "Pass 2-D ids for bags of equal length" if offsets is None else ""
        raise lookup_error(table, requirement, describe(offsets), remedy)
    check_strided(table, "offsets", offsets)
    if offsets.device != ids.device:
        requirement = f"offsets must be on the ids' device, {ids.device}"
        raise lookup_error(table, requirement, offsets.device)
    num_ids = ids.numel()
    if not offsets.numel() and not with_last and not num_ids:
        return
    if not offsets.numel() or int(offsets[0]) != 0:
        got = f"{int(offsets[0])} at position 0" if offsets.numel() else "no offsets"
        raise lookup_error(table, "offsets must begin with 0", got)
    last = int(offsets[-1])
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        position = int(falls.nonzero()[0]) + 1
        before, value = offsets[position - 1 : position + 1].tolist()
        got = f"{value} at position {position}, after {before}"
        raise lookup_error(table, "offsets must not decrease", got)
    if last > num_ids:
        position = int((offsets > num_ids).nonzero()[0])
        requirement = f"offsets must be at most the number of ids, {num_ids}"
        raise lookup_error(table, requirement, f"{int(offsets[position])} at position {position}")
    if with_last and last != num_ids:
        requirement = "with include_last_offset the last offset must be the number of ids"
        got = f"{last} at position {len(offsets) - 1}"
        raise lookup_error(table, f"{requirement}, {num_ids}", got)


def _check_per_sample_weights(table: Any, weight: Tensor, ids: Tensor, weights: Any) -> None:
    if table.mode != "sum":
        requirement = "per_sample_weights are for mode='sum'"
        raise lookup_error(table, requirement, f"mode={table.mode!r}")
    if not isinstance(weights, Tensor) or weights.dtype != weight.dtype:
        requirement = f"per_sample_weights must be a tensor of the table's dtype, {weight.dtype}"
        raise lookup_error(table, requirement, describe(weights))
    check_strided(table, "per_sample_weights", weights)
    if weights.shape != ids.shape:
        requirement = f"per_sample_weights must have the shape of the ids, {tuple(ids.shape)}"
        raise lookup_error(table, requirement, tuple(weights.shape))
    if weights.device != weight.device:
        requirement = f"per_sample_weights must be on the table's device, {weight.device}"
        raise lookup_error(table, requirement, weights.device)


def describe(thing: object) -> str:
    """Describe an argument that should be another kind of tensor."""
    if not isinstance(thing, Tensor):
        return "None" if thing is None else f"a {type(thing).__name__}"
    if thing.is_nested:
        return "a nested tensor"
    return f"a {thing.dtype} tensor of shape {tuple(thing.shape)}"


# Gradients


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward function whose result cannot be differentiated again.

    Torch's ``once_differentiable`` is costly, and needed only where gradients are recorded. If
    ``backward()`` is called in a compiled function, it is not compiled.
    """

    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(run)(ctx, *grads)
        if torch.is_grad_enabled():
            return once_differentiable(backward)(ctx, *grads)
        return backward(ctx, *grads)

    return run


class SavedTable:
    """A table whose rows backward reads again.

    Autograd would refuse it if another lookup has caught up deferred rows in the meantime.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._version = version_for_readers(weight)

    def memory(self) -> Tensor:
        """Return the table, or refuse one that was changed."""
        if version_for_readers(self._weight) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: an embedding's weight, of shape {tuple(self._weight.shape)}."
            )
        return memory_of(self._weight)


class _Embed(torch.autograd.Function):
    """All lookups at once; takes all weights, then all per_sample_weights."""

    @staticmethod
    def forward(
        ctx: Any, lookups: list[Lookup], results: list[LookupResult], *tensors: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.lookups, ctx.tables = [], []
        saved: list[Tensor | None] = []
        outputs = []
        needs_weights_grad = ctx.needs_input_grad[2 + len(lookups) :]
        for lookup, result, needs_table in zip(lookups, results, needs_weights_grad, strict=True):
            weight, ids, offsets, include_last_offset, weights, *options = lookup
            ctx.lookups.append((weight.shape, include_last_offset, options))
            output, *found = result
            outputs.append(output)
            if result.indices is not None and weights is None:
                offsets = None  # the bag of each id is known
            # The ids are saved even if they are not used: they must not change before backward.
            saved += (ids, offsets, weights, *found)
            ctx.tables.append(SavedTable(weight) if needs_table else None)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Any) -> Any:
        num_tables, saved, needs_grad = len(grads), ctx.saved_tensors, ctx.needs_input_grad[2:]
        per_table = len(saved) // num_tables
        found: list[Any] = [None] * (2 * num_tables)
        for n, (shape, include_last_offset, options) in enumerate(ctx.lookups):
            grad = grads[n]
            if grad is None:
                continue
            ids, offsets, weights, *result = saved[per_table * n : per_table * (n + 1)]
            weight: Any = None if ctx.tables[n] is None else ctx.tables[n].memory()
            lookup = Lookup(weight, ids, offsets, include_last_offset, weights, *options)
            if needs_grad[n]:
                part = weight_grad(shape, lookup, LookupResult(grad, *result), grad)
                found[n] = CompactGrad.of([part], shape, grad)
            if needs_grad[num_tables + n]:
                found[num_tables + n] = per_sample_weights_grad(lookup, grad)
        return None, None, *found


def weight_grad(
    shape: torch.Size, lookup: Lookup, result: LookupResult, grad: Tensor
) -> IndexedGrad:
    """Return the gradient of a weight."""
    if lookup.mode == MAX:
        return _max_grad(shape, result, grad)
    weights = lookup.per_sample_weights
    if lookup.mode == DOT:
        assert weights is not None
        indices, index, table = result.indices, result.value_index, lookup.table
        if indices is None:
            indices, index = _copy(lookup.flat_ids, torch.int64), lookup.bag_index()
        options = -1 if table.padding_idx is None else table.padding_idx, table.scale_grad_by_freq
        # Without their graph, which holds the table whose gradient this will be.
        rows = weights.detach()
        return grad_of_ids(shape, indices, rows, index, grad.reshape(-1), *options)
    weights = None if weights is None else weights.reshape(-1)
    if lookup.mode == MEAN:
        sizes = lookup.bag_sizes() if result.bag_sizes is None else result.bag_sizes
        values = grad * _inverse_sizes(lookup, sizes, grad)
    else:
        values = unshared(grad)
        if lookup.mode == ROWS:
            values = values.reshape(lookup.ids.numel(), shape[1])
    ids, value_index, padding_idx = result.indices, result.value_index, -1
    is_known = ids is not None and (weights is None or lookup.padding_idx < 0)
    if not is_known:
        ids, value_index, padding_idx = lookup.flat_ids, lookup.bag_index(), lookup.padding_idx
    assert ids is not None
    by_freq = lookup.table.scale_grad_by_freq
    if not is_known and padding_idx < 0:  # the next batch may be read into the same buffer
        ids = _copy(ids, torch.int64)
    return grad_of_ids(shape, ids, values, value_index, weights, padding_idx, by_freq)


def grad_of_ids(
    shape: torch.Size,
    ids: Tensor,
    values: Tensor,
    value_index: Tensor | None = None,
    scale: Tensor | None = None,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> IndexedGrad:
    """Return the gradient of a table from that of its output, ``values``: a row for each id or bag.

    The ids must not change before the step.
    """
    if scale is not None:  # which may be a parameter that the same step updates
        scale = _copy(scale, scale.dtype)
    if padding_idx >= 0:
        present = (ids != padding_idx).nonzero().squeeze(1)
        ids = ids[present].long()
        value_index = present if value_index is None else value_index[present]
        scale = None if scale is None else scale[present]
    if scale_grad_by_freq:
        _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        frequency = counts.to(values.dtype.to_real()).reciprocal()[which]
        scale = frequency if scale is None else scale * frequency
    rows, dim = shape
    return IndexedGrad(ids, values, rows, dim, value_index, scale)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _inverse_sizes(lookup: Lookup, sizes: Tensor | None, grad: Tensor) -> Tensor | float:
    """Torch multiplies with the inverse of a bag's size, rounded to the gradient's dtype."""
    if sizes is not None:
        return sizes.clamp(min=1).to(grad.dtype).unsqueeze(1).reciprocal()
    length = max(lookup.bag_length, 1)
    # A number is rounded to float32 and no further; of numbers up to here, never wrongly.
    if grad.dtype in (torch.float32, torch.float64) and length < 1 << 24:
        return 1 / length
    return torch.full((1, 1), length, dtype=grad.dtype, device=grad.device).reciprocal()


def _max_grad(shape: torch.Size, result: LookupResult, grad: Tensor) -> IndexedGrad:
    """Under ``max``, each element of a bag that is not empty comes from one row."""
    assert result.max_index is not None
    assert result.bag_sizes is not None
    rows, dim = shape
    columns = torch.arange(dim, device=grad.device)
    bags = result.bag_sizes.nonzero()
    indices = (result.max_index[bags.squeeze(1)].long() * dim + columns).reshape(-1)
    value_index = (bags * dim + columns).reshape(-1)
    return IndexedGrad(indices, unshared(grad), rows * dim, 1, value_index)


def per_sample_weights_grad(lookup: Lookup, grad: Tensor) -> Tensor:
    """Return the gradient of the weights per sample."""
    assert lookup.per_sample_weights is not None
    if lookup.mode == DOT:
        factors = grad.contiguous()
        sums = lookup._replace(per_sample_weights=factors, mode=SUM, needs_grad=False)
        results = look_up([sums])
        if results is None:
            return (lookup.weight[lookup.ids] * factors.unsqueeze(-1)).sum(1)
        return results[0].output
    ids, bags = lookup.flat_ids, lookup.bag_index()
    if bags is None:
        bags = torch.arange(lookup.num_bags, device=ids.device)
    found: Tensor = embedding_bag_weights_backward(
        grad, lookup.weight, ids.long(), bags, bags, lookup.mode - 1, lookup.padding_idx
    )
    return found.reshape(lookup.per_sample_weights.shape)


def unshared(grad: Tensor) -> Tensor:
    """Return the gradient of an output, or a clone if its memory is shared.

    Autograd passes the same tensor to all summands. A view of it may become the gradient of a
    parameter, to which the next backward adds in place, before the optimizer reads it here.
    """
    if not grad.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    counts = uses(grad), uses_of_memory(grad)
    return grad if counts == _uses_if_unshared() and None not in counts else grad.clone()


@functools.cache
def _uses_if_unshared() -> tuple[int | None, int | None]:
    """The counts of a tensor that is not shared, which depend on the version of torch."""
    alone = torch.zeros(1, device="cpu")
    return uses(alone), uses_of_memory(alone)
