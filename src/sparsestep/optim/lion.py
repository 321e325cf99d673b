"""Lion: a step of constant size along the sign of an average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import (
    FunctionalOptimizer,
    FunctionOptions,
    WeightDecay,
    apply_,
    signature_from,
)
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import SignDrift
from sparsestep.rules.options import NO_OP_VALUES, Betas, SharedOptions
from sparsestep.rules.rule import Rule, StateSpec


def update(
    param: Tensor, grad: Tensor, exp_avg: Tensor, *, step: int, lr: float, betas: Betas
) -> tuple[Tensor, Tensor]:
    """One step of Lion."""
    beta1, beta2 = betas
    param = param - lr * (exp_avg + (1 - beta1) * (grad - exp_avg)).sign()
    return param, exp_avg + (1 - beta2) * (grad - exp_avg)


_IDLE = SignDrift(
    buffer="exp_avg",
    decays=lambda hyperparams: {"exp_avg": hyperparams["betas"][1]},
    size=lambda step, hyperparams: (hyperparams["lr"] if hyperparams["betas"][0] > 0 else 0.0, 1.0),
)
RULE = Rule(
    "lion",
    update,
    (StateSpec("exp_avg", int8_format="signed"),),
    has_native_kernel=True,
    idle_update=_IDLE,
)


@passes_options
class Lion(RuleOptimizer, Optimizer):
    r"""Lion, with one running average as its only state.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        p &\leftarrow (1 - lr \lambda) p - lr \cdot \mathrm{sign}(\beta_1 m + (1 - \beta_1) g) \\
        m &\leftarrow \beta_2 m + (1 - \beta_2) g

    Weight decay is decoupled. The state is ``step`` and ``exp_avg``.

    Args:
        lr: learning rate, a number or a one-element tensor. Use one that is three to ten times
            smaller than for AdamW.
        betas: the weight of the running average in the step, and its decay rate.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.Lion(table.parameters(), lr=1e-4)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()

    References:
        Chen et al., `Symbolic Discovery of Optimization Algorithms
        <https://arxiv.org/abs/2302.06675>`_, 2023.
    """

    rule = RULE
    always_decoupled = True
    no_op_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NO_OP_VALUES,
        "decoupled_weight_decay": (True,),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...


@document_args(like=Lion)
def lion_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-4,
    betas: Betas = (0.9, 0.99),
    weight_decay: float = 0.0,
    **shared: Unpack[FunctionOptions],
) -> None:
    """One step of :class:`sparsestep.Lion`. Weight decay is decoupled.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean = torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.lion_(weight, grad, mean, lr=0.5)
        >>> weight[:, 0].tolist()
        [0.0, -0.5]
    """
    hyperparams = {"lr": lr, "betas": betas}
    decay = WeightDecay(weight_decay=weight_decay, decoupled_weight_decay=True)
    apply_("lion_", RULE, param, grad, [exp_avg], step, hyperparams, **decay, **shared)


class FunctionalLion(FunctionalOptimizer, optimizer=Lion):
    """:class:`sparsestep.Lion` for gradients that you pass yourself."""

    @signature_from(Lion)
    def __init__(self, *args: Any, **options: Any) -> None: ...
