"""The reference engine: gather, call the rule, scatter.

It runs on any device and any strides. It is the oracle of the tests, the path for tensors that have
no native kernel, and the documentation of the native engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsestep.engines import rounding
from sparsestep.engines.base import ParamUpdate, certain, finish
from sparsestep.errors import InputError
from sparsestep.grads.dedup import sum_duplicates
from sparsestep.memory.tensors import HALF_DTYPES, overlapping
from sparsestep.rules import int8


@dataclass(slots=True)
class ReferenceResult:
    """New values for the slots of a gradient, in the parameter and its state; not written yet."""

    update: ParamUpdate
    slots: Tensor | None
    new: list[Tensor]
    kept: tuple[Tensor, Tensor] | None = None  # of packed state, as ``PackedMask.locate`` says

    @torch.no_grad()
    def writes(self) -> Iterator[Callable[[], object]]:
        """Calls that store the new values, rounded to each tensor's own dtype."""
        for index, (tensor, new) in enumerate(zip(self.update.targets, self.new, strict=False)):
            rounded = self._rounded(index, new, tensor.dtype)
            if self.kept is not None and _is_packed(self.update, index):
                yield _scatter_kept(tensor.detach(), *self.kept, rounded)
            else:
                yield _scatter(tensor.detach(), self.slots, rounded)

    def _rounded(self, index: int, new: Tensor, dtype: torch.dtype) -> Tensor:
        seed, settings, stride = self.update.seed, self.update.settings, self.update.row_stride
        is_code = dtype is torch.int8
        if seed is None or not (is_code or (settings.stochastic_rounding and dtype in HALF_DTYPES)):
            return new.to(dtype)
        slots = self.slots
        if slots is None:
            slots = torch.arange(len(new), device=new.device)
        if is_code:
            rows = slots if stride is None else stride.rows(slots)
            bits = rounding.int8_random_bits(seed, index, rows, new.shape[1])
            return int8.round_codes(settings.rule.state[index - 1], new, bits)
        columns = torch.arange(new[0].numel(), device=new.device)
        elements = slots[:, None] * len(columns) + columns
        if stride is not None:
            is_per_row = index > 0 and settings.rule.state[index - 1].per_row
            length = 1 if is_per_row else stride.length
            elements = stride._replace(length=length).elements(elements)
        bits = rounding.random_bits(seed, index, elements.view(new.shape))
        return rounding.round_stochastic(new, dtype, bits)


class ReferenceEngine:
    """Computes all new values before it writes any; ``params`` as in ``EngineDispatcher``."""

    def __init__(self, params: Callable[[], Iterable[Tensor]]) -> None:
        self._params = params
        self._updates: list[ParamUpdate] = []
        self._writes: list[Callable[[], object]] = []
        self._late: list[ParamUpdate] = []

    def claim(self, update: ParamUpdate) -> None:
        """Take any update."""
        self._updates.append(update)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._updates

    def prepare(self) -> None:
        """Compute the new values from the current ones."""
        if not self._updates:
            return
        shared = overlapping(self._params())
        for update in self._updates:
            try:
                writes = _compute_writes(update)
            except InputError as error:
                raise update.error(error) from None
            if id(update.key) in shared:
                # This memory overlaps another parameter's, which commit may write first: recompute
                # then. This first run has shown that the rule does not raise.
                self._late.append(update)
            else:
                self._writes += writes

    def commit(self) -> None:
        """Write the new values."""
        if self._writes:
            finish(self._writes)
        for update in self._late:
            finish(certain(partial(_compute_writes, update)))


def _compute_writes(update: ParamUpdate) -> list[Callable[[], object]]:
    return list(compute(update).writes())


@torch.no_grad()
def compute(update: ParamUpdate) -> ReferenceResult:
    """Evaluate the rule on the slots of a gradient; raises if an index is out of range."""
    settings, indexed, packed = update.settings, update.indexed, update.packed
    if packed is not None and indexed.indices is None:
        indexed = packed.select(indexed)
    slots, grad = sum_duplicates(indexed)
    if grad.numel() == 0:
        return ReferenceResult(update, None, [])
    tensors = update.targets
    in_double = any(tensor.dtype == torch.float64 for tensor in (*tensors, grad))
    dtype = torch.float64 if in_double else torch.float32
    grad = grad.to(dtype)
    if settings.grad_sign < 0:
        grad = -grad
    kept = None
    if packed is not None and slots is not None:
        per_slot = packed.shape.numel() // indexed.num_slots
        inside = torch.arange(per_slot, device=slots.device)
        kept = packed.locate(slots[:, None] * per_slot + inside)
    old = []
    for index, tensor in enumerate(tensors):
        if kept is not None and _is_packed(update, index):
            old.append(_gather_kept(tensor, *kept, dtype))
            continue
        size = 1 if index > 0 and settings.rule.state[index - 1].per_row else indexed.slot_size
        old.append(_gather(tensor, slots, indexed.num_slots, size, dtype))
    param, *state = old = [old[0], *int8.decode(settings.rule.state, old[1:])]
    mask = indexed.element_mask
    if mask is not None:
        mask = mask if indexed.value_index is None else mask[indexed.value_index]
        grad = grad.masked_fill(~mask, 0)
    if settings.coupled_decay:
        decay = settings.coupled_decay * param
        grad = grad + (decay if mask is None else torch.where(mask, decay, 0.0))
    if settings.decay_factor != 1.0:
        param = param * settings.decay_factor
    new = settings.rule.apply([param, *state], grad, update.step, settings.hyperparams)
    if mask is not None:  # state per row is updated anyway; indices are in order here
        new = [
            torch.where(mask, value, before) if value.shape == mask.shape else value
            for value, before in zip(new, old, strict=True)
        ]
    if settings.constraint is not None:  # slots are rows
        new[0] = settings.constraint.apply(new[0])
    new[1:] = int8.encode(settings.rule.state, new[1:])
    return ReferenceResult(update, slots, new, kept)


def _gather(
    tensor: Tensor, slots: Tensor | None, num_slots: int, slot_size: int, dtype: torch.dtype
) -> Tensor:
    """Always a copy: a formula may work in place, or return its arguments."""
    if slots is None:
        return tensor.reshape(num_slots, slot_size).to(dtype, copy=True)
    return tensor[_slot_index(tensor, slots, slot_size)].reshape(len(slots), slot_size).to(dtype)


def _is_packed(update: ParamUpdate, index: int) -> bool:
    """Whether a mask has packed one of an update's targets: state per element."""
    is_state = update.packed is not None and index > 0
    return is_state and not update.settings.rule.state[index - 1].per_row


def _gather_kept(tensor: Tensor, is_kept: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed state as slots, with zeros where a mask keeps nothing."""
    found = tensor.new_zeros((*is_kept.shape, *tensor.shape[1:]), dtype=dtype)
    found[is_kept] = tensor[positions].to(dtype)
    return found.view(len(is_kept), -1)


def _scatter_kept(
    tensor: Tensor, is_kept: Tensor, positions: Tensor, new: Tensor
) -> Callable[[], object]:
    values = new.reshape(*is_kept.shape, *tensor.shape[1:])[is_kept]
    return partial(tensor.index_put_, (positions,), values)


def _scatter(tensor: Tensor, slots: Tensor | None, new: Tensor) -> Callable[[], object]:
    """A call that writes new values, and allocates nothing of their size."""
    index = () if slots is None else _slot_index(tensor, slots, new.shape[1])
    if not index:  # the one slot is the whole tensor
        return partial(tensor.copy_, new.reshape(tensor.shape))
    shape = (*index[0].shape, *tensor.shape[len(index) :])
    return partial(tensor.index_put_, index, new.reshape(shape))


def _slot_index(tensor: Tensor, slots: Tensor, slot_size: int) -> tuple[Tensor, ...]:
    """Slots as indices of the leading dims, for any strides; of elements if slots cut a dim."""
    leading = tensor.dim()
    rest = 1
    while rest < slot_size:
        leading -= 1
        rest *= tensor.shape[leading]
    if rest != slot_size:
        inside = torch.arange(slot_size, device=slots.device)
        return torch.unravel_index(slots[:, None] * slot_size + inside, tensor.shape)
    if leading <= 1:  # no leading dim: the one slot is the whole tensor
        return (slots,) if leading else ()
    return torch.unravel_index(slots, tensor.shape[:leading])
