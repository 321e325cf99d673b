"""Every kernel that a step would launch, compiled ahead of time for GPUs that are not here.

``python -m tests.engines.triton_compile`` takes real steps, but with a driver that has no device:
what is launched is compiled for each target, with the arguments and types of a real launch, and
looked at. ``make gpu-check`` runs it; with names of optimizers as arguments, only those.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget

from sparsestep.engines import triton as engine
from tests.table import EVERY, Variant

TARGETS = [
    *(GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)),
    *(GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942")),
]
REGISTERS = 128  # of a thread; with more, few warps fit on a multiprocessor
COLUMNS = 64

# What must not be in the code: sums that depend on who comes first, and results that are rounded
# in another way than on the CPU. In float64 there are powers, which are a library's.
FORBIDDEN_PTX = re.compile(
    r"\b(?:atom|red)\.|\bfma\.\S*f32"
    r"|\b(?:add|sub|mul|div|sqrt|rsqrt|rcp|ex2|lg2)\.(?:\S+\.)?(?:approx|full|ftz)\.(?:\S+\.)?f32"
)
FORBIDDEN_IR = re.compile(r"\batomicrmw\b|\bcmpxchg\b|llvm\.fma\.v?\S*f32|llvm\.fmuladd|!fpmath")


class NoDevice:
    """A driver for a device that is not there: enough to compile a launch."""

    launcher_cls = None

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return TARGETS.index(self._target)  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class Compiled:
    """A kernel for a target."""

    target: GPUTarget
    kernel: Any

    @property
    def signature(self) -> dict[str, str]:
        return dict(self.kernel.src.signature)

    def faults(self) -> Iterator[str]:
        """What is in the code that must not be, and what is missing."""
        code = self.kernel.asm["llir"]
        for found in sorted(set(FORBIDDEN_IR.findall(code))):
            yield f"{found} in the intermediate code"
        if self.target.backend == "cuda":
            for found in sorted(set(FORBIDDEN_PTX.findall(self.kernel.asm["ptx"]))):
                yield f"{found} in the PTX"
        registers, spilled = self.registers()
        if registers > REGISTERS or spilled:
            yield f"{registers} registers, {spilled} bytes spilled"

    def registers(self) -> tuple[int, int]:
        """Registers of a thread, and what of them is kept in memory."""
        if self.target.backend == "hip":
            code = self.kernel.asm["amdgcn"]
            found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): +(\d+)", code))
            return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            command = [tool, "--dump-resource-usage", file.name]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
        return int(found[0]), int(found[1]) + int(found[2])


def launches(
    variant: Variant, target: GPUTarget, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Compiled]:
    """What a step with a gradient of an embedding launches on a target."""
    made: list[Compiled] = []

    def call(kernel: Any, grid: Any, given: Any, how: dict[str, Any], warm_up: bool) -> None:
        if warm_up:
            made.append(Compiled(target, kernel.warmup(*given, grid=grid, **how)))

    triton.runtime.driver.set_active(NoDevice(target))
    before = engine._call, engine._obstacle
    engine._call, engine._obstacle = call, lambda update: None  # type: ignore[assignment]
    try:
        param = torch.nn.Parameter(torch.zeros(100, COLUMNS, dtype=dtype))
        ids = torch.arange(80)[None] % 50  # more than one block of them
        values = torch.ones(80, COLUMNS, dtype=dtype)
        param.grad = torch.sparse_coo_tensor(ids, values, param.shape, check_invariants=True)
        variant([param], engine="triton", **options).step()
    finally:
        engine._call, engine._obstacle = before
    return made


def check(variants: Iterable[Variant], targets: Iterable[GPUTarget]) -> list[str]:
    """Compile and look; the faults that were found."""
    faults = []
    for variant in variants:
        for target in targets:
            began = time.perf_counter()
            compiled = launches(variant, target)
            registers = [kernel.registers()[0] for kernel in compiled]
            took = time.perf_counter() - began
            print(f"{variant!s:60.60} {target.arch!s:7} registers {registers} {took:.1f} s")
            for kernel in compiled:
                faults += [f"{variant} on {target.arch}: {fault}" for fault in kernel.faults()]
    return faults


def chosen(names: list[str]) -> list[Variant]:
    return [v for v in EVERY if not names or v.cls.__name__ in names]


def check_target(number: int, names: list[str]) -> list[str]:
    return check(chosen(names), TARGETS[number : number + 1])


def main(names: list[str]) -> int:
    if not chosen(names):
        sys.exit(f"no optimizer is called {' or '.join(names)}")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = pool.map(partial(check_target, names=names), range(len(TARGETS)))
        faults = list(chain.from_iterable(found))
    rules = f"{len(chosen(names))} rules for {len(TARGETS)} targets"
    print("\n".join(faults) or f"{rules}: all well")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
