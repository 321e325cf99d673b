"""Follow the regularized leader, proximal: the classic of click prediction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import (
    FunctionalOptimizer,
    FunctionOptions,
    apply_,
    check_keywords,
    signature_from,
)
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import RecomputeFromState
from sparsestep.rules.options import SharedOptions
from sparsestep.rules.rule import Rule, StateSpec


def update(
    param: Tensor,
    grad: Tensor,
    linear: Tensor,
    sum: Tensor,
    *,
    step: int,
    lr: float,
    beta: float,
    l1: float,
    l2: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step; with a learning rate of zero the parameter rests."""
    rate = 1 / lr if lr else 0.0
    before = sum.sqrt()
    sum = sum + grad * grad
    root = sum.sqrt()
    linear = linear + grad - (root - before) * rate * param
    return (solve(linear, root, rate, beta, l1, l2) if rate else param), linear, sum


def solve(linear: Tensor, root: Tensor, rate: float, beta: float, l1: float, l2: float) -> Tensor:
    """The parameter, which is a function of its state; ``root`` is that of ``sum``."""
    solution = (linear.sign() * l1 - linear) / ((beta + root) * rate + l2)
    return torch.where(linear.abs() <= l1, 0.0, solution)


_STATE = (StateSpec("linear"), StateSpec("sum", "initial_accumulator_value"))
# Without a gradient, it is only the learning rate that moves the parameter.
_IDLE = RecomputeFromState(
    native="ftrl",
    formula=lambda state, hyperparams: solve(
        state["linear"],
        state["sum"].sqrt(),
        1 / hyperparams["lr"] if hyperparams["lr"] else 0.0,
        hyperparams["beta"],
        hyperparams["l1"],
        hyperparams["l2"],
    ),
)
RULE = Rule("ftrl", update, _STATE, has_native_kernel=True, idle_update=_IDLE)


@passes_options
class Ftrl(RuleOptimizer, Optimizer):
    r"""FTRL-Proximal with L1 and L2 regularization.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        \sigma &= \frac{\sqrt{n + g^2} - \sqrt{n}}{lr} \\
        z &\leftarrow z + g - \sigma p \\
        n &\leftarrow n + g^2 \\
        p &\leftarrow \begin{cases}
            0 & |z| \le \lambda_1 \\
            -\dfrac{z - \mathrm{sign}(z) \lambda_1}{(\beta + \sqrt{n}) / lr + \lambda_2}
                & \text{otherwise}
        \end{cases}

    The parameter is a function of :math:`z` and :math:`n` alone, so its initial value is soon
    forgotten. Start at zero, as the paper does. With L1, most weights are exactly zero.

    The state is ``step``, ``linear`` (:math:`z`) and ``sum`` (:math:`n`).

    Args:
        lr: the paper's :math:`\alpha`, a number or a one-element tensor.

    Example:
        >>> import torch, sparsestep
        >>> weight = torch.nn.Parameter(torch.zeros(1000, 1))
        >>> optimizer = sparsestep.Ftrl([weight], lr=0.1, l1=0.5)
        >>> weight.grad = torch.sparse_coo_tensor(
        ...     [[3, 7]], [[1.0], [0.25]], (1000, 1), check_invariants=True
        ... )
        >>> optimizer.step()
        >>> weight.detach()[[3, 7]].flatten().tolist()
        [-0.02500000037252903, 0.0]

    References:
        McMahan et al., `Ad Click Prediction: a View from the Trenches
        <https://research.google/pubs/ad-click-prediction-a-view-from-the-trenches/>`_, 2013.
    """

    rule = RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.1,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        initial_accumulator_value: float = 0.0,
        *,
        maximize: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...


@document_args(like=Ftrl)
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
    **shared: Unpack[FunctionOptions],
) -> None:
    r"""One step of :class:`sparsestep.Ftrl`.

    Example:
        >>> import torch, sparsestep
        >>> weight, linear, total = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.ftrl_(weight, grad, linear, total, lr=0.5, l1=0.5)
        >>> weight[:, 0].tolist()
        [0.0, -0.125]
    """
    hyperparams = {"lr": lr, "beta": beta, "l1": l1, "l2": l2}
    state = [linear, sum]
    check_keywords("ftrl_", shared)
    apply_("ftrl_", RULE, param, grad, state, step, hyperparams, **shared)


class FunctionalFtrl(FunctionalOptimizer, optimizer=Ftrl):
    """:class:`sparsestep.Ftrl` for gradients that you pass yourself."""

    @signature_from(Ftrl)
    def __init__(self, *args: Any, **options: Any) -> None: ...
