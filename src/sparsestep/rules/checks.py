"""Checks of options: one table of kinds and ranges, shared by optimizers and functions.

Where torch has a message for the same mistake, ours begins with torch's words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.grads.indexed import FLOATS

BIAS_CORRECTIONS = ("global", "per_row")

# Numbers that must not be negative, numbers of any sign, and options that are True or False.
NON_NEGATIVE = frozenset(
    {
        *("alpha", "beta", "eps", "initial_accumulator_value", "l1", "l2", "lr_decay"),
        *("momentum", "weight_decay"),
    }
)
NUMBERS = NON_NEGATIVE | {"lr", "dampening"}
SWITCHES = frozenset(
    {
        *("amsgrad", "capturable", "centered", "decoupled_weight_decay", "differentiable"),
        *("maximize", "nesterov", "stochastic_rounding"),
    }
)

# A schedule that ends at zero may end just below: LinearLR(end_factor=0) does.
_ROUNDING = 1e-12


def check(options: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Refuse options of the wrong kind or out of range.

    Args:
        options: the options by name. Names that are not in the table are skipped.
        own: the options of a user's own formula, which may be anything.

    Example:
        >>> check({"lr": 0.1, "betas": (0.9, 0.999), "maximize": False, "layer": 7})
        >>> check({"lr": "1e-3"})
        Traceback (most recent call last):
        ...
        sparsestep.errors.InputError: lr must be a number. Got '1e-3'. YAML reads 1e-3 as a \
string: write 1.0e-3.
    """
    for name, value in options.items():
        check_value = _CHECKS.get(name)
        if check_value is not None and name not in own:
            check_value(name, value)


def number(name: str, value: Any) -> float:
    """Return an option as a Python number; refuse any other kind.

    Example:
        >>> number("lr", torch.tensor(0.5))
        0.5
    """
    if isinstance(value, float):
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InputError(f"Tensor {name} must be 1-element. Got shape {tuple(value.shape)}.")
        value = _element(value)
    if not isinstance(value, int | float | Real):
        raise InputError(sentence(f"{name} must be a number", shown(value), _number_for(value)))
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _element(value: Tensor) -> Any:
    """Return the one element of a tensor; the tensor itself if it has no readable memory."""
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):
        return value


def shown(value: Any) -> str:
    """Return a value as messages show it, whatever its type.

    Example:
        >>> shown("1e-3"), shown(torch.tensor(0.5)), shown(torch.zeros(3, 2))
        ("'1e-3'", '0.5', 'a tensor of shape (3, 2)')
    """
    if isinstance(value, Tensor):
        found = _element(value)
        is_number = not isinstance(found, Tensor)
        return str(found) if is_number else f"a tensor of shape {tuple(value.shape)}"
    try:
        return repr(value)
    except Exception:  # not even its own class can tell
        return f"a {type(value).__name__}"


def _number_for(text: object) -> str:
    """Return the remedy for text that spells a number."""
    if not isinstance(text, str):
        return ""
    parts = re.fullmatch(r"([+-]?\d+)(\.\d*)?[eE]([+-]?)(\d+)", text.strip())
    if parts is not None:
        whole, fraction, sign, exponent = parts.groups()
        written = f"{whole}{fraction or '.0'}e{sign or '+'}{exponent}"
        return f"YAML reads {text.strip()} as a string: write {written}"
    try:
        float(text)
    except ValueError:
        return ""
    return f"Pass float({text!r})"


def _learning_rate(name: str, value: Any) -> None:
    """Refuse a negative learning rate; zero is fine, warm-ups begin there."""
    found = number(name, value)
    if not -_ROUNDING <= found < math.inf:
        raise InputError(f"Invalid learning rate: {shown(value)}. {name} must be {_bound(found)}.")


def _non_negative(name: str, value: Any) -> None:
    found = number(name, value)
    if not 0.0 <= found < math.inf:
        said = "epsilon" if name == "eps" else name
        raise InputError(f"Invalid {said} value: {shown(value)}. {name} must be {_bound(found)}.")


def positive(name: str, value: Any) -> None:
    """Refuse zero, too."""
    _non_negative(name, value)
    if not value > 0.0:
        said = "epsilon" if name == "eps" else name
        raise InputError(f"Invalid {said} value: {shown(value)}. {name} must be greater than 0.")


def _bound(value: float) -> str:
    return "at least 0" if value < 0 else "finite"


def _finite(name: str, value: Any) -> None:
    if not math.isfinite(number(name, value)):
        raise InputError(f"Invalid {name} value: {shown(value)}. {name} must be finite.")


def _betas(name: str, value: Any) -> None:
    """Refuse averages that would never forget, or grow."""
    found = pair(value)
    if found is None:
        raise InputError(sentence(f"{name} must be a pair of numbers", shown(value)))
    for index, beta in enumerate(found):
        if not 0.0 <= number(f"{name}[{index}]", beta) < 1.0:
            raise InputError(
                f"Invalid beta parameter at index {index}: {shown(beta)}. "
                f"{name}[{index}] must be in [0, 1)."
            )
    if isinstance(found[0], Tensor) != isinstance(found[1], Tensor):
        raise InputError(f"{name} must be either both floats or both Tensors. Got {shown(value)}.")


def pair(value: Any) -> tuple[Any, Any] | None:
    """Return the two items of a sequence, an array or a tensor; ``None`` for anything else.

    Example:
        >>> pair([0.9, 0.999]), pair("ab"), pair(0.9)
        ((0.9, 0.999), None, None)
    """
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__"):
        return None
    try:
        return (value[0], value[1]) if len(value) == 2 else None
    except (IndexError, TypeError):  # a tensor without dims
        return None


def _switch(name: str, value: Any) -> None:
    """Refuse what is neither true nor false; 0, 1 and one-element tensors will do."""
    found = _element(value) if hasattr(value, "item") else value
    if not isinstance(found, int) or found not in (0, 1):
        raise InputError(sentence(f"{name} must be True or False", shown(value)))


def _flag(name: str, value: Any) -> None:
    """Refuse anything but a bool."""
    if not isinstance(value, bool):
        raise InputError(sentence(f"{name} must be True or False", shown(value)))


def _switch_or_none(name: str, value: Any) -> None:
    if value is not None:
        try:
            _switch(name, value)
        except InputError:
            contract = f"{name} must be True, False or None"
            raise InputError(sentence(contract, shown(value))) from None


def _bias_correction(name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in BIAS_CORRECTIONS:
        contract = f"{name} must be one of {', '.join(BIAS_CORRECTIONS)}"
        raise InputError(sentence(contract, shown(value)))


def _state_dtype(name: str, value: Any) -> None:
    if value is None or (isinstance(value, torch.dtype) and _can_hold_state(value)):
        return
    meant = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    known = isinstance(meant, torch.dtype) and _can_hold_state(meant)
    contract = f"{name} must be a real float dtype, torch.int8 or None"
    raise InputError(sentence(contract, shown(value), f"Pass {meant}" if known else ""))


def _can_hold_state(dtype: torch.dtype) -> bool:
    return dtype in FLOATS or dtype is torch.int8


def _seed(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(sentence(f"{name} must be an integer or None", shown(value)))


# Every option of every optimizer but the mask, which depends on the parameters.
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "lr": _learning_rate,
    "betas": _betas,
    "dampening": _finite,
    **dict.fromkeys(NON_NEGATIVE, _non_negative),
    **dict.fromkeys(SWITCHES, _switch),
    **dict.fromkeys(("decoupled_weight_decay", "stochastic_rounding"), _flag),
    **dict.fromkeys(("foreach", "fused"), _switch_or_none),
    "bias_correction": _bias_correction,
    "rounding_seed": _seed,
    "state_dtype": _state_dtype,
}


def torch_kernel(group: Mapping[str, Any], *, takes_tensors: bool) -> None:
    """Refuse combinations of options that torch's kernels refuse, before any of them is called.

    Args:
        group: the param group, whose options are each valid.
        takes_tensors: whether the foreach kernel takes tensors for ``lr`` and ``betas``.
    """
    foreach, fused = group.get("foreach"), group.get("fused")
    if fused and group.get("differentiable"):
        raise InputError("`fused` does not support `differentiable`. Set only one of them.")
    if fused and foreach:
        raise InputError("`fused` and `foreach` cannot be `True` together. Set only one of them.")
    if foreach and not takes_tensors and not group.get("capturable"):
        betas = pair(group.get("betas")) or ()
        named = [("lr", group.get("lr")), *((f"betas[{i}]", b) for i, b in enumerate(betas))]
        for name, value in named:
            if isinstance(value, Tensor):
                raise InputError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True."
                )
