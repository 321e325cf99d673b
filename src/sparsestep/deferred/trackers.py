"""Which optimizer tracks a parameter, to warn if another one gets it, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sparsestep.deferred.owner import Owner
from sparsestep.errors import StaleWarning, warn

_trackers: Any = WeakIdKeyDictionary()  # a weak reference to the optimizer, by parameter


def track(owner: Owner, params: Iterable[Tensor]) -> None:
    """Take note of who brings rows of these parameters up to date."""
    for param in params:
        _trackers[param] = weakref.ref(owner)


def untrack(owner: Owner, params: Iterable[Tensor]) -> None:
    """Take note that it no longer does."""
    for param in params:
        if param in _trackers and _trackers[param]() is owner:
            del _trackers[param]


def warn_of_another(name: str, params: Iterable[Tensor]) -> None:
    """Say so if parameters of an optimizer with masked semantics are tracked by another.

    Frameworks that make an optimizer anew from the options of its groups lose the semantics.
    """
    if not _trackers:
        return
    others = (_trackers[param]() for param in params if param in _trackers)
    other = next((type(other).__name__ for other in others if other is not None), None)
    if other is not None:
        warn(
            StaleWarning,
            f"sparsestep: {name} has semantics='masked', but its parameters also belong to {other} "
            "with semantics='dense', which tracks the model. If your framework created it from the "
            "options of the other, pass semantics='dense' and call its track(model). Otherwise "
            "call remove() on the handle that track() returned.",
        )
