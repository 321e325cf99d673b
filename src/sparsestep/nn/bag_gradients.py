"""The compact gradients of bags, from what a lookup has left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._torch import embedding_bag_weights_backward
from sparsestep.grads.indexed import Touched
from sparsestep.nn.parts import part, part_of, unshared

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

    def part(self, saved: Saved, grad: Tensor) -> Touched:
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


def _won(shape: torch.Size, saved: Saved, grad: Tensor) -> Touched:
    """Under ``max`` each element of a bag that is not empty is that of one row."""
    assert saved.winners is not None
    assert saved.counted is not None
    rows, dim = shape
    columns = torch.arange(dim, device=grad.device)
    bags = saved.counted.nonzero()
    positions = (saved.winners[bags.squeeze(1)].long() * dim + columns).reshape(-1)
    source = (bags * dim + columns).reshape(-1)
    return Touched(positions, unshared(grad), rows * dim, 1, source)
