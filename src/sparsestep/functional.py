"""One function per rule: param, gradient, state tensors, options. In place, and nothing hidden.

The gradient may have any layout: strided, COO, CSR, CSC, BSR, BSC, a ``MaskedTensor`` or a
``Touched``. State tensors come in torch's order and under torch's names and are written in place;
``step`` is the number of the update, from 1. Everything is checked before anything is written.
Autograd is not involved, so the functions may be called inside anybody's ``torch.no_grad`` code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from typing_extensions import Unpack

from sparsestep import engines
from sparsestep.contract import checks, options
from sparsestep.contract.rule import Rule
from sparsestep.engines.protocol import ParamUpdate, Settings
from sparsestep.errors import InputError, sentence, usable
from sparsestep.gradients import masks
from sparsestep.gradients.layouts import Gradient, touched
from sparsestep.gradients.touched import COMPLEX, FLOATS
from sparsestep.memory.parameters import check_writable
from sparsestep.optimizer import state as states
from sparsestep.optimizer.updates import in_real_numbers, local
from sparsestep.rules import adagrad, adam, ftrl, lion, rmsprop, rowwise_adagrad, rowwise_adam, sgd
from sparsestep.rules import sparse_adam as sparse_adam_rules

Pair = tuple[float, float]


class Common(TypedDict, total=False):
    """What every function takes.

    Attributes:
        maximize: go along the gradient instead of against it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"`` or ``"reference"``.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """

    maximize: bool
    mask: Tensor | None
    engine: str
    seed: int | None


class Decay(Common, total=False):
    """What functions with weight decay take.

    Attributes:
        weight_decay: how much.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
    """

    weight_decay: float
    decoupled_weight_decay: bool


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
    engine: str = "auto",
    seed: int | None = None,
) -> None:
    """Run any rule once over one parameter; the functions below are short for this."""
    try:
        with usable("the arguments must be of their kinds: tensors, numbers, True or False"):
            engines.check_engine(engine)
            number = _checked_step(step)
            hyper = _checked_options(hyper)
            checks.at_least_zero("weight_decay", weight_decay)
            decay = float(options.number(weight_decay))
            shrink = 1 - hyper.get("lr", 0.0) * decay if decoupled_weight_decay else 1.0
            sign = -1.0 if maximize else 1.0
            rule.numbers(hyper)  # they must be numbers
            if seed is not None:
                # What the core takes; both engines look at no more than that.
                seed &= 0xFFFFFFFFFFFFFFFF
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
    settings = Settings(rule, hyper, sign, l2, shrink, None, seed, lambda _: who)
    written, gradient = in_real_numbers(param.detach(), tensors, gradient)
    update = ParamUpdate(settings, {}, 0, owner, param, grad, gradient)
    update.written, update.step, update.seed = written, number, seed
    engines.run([update], engine)
    tensors = [tensor for tensor in (owner, *state) if tensor is not None]
    if tensors:
        increment_version(tensors)  # they are the caller's own, who may have autograd watch them


def _checked_step(step: int | Tensor) -> int:
    value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(value, Tensor):
        contract = "step must be the number of this update, from 1"
        raise InputError(sentence(contract, f"a tensor of shape {tuple(value.shape)}"))
    if not value >= 1 or value % 1:
        raise InputError(sentence("step must be the number of this update, from 1", value))
    return int(value)


_ANY_NUMBER = ("dampening", "nesterov")


def _checked_options(hyper: dict[str, Any]) -> dict[str, Any]:
    """The formula's options as plain numbers; refuses what it cannot work with."""
    for name, value in hyper.items():
        if name == "lr":
            checks.learning_rate(value)
        elif name == "betas":
            checks.betas(value)
        elif name not in _ANY_NUMBER:
            checks.at_least_zero("epsilon" if name == "eps" else name, value)
    return {name: options.plain(value) for name, value in hyper.items()}


def _check_param(param: Tensor) -> None:
    if not isinstance(param, Tensor):
        raise InputError(sentence("the parameter must be a tensor", type(param).__name__))
    if param.layout is not torch.strided:
        raise InputError(sentence("the parameter must be a strided tensor", param.layout))
    if param.dtype not in FLOATS and param.dtype not in COMPLEX:
        raise InputError(sentence("a parameter must be of a real float dtype", param.dtype))


def _checked_state(rule: Rule, param: Tensor, state: Sequence[Tensor | None]) -> list[Tensor]:
    names = [kept.name for kept in rule.state]
    if len(state) != len(names):
        contract = f"these options need the state {', '.join(names)}"
        raise InputError(sentence(contract, f"{len(state)} tensors"))
    tensors = states.checked(rule, param, dict(zip(names, state, strict=True)))
    for kept, tensor in zip(rule.state, tensors, strict=True):
        wanted = states.dtype_for(kept, param)
        if tensor.is_complex() != wanted.is_complex:
            contract = f"the state {kept.name!r} of a {param.dtype} parameter must be {wanted}"
            raise InputError(sentence(contract, tensor.dtype))
        check_writable(f"the state {kept.name!r}", tensor)
    return tensors


def sparse_adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Pair = (0.9, 0.999),
    eps: float = 1e-8,
    **common: Unpack[Common],
) -> None:
    """One step of :class:`sparsestep.SparseAdam`.

    Example:
        >>> import sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.Touched(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.sparse_adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[:, 0].round(decimals=3).tolist()
        [0.0, -0.5, 0.0]
    """
    if isinstance(param, Tensor) and param.is_complex():  # as SparseAdam
        raise InputError(sentence("sparse_adam_: the parameter must be real", param.dtype))
    with usable("sparse_adam_: eps must be a number"):
        is_zero = options.number(eps) == 0
    if is_zero:
        raise InputError(sentence("sparse_adam_: eps must be greater than 0", eps))
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule, state = sparse_adam_rules.RULE, [exp_avg, exp_avg_sq]
    apply_(
        *("sparse_adam_", rule, param, grad, state, step, hyper),
        weight_decay=0.0,
        decoupled_weight_decay=False,
        **common,
    )


def adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Pair = (0.9, 0.999),
    eps: float = 1e-8,
    **decay: Unpack[Decay],
) -> None:
    """One step of :class:`sparsestep.Adam`; of AMSGrad, where ``max_exp_avg_sq`` is given.

    Example:
        >>> import sparsestep
        >>> weight, mean, square = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = torch.eye(2).to_sparse_coo()
        >>> sparsestep.functional.adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight.round(decimals=3).tolist()
        [[-0.5, 0.0], [0.0, -0.5]]
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule = adam.RULES[max_exp_avg_sq is not None, False]
    state = [exp_avg, exp_avg_sq, max_exp_avg_sq][: len(rule.state)]
    apply_("adam_", rule, param, grad, state, step, hyper, **decay)


def adamw_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Pair = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    **common: Unpack[Common],
) -> None:
    """One step of :class:`sparsestep.AdamW`: Adam with decoupled weight decay."""
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule = adam.RULES[max_exp_avg_sq is not None, False]
    state = [exp_avg, exp_avg_sq, max_exp_avg_sq][: len(rule.state)]
    apply_(
        *("adamw_", rule, param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=True,
        **common,
    )


def adagrad_(
    param: Tensor,
    grad: Gradient,
    sum: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    **decay: Unpack[Decay],
) -> None:
    """One step of :class:`sparsestep.Adagrad`."""
    hyper = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
    apply_("adagrad_", adagrad.RULE, param, grad, [sum], step, hyper, **decay)


def rowwise_adagrad_(
    param: Tensor,
    grad: Gradient,
    sum: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-2,
    eps: float = 1e-10,
    **decay: Unpack[Decay],
) -> None:
    """One step of :class:`sparsestep.RowwiseAdagrad`; ``sum`` has the length of the first dim."""
    hyper = {"lr": lr, "eps": eps}
    apply_("rowwise_adagrad_", rowwise_adagrad.RULE, param, grad, [sum], step, hyper, **decay)


def rowwise_adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Pair = (0.9, 0.999),
    eps: float = 1e-8,
    **decay: Unpack[Decay],
) -> None:
    """One step of :class:`sparsestep.RowwiseAdam`; ``exp_avg_sq`` has the first dim's length."""
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    state = [exp_avg, exp_avg_sq]
    apply_("rowwise_adam_", rowwise_adam.RULE, param, grad, state, step, hyper, **decay)


def sgd_(
    param: Tensor,
    grad: Gradient,
    momentum_buffer: Tensor | None = None,
    *,
    step: int | Tensor = 2,
    lr: float | Tensor = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    **decay: Unpack[Decay],
) -> None:
    """One step of :class:`sparsestep.SGD`; with momentum, where ``momentum_buffer`` is given.

    ``step=1`` says that it is the buffer's first: it then takes the gradient undampened.
    """
    with usable("sgd_: the options must be of their kinds: numbers, True or False"):
        needs_more = bool(nesterov and (momentum <= 0 or dampening != 0))
    if needs_more:
        raise InputError("sgd_: Nesterov momentum requires a momentum and zero dampening.")
    if momentum_buffer is None:
        if momentum:
            contract = "sgd_: momentum needs a momentum_buffer"
            raise InputError(sentence(contract, "None", "Pass a tensor of zeros, and step=1"))
        apply_("sgd_", sgd.RULE, param, grad, [], step, {"lr": lr}, **decay)
        return
    hyper = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    apply_("sgd_", sgd.MOMENTUM, param, grad, [momentum_buffer], step, hyper, **decay)


def rmsprop_(
    param: Tensor,
    grad: Gradient,
    square_avg: Tensor,
    momentum_buffer: Tensor | None = None,
    grad_avg: Tensor | None = None,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    **decay: Unpack[Decay],
) -> None:
    """One step of :class:`sparsestep.RMSprop`; centered where ``grad_avg`` is given."""
    hyper = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum}
    rule = rmsprop.RULES[grad_avg is not None, momentum_buffer is not None]
    state = [t for t in (square_avg, momentum_buffer, grad_avg) if t is not None]
    with usable("rmsprop_: momentum must be a number"):
        needs_buffer = bool(momentum) and momentum_buffer is None
    if needs_buffer:
        contract = "rmsprop_: momentum needs a momentum_buffer"
        raise InputError(sentence(contract, "None", "Pass a tensor of zeros"))
    apply_("rmsprop_", rule, param, grad, state, step, hyper, **decay)


def lion_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-4,
    betas: Pair = (0.9, 0.99),
    weight_decay: float = 0.0,
    **common: Unpack[Common],
) -> None:
    """One step of :class:`sparsestep.Lion`, whose weight decay is decoupled."""
    hyper = {"lr": lr, "betas": betas}
    apply_(
        *("lion_", lion.RULE, param, grad, [exp_avg], step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=True,
        **common,
    )


def ftrl_(
    param: Tensor,
    grad: Gradient,
    linear: Tensor,
    sum: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 0.1,
    beta: float = 1.0,
    l1: float = 0.0,
    l2: float = 0.0,
    **common: Unpack[Common],
) -> None:
    """One step of :class:`sparsestep.Ftrl`."""
    hyper = {"lr": lr, "beta": beta, "l1": l1, "l2": l2}
    state = [linear, sum]
    apply_(
        *("ftrl_", ftrl.RULE, param, grad, state, step, hyper),
        weight_decay=0.0,
        decoupled_weight_decay=False,
        **common,
    )
