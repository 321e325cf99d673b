"""What goes along a running average of gradients."""

from __future__ import annotations

from torch import Tensor

from sparsestep.contract.options import Engine
from sparsestep.errors import InputError, sentence, usable
from sparsestep.functional.apply import apply_
from sparsestep.gradients.layouts import Gradient
from sparsestep.rules import lion, rmsprop, sgd

Pair = tuple[float, float]


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
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.SGD`; with momentum, where ``momentum_buffer`` is given.

    ``step=1`` says that it is the buffer's first: it then takes the gradient undampened.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        momentum_buffer: the buffer, where there is momentum.
        step: the number of this update; 1 where the buffer is new.
        lr: learning rate, a number or a one-element tensor.
        momentum: how much of the buffer is kept.
        dampening: how much of the gradient does not go into the buffer.
        nesterov: look ahead by the momentum.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    with usable("sgd_: the options must be of their kinds: numbers, True or False"):
        needs_more = bool(nesterov and (momentum <= 0 or dampening != 0))
    if needs_more:
        raise InputError("sgd_: Nesterov momentum requires a momentum and zero dampening.")
    if momentum_buffer is None and momentum:
        contract = "sgd_: momentum needs a momentum_buffer"
        raise InputError(sentence(contract, "None", "Pass a tensor of zeros, and step=1"))
    rule, state, hyper = sgd.RULE, list[Tensor](), {"lr": lr}
    if momentum_buffer is not None:
        rule, state = sgd.MOMENTUM, [momentum_buffer]
        hyper |= {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    apply_(
        *("sgd_", rule, param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


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
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.RMSprop`; centered where ``grad_avg`` is given.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        square_avg: the running average of the gradient's square.
        momentum_buffer: the buffer, where there is momentum.
        grad_avg: that of the gradient, for the centered form.
        step: the number of this update, for which the formula does not ask.
        lr: learning rate, a number or a one-element tensor.
        alpha: decay rates of the running averages.
        eps: added to the square root.
        momentum: how much of the buffer is kept.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum}
    rule = rmsprop.RULES[grad_avg is not None, momentum_buffer is not None]
    state = [t for t in (square_avg, momentum_buffer, grad_avg) if t is not None]
    with usable("rmsprop_: momentum must be a number"):
        needs_buffer = bool(momentum) and momentum_buffer is None
    if needs_buffer:
        contract = "rmsprop_: momentum needs a momentum_buffer"
        raise InputError(sentence(contract, "None", "Pass a tensor of zeros"))
    apply_(
        *("rmsprop_", rule, param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


def lion_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-4,
    betas: Pair = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.Lion`, whose weight decay is decoupled.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        step: the number of this update, for which the formula does not ask.
        lr: learning rate, a number or a one-element tensor.
        betas: how much of the average goes into the step, and how slowly it forgets.
        weight_decay: how fast the parameter shrinks: by ``lr * weight_decay``.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "betas": betas}
    apply_(
        *("lion_", lion.RULE, param, grad, [exp_avg], step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=True,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )
