"""How a message is phrased: who, what must hold, what came instead, what to do; and said once."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
    """A slower way was taken than the fast one that is usually there. Said once for each reason.

    The message ends with a remedy.

    Example:
        >>> import warnings, sparsestep
        >>> warnings.simplefilter("ignore", sparsestep.SlowWarning)  # if it is what you want
    """


class StaleWarning(UserWarning):
    """Rows were read before they were brought up to date. Said once for each reason.

    Example:
        >>> import warnings, sparsestep
        >>> warnings.simplefilter("ignore", sparsestep.StaleWarning)  # if it is what you want
    """


def sentence(contract: str, got: object, remedy: str = "") -> str:
    """Phrase a refusal.

    Example:
        >>> sentence("betas[0] must be in [0, 1)", 1.2)
        'betas[0] must be in [0, 1). Got 1.2.'
        >>> sentence("lr must be at least 0", -1, "To maximize, pass maximize=True")
        'lr must be at least 0. Got -1. To maximize, pass maximize=True.'
    """
    text = f"{contract}. Got {_shortened(got)}."
    return f"{text} {remedy}." if remedy else text


@contextmanager
def usable(what: str) -> Iterator[None]:
    """Refuse what is not even of a kind that could be worked with.

    Options are checked and used as what they should be. Where that alone raises, they were
    something else: text where a number was meant, a table where one element was.

    Example:
        >>> try:
        ...     with usable("lr must be a number"):
        ...         "fast" > 0
        ... except InputError as error:
        ...     print(error)
        lr must be a number. Got TypeError: '>' not supported between instances of 'str' and 'int'.
    """
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        missing = isinstance(e, NotImplementedError)
        kind = "an operation that torch does not have" if missing else type(e).__name__
        raise InputError(sentence(what, f"{kind}: {str(e).rstrip('.')}")) from None


def _shortened(got: object) -> str:
    """What it says, in one line: a tensor, or an error of torch's, may go on for pages."""
    try:
        text = " ".join(str(got).split())
    except Exception:  # a subclass of Tensor that does not even print
        return f"a {type(got).__name__}"
    return text if len(text) < 300 else f"{text[:260]} …"


# Whose lines are nobody's mistake: a warning points at the first line outside of these.
_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_said: set[tuple[type[Warning], str]] = set()


def warn_once(category: type[Warning], reason: str) -> None:
    """Say something once, and point at the user's line, whoever of us and torch lies between.

    Another reason is another warning. Where a filter makes it an error it is raised every time.

    Example:
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     for reason in ("it rains", "it rains", "it snows"):
        ...         warn_once(SlowWarning, reason)
        >>> [str(warning.message) for warning in said]
        ['sparsestep: it rains', 'sparsestep: it snows']
    """
    if (category, reason) in _said:
        return
    warn(category, f"sparsestep: {reason}")
    _said.add((category, reason))


def warn(category: type[Warning], message: str) -> None:
    """Say something, and point at the user's line."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
