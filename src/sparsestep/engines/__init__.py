"""Engines run a rule over the touched part of a parameter; here one is chosen.

``protocol`` says what an engine is and what it is given. ``torch_kernels`` is for dense gradients,
``native`` is fast and ``reference`` can do everything; ``auto`` takes them in this order.
``triton`` is for GPUs, and has to be selected by name. An engine knows rules and gradients, but no
optimizer.
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
    """The native engine for a step, where there is one that may be used."""
    return NativeEngine() if engine in ("auto", "native") and _native.ext is not None else None


class EngineDispatcher:
    """The engines for all that torch's kernels do not do, of one step.

    Args:
        engine: one of ``ENGINES``.
        native: what ``native_engine`` gave, with whatever it has claimed already.
        params: every parameter that may be written in this step, by whichever engine.
    """

    def __init__(
        self, engine: str, native: NativeEngine | None, params: Callable[[], Iterable[Tensor]]
    ) -> None:
        self._engine = engine
        self._native = native
        self._triton = TritonEngine() if engine == "triton" else None
        self._reference = ReferenceEngine(params)
        self._slow: list[str] = []  # why updates are not done by the fast engine

    def claim(self, update: ParamUpdate) -> None:
        """Give an update to the engine that can run it; raises where that is not the one wanted."""
        if self._native is not None and self._native.claim(update):
            update.engine = "native"
            return
        if self._triton is not None and self._triton.claim(update):
            update.engine = "triton"
            return
        if self._engine == "native":
            raise update.error(_native_obstacle(update, self._native, ", or use engine='auto'"))
        if self._engine == "auto":
            self._slow += _slow_reasons(update, self._native)
        self._reference.claim(update)
        update.engine, update.fallback_reason = "reference", self._why_reference(update)

    def _why_reference(self, update: ParamUpdate) -> str:
        if self._engine == "reference":
            return "you set engine='reference'."
        if _native.ext is None:
            return _NO_CORE
        return _native_obstacle(update, self._native)

    @property
    def is_native(self) -> bool:
        """Whether the core runs all of it."""
        return self._reference.is_empty and self._triton is None

    def check(self) -> None:
        """The part of the preparations that does not depend on the values: positions, memory."""
        if self._native is not None:
            self._native.prepare()
        if self._triton is not None:
            self._triton.prepare()

    def prepare(self) -> None:
        """The rest: what is computed from the values as they are now."""
        self._reference.prepare()
        reserve()
        for reason in self._slow:  # a formula that does not work has said so instead
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
    if torch.compiler.is_compiling():  # for gradients that are in no graph, but this function is
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
    why = native.trace_error(update.settings) if native is not None else None
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


def _slow_reasons(update: ParamUpdate, native: NativeEngine | None) -> list[str]:
    """Why it is the reference engine that does it, where one would expect another."""
    rule = update.settings.rule
    if not rule.has_native_kernel and rule.traceable_update is None:
        return []  # compiled by torch: it was never to run elsewhere
    if _native.ext is None:
        return [_NO_CORE]
    if update.param.is_cpu and (not rule.has_native_kernel or update.indexed.indices is not None):
        return [_native_obstacle(update, native)]
    return []  # torch's own kernels are the fast way for this device or a dense gradient
