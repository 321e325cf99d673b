"""What the functions of all rules share: one rule, run once over one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep import engines
from sparsestep._torch import disable_compiler
from sparsestep.engines.base import ParamUpdate, Settings
from sparsestep.errors import InputError, sentence
from sparsestep.grads import masks
from sparsestep.grads.indexed import COMPLEX, FLOATS
from sparsestep.grads.layouts import Gradient, touched
from sparsestep.memory.mapped_file import mapped_files
from sparsestep.memory.mapped_file import written as note_written
from sparsestep.memory.tensors import check_writable
from sparsestep.optim import graphs
from sparsestep.optim import state as states
from sparsestep.optim.announcing import announce_checked
from sparsestep.optim.updates import for_engines, local
from sparsestep.rules import checks, options
from sparsestep.rules.rule import Rule


def apply_(
    who: str,
    rule: Rule,
    param: Tensor,
    grad: Gradient,
    state: Sequence[Tensor | None],
    step: int | Tensor,
    hyper: dict[str, Any],
    *,
    maximize: bool = False,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    mask: Tensor | None = None,
    engine: options.Engine = "auto",
    seed: int | None = None,
) -> None:
    """Run any rule once over one parameter; the other functions of this module call it.

    Args:
        who: what error messages call the caller.
        rule: the rule.
        param: the parameter.
        grad: its gradient, in any layout.
        state: the state tensors, in the rule's order.
        step: the number of this update, counted from 1.
        hyper: the options of the rule's formula.
        maximize: maximize the objective instead of minimizing it.
        weight_decay: strength of the weight decay.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        mask: a bool tensor that selects the rows or elements to update.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: turns on stochastic rounding of half-precision tensors; use a new one for each step.

    Raises:
        InputError: an argument is invalid; nothing has changed.
    """
    if torch.compiler.is_compiling():
        run = graphs.apply_in_graph if graphs.can_be_in_graph(grad) else _uncompiled
        kept = (maximize, weight_decay, decoupled_weight_decay, mask, engine, seed)
        keywords: dict[str, Any] = dict(zip(graphs.KEYWORDS, kept, strict=True))
        run(who, rule, param, grad, state, step, hyper, **keywords)
        return
    try:
        engines.check_engine(engine)
        checked_step = _checked_step(step)
        switches = {"maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        checks.check({**hyper, "weight_decay": weight_decay, **switches})
        hyper = {name: options.to_numbers(value) for name, value in hyper.items()}
        decay = float(options.to_number(weight_decay))
        shrink = 1 - hyper.get("lr", 0.0) * decay if decoupled_weight_decay else 1.0
        sign = -1.0 if maximize else 1.0
        seed = None if seed is None else _checked_seed(seed)
        _check_param(param)
        owner = param
        param, grad = local(param, grad, by_row=rule.by_row)
        check_writable("a parameter", param)
        gradient = touched(param, grad, by_row=rule.by_row)
        tensors = _checked_state(rule, param, state)
        if mask is not None:
            masks.checked([mask], [param], by_row=rule.by_row)
            selection = masks.Selection(mask, param.shape).update()
            gradient = masks.select(gradient, selection, param.numel())
    except InputError as error:
        raise InputError(f"{who}: {error}") from None
    l2 = 0.0 if decoupled_weight_decay else decay
    settings = Settings(rule, hyper, sign, l2, shrink, None, seed, seed is not None, lambda _: who)
    if mapped_files:
        announce_checked(param, tensors, gradient)
    written, gradient = for_engines(param.detach(), tensors, gradient)
    update = ParamUpdate(settings, {}, 0, owner, param, grad, gradient)
    update.written, update.step, update.seed = written, checked_step, seed
    engines.run([update], engine)
    tensors = [tensor for tensor in (owner, *state) if tensor is not None]
    if tensors:
        increment_version(tensors)  # they are the caller's own, who may have autograd watch them
    if mapped_files:
        note_written([owner])


def _checked_step(step: int | Tensor) -> int:
    contract = "step must be the number of this update, counted from 1"
    if isinstance(step, Tensor) and step.numel() != 1:
        raise InputError(sentence(contract, f"a tensor of shape {tuple(step.shape)}"))
    checks.number("step", step)
    value = options.to_number(step)
    if not 1 <= value < _TOO_MANY or value % 1:
        raise InputError(sentence(contract, value))
    return int(value)


def _checked_seed(seed: Any) -> int:
    try:
        return index(seed) & 0xFFFFFFFFFFFFFFFF  # both engines look at 64 bits
    except (TypeError, ValueError, RuntimeError):
        raise InputError(sentence("seed must be an integer or None", checks.shown(seed))) from None


_TOO_MANY = 1 << 63  # steps for the core to count


def _check_param(param: Tensor) -> None:
    if not isinstance(param, Tensor):
        raise InputError(sentence("the parameter must be a tensor", type(param).__name__))
    if param.layout is not torch.strided:
        raise InputError(sentence("the parameter must be a strided tensor", param.layout))
    if param.dtype not in FLOATS and param.dtype not in COMPLEX:
        raise InputError(sentence("a parameter must have a real float dtype", param.dtype))


def _checked_state(rule: Rule, param: Tensor, state: Sequence[Tensor | None]) -> list[Tensor]:
    names = [spec.name for spec in rule.state]
    if len(state) != len(names):
        contract = f"these options need the state {', '.join(names)}"
        raise InputError(sentence(contract, f"{len(state)} tensors"))
    tensors = states.checked(rule, param, dict(zip(names, state, strict=True)))
    for spec, tensor in zip(rule.state, tensors, strict=True):
        check_writable(f"the state {spec.name!r}", tensor)
    return tensors


_uncompiled = disable_compiler(apply_)
graphs.register(apply_)
