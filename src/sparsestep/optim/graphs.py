"""A rule in a graph of torch.compile: one operation, ``torch.ops.sparsestep.apply_``.

The compiler traces everything it can, but it cannot trace the core. An operation that declares what
it writes stays whole, and does not break the graph around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsestep.grads.indexed import Touched
from sparsestep.grads.layouts import Gradient
from sparsestep.rules.rule import Rule, rules_by_key

_SCHEMA = (
    "(str who, str rule, Tensor(a!) param, Tensor(b!)[] state, "
    "Tensor? positions, Tensor values, SymInt slots, SymInt block, Tensor? source, Tensor? scale, "
    "Tensor? held, SymInt step, Tensor? step_tensor, str names, float[] numbers, Tensor[] tensors, "
    "bool maximize, float weight_decay, bool decoupled_weight_decay, Tensor? mask, str engine, "
    "SymInt? seed) -> ()"
)

# The keywords of ``apply_``, in the order of the operation.
KEYWORDS: tuple[str, ...] = (
    "maximize",
    "weight_decay",
    "decoupled_weight_decay",
    "mask",
    "engine",
    "seed",
)


def can_be_in_graph(grad: Gradient) -> bool:
    """Whether a graph can hold a gradient; no graph holds a sparse tensor."""
    if isinstance(grad, Touched):
        return True
    return type(grad) in (Tensor, torch.nn.Parameter) and grad.layout is torch.strided


def apply_in_graph(
    who: str,
    rule: Rule,
    param: Tensor,
    grad: Gradient,
    state: Sequence[Tensor | None],
    step: int | Tensor,
    hyper: dict[str, Any],
    **keywords: Any,
) -> None:
    """``apply_`` as the operation that a graph has; the arguments are the same."""
    gradient = grad if isinstance(grad, Touched) else Touched(None, grad)
    is_tensor = isinstance(step, Tensor)
    names, numbers, tensors = _flat(hyper)
    torch.ops.sparsestep.apply_(
        *(who, rule.key, param, [tensor for tensor in state if tensor is not None]),
        *gradient,
        *((0, step) if is_tensor else (step, None)),
        *(names, numbers, tensors),
        *[keywords[name] for name in KEYWORDS],
    )


def _flat(hyper: dict[str, Any]) -> tuple[str, list[float], list[Tensor]]:
    """Options as a graph can have them: names, numbers, and what is a tensor in place of a number.

    Example:
        >>> _flat({"lr": torch.tensor(0.5), "betas": (0.75, 0.5), "nesterov": True})
        ('lr=tensor betas=2 nesterov=1', [0.75, 0.5, 1.0], [tensor(0.5000)])
    """
    names: list[str] = []
    numbers: list[float] = []
    tensors: list[Tensor] = []
    for name, value in hyper.items():
        if isinstance(value, Tensor):
            names.append(f"{name}=tensor")
            tensors.append(value)
        else:
            several = type(value) in (tuple, list)  # what older compilers understand
            values = value if several else (value,)
            names.append(f"{name}={len(values)}" if several else f"{name}=1")
            for each in values:
                numbers.append(float(each))
    return " ".join(names), numbers, tensors


def _whole(names: str, numbers: Sequence[float], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The options again.

    Example:
        >>> _whole("lr=tensor betas=2 nesterov=1", [0.75, 0.5, 1.0], [torch.tensor(0.5)])
        {'lr': tensor(0.5000), 'betas': (0.75, 0.5), 'nesterov': 1.0}
    """
    left, others = list(numbers), list(tensors)
    hyper: dict[str, Any] = {}
    for each in names.split():
        name, kind = each.split("=")
        if kind == "tensor":
            hyper[name] = others.pop(0)
        elif kind == "1":
            hyper[name] = left.pop(0)
        else:
            hyper[name] = tuple(left.pop(0) for _ in range(int(kind)))
    return hyper


def register(apply: Callable[..., None]) -> None:
    """Make the operation; a function that has the arguments of ``apply_`` does its work."""

    def run(who: str, rule: str, param: Tensor, state: list[Tensor], *rest: Any) -> None:
        gradient, rest = Touched(*rest[:7]), rest[7:]
        step, step_tensor, names, numbers, tensors = rest[:5]
        kept = dict(zip(KEYWORDS, rest[5:], strict=True))
        hyper = _whole(names, numbers, tensors)
        step = step if step_tensor is None else step_tensor
        apply(who, rules_by_key[rule], param, gradient, state, step, hyper, **kept)

    operation = torch.library.custom_op(
        "sparsestep::apply_", run, mutates_args=("param", "state"), schema=_SCHEMA
    )
    operation.register_fake(lambda *arguments: None)
