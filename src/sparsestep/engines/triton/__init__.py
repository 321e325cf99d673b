"""The Triton engine: on a GPU, kernels that are printed from the formula.

The formula is traced (``rules/trace.py``) and printed as a kernel (``codegen.py``).
A step sorts the indices, stably. One kernel sums long runs in blocks, if there can be any; the next
sums each run in order and applies the rule. There are no atomic additions, so the bits are the same
in every run. The host waits once, to check the indices; with ``capturable``, kernels check them.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._torch import assert_async, cat
from sparsestep.engines.base import ParamUpdate
from sparsestep.engines.triton.codegen import KernelSpec, load_kernel
from sparsestep.errors import InputError, message
from sparsestep.grads.indexed import IndexedGrad, index_error
from sparsestep.rules.trace import trace

# Columns per program: of rows that may be split, and of those that may not.
_COLUMNS = 1024
_ROW = 16384
_ELEMENTS = 1024  # per program, if rows are shorter
_ENTRIES = 256  # per program: all wait for the longest run among them
_RUN = 64  # as in kernels.py


def check_available() -> None:
    """Raise InputError if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        requirement = "engine='triton' needs Triton"
        remedy = "pip install 'sparsestep[triton]', or use engine='auto'"
        raise InputError(message(requirement, "an installation without it", remedy))


@dataclass(slots=True)
class KernelLaunch:
    """One update: the arguments of its kernels."""

    update: ParamUpdate
    constants: list[float]  # of the traced formula
    spec: KernelSpec
    indexed: IndexedGrad
    entries: int
    indices: Tensor | None = None  # sorted; None: every slot once, in order
    order: Tensor | None = None  # of the entries; None: sorted already, without duplicates
    ok: Tensor | None = None  # not 0 if all indices of the step are valid; None: already checked
    blocks: Tensor | None = None  # for the sums of long runs

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        tensors = (*self.update.targets, self.indexed.values)
        in_double = any(tensor.dtype == torch.float64 for tensor in tensors)
        return torch.float64 if in_double else torch.float32

    def sort(self) -> None:
        """Sort the indices, equal ones in order of appearance."""
        indices = self.indexed.indices
        if indices is None or indices is self.indexed.value_index:  # a mask's, if not None
            self.indices = indices
            return
        self.indices, self.order = torch.sort(indices.reshape(-1), stable=True)
        if self.entries > _RUN:
            count, block = self.entries // _RUN + 1, self.indexed.slot_size
            self.blocks = self.indexed.values.new_empty(count, block, dtype=self.dtype)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest index, each as a tensor of one element."""
        assert self.indices is not None
        return self.indices[:1], self.indices[-1:]

    def run(self, *, warm_up: bool = False) -> None:
        """Launch the kernels, or only compile them."""
        import triton.language as tl

        from sparsestep.engines.triton.kernels import block_sums

        indexed, settings = self.indexed, self.update.settings
        rows, block, warps = tile_shape(self.spec, indexed)
        how = {
            "T": tl.float64 if self.dtype == torch.float64 else tl.float32,
            "C": indexed.slot_size,
            "ROWS": rows,
            "BLOCK": block,
            "num_warps": warps,
            "enable_fp_fusion": False,
        }
        grid = (-(-self.entries // rows), -(-indexed.slot_size // block))
        gradient = (indexed.values, self.indices, self.order, indexed.value_index, indexed.scale)
        if self.blocks is not None:
            steps = self.entries.bit_length() + 1
            _call(block_sums, grid, (*gradient, self.blocks, self.entries, steps), how, warm_up)
        mask = None if indexed.element_mask is None else indexed.element_mask.view(torch.uint8)
        given = (*self.update.targets, *gradient, mask, self.blocks, self.ok, self.entries)
        seed = self.update.seed or 0
        seed -= seed >> 63 << 64  # as a signed integer
        numbers = (seed, settings.coupled_decay, settings.decay_factor, *self.constants)
        _call(load_kernel(self.spec), grid, (*given, *numbers), how, warm_up)


def tile_shape(spec: KernelSpec, indexed: IndexedGrad) -> tuple[int, int, int]:
    """Entries, columns and warps per program."""
    columns = spec.width if spec.by_row else min(spec.width, _COLUMNS)
    most = _ELEMENTS if indexed.indices is None else _ENTRIES
    rows = min(max(1, _ELEMENTS // columns), most)
    return rows, columns, 4 if rows * columns <= 2048 else 8 if columns <= 4096 else 16


class TritonEngine:
    """The updates of one step that printed kernels run."""

    def __init__(self) -> None:
        self._launches: list[KernelLaunch] = []

    def claim(self, update: ParamUpdate) -> bool:
        """Claim an update; raises if there is no kernel for it."""
        why = _obstacle(update)
        if why is not None:
            raise update.error(why)
        settings, indexed = update.settings, update.indexed
        try:
            program = trace(settings.rule, update.step, settings.hyperparams, allow_float64=True)
        except Exception as error:  # a formula may do anything with its symbolic arguments
            requirement = "engine='triton' needs a formula that can be traced"
            got = f"rule {settings.rule.name!r}: {error}"
            raise update.error(message(requirement, got, "Use engine='auto'")) from None
        if indexed.indices is None and not settings.rule.needs_whole_rows:
            flat = indexed.values.reshape(-1)
            indexed = indexed._replace(values=flat, num_slots=flat.numel(), slot_size=1)
        if indexed.element_mask is not None:  # a row sees zeros elsewhere
            values = indexed.values.reshape(indexed.element_mask.shape)
            indexed = indexed._replace(values=values.masked_fill(~indexed.element_mask, 0))
        indexed = indexed.with_value_rows()._replace(values=indexed.values.contiguous())
        spec = KernelSpec(
            program.inputs,
            tuple(program.operations),
            program.results,
            negates=settings.grad_sign < 0,
            adds_decay=settings.coupled_decay != 0,
            shrinks=settings.decay_factor != 1,
            at_random=update.seed is not None and settings.stochastic_rounding,
            width=1 << max(0, indexed.slot_size - 1).bit_length(),
        )
        if spec.by_row and spec.width > _ROW:
            requirement = f"rules with state per row support rows of up to {_ROW} elements here"
            raise update.error(message(requirement, indexed.slot_size, "Use engine='auto'"))
        entries = indexed.num_slots if indexed.indices is None else indexed.indices.numel()
        if entries and indexed.slot_size:
            self._launches.append(KernelLaunch(update, program.constants, spec, indexed, entries))
        return True

    @torch.no_grad()
    def prepare(self) -> None:
        """Sort and check the indices, and compile the kernels."""
        captured: list[Tensor] = []  # whether the indices of a launch are valid
        by_device: dict[torch.device, list[KernelLaunch]] = {}
        for launch in self._launches:
            launch.sort()
            if launch.order is None:
                continue
            if launch.update.group.get("capturable"):
                low, high = launch.bounds()
                captured.append((low >= 0) & (high < launch.indexed.num_slots))
            else:
                by_device.setdefault(launch.order.device, []).append(launch)
        for launches in by_device.values():
            bounds = cat([bound for launch in launches for bound in launch.bounds()])
            found = bounds.cpu().tolist()  # here the host waits
            for launch, least, most in zip(launches, found[::2], found[1::2], strict=True):
                slots = launch.indexed.num_slots
                if least < 0 or most >= slots:
                    raise launch.update.error(index_error(least if least < 0 else most, slots))
        if captured:
            ok = cat(captured).all()
            assert_async(ok, "an index of a gradient is out of range: nothing is updated")
            for launch in self._launches:
                launch.ok = ok.to(torch.int32)
        for launch in self._launches:
            launch.run(warm_up=True)

    @torch.no_grad()
    def commit(self) -> None:
        """Launch the kernels."""
        for launch in self._launches:
            launch.run()
            increment_version([t for t in launch.update.targets if not t.is_inference()])


def _obstacle(update: ParamUpdate) -> str | None:
    """Why there can be no kernel for an update."""
    tensors = update.targets
    param = tensors[0]
    if param.is_cpu and os.environ.get("TRITON_INTERPRET", "0") != "1":
        requirement = "engine='triton' needs parameters on a GPU"
        remedy = "Use engine='auto', or set TRITON_INTERPRET=1 to run kernels on the CPU"
        return message(requirement, "one on the CPU", remedy)
    if any(tensor.dtype is torch.int8 for tensor in tensors):
        requirement = "engine='triton' needs state of a float dtype"
        return message(requirement, "torch.int8", "Use engine='auto', or another state_dtype")
    if update.settings.constraint is not None:
        requirement = "engine='triton' does not support max_norm and normalize"
        return message(requirement, "one of them", "Use engine='auto'")
    if not all(tensor.is_contiguous() for tensor in tensors):
        requirement = "engine='triton' needs contiguous parameters and state"
        got = f"shape {tuple(param.shape)} with strides {param.stride()}"
        return message(requirement, got, "Make the parameter contiguous, or use engine='auto'")
    return None


def _call(
    kernel: Any, grid: tuple[int, int], given: tuple[Any, ...], how: dict[str, Any], warm_up: bool
) -> None:
    device = given[0].device
    guard = nullcontext if device.type == "cpu" else torch.get_device_module(device).device
    with guard(device):  # Triton launches on the current one
        if warm_up:
            kernel.warmup(*given, grid=grid, **how)
        else:
            kernel[grid](*given, **how)
