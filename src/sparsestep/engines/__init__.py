"""Engines run a rule over the touched part of a parameter; here one is chosen.

``auto`` takes the native engine wherever it applies and the reference engine elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from sparsestep import core
from sparsestep.contract.rule import Update
from sparsestep.engines import native, reference
from sparsestep.engines.signals import uninterrupted
from sparsestep.errors import InputError, SlowWarning, sentence, warn_once
from sparsestep.memory.parameters import overlapping

ENGINES = ("auto", "native", "reference")


def check_engine(engine: str) -> None:
    """Refuse an engine that does not exist here."""
    if engine not in ENGINES:
        raise InputError(sentence(f"engine must be one of {', '.join(ENGINES)}", repr(engine)))
    if engine == "native" and core.core is None:
        raise InputError(
            sentence(
                "engine='native' needs the C++ core",
                "an installation without it",
                "Reinstall without SPARSESTEP_PURE, or use engine='auto'",
            )
        )


def native_step(engine: str) -> native.Step | None:
    """What collects a step's work for the core, where there is one that may be used."""
    return None if engine == "reference" or core.core is None else native.Step()


class Work:
    """Updates on their way through the engines: claimed, prepared, committed.

    Whatever may raise does so before ``commit``, for all engines: the core checks positions and
    allocates, the reference engine computes all new values and writes none.
    """

    def __init__(
        self, updates: Sequence[Update], engine: str, natively: native.Step | None = None
    ) -> None:
        """Let each engine claim the updates that it can run.

        Args:
            updates: what is to be done.
            engine: one of ``ENGINES``.
            natively: what ``native_step`` gave, with whatever it has taken already.
        """
        self._natively = natively
        self._others = []
        for update in updates:
            if natively is not None and natively.add(update):
                continue
            if engine == "native":
                raise update.refuse(_why_not_native(update))
            if engine == "auto":
                _say_once_that_it_is_slow(update)
            self._others.append(update)
        self._results: list[reference.Result] = []
        self._shared: set[int] = set()

    @property
    def is_native(self) -> bool:
        """Whether the core runs all of it."""
        return not self._others

    def prepare(self) -> None:
        """Check what does not depend on the values, and allocate."""
        if self._natively is not None:
            self._natively.prepare()

    def compute(self, written: Iterable[Tensor]) -> None:
        """Compute what the core does not, from the values as they are now.

        Args:
            written: every parameter that the step writes, by whichever engine.
        """
        if not self._others:
            return
        self._shared = overlapping(written)
        for update in self._others:
            try:
                self._results.append(reference.compute(update))
            except InputError as error:
                raise update.refuse(error) from None

    def commit(self) -> None:
        """Write; nothing can fail."""
        if self._natively is not None:
            self._natively.commit()
        for result in self._results:
            if id(result.update.owner) in self._shared:
                # Another view of the same memory may have been written meanwhile. That the rule can
                # be run was seen when it was run in vain.
                result = reference.compute(result.update)
            result.write()


def run(updates: Sequence[Update], engine: str) -> None:
    """Apply all updates, or raise and apply none."""
    work = Work(updates, engine, native_step(engine))
    work.prepare()
    work.compute([update.owner for update in updates])
    if work.is_native:
        work.commit()  # one call of the core
    else:
        uninterrupted(work.commit)


def _why_not_native(update: Update) -> str:
    param, rule = update.param, update.settings.rule
    if rule.coefficients is None:
        contract = "the native engine takes rules that have a C++ twin"
        return sentence(contract, f"rule {rule.name!r}", "Use engine='auto'")
    return sentence(
        "the native engine takes CPU tensors whose rows lie at regular distances",
        f"{param.dtype} on {param.device}, shape {tuple(param.shape)}, strides {param.stride()}",
        "Make the parameter contiguous, or use engine='auto'",
    )


def _say_once_that_it_is_slow(update: Update) -> None:
    if update.settings.rule.coefficients is None:
        return  # a user's own rule: it was never to run elsewhere
    if core.core is None:
        reason = "sparsestep was installed without its C++ core (SPARSESTEP_PURE)"
    elif update.param.is_cpu and update.touched.positions is not None:
        reason = _why_not_native(update)
    else:
        return  # torch's own kernels are the fast way for this device or a dense gradient
    slow = "the reference engine is used, about ten times slower than the native one"
    warn_once(SlowWarning, f"{slow}: {reason}")
