"""The Triton engine: on a GPU, kernels that are printed from the formula.

The formula is traced (``rules/trace.py``) and printed as a kernel (``codegen.py``).
A step sorts the positions, stably, and launches: a kernel that sums long runs in blocks, where
there can be any, and one that sums each run in order and lets the rule update the row. Nothing is
added atomically, so the bits are the same in every run. The host waits once, for whether all
positions are slots; with ``capturable`` it does not, and the kernels look for themselves.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._torch import assert_async, cat, stack
from sparsestep.engines.base import ParamUpdate
from sparsestep.engines.triton.codegen import KernelSpec, load_kernel
from sparsestep.errors import InputError, message
from sparsestep.grads.indexed import IndexedGrad, index_error
from sparsestep.rules.trace import trace

# Columns that a program sees at most: of rows that may be cut, and of those that may not.
_COLUMNS = 1024
_ROW = 16384
_ELEMENTS = 1024  # of a program, where rows are shorter
_ENTRIES = 256  # of a program: they wait for the longest run among them
_RUN = 64  # as in kernels.py


def check_available() -> None:
    """Refuse the engine where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        requirement = "engine='triton' needs Triton"
        remedy = "pip install 'sparsestep[triton]', or use engine='auto'"
        raise InputError(message(requirement, "an installation without it", remedy))


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(slots=True)
class KernelLaunch:
    """One update, as kernels are given it.

    Attributes:
        update: the update.
        numbers: the constants of its traced formula.
        form: of its kernel.
        indexed: its gradient.
        entries: how many.
        positions: sorted; ``None`` where every slot comes once, in order.
        order: of the entries; ``None`` where they are sorted already, and no slot comes twice.
        ok: where not 0, all positions of the step are slots; ``None`` where the host has looked.
        blocks: for the sums of long runs.
    """

    update: ParamUpdate
    numbers: list[float]
    form: KernelSpec
    indexed: IndexedGrad
    entries: int
    positions: Tensor | None = None
    order: Tensor | None = None
    ok: Tensor | None = None
    blocks: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        tensors = (*self.update.targets, self.indexed.values)
        in_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        return torch.float64 if in_double else torch.float32

    def sort(self) -> None:
        """Bring equal positions together, in order of appearance."""
        positions = self.indexed.indices
        if positions is None or positions is self.indexed.value_index:  # a mask's, if not None
            self.positions = positions
            return
        self.positions, self.order = torch.sort(positions.reshape(-1), stable=True)
        if self.entries > _RUN:
            count, block = self.entries // _RUN + 1, self.indexed.slot_size
            self.blocks = self.indexed.values.new_empty(count, block, dtype=self.dtype)

    def bounds(self) -> list[Tensor]:
        """The smallest and the largest position."""
        return [self._sorted[:1], self._sorted[-1:]]

    def is_inside(self) -> Tensor:
        """Whether all positions are slots, as a tensor, which the host does not look at."""
        return (self._sorted[0] >= 0) & (self._sorted[-1] < self.indexed.num_slots)

    @property
    def _sorted(self) -> Tensor:
        assert self.positions is not None
        return self.positions

    def run(self, *, warm_up: bool = False) -> None:
        """Launch its kernels, or have them compiled."""
        import triton.language as tl

        indexed, settings = self.indexed, self.update.settings
        rows, block, warps = tile_shape(self.form, indexed)
        how = {
            "T": tl.float64 if self.dtype == torch.float64 else tl.float32,
            "C": indexed.slot_size,
            "ROWS": rows,
            "BLOCK": block,
            "num_warps": warps,
            "enable_fp_fusion": False,
        }
        grid = (-(-self.entries // rows), -(-indexed.slot_size // block))
        gradient = (indexed.values, self.positions, self.order, indexed.value_index, indexed.scale)
        if self.blocks is not None:
            steps = self.entries.bit_length() + 1
            _call(_block_sums(), grid, (*gradient, self.blocks, self.entries, steps), how, warm_up)
        held = None if indexed.element_mask is None else indexed.element_mask.view(torch.uint8)
        given = (*self.update.targets, *gradient, held, self.blocks, self.ok, self.entries)
        numbers = (
            _signed(self.update.seed or 0),
            settings.coupled_decay,
            settings.decay_factor,
            *self.numbers,
        )
        _call(load_kernel(self.form), grid, (*given, *numbers), how, warm_up)


def tile_shape(form: KernelSpec, indexed: IndexedGrad) -> tuple[int, int, int]:
    """Entries and columns that a program sees, and its warps."""
    columns = form.width if form.by_row else min(form.width, _COLUMNS)
    most = _ELEMENTS if indexed.indices is None else _ENTRIES
    rows = min(max(1, _ELEMENTS // columns), most)
    return rows, columns, 4 if rows * columns <= 2048 else 8 if columns <= 4096 else 16


class TritonEngine:
    """The updates of one step that are printed kernels."""

    def __init__(self) -> None:
        self._launches: list[KernelLaunch] = []

    def claim(self, update: ParamUpdate) -> bool:
        """Take an update; raises where there is no kernel for it."""
        why = _obstacle(update)
        if why is not None:
            raise update.error(why)
        settings, indexed = update.settings, update.indexed
        try:
            program = trace(settings.rule, update.step, settings.hyperparams, allow_float64=True)
        except Exception as error:  # whatever a formula does that a tracer cannot
            requirement = "engine='triton' needs a formula that can be recorded"
            got = f"rule {settings.rule.name!r}: {error}"
            raise update.error(message(requirement, got, "Use engine='auto'")) from None
        if indexed.indices is None and not settings.rule.needs_whole_rows:
            size = indexed.values.numel()
            indexed = indexed._replace(
                values=indexed.values.reshape(-1), num_slots=size, slot_size=1
            )
        indexed = indexed.with_value_rows()._replace(values=indexed.values.contiguous())
        form = KernelSpec(
            program.inputs,
            tuple(program.operations),
            program.results,
            negates=settings.grad_sign < 0,
            adds_decay=settings.coupled_decay != 0,
            shrinks=settings.decay_factor != 1,
            at_random=update.seed is not None and settings.stochastic_rounding,
            width=1 << max(0, indexed.slot_size - 1).bit_length(),
        )
        if form.by_row and form.width > _ROW:
            requirement = f"rules with state per row support rows of up to {_ROW} elements here"
            raise update.error(message(requirement, indexed.slot_size, "Use engine='auto'"))
        entries = indexed.num_slots if indexed.indices is None else indexed.indices.numel()
        if entries and indexed.slot_size:
            self._launches.append(KernelLaunch(update, program.constants, form, indexed, entries))
        return True

    @torch.no_grad()
    def prepare(self) -> None:
        """Sort positions, see that all are slots, and have the kernels compiled."""
        for launch in self._launches:
            launch.sort()
        self._check_indices(launch for launch in self._launches if not _is_captured(launch))
        captured = [x for x in self._launches if x.order is not None and _is_captured(x)]
        if captured:
            ok = stack([launch.is_inside() for launch in captured]).all()
            assert_async(ok, "an index of a gradient is out of range: nothing is updated")
            for launch in self._launches:
                launch.ok = ok.to(torch.int32)
        for launch in self._launches:
            launch.run(warm_up=True)

    @staticmethod
    def _check_indices(launches: Iterable[KernelLaunch]) -> None:
        """Wait for the smallest and the largest positions, all at once; refuse what is no slot."""
        by_device: dict[torch.device, list[KernelLaunch]] = {}
        for launch in launches:
            if launch.order is not None:
                by_device.setdefault(launch.order.device, []).append(launch)
        for some in by_device.values():
            bounds = cat([bound for launch in some for bound in launch.bounds()])
            found = bounds.cpu().tolist()  # here the host waits
            for launch, low, high in zip(some, found[::2], found[1::2], strict=True):
                slots = launch.indexed.num_slots
                if low < 0 or high >= slots:
                    raise launch.update.error(index_error(low if low < 0 else high, slots))

    @torch.no_grad()
    def commit(self) -> None:
        """Launch."""
        for launch in self._launches:
            launch.run()
            increment_version([t for t in launch.update.targets if not t.is_inference()])


def _is_captured(launch: KernelLaunch) -> bool:
    return bool(launch.update.group.get("capturable"))


def _obstacle(update: ParamUpdate) -> str | None:
    """Why there can be no kernel for it."""
    tensors = update.targets
    param = tensors[0]
    if param.is_cpu and not is_interpreted():
        requirement = "engine='triton' needs parameters on a GPU"
        remedy = "Use engine='auto', or set TRITON_INTERPRET=1 to run kernels on the CPU"
        return message(requirement, "one on the CPU", remedy)
    if any(tensor.dtype is torch.int8 for tensor in tensors):
        requirement = "engine='triton' needs state of a float dtype"
        return message(requirement, "torch.int8", "Use engine='auto', or another state_dtype")
    if not all(tensor.is_contiguous() for tensor in tensors):
        requirement = "engine='triton' needs contiguous parameters and state"
        got = f"shape {tuple(param.shape)} with strides {param.stride()}"
        return message(requirement, got, "Make the parameter contiguous, or use engine='auto'")
    return None


def _call(
    kernel: Any, grid: tuple[int, int], given: tuple[Any, ...], how: dict[str, Any], warm_up: bool
) -> None:
    with _device_guard(given[0].device):
        if warm_up:
            kernel.warmup(*given, grid=grid, **how)
        else:
            kernel[grid](*given, **how)


def _device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the device that is the current one."""
    if device.type == "cpu":
        return nullcontext()
    there: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return there


def _block_sums() -> Any:
    from sparsestep.engines.triton.kernels import block_sums

    return block_sums


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed
