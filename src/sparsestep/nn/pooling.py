"""Lookups of bags in any number of tables, and their compact gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsestep.gradients.compact import compact
from sparsestep.gradients.touched import Touched
from sparsestep.nn.checks import check_ids, check_offsets, check_weights, refusal
from sparsestep.nn.embedding import takes_compact
from sparsestep.nn.parts import first_derivative, part, unshared
from sparsestep.nn.processes import write_out_for_ddp
from sparsestep.torch_internals import embedding_bag, embedding_bag_weights_backward

_MODES = {"sum": 0, "mean": 1, "max": 2}


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
            contract = "2-D ids are bags of equal length: offsets must be None"
            raise refusal(table, contract, "offsets", "Flatten the ids to use offsets")
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
            contract = "where the ids are nested, per_sample_weights must be nested"
            raise refusal(table, contract, "an ordinary tensor")
        factors = factors.values().reshape(-1)
    return ids.values().reshape(-1), ids.offsets(), factors, True  # type: ignore[attr-defined]


def _check_mode(table: torch.nn.EmbeddingBag) -> None:
    if table.mode not in _MODES:
        raise refusal(table, "mode has to be one of sum, mean or max", repr(table.mode))
    if table.mode == "max" and table.scale_grad_by_freq:
        contract = "max mode does not support scaling the gradient by the frequency"
        raise refusal(table, contract, "scale_grad_by_freq=True")


def pooled(asked: Sequence[Bags]) -> list[Tensor]:
    """A row for each bag of each table."""
    if not all(takes_compact(bags.weight) for bags in asked):
        if len(asked) == 1:
            (bags,) = asked
            return [by_torch(bags.table, bags.ids, bags.starts, bags.factors, bags.ends)]
        return [found for bags in asked for found in pooled([bags])]
    for bags in asked:
        limit = bags.table.max_norm
        if limit is not None:
            with torch.no_grad():
                torch.embedding_renorm_(bags.weight, bags.ids, limit, bags.table.norm_type)
    tensors = [bags.weight for bags in asked] + [bags.factors for bags in asked]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        for bags in asked:
            write_out_for_ddp(bags.weight)
        return list(_Pooled.apply(asked, *tensors))
    return [_look_up(bags, bags.factors)[0] for bags in asked]


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


def _look_up(bags: Bags, factors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, how many ids counted in each bag, and for ``max`` whose elements were chosen."""
    table = bags.table
    padding = -1 if table.padding_idx is None else table.padding_idx
    found, _, sizes, winners = embedding_bag(
        bags.weight,
        bags.ids,
        bags.starts,
        False,
        _MODES[table.mode],
        False,
        factors,
        bags.ends,
        padding,
    )
    return found, sizes, winners


class _Saved(NamedTuple):
    """The tensors of a lookup that its gradient needs."""

    ids: Tensor
    starts: Tensor | None  # where the bags are not of equal length
    counted: Tensor | None  # how many ids are no padding, in each bag
    winners: Tensor | None
    factors: Tensor | None
    weight: Tensor | None


@dataclass(slots=True)
class _Looked:
    """What the gradient has to know of a lookup beside its tensors."""

    shape: torch.Size
    mode: str
    padding: int
    by_frequency: bool
    count: int
    length: int
    ends: bool

    @staticmethod
    def of(bags: Bags) -> _Looked:
        table = bags.table
        padding = -1 if table.padding_idx is None else table.padding_idx
        return _Looked(
            bags.weight.shape,
            table.mode,
            padding,
            table.scale_grad_by_freq,
            bags.count,
            bags.length,
            bags.ends,
        )

    def sizes(self, saved: _Saved) -> Tensor | None:
        """How many ids each bag has, where that differs."""
        if saved.starts is None:
            return None
        starts = saved.starts.long()
        return starts.diff() if self.ends else starts.diff(append=_number(saved.ids))

    def bag_of_each_id(self, sizes: Tensor | None, ids: Tensor) -> Tensor | None:
        """``None`` where every bag has one id."""
        if sizes is not None:
            return torch.repeat_interleave(sizes, output_size=ids.numel())
        if self.length == 1:
            return None
        bags = torch.arange(self.count, device=ids.device)
        return bags.unsqueeze(1).expand(self.count, self.length).reshape(-1).contiguous()

    def part(self, saved: _Saved, grad: Tensor) -> Touched:
        """The part of the table's gradient that comes from this lookup."""
        if self.mode == "max":
            return _won(self.shape, saved, grad)
        sizes = self.sizes(saved)
        values = unshared(grad) if self.mode == "sum" else self._mean_of(saved, sizes, grad)
        return part(
            self.shape,
            saved.ids,
            values,
            self.bag_of_each_id(sizes, saved.ids),
            saved.factors,
            padding=self.padding,
            by_frequency=self.by_frequency,
        )

    def _mean_of(self, saved: _Saved, sizes: Tensor | None, grad: Tensor) -> Tensor:
        # Torch multiplies with the inverse, rounded to the gradient's dtype.
        counted = sizes if saved.counted is None else saved.counted
        if counted is None:
            counted = torch.full((1, 1), max(self.length, 1), dtype=grad.dtype, device=grad.device)
        else:
            counted = counted.clamp(min=1).to(grad.dtype).unsqueeze(1)
        return grad * counted.reciprocal()


def _number(ids: Tensor) -> Tensor:
    return torch.full((1,), ids.numel(), device=ids.device)


def _won(shape: torch.Size, saved: _Saved, grad: Tensor) -> Touched:
    """Under ``max`` each element of a bag that is not empty is that of one row."""
    assert saved.winners is not None
    assert saved.counted is not None
    rows, dim = shape
    columns = torch.arange(dim, device=grad.device)
    bags = saved.counted.nonzero()
    positions = (saved.winners[bags.squeeze(1)].long() * dim + columns).reshape(-1)
    source = (bags * dim + columns).reshape(-1)
    return Touched(positions, unshared(grad), rows * dim, 1, source)


class _Pooled(torch.autograd.Function):
    """All lookups at once; called with the weights of all tables, then the factors of all."""

    @staticmethod
    def forward(ctx: Any, asked: Sequence[Bags], *tensors: Any) -> tuple[Tensor, ...]:
        tables = len(asked)
        ctx.set_materialize_grads(False)
        ctx.looked = [_Looked.of(bags) for bags in asked]
        saved: list[Tensor | None] = []
        outputs = []
        for index, (bags, looked) in enumerate(zip(asked, ctx.looked, strict=True)):
            factors = tensors[tables + index]
            found, counted, winners = _look_up(bags, factors)
            outputs.append(found)
            is_max = looked.mode == "max"
            saved += _Saved(
                bags.ids,
                bags.starts if bags.length < 0 else None,
                counted if is_max or (looked.mode == "mean" and looked.padding >= 0) else None,
                winners if is_max else None,
                factors,
                bags.weight if ctx.needs_input_grad[1 + tables + index] else None,
            )
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return first_derivative(_gradients, ctx, *grads)


def _gradients(ctx: Any, *grads: Any) -> Any:
    tables, fields = len(ctx.looked), len(_Saved._fields)
    wanted = ctx.needs_input_grad[1:]
    everything = ctx.saved_tensors
    of_weights: list[Any] = [None] * tables
    of_factors: list[Any] = [None] * tables
    for index, (looked, grad) in enumerate(zip(ctx.looked, grads, strict=True)):
        if grad is None:
            continue
        saved = _Saved(*everything[fields * index : fields * (index + 1)])
        if wanted[index]:
            of_weights[index] = compact([looked.part(saved, grad)], looked.shape, grad)
        if wanted[tables + index]:
            of_factors[index] = _of_factors(looked, saved, grad)
    return None, *of_weights, *of_factors


def _of_factors(looked: _Looked, saved: _Saved, grad: Tensor) -> Tensor:
    ids = saved.ids
    bags = looked.bag_of_each_id(looked.sizes(saved), ids)
    if bags is None:
        bags = torch.arange(looked.count, device=ids.device)
    found: Tensor = embedding_bag_weights_backward(
        grad, saved.weight, ids.long(), bags, bags, _MODES[looked.mode], looked.padding
    )
    return found
