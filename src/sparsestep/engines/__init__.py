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
from sparsestep.engines.base import ParamUpdate
from sparsestep.engines.finishing import reserve
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
        raise InputError(
            message(
                "engine='native' needs the C++ core",
                "an installation without it",
                "Reinstall without SPARSESTEP_PURE, or use engine='auto'",
            )
        )
    if engine == "triton":
        check_available()


def new_native_engine(engine: str) -> NativeEngine | None:
    """Return a native engine for a step, or ``None`` if it is not available or not selected."""
    return NativeEngine() if engine in ("auto", "native") and _native.ext is not None else None


class EngineDispatcher:
    """The engines of one step, except torch's kernels.

    Args:
        engine: one of ``ENGINES``.
        native: the native engine, which may have claimed updates already.
        params: every parameter that any engine may write in this step.
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
        update.engine, update.fallback_reason = "reference", self._why_reference(update)
        if self._engine == "auto" and _should_be_fast(update):
            self._slow.append(update.fallback_reason)

    def _why_reference(self, update: ParamUpdate) -> str:
        if self._engine == "reference":
            return "you set engine='reference'."
        if _native.ext is None:
            return _NO_CORE
        return _native_obstacle(update, self._native)

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


def _native_obstacle(update: ParamUpdate, native: NativeEngine | None, instead: str = "") -> str:
    param, rule = update.targets[0], update.settings.rule
    why = native.traces.errors.get(id(update.settings)) if native is not None else None
    if why is not None:
        requirement = "the native engine needs a formula of element-wise and row-wise operations"
        return message(requirement, f"rule {rule.name!r}, where {why}", _suggest(why))
    if not rule.has_native_kernel and rule.traceable_update is None:
        requirement = "the native engine needs a rule that it can record"
        return message(requirement, f"rule {rule.name!r} with compile", "Leave out compile")
    return message(
        "the native engine needs CPU tensors whose rows are evenly spaced",
        f"{param.dtype} on {param.device}, shape {tuple(param.shape)}, strides {param.stride()}",
        f"Make the parameter contiguous{instead}",
    )


def _suggest(why: str) -> str:
    if "branches on" in why:
        return "Use torch.where instead of if"
    page = "https://sparsestep.readthedocs.io/write-your-own-rule.html"
    return f"engine='reference' runs any formula; {page} lists the operations"


def _should_be_fast(update: ParamUpdate) -> bool:
    """Whether it is worth a warning that the reference engine runs an update."""
    rule = update.settings.rule
    if not rule.has_native_kernel and rule.traceable_update is None:
        return False  # compiled by torch
    if _native.ext is None:
        return True
    # Torch's kernels are the fast path for other devices and dense gradients.
    is_sparse = update.indexed.indices is not None
    return update.param.is_cpu and (is_sparse or not rule.has_native_kernel)
