"""Adagrad with one sum per row: an embedding's optimizer state shrinks to one number per row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from sparsestep.contract import checks
from sparsestep.contract.motion import Still
from sparsestep.contract.options import Engine, Mask, Semantics, common
from sparsestep.contract.rule import Rule, State
from sparsestep.gradients.layouts import Gradient
from sparsestep.optimizer.applying import apply_
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer, takes


def update(
    param: Tensor, grad: Tensor, sum: Tensor, *, step: int, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    """One step; ``sum`` is a column beside the rows of ``param``."""
    sum = sum + (grad * grad).mean(dim=1, keepdim=True)
    return param - lr / (sum.sqrt() + eps) * grad, sum


_SUM = State("sum", "initial_accumulator_value", per_row=True)
RULE = Rule("rowwise_adagrad", update, (_SUM,), is_native=True, motion=Still())


class RowwiseAdagrad(RuleOptimizer, Optimizer):
    r"""Adagrad with one sum per row, for embeddings.

    For every row of the gradient, with :math:`g` the sum of its duplicates and :math:`D`
    the length of a row:

    .. math::
        g &\leftarrow g + \lambda p \\
        s &\leftarrow s + \frac{1}{D} \sum_j g_j^2 \\
        p &\leftarrow p - lr \cdot \frac{g}{\sqrt{s} + \epsilon}

    This is what FBGEMM calls exact row-wise Adagrad. A row is a slice along the first dim; of a
    one-dimensional parameter, an element. A complex row counts as twice as many real numbers.

    The state is ``step`` and ``sum``, which has the length of the first dim.

    It is row-wise for every parameter, dense layers included: a ``Linear`` gets one sum for each
    output. Where layers are to have a sum per element, as in DLRM, give them an :class:`Adagrad`.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor.
        weight_decay: :math:`\lambda`.
        initial_accumulator_value: what ``sum`` starts with.
        eps: added to the square root. FBGEMM's default is 1e-8; this is torch's Adagrad's.
        maximize: maximize the objective instead of minimizing it.
        decoupled_weight_decay: shrink :math:`p` by :math:`lr \lambda` instead, as AdamW does.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        semantics: what a missing entry means: no update (``"masked"``) or zero (``"dense"``).
        mask: bools, which rows or elements are trained; a list if there are several parameters.
        state_dtype: the dtype of the state. By default the parameter's, but at least float32.
        stochastic_rounding: round half-precision parameters and state up or down at random.
        rounding_seed: its seed; by default that of ``torch.manual_seed``.

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

    _extras: ClassVar[tuple[str, ...]] = (*RuleOptimizer._extras, "decoupled_weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        engine: Engine = "auto",
        semantics: Semantics = "masked",
        mask: Mask = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            decoupled_weight_decay=decoupled_weight_decay,
            **common(engine, semantics, mask, state_dtype, stochastic_rounding, rounding_seed),
        )

    @staticmethod
    def _check_options(group: dict[str, Any]) -> None:
        """Refuse values that the formula cannot work with."""
        checks.learning_rate(group["lr"])
        checks.at_least_zero("epsilon", group["eps"])
        for name in ("weight_decay", "initial_accumulator_value"):
            checks.at_least_zero(name, group[name])

    @classmethod
    def _rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULE


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
        *("rowwise_adagrad_", RULE, param, grad, [sum], step, hyper),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


class FunctionalRowwiseAdagrad(FunctionalOptimizer):
    """:class:`sparsestep.RowwiseAdagrad` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = RowwiseAdagrad
    positional: ClassVar[tuple[str, ...]] = (
        "lr",
        "weight_decay",
        "initial_accumulator_value",
        "eps",
    )

    @takes(RowwiseAdagrad)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
