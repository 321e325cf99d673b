"""Lookups of bags in any number of tables, and their compact gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsestep._torch import embedding_bag
from sparsestep.deferred.guard import readable
from sparsestep.grads.compact import CompactGrad
from sparsestep.memory.tensors import memory_of
from sparsestep.nn.embedding import takes_compact
from sparsestep.nn.interop import write_out_for_ddp
from sparsestep.nn.lookup import (
    MODES,
    POOLING,
    Found,
    Looked,
    Request,
    Saved,
    check_ids,
    check_offsets,
    check_weights,
    first_derivative,
    look_up,
    refusal,
)


@dataclass(slots=True)
class Bags:
    """What is to be looked up in a table, checked.

    Attributes:
        table: whose rows.
        weight: the table's, as it is now.
        ids: the ids of all bags, one after the other.
        starts: where each bag begins.
        ends: whether ``starts`` has the end of the last bag as well.
        count: how many bags.
        length: how many ids each bag has, where that is the same for all; otherwise -1.
        factors: what each row is multiplied with.
    """

    table: torch.nn.EmbeddingBag
    weight: Tensor
    ids: Tensor
    starts: Tensor
    ends: bool
    count: int
    length: int
    factors: Tensor | None

    @staticmethod
    def of(
        table: torch.nn.EmbeddingBag,
        ids: Any,
        offsets: Tensor | None = None,
        factors: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Bags:
        """What a table is asked for, or an error that says what is wrong with it.

        Args:
            table: the table.
            ids: 2-D, a bag in each row, or 1-D.
            offsets: where bags begin, for 1-D ids.
            factors: one for each id.
            starts: where bags begin, for 2-D ids, if it is known already.
        """
        weight, ends = table.weight, table.include_last_offset
        if isinstance(ids, Tensor) and ids.is_nested:
            ids, offsets, factors, ends = _flat(table, ids, factors)
        check_ids(table, weight, ids)
        _check_mode(table)
        if factors is not None:
            check_weights(table, weight, ids, factors, table.mode)
            factors = factors.reshape(-1).contiguous()
        if ids.dim() == 1:
            check_offsets(table, ids, offsets, with_last=ends)
            assert offsets is not None
            ids, starts = ids.contiguous(), offsets.contiguous()
            return Bags(table, weight, ids, starts, ends, len(starts) - ends, -1, factors)
        if ids.dim() != 2:
            raise refusal(table, "ids must be 1-D or 2-D", f"shape {tuple(ids.shape)}")
        if offsets is not None:
            requirement = "2-D ids are bags of equal length: offsets must be None"
            raise refusal(table, requirement, "offsets", "Flatten the ids to use offsets")
        count, length = ids.shape
        if starts is None:
            starts = equal_starts(ids)
        ids = ids.reshape(-1).contiguous()
        return Bags(table, weight, ids, starts, False, count, length, factors)


def equal_starts(ids: Tensor) -> Tensor:
    """Where the bags of 2-D ids begin."""
    count, length = ids.shape
    if not length:
        return torch.zeros(count, dtype=ids.dtype, device=ids.device)
    return torch.arange(0, count * length, length, dtype=ids.dtype, device=ids.device)


def _flat(table: torch.nn.EmbeddingBag, ids: Tensor, factors: Tensor | None) -> Any:
    """A nested tensor, whose rows are bags, as torch takes it: ids, offsets, factors, ends."""
    if factors is not None:
        if not factors.is_nested:
            requirement = "with nested ids, per_sample_weights must be nested, too"
            raise refusal(table, requirement, "an ordinary tensor")
        factors = factors.values().reshape(-1)
    return ids.values().reshape(-1), ids.offsets(), factors, True  # type: ignore[attr-defined]


def _is_refused(table: torch.nn.EmbeddingBag) -> bool:
    return table.mode not in MODES or (table.mode == "max" and table.scale_grad_by_freq)


def _check_mode(table: torch.nn.EmbeddingBag) -> None:
    if table.mode not in MODES:
        raise refusal(table, "mode has to be one of sum, mean or max", repr(table.mode))
    if _is_refused(table):
        requirement = "max mode does not support scaling the gradient by the frequency"
        raise refusal(table, requirement, "scale_grad_by_freq=True")


class Asked(NamedTuple):
    """What a caller wants of a table; nothing is checked."""

    table: torch.nn.EmbeddingBag
    ids: Any
    offsets: Any = None
    factors: Any = None


class _Read(NamedTuple):
    """A lookup that was done: in which weight, what was found, what the gradient needs of it."""

    weight: Tensor
    factors: Tensor | None
    output: Tensor
    looked: Looked
    saved: Saved


def pooled(asked: Sequence[Asked]) -> list[Tensor]:
    """A row for each bag of each table, or an error that says what is wrong."""
    done = _by_core(asked)
    return _by_operations(asked) if done is None else _recorded(done)


def _by_core(asked: Sequence[Asked]) -> list[_Read] | None:
    """All tables in one pass; ``None``, and nothing done, where anything is unusual or wrong."""
    is_recorded = torch.is_grad_enabled()
    requests = []
    for table, ids, offsets, factors in asked:
        weight = table.weight
        pooling = 0 if _is_refused(table) else POOLING[table.mode]
        if not pooling or table.max_norm is not None or not takes_compact(weight):
            return None
        is_usual = type(ids) is Tensor and ids.layout is torch.strided
        if is_usual and not ids.is_contiguous():
            ids = ids.contiguous()
        has_gradient = is_recorded and weight.requires_grad
        ends, padding = table.include_last_offset, _padding(table)
        memory = readable(weight, ids)
        requests.append(
            Request(memory, ids, offsets, ends, factors, pooling, padding, has_gradient)
        )
    found = look_up(requests)
    if found is None:
        return None
    return [_read(*each) for each in zip(asked, requests, found, strict=True)]


def _read(asked: Asked, request: Request, found: Found) -> _Read:
    table, ids, offsets, factors = asked
    length = ids.shape[1] if ids.dim() == 2 else -1
    if found.positions is not None and factors is None:
        offsets = None  # the bag of each id is known
    saved = Saved(ids, offsets, found.counted, found.winners, factors)
    saved = saved._replace(positions=found.positions, source=found.source)
    looked = Looked(
        *(request.weight.shape, table.mode, request.padding, table.scale_grad_by_freq),
        *(len(found.output), length, request.ends),
    )
    return _Read(table.weight, factors, found.output, looked, saved)


def _padding(table: torch.nn.EmbeddingBag) -> int:
    return -1 if table.padding_idx is None else table.padding_idx


def _by_operations(asked: Sequence[Asked]) -> list[Tensor]:
    """With torch's operations, and every check before anything is read or changed."""
    starts: dict[Any, Tensor] = {}  # bags of one length begin at the same places in all tables
    checked = [Bags.of(*each, _known_starts(starts, each.ids)) for each in asked]
    if not all(takes_compact(bags.weight) for bags in checked):
        if len(checked) > 1:
            return [found for each in asked for found in pooled([each])]
        (bags,) = checked
        return [by_torch(bags.table, bags.ids, bags.starts, bags.factors, bags.ends)]
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
        known[form] = equal_starts(ids)
    return known[form]


def _by_operation(bags: Bags, weight: Tensor) -> _Read:
    table, padding = bags.table, _padding(bags.table)
    mode, is_max = table.mode, table.mode == "max"
    ids = bags.ids
    if padding < 0 and not is_max and not weight.is_contiguous():
        # Rows that lie apart, as in a file: torch would copy all of them.
        rows, inverse = ids.unique(return_inverse=True)
        weight, ids = weight.index_select(0, rows), inverse.to(ids.dtype)
    output, _, counted, winners = embedding_bag(
        *(weight, ids, bags.starts, False, MODES[mode], False),
        *(bags.factors, bags.ends, padding),
    )
    saved = Saved(
        bags.ids,
        bags.starts if bags.length < 0 else None,
        counted if is_max or (mode == "mean" and padding >= 0) else None,
        winners if is_max else None,
        bags.factors,
    )
    looked = Looked(
        *(bags.weight.shape, mode, padding, table.scale_grad_by_freq),
        *(bags.count, bags.length, bags.ends),
    )
    return _Read(bags.weight, bags.factors, output, looked, saved)


def by_torch(
    table: torch.nn.EmbeddingBag, ids: Any, offsets: Any, factors: Any, ends: bool
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
        factors,
        ends,
        table.padding_idx,
    )


def _recorded(done: Sequence[_Read]) -> list[Tensor]:
    """The outputs, for autograd to come back to."""
    weights, factors = [each.weight for each in done], [each.factors for each in done]
    tensors = [*weights, *factors]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        for weight in weights:
            write_out_for_ddp(weight)
        return list(_Pooled.apply(done, *tensors))
    return [each.output for each in done]


class _Pooled(torch.autograd.Function):
    """All lookups at once; called with the weights of all tables, then the factors of all."""

    @staticmethod
    def forward(ctx: Any, done: Sequence[_Read], *tensors: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.looked = [each.looked for each in done]
        wanted = ctx.needs_input_grad[1 + len(done) :]
        tensors_saved: list[Tensor | None] = []
        for each, of_factors in zip(done, wanted, strict=True):
            saved = each.saved
            if of_factors:
                saved = saved._replace(weight=memory_of(each.weight))
            tensors_saved += saved
        ctx.save_for_backward(*tensors_saved)
        return tuple(each.output for each in done)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return first_derivative(_gradients, ctx, *grads)


def _gradients(ctx: Any, *grads: Any) -> Any:
    tables, fields = len(ctx.looked), len(Saved._fields)
    wanted = ctx.needs_input_grad[1:]
    everything = ctx.saved_tensors
    of_weights: list[Any] = [None] * tables
    of_factors: list[Any] = [None] * tables
    for index, (looked, grad) in enumerate(zip(ctx.looked, grads, strict=True)):
        if grad is None:
            continue
        saved = Saved(*everything[fields * index : fields * (index + 1)])
        if wanted[index]:
            of_weights[index] = CompactGrad.of([looked.part(saved, grad)], looked.shape, grad)
        if wanted[tables + index]:
            of_factors[index] = looked.of_factors(saved, grad)
    return None, *of_weights, *of_factors
