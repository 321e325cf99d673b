"""RAdam as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.radam import radam as torch_radam

from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.grads.layouts import Gradient
from sparsestep.optim import _bias_correction as bias
from sparsestep.optim.functional import FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules import options
from sparsestep.rules.options import EngineName, Mask, Semantics, shared_options
from sparsestep.rules.rule import Rule, StateSpec

Pair = tuple[float, float]


def rectified(step: int, lr: float, betas: Pair) -> tuple[float, bool]:
    """The size of a step, and whether it divides by the root of the second moment.

    Example:
        >>> rectified(1, 0.5, (0.5, 0.75))
        (1.0, False)
    """
    size, root = bias.global_correction(step, lr, betas)
    left = betas[1] ** step
    rho_inf = 2 / (1 - betas[1]) - 1
    rho = rho_inf - 2 * step * left / (1 - left)
    if rho <= 5:
        return size, False
    rect = math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))
    return size * root * rect, True


def update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: Pair,
    eps: float,
) -> tuple[Tensor, ...]:
    """One step of RAdam; eps is added before bias correction."""
    beta1, beta2 = betas
    size, divides = rectified(step, lr, betas)
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    move = size * exp_avg
    if divides:
        move = move / (exp_avg_sq.sqrt() + eps)
    return param - move, exp_avg, exp_avg_sq


# No idle update: an idle row moves as under momentum SGD at first and as under Adam later,
# and an idle update has one kind.
_STATE = (
    StateSpec("exp_avg", int8_format="signed"),
    StateSpec("exp_avg_sq", int8_format="unsigned"),
)
RULE = Rule("radam", update, _STATE, has_native_kernel=True)

_KERNEL_OPTIONS = (
    *("lr", "weight_decay", "eps", "maximize", "foreach", "capturable"),
    *("differentiable", "decoupled_weight_decay"),
)


class RAdam(RuleOptimizer, Optimizer):
    r"""RAdam for dense and sparse gradients; a drop-in for ``torch.optim.RAdam``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{lr}{1 - \beta_1^t} \cdot m \cdot
            \begin{cases}
            r_t \sqrt{1 - \beta_2^t} / (\sqrt{v} + \epsilon) & \rho_t > 5 \\
            1 & \text{else}
            \end{cases}

    where :math:`\rho_t` measures how many gradients :math:`v` averages, and :math:`r_t` corrects
    the variance of that average:

    .. math::
        \rho_\infty &= \frac{2}{1 - \beta_2} - 1 \qquad
        \rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1 - \beta_2^t} \\
        r_t &= \sqrt{\frac{(\rho_t - 4)(\rho_t - 2) \rho_\infty}
            {(\rho_\infty - 4)(\rho_\infty - 2) \rho_t}}

    So the first steps (five, with the usual betas) use momentum alone: a warm-up that needs no
    schedule. :math:`t` counts the steps of the parameter, so a row that appears late has no warm-up
    of its own. ``semantics="dense"`` is not supported. Dense gradients run in torch's own kernel,
    so the results are torch's bit for bit.

    The state is torch's: ``step``, ``exp_avg`` and ``exp_avg_sq``. Checkpoints load in both
    directions.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages of the gradient and its square.
        eps: added to the square root before bias correction.
        weight_decay: :math:`\lambda`.
        decoupled_weight_decay: shrink :math:`p` by :math:`lr \lambda` instead, as AdamW does.
        foreach: for torch's kernel.
        maximize: maximize the objective instead of minimizing it.
        capturable: for torch's kernel.
        differentiable: for torch's kernel; dense gradients only.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        semantics: what a missing entry means: no update (``"masked"``) or zero (``"dense"``).
        mask: a bool tensor that selects rows or elements to train; a list for several parameters.
        state_dtype: the dtype of the state. By default the parameter's, but at least float32.
        stochastic_rounding: round half-precision parameters and state up or down at random.
        rounding_seed: seed for stochastic rounding; by default that of ``torch.manual_seed``.

    Example:
        The first step goes by the gradient, not by its sign as Adam's does.

        >>> import torch, sparsestep
        >>> weight = torch.tensor([[1.0, 4.0]] * 4)
        >>> table = torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        >>> optimizer = sparsestep.RAdam(table.parameters(), lr=0.25)
        >>> table(torch.tensor([1, 3])).square().sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [[1.0, 4.0], [0.5, 2.0], [1.0, 4.0], [0.5, 2.0]]

    References:
        Liu et al., `On the Variance of the Adaptive Learning Rate and Beyond
        <https://arxiv.org/abs/1908.03265>`_, 2019.
    """

    has_torch_kernel = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Pair = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        engine: EngineName = "auto",
        semantics: Semantics = "masked",
        mask: Mask = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "decoupled_weight_decay": decoupled_weight_decay,
            "differentiable": differentiable,
        }
        super().__init__(
            params,
            defaults,
            **shared_options(
                engine, semantics, mask, state_dtype, stochastic_rounding, rounding_seed
            ),
        )

    @staticmethod
    def torch_kernel(batch: DenseBatch) -> None:
        """Let torch's own kernel do the step of dense gradients."""
        beta1, beta2 = options.as_floats(batch.group["betas"])
        torch_radam(
            batch.params,
            batch.grads,
            batch.state["exp_avg"],
            batch.state["exp_avg_sq"],
            batch.steps,
            beta1=beta1,
            beta2=beta2,
            has_complex=batch.has_complex,
            **{name: batch.group[name] for name in _KERNEL_OPTIONS},
        )

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULE


def radam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: EngineName = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.RAdam`.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: the running average of its square.
        step: the number of this update, counted from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root before bias correction.
        weight_decay: strength of the weight decay.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: a bool tensor that selects the rows or elements to update.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: turns on stochastic rounding of half-precision tensors; use a new one for each step.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.tensor([[1.0, 4.0]]))
        >>> sparsestep.functional.radam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[1].tolist()
        [-0.5, -2.0]
    """
    hyperparams = {"lr": lr, "betas": betas, "eps": eps}
    state = [exp_avg, exp_avg_sq]
    apply_(
        *("radam_", RULE, param, grad, state, step, hyperparams),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


class FunctionalRAdam(
    FunctionalOptimizer, optimizer=RAdam, positional=("lr", "betas", "eps", "weight_decay")
):
    """:class:`sparsestep.RAdam` for gradients that you pass yourself."""

    @signature_from(RAdam)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
