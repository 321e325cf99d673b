"""``sparsestep.rule``: a plain function of tensors becomes an optimizer for every layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sparsestep.contract import Rule, State
from sparsestep.errors import InputError, sentence
from sparsestep.optimizer import RuleOptimizer

Formula = Callable[..., Any]


def rule(
    function: Formula | None = None,
    *,
    state: Mapping[str, float] | None = None,
    row_state: Mapping[str, float] | None = None,
    compile: bool | Mapping[str, Any] = False,
) -> Any:
    """Turn an update formula into an optimizer class that runs on every layout.

    The function gets the touched values of the parameter, their gradient (duplicates summed) and
    the state, and returns the new parameter and state. Its keyword-only arguments are the
    optimizer's options; ``step``, where it asks for it, is the number of the parameter's update.
    Values come as ``[slots, block]``. What it returns is checked before anything is written.

    Args:
        function: the formula ``(param, grad, *state, *row_state, **options)``.
        state: what is kept for each element: names, in the function's order, and first values.
        row_state: what is kept for each row. The function then sees whole rows, and these as a
            column beside them.
        compile: pass the function through ``torch.compile``, with these options if it is a mapping.

    Returns:
        The optimizer class, or a decorator.

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
    kept = (
        *(State(name, float(first)) for name, first in (state or {}).items()),
        *(State(name, float(first), per_row=True) for name, first in (row_state or {}).items()),
    )
    _check(function, kept)
    update = function
    if compile:
        update = _keeping_signature(torch.compile(function, **_compile_options(compile)), function)
    made = Rule(function.__name__, update, kept)
    options = {
        name: argument.default
        for name, argument in inspect.signature(function).parameters.items()
        if argument.kind is argument.KEYWORD_ONLY and name != "step"
    }
    return _optimizer_class(function, made, options)


def _compile_options(compile: bool | Mapping[str, Any]) -> dict[str, Any]:
    return dict(compile) if isinstance(compile, Mapping) else {}


def _keeping_signature(compiled: Formula, function: Formula) -> Formula:
    def update(*values: Tensor, **options: Any) -> Any:
        return compiled(*values, **options)

    update.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return update


def _check(function: Formula, kept: tuple[State, ...]) -> None:
    """The function must take what it will be called with."""
    arguments = inspect.signature(function).parameters.values()
    places = [a.name for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    wanted = ["param", "grad", *(spec.name for spec in kept)]
    if len(places) != len(wanted) or places[2:] != wanted[2:]:
        name = getattr(function, "__name__", "rule")
        contract = f"rule {name!r} must take ({', '.join(wanted)}, *, options...)"
        got = f"({', '.join(places)})"
        raise InputError(sentence(contract, got, "Name its state in state= or row_state="))


# What every optimizer has, unless the formula has an option of that name itself.
_COMMON: dict[str, Any] = {"maximize": False, "weight_decay": 0.0}


def _optimizer_class(
    function: Formula, made: Rule, options: Mapping[str, Any]
) -> type[RuleOptimizer]:
    required = [name for name, default in options.items() if default is inspect.Parameter.empty]
    common = {name: value for name, value in _COMMON.items() if name not in options}

    class UserRule(RuleOptimizer):
        __doc__ = function.__doc__
        extras = (
            *RuleOptimizer.extras,
            *(["decoupled_weight_decay"] if "weight_decay" in common else []),
        )
        own_options = frozenset(options)

        def __init__(self, params: ParamsT, **given: Any) -> None:
            missing = [name for name in required if name not in given]
            if missing:
                contract = f"{function.__name__} needs {', '.join(required)}"
                raise InputError(sentence(contract, ", ".join(given) or "none of them"))
            defaults = {**options, **common}
            defaults.update({k: given.pop(k) for k in list(given) if k in defaults})
            super().__init__(params, defaults, **given)

        @classmethod
        def rule_for(cls, group: dict[str, Any]) -> Rule:
            """The formula."""
            return made

    UserRule.__name__ = UserRule.__qualname__ = function.__name__
    UserRule.__module__ = function.__module__
    return UserRule
