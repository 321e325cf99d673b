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
from sparsestep.engines.base import ParamUpdate
from sparsestep.engines.finishing import finish
from sparsestep.errors import InputError
from sparsestep.grads.dedup import sum_duplicates
from sparsestep.memory.tensors import HALF_DTYPES, overlapping
from sparsestep.rules import int8


@dataclass(slots=True)
class ReferenceResult:
    """New values for the touched part of a parameter and its state, not written yet."""

    update: ParamUpdate
    slots: Tensor | None
    new: list[Tensor]

    @torch.no_grad()
    def writes(self) -> Iterator[Callable[[], object]]:
        """Calls that store the new values, rounded to each tensor's own dtype."""
        for place, (tensor, new) in enumerate(zip(self.update.targets, self.new, strict=False)):
            yield _scatter(tensor.detach(), self.slots, self._rounded(place, new, tensor.dtype))

    def _rounded(self, place: int, new: Tensor, dtype: torch.dtype) -> Tensor:
        seed, settings = self.update.seed, self.update.settings
        is_code = dtype is torch.int8
        if seed is None or not (is_code or (settings.stochastic_rounding and dtype in HALF_DTYPES)):
            return new.to(dtype)
        slots = self.slots
        if slots is None:
            slots = torch.arange(len(new), device=new.device)
        dealt = self.update.row_stride
        if is_code:
            rows = slots if dealt is None else dealt.rows(slots)
            chance = rounding.int8_random_bits(seed, place, rows, new.shape[1])
            return int8.round_codes(settings.rule.state[place - 1], new, chance)
        columns = torch.arange(new[0].numel(), device=new.device)
        elements = slots[:, None] * len(columns) + columns
        if dealt is not None:
            length = 1 if self._is_per_row(place) else dealt.length
            elements = dealt._replace(length=length).elements(elements)
        bits = rounding.random_bits(seed, place, elements.view(new.shape))
        return rounding.round_stochastic(new, dtype, bits)

    def _is_per_row(self, place: int) -> bool:
        return place > 0 and self.update.settings.rule.state[place - 1].per_row


class ReferenceEngine:
    """Computes all new values before it writes any.

    Args:
        params: every parameter that may be written in this step, by whichever engine.
    """

    def __init__(self, params: Callable[[], Iterable[Tensor]]) -> None:
        self._params = params
        self._updates: list[ParamUpdate] = []
        self._writes: list[Callable[[], object]] = []
        self._late: list[ParamUpdate] = []

    def claim(self, update: ParamUpdate) -> bool:
        """Take any update."""
        self._updates.append(update)
        return True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._updates

    def prepare(self) -> None:
        """Compute, from the values as they are now."""
        if not self._updates:
            return
        shared = overlapping(self._params())
        for update in self._updates:
            try:
                result = compute(update)
            except InputError as error:
                raise update.error(error) from None
            if id(update.key) in shared:
                # Another view of the same memory may be written meanwhile. That the rule can be run
                # was seen now that it was run in vain.
                self._late.append(update)
            else:
                self._writes += result.writes()

    def commit(self) -> None:
        """Write the new values."""
        if self._writes:
            finish(self._writes)
        for update in self._late:
            late: list[Callable[[], object]] = []
            finish((partial(_append_writes, update, late),))
            finish(late)


def _append_writes(update: ParamUpdate, writes: list[Callable[[], object]]) -> None:
    writes[:] = compute(update).writes()


@torch.no_grad()
def compute(update: ParamUpdate) -> ReferenceResult:
    """Evaluate the rule on the touched part; raises if a position is no slot; writes nothing."""
    settings, touched = update.settings, update.indexed
    slots, grad = sum_duplicates(touched)
    if grad.numel() == 0:
        return ReferenceResult(update, slots, [])
    tensors = update.targets
    in_double = any(tensor.dtype == torch.float64 for tensor in (*tensors, grad))
    dtype = torch.float64 if in_double else torch.float32
    grad = grad.to(dtype)
    if settings.grad_sign < 0:
        grad = -grad
    blocks = [
        touched.slot_size,
        *(1 if k.per_row else touched.slot_size for k in settings.rule.state),
    ]
    old = [
        _gather(tensor, slots, touched.num_slots, block, dtype)
        for tensor, block in zip(tensors, blocks, strict=True)
    ]
    old = [old[0], *int8.decode(settings.rule.state, old[1:])]
    param, *state = old
    held = touched.element_mask
    if held is not None and touched.value_index is not None:
        held = held[touched.value_index]
    if settings.coupled_decay:
        decay = settings.coupled_decay * param
        grad = grad + (decay if held is None else torch.where(held, decay, 0.0))
    if settings.decay_factor != 1.0:
        param = param * settings.decay_factor
    new = settings.rule.apply([param, *state], grad, update.step, settings.hyperparams)
    if held is not None:
        # Only what is held moves; what is kept per row moves anyway. Positions are in order here.
        new = [
            torch.where(held, value, before) if value.shape == held.shape else value
            for value, before in zip(new, old, strict=True)
        ]
    return ReferenceResult(update, slots, [new[0], *int8.encode(settings.rule.state, new[1:])])


def _gather(
    tensor: Tensor, slots: Tensor | None, count: int, block: int, dtype: torch.dtype
) -> Tensor:
    """A copy in any case: a formula may work in place, or return what it was given."""
    if slots is None:
        return tensor.reshape(count, block).to(dtype, copy=True)
    return tensor[_slot_index(tensor, slots, block)].reshape(len(slots), block).to(dtype)


def _scatter(tensor: Tensor, slots: Tensor | None, new: Tensor) -> Callable[[], object]:
    """A call that writes new values, and allocates nothing of their size."""
    if slots is None:
        return partial(tensor.copy_, new.reshape(tensor.shape))
    index = _slot_index(tensor, slots, new.shape[1])
    if not index:  # the one slot is the whole tensor
        return partial(tensor.copy_, new.reshape(tensor.shape))
    shape = (*index[0].shape, *tensor.shape[len(index) :])
    return partial(tensor.index_put_, index, new.reshape(shape))


def _slot_index(tensor: Tensor, slots: Tensor, block: int) -> tuple[Tensor, ...]:
    """Slots as indices of the leading dims, so that any strides can be read and written.

    A slot that is no whole number of dims, like a run of columns, is indexed by its elements.
    """
    leading = tensor.dim()
    rest = 1
    while rest < block:
        leading -= 1
        rest *= tensor.shape[leading]
    if rest != block:
        inside = torch.arange(block, device=slots.device)
        return torch.unravel_index(slots[:, None] * block + inside, tensor.shape)
    if leading <= 1:  # no leading dim: the one slot is the whole tensor
        return (slots,) if leading else ()
    return torch.unravel_index(slots, tensor.shape[:leading])
