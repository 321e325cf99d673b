"""Adam with one second moment per row: half of Adam's state."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.errors import InputError, error_prefix, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim import adam
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules import options as checks
from sparsestep.rules.idle import AdamDrift, NoDrift
from sparsestep.rules.options import Betas, BiasCorrectionMode, DenseMode, SharedOptions
from sparsestep.rules.rule import Rule, StateSpec


def update(
    param: Tensor,
    grad: Tensor,
    *state: Tensor,
    correction: adam.BiasCorrection,
    betas: Betas,
    eps: float,
) -> tuple[Tensor, ...]:
    """One step; ``exp_avg_sq`` is a column beside the rows of ``param``.

    With a ``beta1`` of zero there is no ``exp_avg``: it is the gradient itself.
    """
    beta1, beta2 = betas
    size, root = correction
    *averages, exp_avg_sq = state
    averages = [exp_avg + (1 - beta1) * (grad - exp_avg) for exp_avg in averages]
    mean_square = (grad * grad).mean(dim=1, keepdim=True)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * mean_square
    direction = averages[0] if averages else grad
    return param - size / (exp_avg_sq.sqrt() / root + eps) * direction, *averages, exp_avg_sq


_SQUARE = StateSpec("exp_avg_sq", per_row=True)
_STATE = (StateSpec("exp_avg", int8_format="signed"), _SQUARE)
_IDLE = AdamDrift(buffer="exp_avg", square="exp_avg_sq", decays=adam.decays, size=adam.step_size)
_IDLE_WITHOUT_MOMENTUM = NoDrift(decays=lambda hyperparams: {"exp_avg_sq": hyperparams["betas"][1]})
RULES = adam.rules_with_bias_correction("rowwise_adam", update, _STATE, _IDLE)
RULES_WITHOUT_MOMENTUM = adam.rules_with_bias_correction(
    "rowwise_adam_without_momentum", update, (_SQUARE,), _IDLE_WITHOUT_MOMENTUM
)


@passes_options
class RowwiseAdam(RuleOptimizer, Optimizer):
    r"""Adam with one second moment per row, for embeddings.

    For every row of the gradient, with :math:`g` the sum of its duplicates and :math:`D`
    the length of a row:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) \frac{1}{D} \sum_j g_j^2 \\
        p &\leftarrow p - \frac{lr}{1 - \beta_1^t} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    FBGEMM calls this partial row-wise Adam; its weight decay is decoupled
    (``decoupled_weight_decay=True``). A row is a slice along the first dim, or a single element of
    a one-dimensional parameter.

    The state is ``step``, ``exp_avg`` and ``exp_avg_sq``, which has one value per row. With
    ``betas=(0.0, beta2)`` there is no ``exp_avg``: the state is 4 bytes per row, or 8 with
    ``bias_correction="per_row"``, whatever the length of a row. You may set the first beta of a
    group to zero during training; an ``exp_avg`` that is there is no longer used. The other way is
    refused: there is no ``exp_avg`` to continue from.

    With ``dense="elementwise"``, parameters with dense gradients get :class:`Adam`'s formula and
    state. The first gradient of a parameter decides, and its state keeps the decision: a later
    gradient of the other kind is updated by the same formula.

    Args:
        eps: added to the square root after bias correction.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.RowwiseAdam(table.parameters(), lr=0.01)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["exp_avg_sq"].shape
        torch.Size([10])

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2014.
    """

    group_options = (
        *RuleOptimizer.group_options,
        "bias_correction",
        "decoupled_weight_decay",
        "dense",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        bias_correction: BiasCorrectionMode = "global",
        dense: DenseMode = "rowwise",
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        rules = RULES if group["betas"][0] != 0 else RULES_WITHOUT_MOMENTUM
        return rules[adam.uses_per_row(group)]

    @classmethod
    def elementwise_rule_for(cls, group: dict[str, Any]) -> Rule | None:
        """Adam's rule, if dense gradients are updated element by element."""
        is_elementwise = group.get("dense") == "elementwise"
        return adam.RULES[False][adam.uses_per_row(group)] if is_elementwise else None


@document_args(like=RowwiseAdam)
def rowwise_adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor | None = None,
    exp_avg_sq: Tensor | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.RowwiseAdam`; ``exp_avg_sq`` has one value per row.

    If ``betas[0]`` is zero, pass ``exp_avg_sq`` alone.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.rowwise_adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[:, 0].round(decimals=3).tolist()
        [0.0, -0.5]
    """
    hyperparams = {"lr": lr, "betas": betas, "eps": eps}
    rule, state = RULES[False], [exp_avg, exp_avg_sq]
    if exp_avg is None:
        with error_prefix("rowwise_adam_"):
            checks.check_options({"betas": betas})
        if betas[0] != 0:
            requirement = "rowwise_adam_: betas[0] must be 0 without exp_avg"
            raise InputError(message(requirement, betas[0], "Pass a tensor of zeros"))
        rule, state = RULES_WITHOUT_MOMENTUM[False], [exp_avg_sq]
    apply_("rowwise_adam_", rule, param, grad, state, step, hyperparams, **shared)


class FunctionalRowwiseAdam(FunctionalOptimizer, optimizer=RowwiseAdam):
    """:class:`sparsestep.RowwiseAdam` for gradients that you pass yourself."""

    @signature_from(RowwiseAdam)
    def __init__(self, *args: Any, **options: Any) -> None: ...
