"""What every optimizer takes beyond torch's arguments, and how a param group is read.

Extras are keys of a param group that are there only where somebody sets them, so that a checkpoint
has torch's keys and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.grads import FLOATS


class Extras(TypedDict, total=False):
    """Keyword arguments that every optimizer takes.

    Attributes:
        engine: ``"auto"``, ``"native"`` or ``"reference"``; the two agree to the last places.
        semantics: what an entry means that a gradient does not hold. ``"masked"``: not updated.
            ``"dense"``: its gradient is zero, so momentum and decoupled decay go on; the work is
            done when the row is next needed. See ``track`` and ``catch_up``.
        mask: a bool tensor, one value for each row or one for each element: what is outside keeps
            its bits, whatever the gradient, decay or momentum. For one parameter; for several a
            list, with ``None`` for those without a mask. Mostly a key of a param group. Rules that
            keep numbers per row take row masks only.
        state_dtype: the dtype of the state. By default that of the parameter, but float32 for a
            half-precision one. Complex parameters take no other than their own.
        stochastic_rounding: round half-precision parameters and state up or down at random, so that
            small updates are not lost. The random numbers follow ``torch.manual_seed`` as it was
            when the param group was made, which keeps it as ``rounding_seed``.
    """

    engine: str
    semantics: str
    mask: Tensor | Sequence[Tensor | None] | None
    state_dtype: torch.dtype | None
    stochastic_rounding: bool


class DecayExtras(Extras, total=False):
    """Also for optimizers whose torch class has coupled decay only.

    Attributes:
        decoupled_weight_decay: shrink the parameter by ``lr * weight_decay`` instead of adding
            ``weight_decay`` times the parameter to the gradient.
    """

    decoupled_weight_decay: bool


class AdamExtras(Extras, total=False):
    """Also for Adam's family.

    Attributes:
        bias_correction: ``"global"``: by the number of the parameter's steps; ``"per_row"``: by the
            number of updates that the row itself has had.
    """

    bias_correction: str


class RowwiseAdamExtras(AdamExtras, DecayExtras, total=False):
    """What both :class:`AdamExtras` and :class:`DecayExtras` have."""


# The value that an extra has where nobody sets it.
DEFAULTS: dict[str, Any] = {
    "bias_correction": "global",
    "decoupled_weight_decay": False,
    "mask": None,
    "state_dtype": None,
    "stochastic_rounding": False,
}

BIAS_CORRECTIONS = ("global", "per_row")


def read(group: dict[str, Any], name: str) -> Any:
    """A param group's value of an option, or the extra's default."""
    return group[name] if name in group else DEFAULTS[name]


def given(extras: dict[str, Any]) -> dict[str, Any]:
    """The extras that differ from their defaults, with the seed that rounding needs.

    Example:
        >>> given({"state_dtype": None, "bias_correction": "per_row"})
        {'bias_correction': 'per_row'}
    """
    found = {k: v for k, v in extras.items() if not _is(v, DEFAULTS[k])}
    if found.get("stochastic_rounding"):
        found["rounding_seed"] = torch.initial_seed()
    return found


def _is(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, type(default)) and value == default)


def check(options: dict[str, Any]) -> None:
    """Refuse extras that make no sense."""
    correction = read(options, "bias_correction")
    if correction not in BIAS_CORRECTIONS:
        contract = f"bias_correction must be one of {', '.join(BIAS_CORRECTIONS)}"
        raise InputError(sentence(contract, repr(correction)))
    dtype = read(options, "state_dtype")
    if dtype is not None and dtype not in FLOATS:
        raise InputError(sentence("state_dtype must be a real float dtype or None", dtype))
    for name in ("stochastic_rounding", "decoupled_weight_decay"):
        if not isinstance(read(options, name), bool):
            raise InputError(sentence(f"{name} must be True or False", repr(read(options, name))))


def number(value: float | Tensor) -> float:
    """An option that may be a one-element tensor, as a number."""
    return value.item() if isinstance(value, Tensor) else value
