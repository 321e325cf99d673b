"""Adam's family."""

from __future__ import annotations

from torch import Tensor

from sparsestep.contract.options import Engine, to_number
from sparsestep.errors import InputError, sentence, usable
from sparsestep.functional.apply import apply_
from sparsestep.gradients.layouts import Gradient
from sparsestep.rules import adam, radam, rowwise_adam
from sparsestep.rules import sparse_adam as sparse_adam_rules

Pair = tuple[float, float]


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
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.SparseAdam`.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: that of its square.
        step: the number of this update, from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root before bias correction.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.Touched(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.sparse_adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[:, 0].round(decimals=3).tolist()
        [0.0, -0.5, 0.0]
    """
    if isinstance(param, Tensor) and param.is_complex():  # as SparseAdam
        raise InputError(sentence("sparse_adam_: the parameter must be real", param.dtype))
    with usable("sparse_adam_: eps must be a number"):
        is_zero = to_number(eps) == 0
    if is_zero:
        raise InputError(sentence("sparse_adam_: eps must be greater than 0", eps))
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule, state = sparse_adam_rules.RULES[False], [exp_avg, exp_avg_sq]
    apply_(
        *("sparse_adam_", rule, param, grad, state, step, hyper),
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
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
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.Adam`; of AMSGrad, where ``max_exp_avg_sq`` is given.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: that of its square.
        max_exp_avg_sq: the largest of these so far, for AMSGrad.
        step: the number of this update, from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root after bias correction.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = torch.eye(2).to_sparse_coo()
        >>> sparsestep.functional.adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight.round(decimals=3).tolist()
        [[-0.5, 0.0], [0.0, -0.5]]
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule = adam.RULES[max_exp_avg_sq is not None][False]
    state = [exp_avg, exp_avg_sq, max_exp_avg_sq][: len(rule.state)]
    apply_(
        *("adam_", rule, param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


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
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.AdamW`: Adam with decoupled weight decay.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: that of its square.
        max_exp_avg_sq: the largest of these so far, for AMSGrad.
        step: the number of this update, from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root after bias correction.
        weight_decay: how fast the parameter shrinks: by ``lr * weight_decay``.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    rule = adam.RULES[max_exp_avg_sq is not None][False]
    state = [exp_avg, exp_avg_sq, max_exp_avg_sq][: len(rule.state)]
    apply_(
        *("adamw_", rule, param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=True,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


def radam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Pair = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.RAdam`.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: that of its square.
        step: the number of this update, from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root before bias correction.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.Touched(torch.tensor([1]), torch.tensor([[1.0, 4.0]]))
        >>> sparsestep.functional.radam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[1].tolist()
        [-0.5, -2.0]
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    state = [exp_avg, exp_avg_sq]
    apply_(
        *("radam_", radam.RULE, param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


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
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: Engine = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.RowwiseAdam`; ``exp_avg_sq`` has the first dim's length.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: that of its square's mean over a row; one number for each row.
        step: the number of this update, from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root after bias correction.
        weight_decay: how strongly the parameter is drawn to zero.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: which rows or elements may move at all; a bool tensor.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: round half-precision tensors at random, with this seed; another one for each step.
    """
    hyper = {"lr": lr, "betas": betas, "eps": eps}
    state = [exp_avg, exp_avg_sq]
    apply_(
        *("rowwise_adam_", rowwise_adam.RULES[False], param, grad, state, step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )
