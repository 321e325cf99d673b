"""Adam, with AMSGrad, as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.optimizer import Optimizer, ParamsT

from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.grads.layouts import Gradient
from sparsestep.optim import _bias_correction as bias
from sparsestep.optim.functional import FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import AdamDrift
from sparsestep.rules.options import BiasCorrectionMode, EngineName, Mask, Semantics, shared_options
from sparsestep.rules.rule import Rule, StateSpec

Pair = tuple[float, float]


def _update_moments(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, betas: Pair
) -> tuple[Tensor, Tensor]:
    beta1, beta2 = betas
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    return exp_avg, beta2 * exp_avg_sq + (1 - beta2) * grad * grad


def update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    correction: bias.BiasCorrection,
    betas: Pair,
    eps: float,
) -> tuple[Tensor, ...]:
    """One step of Adam; eps is added after bias correction."""
    size, root = correction
    exp_avg, exp_avg_sq = _update_moments(grad, exp_avg, exp_avg_sq, betas)
    return param - size * exp_avg / (exp_avg_sq.sqrt() / root + eps), exp_avg, exp_avg_sq


def amsgrad(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor,
    *,
    correction: bias.BiasCorrection,
    betas: Pair,
    eps: float,
) -> tuple[Tensor, ...]:
    """One step of AMSGrad: the second moment that divides never shrinks."""
    size, root = correction
    exp_avg, exp_avg_sq = _update_moments(grad, exp_avg, exp_avg_sq, betas)
    max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    param = param - size * exp_avg / (max_exp_avg_sq.sqrt() / root + eps)
    return param, exp_avg, exp_avg_sq, max_exp_avg_sq


_STATE = (
    StateSpec("exp_avg", int8_format="signed"),
    StateSpec("exp_avg_sq", int8_format="unsigned"),
)
_MAX = (*_STATE, StateSpec("max_exp_avg_sq", int8_format="unsigned"))


_IDLE = AdamDrift(
    buffer="exp_avg",
    square="exp_avg_sq",
    decays=lambda hyperparams: dict(
        zip(("exp_avg", "exp_avg_sq"), hyperparams["betas"], strict=True)
    ),
    size=lambda step, hyperparams: bias.global_correction(
        step, hyperparams["lr"], hyperparams["betas"]
    ),
)
# The largest second moment does not decay.
_AMSGRAD_MOTION = replace(_IDLE, square="max_exp_avg_sq")

# By AMSGrad and by per-row bias correction.
RULES: dict[bool, dict[bool, Rule]] = {
    False: bias.rules_with_bias_correction("adam", update, _STATE, _IDLE),
    True: bias.rules_with_bias_correction("amsgrad", amsgrad, _MAX, _AMSGRAD_MOTION),
}

_KERNEL_OPTIONS = (
    *("amsgrad", "lr", "weight_decay", "eps", "maximize", "foreach", "capturable"),
    *("differentiable", "fused", "decoupled_weight_decay"),
)


class _AdamBase(RuleOptimizer):
    """What Adam and AdamW share; neither derives from the other, see RuleOptimizer."""

    has_torch_kernel = True
    foreach_supports_tensor_lr = False  # unless capturable
    group_options: ClassVar[tuple[str, ...]] = (*RuleOptimizer.group_options, "bias_correction")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: BiasCorrectionMode = "global",
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
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(
            params,
            defaults,
            bias_correction=bias_correction,
            **shared_options(
                engine, semantics, mask, state_dtype, stochastic_rounding, rounding_seed
            ),
        )

    @staticmethod
    def torch_kernel(batch: DenseBatch) -> None:
        """Let torch's own kernel do the step of dense gradients."""
        group = batch.group
        beta1, beta2 = group["betas"]
        torch_adam(
            batch.params,
            batch.grads,
            batch.state["exp_avg"],
            batch.state["exp_avg_sq"],
            batch.state.get("max_exp_avg_sq", []),
            batch.steps,
            beta1=beta1,
            beta2=beta2,
            has_complex=batch.has_complex,
            **{name: group[name] for name in _KERNEL_OPTIONS},
        )

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULES[bool(group["amsgrad"])][bias.uses_per_row(group)]


class Adam(_AdamBase, Optimizer):
    r"""Adam for dense and sparse gradients; a drop-in for ``torch.optim.Adam``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{lr}{1 - \beta_1^t} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Dense gradients run in torch's own kernel, so the results are torch's bit for bit. (For a
    half-precision parameter, set ``state_dtype`` to its dtype: by default the state is float32.)
    Entries that are missing from a sparse gradient stay unchanged, and so do their moments. With
    ``amsgrad``, the largest :math:`v` so far is used in the denominator.

    The state is torch's: ``step``, ``exp_avg``, ``exp_avg_sq`` and, for AMSGrad,
    ``max_exp_avg_sq``. Checkpoints load in both directions.

    Args:
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages of the gradient and its square.
        eps: added to the square root after bias correction.
        weight_decay: :math:`\lambda`.
        amsgrad: divide by the largest second moment so far.
        foreach: for torch's kernel.
        maximize: maximize the objective instead of minimizing it.
        capturable: for torch's kernel.
        differentiable: for torch's kernel; dense gradients only.
        fused: for torch's kernel.
        decoupled_weight_decay: shrink :math:`p` by :math:`lr \lambda` instead, as AdamW does.
        bias_correction: by the steps of the parameter (``"global"``) or the row (``"per_row"``).
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        semantics: what a missing entry means: no update (``"masked"``) or zero (``"dense"``).
        mask: a bool tensor that selects rows or elements to train; a list for several parameters.
        state_dtype: the dtype of the state. By default the parameter's, but at least float32.
        stochastic_rounding: round half-precision parameters and state up or down at random.
        rounding_seed: seed for stochastic rounding; by default that of ``torch.manual_seed``.

    Example:
        One optimizer for a table with sparse gradients and a layer with dense ones.

        >>> import torch, sparsestep
        >>> table, layer = torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 1)
        >>> optimizer = sparsestep.Adam([*table.parameters(), *layer.parameters()], lr=0.01)
        >>> layer(table(torch.tensor([2, 7, 2]))).sum().backward()
        >>> optimizer.step()

    References:
        Kingma and Ba, `Adam: A Method for Stochastic Optimization
        <https://arxiv.org/abs/1412.6980>`_, 2014. Reddi, Kale and Kumar, `On the Convergence of
        Adam and Beyond <https://arxiv.org/abs/1904.09237>`_, 2018.
    """


def adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
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
    """One step of :class:`sparsestep.Adam`, or of AMSGrad if you pass ``max_exp_avg_sq``.

    Args:
        param: the parameter.
        grad: its gradient, in any layout.
        exp_avg: the running average of the gradient.
        exp_avg_sq: the running average of its square.
        max_exp_avg_sq: the largest ``exp_avg_sq`` so far, for AMSGrad.
        step: the number of this update, counted from 1.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages.
        eps: added to the square root after bias correction.
        weight_decay: strength of the weight decay.
        decoupled_weight_decay: shrink the parameter instead of adding to the gradient.
        maximize: maximize the objective instead of minimizing it.
        mask: a bool tensor that selects the rows or elements to update.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: turns on stochastic rounding of half-precision tensors; use a new one for each step.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = torch.eye(2).to_sparse_coo()
        >>> sparsestep.functional.adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight.round(decimals=3).tolist()
        [[-0.5, 0.0], [0.0, -0.5]]
    """
    hyperparams = {"lr": lr, "betas": betas, "eps": eps}
    rule = RULES[max_exp_avg_sq is not None][False]
    state = [exp_avg, exp_avg_sq, max_exp_avg_sq][: len(rule.state)]
    apply_(
        *("adam_", rule, param, grad, state, step, hyperparams),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


class FunctionalAdam(
    FunctionalOptimizer,
    optimizer=Adam,
    positional=("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused"),
):
    """:class:`sparsestep.Adam` for gradients that you pass yourself."""

    @signature_from(Adam)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
