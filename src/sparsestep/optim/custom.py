"""``sparsestep.rule``: a plain function of tensors becomes an optimizer for every layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from sparsestep.errors import InputError, message
from sparsestep.grads.masks import Masks
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.options import GROUP_DEFAULTS, OPTIMIZER_OPTIONS, EngineName, Semantics
from sparsestep.rules.rule import Rule, StateSpec, fits_float32

Formula = Callable[..., Any]


class CustomOptimizer(RuleOptimizer):
    """What :func:`rule` returns: an optimizer class with the options of a formula.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        engine: ``"auto"``, ``"native"`` or ``"reference"``. The formula is traced and run by the
            core. If it cannot be traced, ``"auto"`` falls back to calling it, and warns once.
        semantics: ``"masked"`` or ``"dense"``. What the formula does without a gradient is derived
            from it; if that has no closed form, ``"dense"`` raises an error.
        mask: a bool tensor that selects rows or elements to train; a list for several parameters.
        state_dtype: the dtype of the state. By default the parameter's, but at least float32.
        max_norm: rescale updated rows whose 2-norm is larger to this norm.
        normalize: rescale updated rows to a 2-norm of 1.
        stochastic_rounding: round half-precision parameters and state up or down at random.
        rounding_seed: seed for stochastic rounding; by default that of ``torch.manual_seed``.
        **options: the options of the formula and, unless the formula has them itself, ``maximize``,
            ``weight_decay`` and, if there is an ``lr``, ``decoupled_weight_decay``.
    """

    _formula_options: ClassVar[Mapping[str, Any]]  # the formula's, with their defaults
    _required: ClassVar[tuple[str, ...]]  # the formula's, without a default

    def __init__(
        self,
        params: ParamsT,
        *,
        engine: EngineName = "auto",
        semantics: Semantics = "masked",
        mask: Masks = None,
        state_dtype: torch.dtype | None = None,
        max_norm: float | None = None,
        normalize: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int | None = None,
        **options: Any,
    ) -> None:
        defaults = {
            name: options.pop(name, value)
            for name, value in {
                **self._formula_options,
                **_standard_options(self._formula_options),
            }.items()
            if name in options or name not in self._required
        }
        super().__init__(
            params,
            defaults,
            engine=engine,
            semantics=semantics,
            mask=mask,
            state_dtype=state_dtype,
            max_norm=max_norm,
            normalize=normalize,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
            **options,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which has to have every option without a default."""
        given: Any = param_group
        if not isinstance(given, dict):
            return super().add_param_group(given)  # raises as torch does
        known = {**self.defaults, **param_group}
        missing = [name for name in self._required if name not in known]
        if missing:
            requirement = f"{self.rule.name} needs {', '.join(missing)}"
            got = ", ".join(name for name in self._formula_options if name in known) or "no options"
            remedy = "Pass it by name, or give every param group its own"
            raise InputError(message(requirement, got, remedy))
        return super().add_param_group(param_group)


@overload
def rule(
    function: Formula,
    *,
    state: Mapping[str, float] | None = ...,
    row_state: Mapping[str, float] | None = ...,
    compile: bool | Mapping[str, Any] = ...,
) -> type[CustomOptimizer]: ...
@overload
def rule(
    function: None = None,
    *,
    state: Mapping[str, float] | None = ...,
    row_state: Mapping[str, float] | None = ...,
    compile: bool | Mapping[str, Any] = ...,
) -> Callable[[Formula], type[CustomOptimizer]]: ...
def rule(
    function: Formula | None = None,
    *,
    state: Mapping[str, float] | None = None,
    row_state: Mapping[str, float] | None = None,
    compile: bool | Mapping[str, Any] = False,
) -> type[CustomOptimizer] | Callable[[Formula], type[CustomOptimizer]]:
    """Turn an update formula into an optimizer class that runs on every layout.

    The function gets the touched values of the parameter, their gradient (duplicates summed) and
    the state, and returns the new parameter and state. Its keyword-only arguments become the
    optimizer's options; an argument named ``step`` gets the number of the parameter's update.
    Values are passed as ``[slots, slot_size]`` matrices; they are copies that the function may
    modify. What it returns is checked before anything is written.

    Args:
        function: the formula ``(param, grad, *state, *row_state, **options)``.
        state: state per element: names, in the function's order, and initial values.
        row_state: state per row. The function then sees whole rows, with this state as a column.
        compile: pass the function through ``torch.compile``, with these options if it is a mapping.

    Returns:
        The optimizer class, or a decorator.

    Raises:
        InputError: the signature does not match ``state`` and ``row_state``, or a name is reserved.

    Example:
        >>> import sparsestep
        >>> @sparsestep.rule(state={"sum": 0.0})
        ... def adagrad(param, grad, sum, *, lr, eps=1e-10):
        ...     sum = sum + grad.square()
        ...     return param - lr * grad / (sum.sqrt() + eps), sum
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = adagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([2, 7, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"][[2, 3, 7], 0].tolist()
        [4.0, 0.0, 1.0]
    """
    if function is None:
        return lambda function: rule(function, state=state, row_state=row_state, compile=compile)
    specs = (*_state_specs("state", state), *_state_specs("row_state", row_state, per_row=True))
    signature = _check_signature(function, specs)
    guarded = _wrap_formula(function, signature, compile)
    traceable_update = function if compile is False else None
    made = Rule(function.__name__, guarded, specs, traceable_update=traceable_update)
    return _make_class(function, made, signature)


# Checks when a function is decorated

# Names that mean something to every optimizer, as keys of a param group or of the state.
_RESERVED = {"params", "param_names", "capturable", "differentiable", "fused"}
_RESERVED |= GROUP_DEFAULTS.keys() | OPTIMIZER_OPTIONS.keys()


def _state_specs(argument: str, given: Any, per_row: bool = False) -> list[StateSpec]:
    requirement = f"{argument} must map names to initial values, as in {argument}={{'sum': 0.0}}"
    if not isinstance(given, Mapping | None):
        raise InputError(message(requirement, repr(given)))
    specs = []
    for name, first in (given or {}).items():
        is_number = isinstance(first, int | float) and fits_float32(first)
        if not isinstance(name, str) or not is_number:
            raise InputError(message(requirement, repr(given)))
        if name == "step":
            requirement = f"{argument} must not use the name of the step count"
            remedy = "To get the count, take step as a keyword-only argument"
            raise InputError(message(requirement, repr(name), remedy))
        specs.append(StateSpec(name, float(first), per_row=per_row))
    return specs


def _check_signature(function: Formula, specs: tuple[StateSpec, ...]) -> inspect.Signature:
    if not callable(function) or not hasattr(function, "__qualname__"):
        remedy = "Name its state in state= or row_state="
        raise InputError(message("rule must get a function", repr(function), remedy))
    name = function.__name__
    try:
        signature = inspect.signature(function)
    except ValueError:
        got = "a function that does not reveal its arguments"
        raise InputError(message(f"rule {name!r} must have a signature", got)) from None
    arguments = signature.parameters.values()
    places = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    others = [a for a in arguments if a.kind in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    wanted = ["param", "grad", *(spec.name for spec in specs)]
    if len(places) != len(wanted) or places[2:] != wanted[2:] or others:
        remedy = "Its state is named in state= or row_state=; its options come after a *"
        requirement = f"rule {name!r} must take ({', '.join(wanted)}, *, options...)"
        raise InputError(message(requirement, signature, remedy))
    taken = sorted(_RESERVED & _formula_options(signature).keys())
    if taken:
        requirement = f"rule {name!r} must not redefine what every optimizer has"
        raise InputError(message(requirement, ", ".join(taken), "Rename it"))
    return signature


def _formula_options(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    return {
        name: argument
        for name, argument in signature.parameters.items()
        if argument.kind is argument.KEYWORD_ONLY and name != "step"
    }


# Around every call of the function


def _wrap_formula(function: Formula, signature: inspect.Signature, compile: Any) -> Formula:
    """Call the function on copies of its arguments, and check its results."""
    name = function.__name__

    def copying(*values: Tensor, **options: Any) -> Any:
        # The values of a dense gradient are the parameter, gradient and state themselves. Compiled,
        # the copies are free.
        return function(*(value.clone() for value in values), **options)

    # torch.compile counts by code object how often it may compile a function.
    copying.__code__ = copying.__code__.replace(co_name=name)
    called = copying
    if not isinstance(compile, bool | Mapping):
        requirement = "compile must be True, False or a mapping of torch.compile's options"
        raise InputError(message(requirement, repr(compile)))
    if compile is not False:
        called = torch.compile(copying, **({} if compile is True else compile))

    def update(*values: Tensor, **options: Any) -> list[Any]:
        new = called(*values, **options)
        if not isinstance(new, Tensor | tuple | list):
            requirement = f"rule {name!r} must return a tensor or a tuple of tensors"
            raise InputError(message(requirement, type(new).__name__))
        results = [new] if isinstance(new, Tensor) else new
        return [_check_result(name, result, values[0]) for result in results]

    update.__signature__ = signature  # type: ignore[attr-defined]
    return update


def _check_result(name: str, value: Any, like: Tensor) -> Any:
    """Return a result in the dtype of the arithmetic; the engine refuses anything but tensors."""
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided or value.is_complex() or value.device != like.device:
        requirement = f"rule {name!r} must return real strided tensors on {like.device}"
        raise InputError(message(requirement, f"{value.layout} of {value.dtype} on {value.device}"))
    return value.to(like.dtype)


# The optimizer class

# Options of every optimizer whose formula has none of that name.
_STANDARD_OPTIONS: dict[str, Any] = {"maximize": False, "weight_decay": 0.0}


def _standard_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _STANDARD_OPTIONS.items() if name not in options}


def _make_class(
    function: Formula, made: Rule, signature: inspect.Signature
) -> type[CustomOptimizer]:
    options = _formula_options(signature)
    missing = inspect.Parameter.empty
    required = tuple(name for name, option in options.items() if option.default is missing)
    # Decoupled decay is by lr * weight_decay.
    decays = ["decoupled_weight_decay"] if "weight_decay" not in options and "lr" in options else []

    class Made(CustomOptimizer, Optimizer):
        __doc__ = function.__doc__
        group_options = (*RuleOptimizer.group_options, *decays, *required)
        formula_options = frozenset(options)
        rule = made
        _formula_options: ClassVar[Mapping[str, Any]] = {
            n: each.default for n, each in options.items()
        }
        _required = required

    Made.__name__ = function.__name__
    Made.__qualname__ = function.__qualname__  # under which a pickle looks for it
    Made.__module__ = function.__module__ or __name__  # None in code run by exec()
    Made.__signature__ = _make_signature(options, decays)  # type: ignore[attr-defined]
    return Made


def _make_signature(
    options: Mapping[str, inspect.Parameter], decays: Sequence[str]
) -> inspect.Signature:
    params, *shared, _ = inspect.signature(CustomOptimizer, eval_str=True).parameters.values()
    further = {**_standard_options(options), **{name: GROUP_DEFAULTS[name] for name in decays}}
    standard = [
        inspect.Parameter(name, params.KEYWORD_ONLY, default=value, annotation=type(value))
        for name, value in further.items()
    ]
    return inspect.Signature([params, *options.values(), *standard, *shared])
