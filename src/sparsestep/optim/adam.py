"""Adam, with AMSGrad, as ``torch.optim`` has it, for every kind of gradient.

Other optimizers of the family share the running averages and their bias correction. The averages
begin at zero, so after ``t`` updates they hold only ``1 - beta^t`` of what they should. Torch
counts the parameter's steps. A row of an embedding that is first seen at step 2001 then counts as
long corrected and moves almost three times as far as the first rows did; with
``bias_correction="per_row"`` each row counts its own updates. The native kernel is
``native/rules/bias_correction.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer, kernel_of
from sparsestep.rules.idle import AdamDrift, IdleUpdate
from sparsestep.rules.options import Betas, BiasCorrectionMode, SharedOptions
from sparsestep.rules.rule import Rule, StateSpec

MOMENTS = (
    StateSpec("exp_avg", int8_format="signed"),
    StateSpec("exp_avg_sq", int8_format="unsigned"),
)

# The row's own count. Exact up to 2^24 updates.
ROW_STEP = StateSpec("row_step", per_row=True, dtype=torch.float32)


class BiasCorrection(NamedTuple):
    """Factors of the bias correction: numbers, or columns with one for each row."""

    step_size: Any  # lr / (1 - beta1^t)
    root: Any  # sqrt(1 - beta2^t)


def global_correction(step: int, lr: float, betas: Betas) -> BiasCorrection:
    """By the number of the parameter's steps."""
    beta1, beta2 = betas
    return BiasCorrection(lr / (1 - beta1**step), math.sqrt(1 - beta2**step))


def step_size(step: int, hyperparams: Mapping[str, Any]) -> BiasCorrection:
    """Return the size of an idle row's step, for an ``IdleUpdate``."""
    return global_correction(step, hyperparams["lr"], hyperparams["betas"])


def decays(hyperparams: Mapping[str, Any]) -> dict[str, float]:
    """Return the decay of an idle row's averages, for an ``IdleUpdate``."""
    return dict(zip(("exp_avg", "exp_avg_sq"), hyperparams["betas"], strict=True))


def per_row_correction(row_step: Tensor, lr: float, betas: Betas) -> tuple[BiasCorrection, Tensor]:
    """By each row's own count of updates; also returns the counts after this one."""
    row_step = row_step + 1
    count = row_step.double()
    step_size = lr / (1 - betas[0] ** count)
    root = (1 - betas[1] ** count).sqrt()
    return BiasCorrection(step_size.to(row_step), root.to(row_step)), row_step


def rules_with_bias_correction(
    name: str,
    update: Callable[..., tuple[Tensor, ...]],
    state: tuple[StateSpec, ...],
    idle_update: IdleUpdate,
) -> dict[bool, Rule]:
    """The rules of ``update(param, grad, *state, correction, betas, eps)``, by uses_per_row."""

    def with_steps(
        param: Tensor, grad: Tensor, *state: Tensor, step: int, lr: float, betas: Betas, eps: float
    ) -> tuple[Tensor, ...]:
        correction = global_correction(step, lr, betas)
        return update(param, grad, *state, correction=correction, betas=betas, eps=eps)

    def with_rows(
        param: Tensor, grad: Tensor, *state: Tensor, step: int, lr: float, betas: Betas, eps: float
    ) -> tuple[Tensor, ...]:
        correction, row_step = per_row_correction(state[-1], lr, betas)
        new = update(param, grad, *state[:-1], correction=correction, betas=betas, eps=eps)
        return *new, row_step

    return {
        False: Rule(name, with_steps, state, has_native_kernel=True, idle_update=idle_update),
        True: Rule(f"{name}_per_row", with_rows, (*state, ROW_STEP), has_native_kernel=True),
    }


def uses_per_row(group: dict[str, Any]) -> bool:
    """Whether a param group asks for it."""
    return bool(group.get("bias_correction") == "per_row")


def update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *largest: Tensor,
    correction: BiasCorrection,
    betas: Betas,
    eps: float,
) -> tuple[Tensor, ...]:
    """One step of Adam, or of AMSGrad with ``max_exp_avg_sq``; eps is added after correction."""
    beta1, beta2 = betas
    size, root = correction
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    largest = tuple(torch.maximum(each, exp_avg_sq) for each in largest)  # never shrinks
    divisor = (largest or (exp_avg_sq,))[0].sqrt() / root + eps
    return param - size * exp_avg / divisor, exp_avg, exp_avg_sq, *largest


_AMSGRAD_STATE = (*MOMENTS, StateSpec("max_exp_avg_sq", int8_format="unsigned"))
_IDLE = AdamDrift(buffer="exp_avg", square="exp_avg_sq", decays=decays, size=step_size)
# The largest second moment does not decay.
_AMSGRAD_IDLE = replace(_IDLE, square="max_exp_avg_sq")

# By AMSGrad and by per-row bias correction.
RULES: dict[bool, dict[bool, Rule]] = {
    False: rules_with_bias_correction("adam", update, MOMENTS, _IDLE),
    True: rules_with_bias_correction("amsgrad", update, _AMSGRAD_STATE, _AMSGRAD_IDLE),
}


@passes_options
class Adam(RuleOptimizer, Optimizer):
    r"""Adam for dense and sparse gradients; a drop-in for ``torch.optim.Adam``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{lr}{1 - \beta_1^t} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    With dense gradients, the results are torch's up to rounding, and with ``foreach`` or ``fused``
    set, bit for bit. (For a half-precision parameter, set ``state_dtype`` to its dtype as well: by
    default the state is float32.) Entries that are missing from a sparse gradient stay unchanged,
    and so do their moments. With ``amsgrad``, the largest :math:`v` so far is used in the
    denominator.

    The state is torch's: ``step``, ``exp_avg``, ``exp_avg_sq`` and, for AMSGrad,
    ``max_exp_avg_sq``. Checkpoints load in both directions.

    Args:
        eps: added to the square root after bias correction.

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

    foreach_supports_tensor_lr = False  # unless capturable
    group_options = (*RuleOptimizer.group_options, "bias_correction")
    torch_kernel = staticmethod(
        kernel_of(torch_adam, "exp_avg", "exp_avg_sq", "max_exp_avg_sq", tensor_betas=True)
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: BiasCorrectionMode = "global",
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULES[bool(group["amsgrad"])][uses_per_row(group)]


@document_args(like=Adam)
def adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.Adam`, or of AMSGrad if you pass ``max_exp_avg_sq``.

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
    apply_("adam_", rule, param, grad, state, step, hyperparams, **shared)


class FunctionalAdam(
    FunctionalOptimizer,
    optimizer=Adam,
    positional="lr betas eps weight_decay amsgrad maximize foreach fused",
):
    """:class:`sparsestep.Adam` for gradients that you pass yourself."""

    @signature_from(Adam)
    def __init__(self, *args: Any, **options: Any) -> None: ...
