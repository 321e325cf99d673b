"""What counts as a finding, and what a refusal has to look like."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable

import sparsestep
from sparsestep import InputError
from tests.oracle import FindingError
from tests.subject import NOT_NATIVE

# Errors of Python and of torch's base class that are documented, or say all there is to say.
_OTHERS = (
    (TypeError, r"unexpected keyword argument"),
    (TypeError, r"missing \d+ required"),
    (TypeError, r"takes (at most|from|\d+) "),
    (TypeError, r"multiple values for"),
    (TypeError, r"params argument given to the optimizer should be an iterable"),
    (TypeError, r"optimizer can only optimize Tensors"),
    (TypeError, r"param_group must be a dict|param group must be a dict"),
    (TypeError, r"optimizer parameters need to be organized in ordered collections"),
    (ValueError, r"can't optimize a non-leaf Tensor"),
    (ValueError, r"optimizer got an empty parameter list"),
    (ValueError, r"some parameters appear in more than one parameter group"),
    (ValueError, r"all optimizer params should be with/without names"),
    (ValueError, r"loaded state dict (has a different number|contains a parameter group)"),
    (RuntimeError, r"The total norm of order .* is non-finite"),
    (RuntimeError, r"linalg.vector_norm cannot compute the .* norm on an empty tensor"),
)
INNER_WORDS = ("INTERNAL ASSERT", "incompatible function arguments", "nanobind", "NotImplemented")


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one sentence for users that says what is wrong."""
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.endswith("tests/table.py"):
        return True  # a user's own formula has its own errors
    if isinstance(error, TypeError) and text.endswith("object is not iterable"):
        # As torch's optimizers say it of their parameters; of nothing else.
        return where(error).endswith(("__init__", "add_param_group"))
    if isinstance(error, InputError):
        has_inner_words = any(words in text for words in INNER_WORDS)
        return bool(text.strip()) and "\n" not in text.strip() and not has_inner_words
    return any(isinstance(error, kind) and re.search(words, text) for kind, words in _OTHERS)


def check_refusal(error: BaseException, during: str) -> None:
    if not is_refusal(error):
        place = where(error)
        text = " ".join(str(error).split())[:200]
        raise FindingError(
            f"{type(error).__name__} at {place}", f"{text} (during {during})"
        ) from error


def is_taken(call: Callable[[], object], check_unchanged: Callable[[], None]) -> bool:
    """Do what is valid; false where the native engine was asked for by name and does not apply."""
    try:
        call()
    except Exception as error:
        if isinstance(error, InputError) and NOT_NATIVE in str(error):
            check_unchanged()
            return False
        raise FindingError(f"{type(error).__name__} in a valid step", str(error)[:300]) from error
    return True


_SOURCES = os.path.dirname(sparsestep.__file__)


def where(error: BaseException) -> str:
    """The innermost line of the library that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_SOURCES)]
    if not ours:
        return "the test itself"
    return f"{os.path.relpath(ours[-1].filename, _SOURCES)}:{ours[-1].name}"
