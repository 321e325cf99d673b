"""Engines run rules over gradients; ``EngineDispatcher`` selects one for each update.

``base`` has the interface. ``torch_fused`` is for dense gradients, ``native`` is fast, and
``reference`` runs everything; ``auto`` tries them in this order. ``triton`` is for GPUs and must be
selected by name. Engines do not depend on optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sparsestep import _native
from sparsestep._process import uninterrupted
from sparsestep._torch import disable_compiler
from sparsestep.engines.base import ParamUpdate, reserve
from sparsestep.engines.native import NativeEngine
from sparsestep.engines.reference import ReferenceEngine
from sparsestep.engines.triton import TritonEngine, check_available
from sparsestep.errors import InputError, SlowWarning, message, warn_once

ENGINES = ("auto", "native", "reference", "triton")


def check_engine(engine: str) -> None:
    """Refuse an engine that does not exist here."""
    if engine not in ENGINES:
        raise InputError(message(f"engine must be one of {', '.join(ENGINES)}", repr(engine)))
    if engine == "native" and _native.ext is None:
        remedy = "Reinstall without SPARSESTEP_PURE, or use engine='auto'"
        got = "an installation without it"
        raise InputError(message("engine='native' needs the C++ core", got, remedy))
    if engine == "triton":
        check_available()


def new_native_engine(engine: str) -> NativeEngine | None:
    """Return a native engine for a step, or ``None`` if it is not available or not selected."""
    return NativeEngine() if engine in ("auto", "native") and _native.ext is not None else None


class EngineDispatcher:
    """The engines of one step, except torch's kernels.

    The native engine may have claimed updates already. ``params`` returns every parameter that any
    engine may write in this step.
    """

    def __init__(
        self, engine: str, native: NativeEngine | None, params: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._engine = engine
        self._native = native
        self._triton = TritonEngine() if engine == "triton" else None
        self._reference = ReferenceEngine(params)
        self._slow: list[str] = []  # why updates fall back to the reference engine

    def claim(self, update: ParamUpdate) -> None:
        """Give an update to an engine that can run it; raises if that is not the selected one."""
        if self._native is not None and self._native.claim(update):
            update.engine = "native"
            return
        if self._triton is not None and self._triton.claim(update):
            update.engine = "triton"
            return
        if self._engine == "native":
            raise update.error(_native_obstacle(update, self._native, ", or use engine='auto'"))
        self._reference.claim(update)
        if self._engine == "reference":
            why = "you set engine='reference'."
        else:
            why = _NO_CORE if _native.ext is None else _native_obstacle(update, self._native)
        update.engine, update.fallback_reason = "reference", why
        if self._engine == "auto" and _should_be_fast(update):
            self._slow.append(why)

    @property
    def is_native(self) -> bool:
        """Whether the core runs all updates."""
        return self._reference.is_empty and self._triton is None

    def check(self) -> None:
        """Prepare what does not depend on values: indices and memory."""
        if self._native is not None:
            self._native.prepare()
        if self._triton is not None:
            self._triton.prepare()

    def prepare(self) -> None:
        """Prepare the rest, which is computed from the current values."""
        self._reference.prepare()
        reserve()
        for reason in self._slow:
            slow = "the reference engine is used, about ten times slower than the native one"
            warn_once(SlowWarning, f"{slow}: {reason}")

    def commit(self) -> None:
        """Write; nothing can fail."""
        if self._native is not None:
            self._native.commit()
        if self._triton is not None:
            self._triton.commit()
        self._reference.commit()


def run_updates(updates: Sequence[ParamUpdate], engine: str) -> None:
    """Apply all updates, or raise and apply none."""
    if torch.compiler.is_compiling():  # gradients that no graph can hold
        _uncompiled_run(updates, engine)
        return
    params = [update.key for update in updates]
    work = EngineDispatcher(engine, new_native_engine(engine), lambda: params)
    for update in updates:
        work.claim(update)
    work.check()
    work.prepare()
    if work.is_native:
        work.commit()  # one call of the core
    else:
        uninterrupted(work.commit)


_uncompiled_run = disable_compiler(run_updates)

_NO_CORE = (
    "sparsestep was installed without its C++ core (SPARSESTEP_PURE). Install a wheel, or build it "
    "with a C++ compiler and without SPARSESTEP_PURE; `sparsestep info` shows whether it is found."
)


_MAX_KEPT = 8192  # max_kept_slot_size in native/core/types.h


def _native_obstacle(update: ParamUpdate, native: NativeEngine | None, instead: str = "") -> str:
    param, rule = update.targets[0], update.settings.rule
    why = native.traces.errors.get(id(update.settings)) if native is not None else None
    if why is not None:
        requirement = "the native engine needs a formula of element-wise and row-wise operations"
        page = "https://sparsestep.readthedocs.io/en/latest/write-your-own-rule.html"
        remedy = f"engine='reference' runs any formula; {page} lists the operations"
        if "branches on" in why:
            remedy = "Use torch.where instead of if"
        return message(requirement, f"rule {rule.name!r}, where {why}", remedy)
    if not rule.has_native_kernel and rule.traceable_update is None:
        requirement = "the native engine needs a rule that it can trace"
        return message(requirement, f"rule {rule.name!r} with compile", "Leave out compile")
    row_size = param[:1].numel() if param.dim() else 1
    if param.is_cpu and update.settings.constraint is not None and row_size > _MAX_KEPT:
        requirement = (
            f"the native engine needs float32 or float64 throughout to constrain rows of more than "
            f"{_MAX_KEPT} elements"
        )
        return message(requirement, f"{param.dtype}, {row_size} elements", instead.lstrip(", or"))
    return message(
        "the native engine needs CPU tensors whose rows are evenly spaced",
        f"{param.dtype} on {param.device}, shape {tuple(param.shape)}, strides {param.stride()}",
        f"Make the parameter contiguous{instead}",
    )


def _should_be_fast(update: ParamUpdate) -> bool:
    """Whether it is worth a warning that the reference engine runs an update."""
    rule = update.settings.rule
    if not rule.has_native_kernel and rule.traceable_update is None:
        return False  # compiled by torch
    if _native.ext is None:
        return True
    # Torch's kernels are the fast path for other devices and dense gradients.
    is_sparse = update.indexed.indices is not None or update.packed is not None
    return update.param.is_cpu and (is_sparse or not rule.has_native_kernel)
