"""The options of all optimizers: what they mean, which values they take, how a group is read.

Options that torch's classes lack are keys of a param group only if they are set, so that a
checkpoint has torch's keys and no others.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparsestep.errors import InputError, message
from sparsestep.grads.masks import Masks
from sparsestep.memory.tensors import FLOAT_DTYPES

Betas: TypeAlias = tuple[float, float]

# The engine. "auto" prefers the core; results agree to the last places.
EngineName: TypeAlias = Literal["auto", "native", "reference", "triton"]

# The meaning of an entry that a gradient lacks. "masked": it is not updated. "dense": its
# gradient is zero, so momentum and decoupled decay go on, when the row is next needed.
Semantics: TypeAlias = Literal["masked", "dense"]

# Adam's bias correction counts updates per parameter or per row.
BiasCorrectionMode: TypeAlias = Literal["global", "per_row"]

# The formula for parameters with dense gradients: row-wise or element-wise.
DenseMode: TypeAlias = Literal["rowwise", "elementwise"]

# A schedule that ends at zero may end just below: LinearLR(end_factor=0) does.
_ROUNDING = 1e-12


def check_options(options: Mapping[str, Any], own: Collection[str] = ()) -> None:
    """Refuse options of the wrong kind or out of range, except a formula's ``own``."""
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is not None and option.check is not None and name not in own:
            option.check(name, value)


def as_number(name: str, value: Any) -> float:
    """Return an option as a Python number; refuse any other kind."""
    if isinstance(value, float):
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InputError(f"Tensor {name} must be 1-element. Got shape {tuple(value.shape)}.")
        value = _element(value) if value.layout == torch.strided else value
    if not isinstance(value, int | float | Real):
        raise InputError(
            message(f"{name} must be a number", format_value(value), _number_for(value))
        )
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        return math.inf


def _element(value: Tensor) -> Any:
    """Return the one element of a tensor; the tensor itself if it cannot be read."""
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):
        return value


def format_value(value: Any) -> str:
    """Return a value of any type as messages show it."""
    if isinstance(value, Tensor):
        found = _element(value)
        is_number = not isinstance(found, Tensor)
        return str(found) if is_number else f"a tensor of shape {tuple(value.shape)}"
    try:
        return repr(value)
    except Exception:  # not even its own class can tell
        return f"a {type(value).__name__}"


def _number_for(text: object) -> str:
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


def _invalid(name: str, value: Any, requirement: str) -> InputError:
    said = f"Invalid {'epsilon' if name == 'eps' else name} value"
    if name == "lr":
        said = "Invalid learning rate"
    return InputError(f"{said}: {format_value(value)}. {name} must be {requirement}.")


def _non_negative(name: str, value: Any) -> None:
    found = as_number(name, value)
    if not (-_ROUNDING if name == "lr" else 0.0) <= found < math.inf:
        raise _invalid(name, value, "at least 0" if found < 0 else "finite")


def check_positive(name: str, value: Any) -> None:
    """Refuse zero, too."""
    _non_negative(name, value)
    if not value > 0.0:
        raise _invalid(name, value, "greater than 0")


def _finite(name: str, value: Any) -> None:
    if not math.isfinite(as_number(name, value)):
        raise _invalid(name, value, "finite")


def _betas(name: str, value: Any) -> None:
    found = as_pair(value)
    if found is None:
        raise InputError(message(f"{name} must be a pair of numbers", format_value(value)))
    for index, beta in enumerate(found):
        if not 0.0 <= as_number(f"{name}[{index}]", beta) < 1.0:
            raise InputError(
                f"Invalid beta parameter at index {index}: {format_value(beta)}. "
                f"{name}[{index}] must be in [0, 1)."
            )
    if isinstance(found[0], Tensor) != isinstance(found[1], Tensor):
        raise InputError(
            f"{name} must be either both floats or both Tensors. Got {format_value(value)}."
        )


def as_pair(value: Any) -> tuple[Any, Any] | None:
    """Return the two items of a sequence, an array or a tensor; ``None`` for anything else."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__"):
        return None
    try:
        return (value[0], value[1]) if len(value) == 2 else None
    except (IndexError, TypeError, NotImplementedError):  # no dims, or no access to elements
        return None


def _is_switch(value: Any) -> bool:
    """Whether a value is true or false; 0, 1 and one-element tensors will do."""
    found = _element(value) if hasattr(value, "item") else value
    return isinstance(found, int) and found in (0, 1)


def _must_be(requirement: str, is_valid: Callable[[Any], bool]) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not is_valid(value):
            raise InputError(message(f"{name} must be {requirement}", format_value(value)))

    return check


def _one_of(modes: tuple[str, ...]) -> Callable[[str, Any], None]:
    return _must_be(
        f"one of {', '.join(modes)}", lambda value: isinstance(value, str) and value in modes
    )


_switch = _must_be("True or False", _is_switch)
_flag = _must_be("True or False", lambda value: isinstance(value, bool))
_switch_or_none = _must_be("True, False or None", lambda value: value is None or _is_switch(value))
_seed = _must_be(
    "an integer or None",
    lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool)),
)


def _state_dtype(name: str, value: Any) -> None:
    dtypes = (*FLOAT_DTYPES, torch.int8)
    if value is not None and not (isinstance(value, torch.dtype) and value in dtypes):
        named = getattr(torch, value.removeprefix("torch."), "") if isinstance(value, str) else ""
        requirement = f"{name} must be a real float dtype, torch.int8 or None"
        remedy = f"Pass {named}" if named in dtypes else ""
        raise InputError(message(requirement, format_value(value), remedy))


def _max_norm(name: str, value: Any) -> None:
    if value is not None:
        check_positive(name, value)


class Option(NamedTuple):
    """A keyword argument of optimizers."""

    description: str  # for the documentation
    check: Callable[[str, Any], None] | None = None  # refuses invalid values
    no_op: tuple[Any, ...] = ()  # without effect; optimizers without the option accept these


_TORCH_KERNEL = "passed to torch's kernel; with ``None``, the core runs dense gradients on the CPU."

# All options of all optimizers. A class may describe an option differently in its docstring.
OPTIONS: dict[str, Option] = {
    "lr": Option("learning rate, a number or a one-element tensor.", _non_negative),
    "betas": Option("decay rates of the running averages of the gradient and its square.", _betas),
    "eps": Option("added to the square root.", _non_negative),
    "weight_decay": Option(r"decay coefficient, :math:`\lambda`.", _non_negative, (0,)),
    "decoupled_weight_decay": Option(
        "shrink the parameter by ``lr * weight_decay``, as AdamW does, instead of adding to the "
        "gradient.",
        _flag,
        (False,),
    ),
    "momentum": Option("the momentum factor.", _non_negative, (0,)),
    "momentum_decay": Option(r"how fast the momentum grows, :math:`\psi`.", _non_negative),
    "dampening": Option(
        "the part of the gradient that does not go into the buffer.", _finite, (0,)
    ),
    "nesterov": Option("look ahead by the momentum.", _switch, (False,)),
    "alpha": Option("decay rate of the running averages.", _non_negative),
    "centered": Option("divide by the variance instead of the mean square.", _switch, (False,)),
    "amsgrad": Option("divide by the largest second moment so far.", _switch, (False,)),
    "lr_decay": Option("how fast the learning rate falls with the steps.", _non_negative, (0,)),
    "initial_accumulator_value": Option("the initial value of ``sum``.", _non_negative, (0,)),
    "beta": Option(r"the paper's :math:`\beta`.", _non_negative),
    "l1": Option(r"strength of L1 regularization, :math:`\lambda_1`.", _non_negative, (0,)),
    "l2": Option(r"strength of L2 regularization, :math:`\lambda_2`.", _non_negative, (0,)),
    "maximize": Option("maximize the objective instead of minimizing it.", _switch, (False,)),
    "foreach": Option(_TORCH_KERNEL, _switch_or_none, (None, False)),
    "capturable": Option("passed to torch's kernel.", _switch, (False,)),
    "differentiable": Option("passed to torch's kernel; dense gradients only.", _switch, (False,)),
    "fused": Option(_TORCH_KERNEL, _switch_or_none, (None, False)),
    "bias_correction": Option(
        'by the steps of the parameter (``"global"``) or the row (``"per_row"``).',
        _one_of(get_args(BiasCorrectionMode)),
        ("global",),
    ),
    "dense": Option(
        'the formula for parameters with dense gradients: of rows (``"rowwise"``), or the '
        'element-wise one (``"elementwise"``).',
        _one_of(get_args(DenseMode)),
        ("rowwise",),
    ),
    "engine": Option(
        '``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; same results.'
    ),
    "semantics": Option(
        'what a missing entry means: no update (``"masked"``) or zero (``"dense"``).'
    ),
    "mask": Option(
        "a bool tensor that selects rows or elements to train; a list for several parameters.",
        no_op=(None,),
    ),
    "state_dtype": Option(
        "the dtype of the state. By default the parameter's, but at least float32.",
        _state_dtype,
        (None,),
    ),
    "max_norm": Option(
        "rescale updated rows whose 2-norm is larger to this norm.", _max_norm, (None,)
    ),
    "normalize": Option("rescale updated rows to a 2-norm of 1.", _flag, (False,)),
    "stochastic_rounding": Option(
        "round half-precision parameters and state up or down at random.", _flag, (False,)
    ),
    "rounding_seed": Option(
        "seed for stochastic rounding; by default that of ``torch.manual_seed``.", _seed, (None,)
    ),
}

# Options that are numbers, and those that are True or False.
NUMBERS = frozenset(
    name for name, option in OPTIONS.items() if option.check in (_non_negative, _finite)
)
SWITCHES = frozenset(name for name, option in OPTIONS.items() if option.check in (_switch, _flag))

# Options of the whole optimizer, with their defaults. They are not param-group keys: how a process
# computes is not part of a checkpoint.
OPTIMIZER_OPTIONS: dict[str, Any] = {"engine": "auto", "semantics": "masked"}


class SharedOptions(TypedDict, total=False):
    """The keyword arguments that every optimizer has."""

    engine: EngineName
    semantics: Semantics
    mask: Masks
    state_dtype: torch.dtype | None
    max_norm: float | None
    normalize: bool
    stochastic_rounding: bool
    rounding_seed: int | None


# The shared options that become param-group keys when they are set.
SHARED_GROUP_OPTIONS = tuple(
    name for name in SharedOptions.__annotations__ if name not in OPTIMIZER_OPTIONS
)

# Defaults of optional param-group keys.
GROUP_DEFAULTS: dict[str, Any] = {
    name: OPTIONS[name].no_op[0]
    for name in (*SHARED_GROUP_OPTIONS, "bias_correction", "decoupled_weight_decay", "dense")
}

# For each option of a param group, the values that have no effect.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    name: option.no_op for name, option in OPTIONS.items() if name not in OPTIMIZER_OPTIONS
}


def check_torch_kernel_options(group: Mapping[str, Any], *, takes_tensors: bool) -> None:
    """Refuse combinations of options that torch's kernels refuse, before a kernel is called.

    The foreach kernels of some rules take no tensors for ``lr`` and ``betas``.
    """
    foreach, fused = group.get("foreach"), group.get("fused")
    if fused and group.get("differentiable"):
        raise InputError("`fused` does not support `differentiable`. Set only one of them.")
    if fused and foreach:
        raise InputError("`fused` and `foreach` cannot be `True` together. Set only one of them.")
    if foreach and not takes_tensors and not group.get("capturable"):
        betas = as_pair(group.get("betas")) or ()
        named = [("lr", group.get("lr")), *((f"betas[{i}]", b) for i, b in enumerate(betas))]
        for name, value in named:
            if isinstance(value, Tensor):
                raise InputError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True."
                )


def check_row_constraint(group: Mapping[str, Any]) -> None:
    """Refuse both constraints at once, and parameters without rows to constrain."""
    if get_option(group, "max_norm") is None and not get_option(group, "normalize"):
        return
    if get_option(group, "max_norm") is not None and get_option(group, "normalize"):
        requirement = "max_norm and normalize exclude each other"
        got = f"max_norm={group['max_norm']} and normalize=True"
        raise InputError(message(requirement, got, "Set only one of them"))
    for index, param in enumerate(group.get("params", ())):
        if not is_lazy(param) and param.dim() < 2:
            requirement = "max_norm and normalize need parameters with rows, of two dims or more"
            got = f"shape {tuple(param.shape)} for param {index}"
            raise InputError(message(requirement, got, "Put it into a group without them"))


class RowConstraint(NamedTuple):
    """Rescales rows whose 2-norm is above a limit.

    Engines apply it to whole rows, after the formula and before rounding. The C++ counterpart is
    ``native/kernels/constraint.h``.
    """

    norm: float  # the 2-norm that a row is rescaled to
    above: float  # the limit; 0 for ``normalize``, so that a row of zeros stays

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> RowConstraint | None:
        """Return the constraint of a param group."""
        if get_option(group, "normalize"):
            return cls(1.0, 0.0)
        limit = get_option(group, "max_norm")
        return None if limit is None else cls(as_float(limit), as_float(limit))

    def apply(self, rows: Tensor) -> Tensor:
        """Return the constrained rows of a matrix."""
        wide = rows if rows.is_mps else rows.double()  # Apple's GPUs have no float64
        norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        factor = torch.where(norm > self.above, self.norm / norm, 1.0)
        return (wide * factor).to(rows.dtype)


def torch_kernel_choice(group: Mapping[str, Any]) -> str:
    """Return the option that asks for torch's own kernel; empty if none does."""
    for name in ("differentiable", "capturable"):
        if group.get(name):
            return f"{name}=True"
    for name in ("foreach", "fused"):
        if group.get(name) is not None:
            return f"{name}={bool(group[name])}"
    return ""


def get_option(group: Mapping[str, Any], name: str) -> Any:
    """A param group's value of an option, or the extra's default."""
    return group[name] if name in group else GROUP_DEFAULTS[name]


def non_default(extras: dict[str, Any]) -> dict[str, Any]:
    """The extras that differ from their defaults, with the seed that rounding needs."""
    found = {}
    for name, value in extras.items():
        default = GROUP_DEFAULTS[name]
        if value is not default and not (isinstance(value, type(default)) and value == default):
            found[name] = value
    if uses_random_rounding(found):
        found.setdefault("rounding_seed", torch.initial_seed())
    return found


def uses_random_rounding(group: Mapping[str, Any]) -> bool:
    """Whether a group rounds at random: half precision on request, int8 always."""
    return bool(group.get("stochastic_rounding")) or group.get("state_dtype") is torch.int8


def ensure_seed(group: dict[str, Any]) -> int | None:
    """The seed of a group's random rounding, which the group then keeps; ``None`` without it."""
    if not uses_random_rounding(group):
        return None
    seed: int | None = group.get("rounding_seed")
    if seed is None:
        seed = group["rounding_seed"] = torch.initial_seed()
    return seed


def check_group_keys(
    group: dict[str, Any],
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] = NO_OP_VALUES,
) -> None:
    """Refuse keys of a param group that are meant for an option and would be ignored.

    Other keys are the user's own notes, as with torch. An option that is not ``known`` to the
    optimizer may have a ``neutral`` value.
    """
    names = frozenset(known)
    unknown = [name for name in neutral if name in group and name not in names]
    plain = int | float | str | None  # others may have no truth value
    alien = sorted(
        name
        for name in unknown
        if not isinstance(group[name], plain) or group[name] not in neutral[name]
    )
    if alien:
        requirement = f"it may only set {', '.join(dict.fromkeys(known))}"
        raise InputError(message(requirement, ", ".join(alien)))
    for key in group:
        if not isinstance(key, str) or key in names or key in _NOT_OPTIONS or key in neutral:
            continue
        if key in OPTIMIZER_OPTIONS:
            requirement = f"{key} is an option of the whole optimizer, not of a param group"
            remedy = f"Pass {key} to the constructor"
            raise InputError(message(requirement, f"{key}={group[key]!r}", remedy))
        nearest = _closest_option(key, names.union(neutral, OPTIMIZER_OPTIONS))
        if nearest is not None:
            raise InputError(
                f"unknown key {key!r}; did you mean {nearest!r}? "
                "Choose another name for a key of your own."
            )


_NOT_OPTIONS = ("params", "param_names")


@lru_cache(maxsize=256)  # with a scheduler, in every step
def _closest_option(key: str, names: frozenset[str]) -> str | None:
    plain = key.lower().replace("-", "_")
    letters = sorted(plain)
    for name in sorted(names):
        if len(name) > 2 and sorted(name) == letters:  # two keys hit in the wrong order
            return name
    # Less would take torch's own max_momentum for momentum.
    near = difflib.get_close_matches(plain, sorted(names), n=1, cutoff=0.85)
    return near[0] if near else None


def as_float(value: Any) -> float:
    """Return an option that may be a one-element tensor or a NumPy scalar as a Python number."""
    if isinstance(value, int | float):
        return value
    number: float = value.item() if hasattr(value, "item") else float(value)
    return number


def as_floats(value: Any) -> Any:
    """Return the same for an option that may be a pair of numbers."""
    two = as_pair(value)
    return as_float(value) if two is None else tuple(map(as_float, two))
