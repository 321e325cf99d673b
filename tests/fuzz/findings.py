"""What counts as a finding, and what a refusal has to look like."""

from __future__ import annotations

import re
import traceback

from sparsestep import InputError
from tests.oracle import FindingError

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
_INNER_WORDS = ("INTERNAL ASSERT", "incompatible function arguments", "nanobind", "NotImplemented")


def is_refusal(error: BaseException) -> bool:
    """Whether somebody can be told this: one sentence that says what is wrong."""
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.endswith("tests/table.py"):
        return True  # a user's own formula has its own errors
    if isinstance(error, TypeError) and text.endswith("object is not iterable"):
        # As torch's optimizers say it of their parameters; of nothing else.
        return where(error).endswith(("__init__", "add_param_group"))
    if isinstance(error, InputError):
        return bool(text.strip()) and "\n" not in text.strip() and not _has_inner_words(text)
    return any(isinstance(error, kind) and re.search(words, text) for kind, words in _OTHERS)


def _has_inner_words(text: str) -> bool:
    return any(words in text for words in _INNER_WORDS)


def check_refusal(error: BaseException, during: str) -> None:
    if not is_refusal(error):
        place = where(error)
        text = " ".join(str(error).split())[:200]
        raise FindingError(
            f"{type(error).__name__} at {place}", f"{text} (during {during})"
        ) from error


def where(error: BaseException) -> str:
    """The innermost line of the library that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/sparsestep/" in f.filename and "/tests/" not in f.filename]
    if not ours:
        return "the test itself"
    return f"{ours[-1].filename.rsplit('/sparsestep/', 1)[-1]}:{ours[-1].name}"
