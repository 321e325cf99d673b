"""Exceptions, warnings, and how messages are phrased: who, requirement, got, remedy."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class InputError(ValueError, RuntimeError):
    """The input is invalid; nothing has changed.

    It is both a ``ValueError`` and a ``RuntimeError``: torch raises the former from constructors
    and the latter from steps, and code that catches either keeps working.

    Example:
        >>> import torch, sparsestep
        >>> try:
        ...     sparsestep.SparseAdam([torch.zeros(2)], betas=(0.9, 1.0))
        ... except sparsestep.InputError as error:
        ...     print(error)
        SparseAdam: Invalid beta parameter at index 1: 1.0. betas[1] must be in [0, 1).
    """


class RangeError(InputError, IndexError):
    """An id is out of range for its table. It is an ``IndexError``, too, as torch's error is."""


class SlowWarning(UserWarning):
    """Something works, but not in the fast way. You get it once for each reason.

    The message gives the reason and ends with a remedy.

    Example:
        >>> import warnings, sparsestep
        >>> warnings.simplefilter("ignore", sparsestep.SlowWarning)  # if it is what you want
    """


class StaleWarning(UserWarning):
    """Rows were read or written before they had caught up. Once for each reason.

    Only with ``semantics="dense"``: the results are then not those of dense training.

    Example:
        >>> import warnings, sparsestep
        >>> warnings.simplefilter("ignore", sparsestep.StaleWarning)  # if it is what you want
    """


def message(requirement: str, got: object, remedy: str = "") -> str:
    """Phrase an error message.

    Example:
        >>> message("betas[0] must be in [0, 1)", 1.2)
        'betas[0] must be in [0, 1). Got 1.2.'
        >>> message("lr must be at least 0", -1, "To maximize, pass maximize=True")
        'lr must be at least 0. Got -1. To maximize, pass maximize=True.'
    """
    text = f"{requirement}. Got {_shorten(got)}."
    return f"{text} {remedy}." if remedy else text


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``"1 gradient"``, ``"2 gradients"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Torch's allocator for the CPU raises a plain ``RuntimeError``."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    texts = ("allocate memory", "allocation failed", "not enough memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def first_error(error: BaseException, handled: BaseException | None) -> BaseException:
    """The error that led to another one, which was raised while it was handled.

    ``handled`` is what was being handled before the first one: ``sys.exc_info()[1]`` then.
    """
    while error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__
    return error


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise ``MemoryError`` if memory runs out; torch raises several exceptions."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(_shorten(error)) from None


@contextmanager
def usable(what: str) -> Iterator[None]:
    """Turn errors about a wrong type into an ``InputError``.

    Options are checked and used as if they had the right type. If that alone raises, they had
    another: a string instead of a number, a table instead of one element.
    """
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        if is_out_of_memory(e):
            raise MemoryError(str(e)) from None
        missing = isinstance(e, NotImplementedError)
        kind = "an operation that torch does not have" if missing else type(e).__name__
        raise InputError(message(what, f"{kind}: {str(e).rstrip('.')}")) from None


@contextmanager
def error_prefix(who: str) -> Iterator[None]:
    """Put a name in front of the messages of ``InputError``: ``"Adam: lr must be ..."``."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{who}: {error}") from None


def _shorten(got: object) -> str:
    """Return ``str(got)`` in one line, shortened: a tensor, or an error of torch's, may be long."""
    try:
        text = " ".join(str(got).split())
    except Exception:  # a subclass of Tensor that does not even print
        text = f"a {type(got).__name__}"
    text = re.sub("^a (?=[AEIOaeio])", "an ", text)  # the name of a type follows
    return text if len(text) < 300 else f"{text[:260]} …"


# Frames skipped when attributing warnings.
_SKIPPED_FRAMES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)
_warned: set[tuple[type[Warning], str]] = set()


def warn_once(category: type[Warning], reason: str) -> None:
    """Warn once per reason, at the user's line, below frames of this package and of torch.

    If a filter turns the warning into an error, it is raised every time.
    """
    if (category, reason) in _warned:
        return
    warn(category, f"sparsestep: {reason}")
    _warned.add((category, reason))


def warn(category: type[Warning], text: str) -> None:
    """Warn, at the user's line."""
    level, frame = 2, sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED_FRAMES):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
