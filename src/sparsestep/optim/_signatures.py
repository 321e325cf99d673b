"""Constructors and ``Args`` sections, made from signatures and the table of options."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from sparsestep.deferred.tracking import move_tracking, recreated_from
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.options import GROUP_DEFAULTS, OPTIMIZER_OPTIONS, OPTIONS

Made = TypeVar("Made", bound=RuleOptimizer)
T = TypeVar("T", bound=Callable[..., Any])

# Arguments that are no options of a param group.
_ARGUMENTS = {
    "params": "parameters or param groups, as for every torch optimizer.",
    "param": "the parameter.",
    "grad": "its gradient, in any layout.",
    "exp_avg": "the running average of the gradient.",
    "exp_avg_sq": "the running average of its square.",
    "max_exp_avg_sq": "the largest ``exp_avg_sq`` so far, for AMSGrad.",
    "sum": "the sum of the squared gradients.",
    "linear": "the paper's :math:`z`.",
    "square_avg": "the running average of the gradient's square.",
    "grad_avg": "the running average of the gradient, for the centered form.",
    "momentum_buffer": "the momentum buffer, if you use momentum.",
    "step": "the number of this update, counted from 1.",
    "seed": "turns on stochastic rounding of half-precision tensors; use a new one for each step.",
    "_allow_empty_param_list": "start without parameters, as ``torch.distributed`` does.",
}
_DEFAULTS = {
    **OPTIMIZER_OPTIONS,
    **GROUP_DEFAULTS,
    **{"maximize": False, "weight_decay": 0.0, "seed": None},
}
_FUNCTION_MASK = "a bool tensor that selects the rows or elements to update."
_UNUSED_STEP = "the number of this update; the formula does not use it."
_TORCH_ONLY = "an option of torch's class; only the default is supported."

_SECTION = re.compile(r"^Args:\n((?:    .*\n)*)\n", re.MULTILINE)


def passes_options(cls: type[Made]) -> type[Made]:
    """Complete a class whose constructor is a signature: it passes options to ``RuleOptimizer``.

    Options in ``group_options`` are keys of a param group only if they are set, all others always.
    The declared function is called first: Python checks the arguments, and it may check values.
    An optimizer that a framework creates again has the semantics of the first one, and its place
    in tracked models.
    """
    declared = vars(cls)["__init__"]
    _, _, *own, _ = inspect.signature(declared).parameters.values()
    defaults = {option.name: option.default for option in own}

    @wraps(declared)
    def construct(self: Any, params: Any, *args: Any, **options: Any) -> None:
        declared(self, params, *args, **options)
        chosen = {**dict(zip(defaults, args, strict=False)), **options}
        old = None
        if not torch.compiler.is_compiling():
            params = list(params) if isinstance(params, Iterator) else params
            old = recreated_from(type(self), params, chosen)
        if old is not None:
            chosen = {"engine": old.engine, "semantics": old.semantics, **chosen}
        given = {**defaults, **chosen}
        always = {name: given.pop(name) for name in defaults if name not in self.group_options}
        RuleOptimizer.__init__(self, params, always, **given)
        if old is not None:
            move_tracking(old, self)

    cls.__init__ = construct  # type: ignore[method-assign]
    return _complete(cls, construct)


def document_args(like: type) -> Callable[[T], T]:
    """Complete the ``Args`` section of the function of an optimizer class."""
    return lambda function: _complete(function, function, like)


def _complete(documented: T, function: Any, like: type | None = None) -> T:
    """Complete the ``Args`` section of a class or function.

    An argument is described by the docstring itself, by that of the class (``like``), or by the
    table of options. ``**shared: Unpack[...]`` is spelled out, in the signature as well.
    """
    signature = inspect.signature(function, eval_str=True)
    *arguments, shared = signature.parameters.values()
    (options,) = get_args(shared.annotation)
    for name, hint in get_type_hints(options).items():
        kind = inspect.Parameter.KEYWORD_ONLY
        arguments.append(inspect.Parameter(name, kind, default=_DEFAULTS[name], annotation=hint))
    function.__signature__ = signature.replace(parameters=arguments)
    if documented.__doc__ is not None:
        documented.__doc__ = with_args(
            documented.__doc__, inspect.signature(documented).parameters, like
        )
    return documented


def with_args(
    doc: str, arguments: Mapping[str, inspect.Parameter], like: type | None = None
) -> str:
    """Return a docstring whose ``Args`` section describes all arguments, before the example.

    Example:
        >>> def lion_(param, grad, *, step=1, lr=0.1, mask=None): ...
        >>> print(with_args("One step.", inspect.signature(lion_).parameters))
        One step.
        <BLANKLINE>
        Args:
            param: the parameter.
            grad: its gradient, in any layout.
            step: the number of this update; the formula does not use it.
            lr: learning rate, a number or a one-element tensor.
            mask: a bool tensor that selects the rows or elements to update.
    """
    doc = inspect.cleandoc(doc)
    known = {name: option.description for name, option in OPTIONS.items()} | _ARGUMENTS
    if like is not None:
        known |= _described(like.__doc__ or "")
    if "grad" in arguments:
        known["mask"] = _FUNCTION_MASK
        if arguments["step"].default == 1:
            known["step"] = _UNUSED_STEP
    known |= _described(doc)
    lines = ["Args:"]
    for name in arguments:
        entry = f"{name}: {known.get(name, _TORCH_ONLY)}"
        lines += textwrap.wrap(entry, 100, initial_indent=" " * 4, subsequent_indent=" " * 8)
    head, mark, tail = _SECTION.sub("", doc).partition("\nExample:\n")
    return "\n".join([head.rstrip(), "", *lines, mark + tail]).rstrip()


def _described(doc: str) -> dict[str, str]:
    """Return the arguments that a docstring describes, with their descriptions."""
    section = _SECTION.search(doc)
    entries = re.split(r"\n    (?! )", section[1].strip()) if section else []
    pairs = [entry.split(":", 1) for entry in entries]
    return {name: " ".join(text.split()) for name, text in pairs}
