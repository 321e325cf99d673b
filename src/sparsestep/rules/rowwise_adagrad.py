"""Adagrad with one sum per row: an embedding's optimizer state shrinks to one number per row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.contract import checks
from sparsestep.contract.motion import Still
from sparsestep.contract.options import DecayExtras
from sparsestep.contract.rule import Rule, State
from sparsestep.optimizer.base import RuleOptimizer


def update(
    param: Tensor, grad: Tensor, sum: Tensor, *, step: int, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    """One step; ``sum`` is a column beside the rows of ``param``."""
    sum = sum + (grad * grad).mean(dim=1, keepdim=True)
    return param - lr / (sum.sqrt() + eps) * grad, sum


def coefficients(*, step: int, lr: float, eps: float) -> tuple[float, ...]:
    """What ``native/rules/rowwise_adagrad.h`` takes."""
    return lr, eps


_SUM = State("sum", "initial_accumulator_value", per_row=True)
RULE = Rule("rowwise_adagrad", update, (_SUM,), coefficients, motion=Still())


class RowwiseAdagrad(RuleOptimizer, Optimizer):
    r"""Adagrad with one sum per row, for embeddings.

    For every row that the gradient holds, with :math:`g` the sum of its duplicates and :math:`D`
    the length of a row:

    .. math::
        g &\leftarrow g + \lambda p \\
        s &\leftarrow s + \frac{1}{D} \sum_j g_j^2 \\
        p &\leftarrow p - lr \cdot \frac{g}{\sqrt{s} + \epsilon}

    This is what FBGEMM calls exact row-wise Adagrad. A row is a slice along the first dim; of a
    one-dimensional parameter, an element. A complex row counts as twice as many real numbers.

    The state is ``step`` and ``sum``, which has the length of the first dim.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: :math:`\lambda`.
        initial_accumulator_value: what ``sum`` starts with.
        eps: added to the square root. FBGEMM's default is 1e-8; this is torch's Adagrad's.
        maximize: go along the gradient instead of against it.
        **extras: see :class:`sparsestep.contract.options.DecayExtras`.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.RowwiseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].shape
        torch.Size([10])

    References:
        Mudigere et al., `Software-Hardware Co-design for Fast and Scalable Training of Deep
        Learning Recommendation Models <https://arxiv.org/abs/2104.05158>`_, 2021.
    """

    extras = (*RuleOptimizer.extras, "decoupled_weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **extras: Unpack[DecayExtras],
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **extras)

    @staticmethod
    def check_options(group: dict[str, Any]) -> None:
        """Refuse values that the formula cannot work with."""
        checks.learning_rate(group["lr"])
        checks.at_least_zero("epsilon", group["eps"])
        for name in ("weight_decay", "initial_accumulator_value"):
            checks.at_least_zero(name, group[name])

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULE
