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
from typing_extensions import Unpack

from sparsestep import engines, masks, options
from sparsestep import state as states
from sparsestep.contract import Rule, Settings, Update
from sparsestep.errors import InputError, sentence
from sparsestep.grads import COMPLEX, FLOATS
from sparsestep.layouts import Gradient, touched
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
        engines.check_engine(engine)
        step = _checked_step(step)
        if param.dtype not in FLOATS and param.dtype not in COMPLEX:
            raise InputError(sentence("a parameter must be of a real float dtype", param.dtype))
        lr = options.number(hyper.get("lr", 0.0))
        hyper = {**hyper, "lr": lr} if "lr" in hyper else hyper
        gradient = touched(param, grad, by_row=rule.by_row)
        names = [kept.name for kept in rule.state]
        tensors = states.checked(rule, param, dict(zip(names, state, strict=True)))
        if mask is not None:
            masks.checked(mask, [param], by_row=rule.by_row)
            selection = masks.Selection(mask, param.shape).update()
            gradient = masks.select(gradient, selection, param.numel())
    except InputError as error:
        raise InputError(f"{who}: {error}") from None
    written = param.detach()
    if param.is_complex():
        gradient = gradient.as_real()
        written = torch.view_as_real(written)
        tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    shrink = 1 - lr * weight_decay if decoupled_weight_decay else 1.0
    l2 = 0.0 if decoupled_weight_decay else weight_decay
    sign = -1.0 if maximize else 1.0
    settings = Settings(rule, hyper, sign, l2, shrink, None, seed, lambda _: who)
    update = Update(settings, 0, written, gradient, tensors, step, seed)
    engines.run([update], engine, engines.native_step(engine))


def _checked_step(step: int | Tensor) -> int:
    number = int(step)
    if number < 1:
        raise InputError(sentence("step must be the number of this update, from 1", number))
    return number


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
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule = sparse_adam_rules.RULE
    apply_("sparse_adam_", rule, param, grad, [exp_avg, exp_avg_sq], step, hyper, **common)


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
    decay: Decay = {**common, "weight_decay": weight_decay, "decoupled_weight_decay": True}
    apply_("adamw_", rule, param, grad, state, step, hyper, **decay)


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
    if momentum and momentum_buffer is None:
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
    decay: Decay = {**common, "weight_decay": weight_decay, "decoupled_weight_decay": True}
    hyper = {"lr": lr, "betas": betas}
    apply_("lion_", lion.RULE, param, grad, [exp_avg], step, hyper, **decay)


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
    apply_("ftrl_", ftrl.RULE, param, grad, [linear, sum], step, hyper, **common)
