"""The options of every optimizer beyond torch's arguments, and how a param group is read.

Extras are keys of a param group only if they are set, so that a checkpoint has torch's keys and no
others.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import torch

from sparsestep.errors import InputError, sentence
from sparsestep.grads.masks import Masks
from sparsestep.rules.checks import pair

# Who computes. "auto" takes the core where it can; all agree to the last places.
Engine: TypeAlias = Literal["auto", "native", "reference", "triton"]

# What an entry means that a gradient does not hold. "masked": it is not updated. "dense": its
# gradient is zero, so momentum and decoupled decay go on, when the row is next needed.
Semantics: TypeAlias = Literal["masked", "dense"]

# Whose updates Adam's bias correction counts: those of the parameter, or those of each row.
BiasCorrection: TypeAlias = Literal["global", "per_row"]

# What may move at all: a bool for each row or each element of a parameter. For several parameters a
# list, with None for those without a mask.
Mask: TypeAlias = Masks

# What belongs to an optimizer as a whole and is no key of its param groups, with the defaults. How
# a process computes is no part of a checkpoint.
WHOLE: dict[str, Any] = {"engine": "auto", "semantics": "masked"}

# The value that an extra has where nobody sets it.
DEFAULTS: dict[str, Any] = {
    "bias_correction": "global",
    "decoupled_weight_decay": False,
    "mask": None,
    "rounding_seed": None,
    "state_dtype": None,
    "stochastic_rounding": False,
}

# Every option that a param group of some optimizer has, and the values of it that ask for nothing:
# those are accepted by optimizers without the option.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (default,) for name, default in DEFAULTS.items()},
    **dict.fromkeys(("dampening", "initial_accumulator_value", "l1", "l2", "lr_decay"), (0,)),
    **dict.fromkeys(("momentum", "weight_decay"), (0,)),
    **dict.fromkeys(("amsgrad", "capturable", "centered", "differentiable"), (False,)),
    **dict.fromkeys(("maximize", "nesterov"), (False,)),
    **dict.fromkeys(("foreach", "fused"), (None, False)),
    **dict.fromkeys(("alpha", "beta", "betas", "eps", "lr"), ()),
}


def common(
    engine: Engine,
    semantics: Semantics,
    mask: Mask,
    state_dtype: torch.dtype | None,
    stochastic_rounding: bool,
    rounding_seed: int | None,
) -> dict[str, Any]:
    """The keyword arguments that every optimizer has, by their names."""
    return {
        "engine": engine,
        "semantics": semantics,
        "mask": mask,
        "state_dtype": state_dtype,
        "stochastic_rounding": stochastic_rounding,
        "rounding_seed": rounding_seed,
    }


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
    if rounds_at_random(found):
        found.setdefault("rounding_seed", torch.initial_seed())
    return found


def rounds_at_random(group: Mapping[str, Any]) -> bool:
    """Whether anything of a group is rounded at random: half precision on request, int8 always."""
    return bool(group.get("stochastic_rounding")) or group.get("state_dtype") is torch.int8


def seed_of(group: dict[str, Any]) -> int | None:
    """The seed of a group's random rounding, which the group then keeps; ``None`` without it.

    Example:
        >>> group = {"stochastic_rounding": True, "rounding_seed": 7}
        >>> seed_of(group), seed_of({})
        (7, None)
    """
    if not rounds_at_random(group):
        return None
    seed: int | None = group.get("rounding_seed")
    if seed is None:
        seed = group["rounding_seed"] = torch.initial_seed()
    return seed


def _is(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, type(default)) and value == default)


def check_keys(
    group: dict[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> None:
    """Refuse keys of a param group that are meant for an option and would be ignored.

    Other keys are the user's own notes, as with torch.

    Args:
        group: the param group.
        known: the options that the optimizer has.
        neutral: which values of others ask for nothing.

    Example:
        >>> check_keys({"params": [], "weight_decay": 0.0, "layer": 7}, known=["lr"])
        >>> check_keys({"params": [], "weigth_decay": 0.1}, known=["lr"])
        Traceback (most recent call last):
        ...
        sparsestep.errors.InputError: unknown key 'weigth_decay'; did you mean 'weight_decay'? \
Choose another name for a key of your own.
    """
    names = frozenset(known)
    unknown = [name for name in neutral if name in group and name not in names]
    alien = sorted(name for name in unknown if not _is_one_of(neutral[name], group[name]))
    if alien:
        contract = f"it may only set {', '.join(dict.fromkeys(known))}"
        raise InputError(sentence(contract, ", ".join(alien)))
    for key in group:
        if not isinstance(key, str) or key in names or key in _NO_OPTIONS or key in neutral:
            continue
        if key in WHOLE:
            contract = f"{key} is an option of the whole optimizer, not of a param group"
            remedy = f"Pass {key} to the constructor"
            raise InputError(sentence(contract, f"{key}={group[key]!r}", remedy))
        nearest = _nearest(key, names.union(neutral, WHOLE))
        if nearest is not None:
            raise InputError(
                f"unknown key {key!r}; did you mean {nearest!r}? "
                "Choose another name for a key of your own."
            )


_NO_OPTIONS = ("params", "param_names")


def _is_one_of(values: tuple[Any, ...], value: Any) -> bool:
    return isinstance(value, int | float | str | None) and value in values


@lru_cache(maxsize=256)  # with a scheduler, in every step
def _nearest(key: str, names: frozenset[str]) -> str | None:
    """The option that was most likely meant; ``None`` for a key that is like none of them."""
    plain = key.lower().replace("-", "_")
    letters = sorted(plain)
    for name in sorted(names):
        if len(name) > 2 and sorted(name) == letters:  # two keys hit in the wrong order
            return name
    # Less would take torch's own max_momentum for momentum.
    near = difflib.get_close_matches(plain, sorted(names), n=1, cutoff=0.85)
    return near[0] if near else None


def to_number(value: Any) -> float:
    """Return an option that may be a one-element tensor or a NumPy scalar as a Python number."""
    if isinstance(value, int | float):
        return value
    number: float = value.item() if hasattr(value, "item") else float(value)
    return number


def to_numbers(value: Any) -> Any:
    """Return the same for an option that may be a pair of numbers.

    Example:
        >>> to_numbers((torch.tensor(0.5), torch.tensor(0.75)))
        (0.5, 0.75)
    """
    two = pair(value)
    return to_number(value) if two is None else tuple(map(to_number, two))
