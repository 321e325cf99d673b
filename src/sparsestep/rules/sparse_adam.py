"""Adam over what was touched, with the formula of ``torch.optim.SparseAdam``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from sparsestep import checks
from sparsestep.contract import Rule, State
from sparsestep.optimizer import RuleOptimizer


def _step_size(step: int, lr: float, beta1: float, beta2: float) -> float:
    return lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)


def update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam; eps is added before bias correction, unlike in ``torch.optim.Adam``."""
    beta1, beta2 = betas
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq + (1 - beta2) * (grad * grad - exp_avg_sq)
    param = param - _step_size(step, lr, beta1, beta2) * (exp_avg / (exp_avg_sq.sqrt() + eps))
    return param, exp_avg, exp_avg_sq


def coefficients(
    *, step: int, lr: float, betas: tuple[float, float], eps: float
) -> tuple[float, ...]:
    """What ``native/rules/sparse_adam.h`` takes."""
    beta1, beta2 = betas
    return 1 - beta1, 1 - beta2, eps, _step_size(step, lr, beta1, beta2)


class SparseAdam(RuleOptimizer):
    r"""Adam that updates only what the gradient holds; a drop-in for ``torch.optim.SparseAdam``.

    For every entry that the gradient holds, with :math:`g` the sum of its duplicates:

    .. math::
        m &\leftarrow m + (1 - \beta_1)(g - m) \\
        v &\leftarrow v + (1 - \beta_2)(g^2 - v) \\
        p &\leftarrow p - \frac{lr \sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot
            \frac{m}{\sqrt{v} + \epsilon}

    Entries that the gradient does not hold keep their bits, moments included. A stored zero counts
    as held. :math:`t` is the parameter's number of steps. The state is torch's: ``step``,
    ``exp_avg``, ``exp_avg_sq``; checkpoints go back and forth. For float16 and bfloat16 parameters
    the moments are float32.

    Unlike torch's class it takes dense gradients too (every entry is touched), accepts ``lr=0``,
    and changes nothing when it raises.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor.
        betas: how slowly the running averages of the gradient and its square forget.
        eps: added to the square root before bias correction.
        maximize: go along the gradient instead of against it.
        engine: ``"auto"``, ``"native"`` or ``"reference"``. The numbers do not depend on it.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.SparseAdam(table.parameters(), lr=0.01)
        >>> before = table.weight.detach().clone()
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).any(dim=1).nonzero().flatten().tolist()
        [2, 7]

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2014.
    """

    rule = Rule(
        name="sparse_adam",
        update=update,
        state=(State("exp_avg"), State("exp_avg_sq")),
        coefficients=coefficients,
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        engine: str = "auto",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults, engine=engine)

    @staticmethod
    def check_options(options: dict[str, Any]) -> None:
        """Refuse values that the formula cannot work with."""
        checks.learning_rate(options["lr"])
        checks.epsilon(options["eps"])
        checks.betas(options["betas"])
