"""How a message is phrased: who, what must hold, what came instead, what to do."""

from __future__ import annotations


class InputError(ValueError, RuntimeError):
    """Something was passed in that cannot be worked with; nothing was changed.

    It is both a ``ValueError`` and a ``RuntimeError``, because torch raises the one from
    constructors and the other from steps, and code that catches either keeps working.

    Example:
        >>> import torch, sparsestep
        >>> try:
        ...     sparsestep.SparseAdam([torch.zeros(2)], betas=(0.9, 1.0))
        ... except sparsestep.InputError as error:
        ...     print(error)
        SparseAdam: Invalid beta parameter at index 1: 1.0. It must be in [0, 1).
    """


class SlowWarning(UserWarning):
    """A slower way was taken than the fast one that is usually there. Said once.

    Example:
        >>> import warnings, sparsestep
        >>> warnings.simplefilter("ignore", sparsestep.SlowWarning)  # if it is what you want
    """


class StaleWarning(UserWarning):
    """Rows were read before they were brought up to date. Said once.

    Example:
        >>> import warnings, sparsestep
        >>> warnings.simplefilter("ignore", sparsestep.StaleWarning)  # if it is what you want
    """


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
