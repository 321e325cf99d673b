"""Engines run a rule over the touched part of a parameter; here one is chosen.

``auto`` takes the native engine wherever it applies and the reference engine elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparsestep.contract import Update
from sparsestep.engines import native, reference
from sparsestep.errors import InputError, SlowWarning, sentence, warn_once

ENGINES = ("auto", "native", "reference")


def check_engine(engine: str) -> None:
    """Refuse an engine that does not exist here."""
    if engine not in ENGINES:
        raise InputError(sentence(f"engine must be one of {', '.join(ENGINES)}", repr(engine)))
    if engine == "native" and native.core is None:
        raise InputError(
            sentence(
                "engine='native' needs the C++ core",
                "an installation without it",
                "Reinstall without SPARSESTEP_PURE, or use engine='auto'",
            )
        )


def native_step(engine: str) -> native.Step | None:
    """What collects a step's work for the core, where there is one that may be used."""
    return None if engine == "reference" or native.core is None else native.Step()


def run(
    updates: Sequence[Update],
    engine: str,
    natively: native.Step | None = None,
    others: Sequence[Callable[[], None]] = (),
    before: Sequence[Callable[[], None]] = (),
) -> None:
    """Apply all updates, or raise and apply none.

    What the reference engine runs is computed first and written last, and the native core checks
    everything before it writes, so nothing can fail once something is written.

    Args:
        updates: what the engines are to do.
        engine: one of ``ENGINES``.
        natively: what ``native_step`` gave, with whatever it has taken already.
        others: called once nothing can fail any more: what torch's own kernels do.
        before: called once every engine has taken its updates: what brings rows up to date. Then
            positions must have been checked.
    """
    others_than_native = []
    for update in updates:
        if natively is not None and natively.add(update):
            continue
        if engine == "native":
            raise update.refuse(_why_not_native(update))
        if engine == "auto":
            _say_once_that_it_is_slow(update)
        others_than_native.append(update)
    for bring_up_to_date in before:
        bring_up_to_date()
    results = []
    for update in others_than_native:
        try:
            results.append(reference.compute(update))
        except InputError as error:
            raise update.refuse(error) from None
    if natively is not None:
        natively.run()
    for other in others:
        other()
    for result in results:
        result.write()


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
    if native.core is None:
        reason = "sparsestep was installed without its C++ core (SPARSESTEP_PURE)"
    elif update.param.is_cpu and update.touched.positions is not None:
        reason = _why_not_native(update)
    else:
        return  # torch's own kernels are the fast way for this device or a dense gradient
    slow = "the reference engine is used, about ten times slower than the native one"
    warn_once(SlowWarning, f"{slow}: {reason}")
