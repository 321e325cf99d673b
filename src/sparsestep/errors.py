"""How a message is phrased: who, what must hold, what came instead, what to do."""

from __future__ import annotations


class InputError(ValueError, RuntimeError):
    """Something was passed in that cannot be worked with; nothing was changed.

    It is both a ``ValueError`` and a ``RuntimeError``, because torch raises the one from
    constructors and the other from steps, and code that catches either keeps working.
    """


class SlowWarning(UserWarning):
    """A slower way was taken than the fast one that is usually there. Said once."""


def sentence(contract: str, got: object, remedy: str = "") -> str:
    """Phrase a refusal.

    Example:
        >>> sentence("betas[0] must be in [0, 1)", 1.2)
        'betas[0] must be in [0, 1). Got 1.2.'
        >>> sentence("lr must be at least 0", -1, "To go uphill, pass maximize=True")
        'lr must be at least 0. Got -1. To go uphill, pass maximize=True.'
    """
    text = f"{contract}. Got {got}."
    return f"{text} {remedy}." if remedy else text
