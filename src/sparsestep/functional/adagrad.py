"""Adagrad's family: what sums up squares."""

from __future__ import annotations

from torch import Tensor

from sparsestep.contract.options import Engine
from sparsestep.functional.apply import apply_
from sparsestep.gradients.layouts import Gradient
from sparsestep.rules import adagrad, ftrl, rowwise_adagrad


def adagrad_(
    param: Tensor,
    grad: Gradient,
    sum: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.Adagrad`.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        sum: the sum of the gradients' squares.
        step: the number of this update, from 1.
        lr: learning rate, a number or a one-element tensor.
        lr_decay: how fast the learning rate falls with the number of the update.
        eps: added to the square root.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
    apply_(
        *("adagrad_", adagrad.RULE, param, grad, [sum], step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


def rowwise_adagrad_(
    param: Tensor,
    grad: Gradient,
    sum: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.RowwiseAdagrad`; ``sum`` has the length of the first dim.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        sum: the sum of the squares' means over a row; one number for each row.
        step: the number of this update, for which the formula does not ask.
        lr: learning rate, a number or a one-element tensor.
        eps: added to the square root.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "eps": eps}
    apply_(
        *("rowwise_adagrad_", rowwise_adagrad.RULE, param, grad, [sum], step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
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
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    r"""One step of :class:`sparsestep.Ftrl`.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        linear: what the paper calls :math:`z`.
        sum: the sum of the gradients' squares.
        step: the number of this update, for which the formula does not ask.
        lr: the paper's :math:`\alpha`, a number or a one-element tensor.
        beta: the paper's :math:`\beta`.
        l1: the strength of L1 regularisation.
        l2: the strength of L2 regularisation.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "beta": beta, "l1": l1, "l2": l2}
    state = [linear, sum]
    apply_(
        *("ftrl_", ftrl.RULE, param, grad, state, step, hyper),
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )
