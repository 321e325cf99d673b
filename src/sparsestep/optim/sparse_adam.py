"""Adam that updates entries of the gradient alone, as ``torch.optim.SparseAdam``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.errors import InputError, error_prefix, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim import adam
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import (
    FunctionalOptimizer,
    FunctionOptions,
    apply_,
    check_keywords,
    signature_from,
)
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import AdamDrift
from sparsestep.rules.options import Betas, BiasCorrectionMode, SharedOptions, check_positive
from sparsestep.rules.rule import Rule


def update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    correction: adam.BiasCorrection,
    betas: Betas,
    eps: float,
) -> tuple[Tensor, ...]:
    """One step of Adam; eps is added before bias correction, unlike in ``torch.optim.Adam``."""
    beta1, beta2 = betas
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = exp_avg_sq + (1 - beta2) * (grad * grad - exp_avg_sq)
    step_size = correction.step_size * correction.root
    return param - step_size * (exp_avg / (exp_avg_sq.sqrt() + eps)), exp_avg, exp_avg_sq


def _idle_step_size(step: int, hyperparams: Mapping[str, Any]) -> Betas:
    size, root = adam.global_correction(step, hyperparams["lr"], hyperparams["betas"])
    return size * root, 1.0


_IDLE = AdamDrift(buffer="exp_avg", square="exp_avg_sq", decays=adam.decays, size=_idle_step_size)
RULES = adam.rules_with_bias_correction("sparse_adam", update, adam.MOMENTS, _IDLE)


@passes_options
class SparseAdam(RuleOptimizer, Optimizer):
    r"""Adam that only updates entries of the gradient; a drop-in for ``torch.optim.SparseAdam``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        m &\leftarrow m + (1 - \beta_1)(g - m) \\
        v &\leftarrow v + (1 - \beta_2)(g^2 - v) \\
        p &\leftarrow p - \frac{lr \sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \cdot
            \frac{m}{\sqrt{v} + \epsilon}

    Entries that are missing from the gradient stay unchanged, and so do their moments. A stored
    zero counts as an entry. :math:`t` is the number of steps of the parameter. The state is
    torch's: ``step``, ``exp_avg``, ``exp_avg_sq``. Checkpoints load in both directions. For float16
    and bfloat16 parameters, the moments are float32.

    Unlike torch's class, it accepts dense gradients (which touch every entry) and ``lr=0``, and a
    step that raises has changed nothing.

    Args:
        eps: added to the square root before bias correction.

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

    step_is_tensor = False
    group_options = (*RuleOptimizer.group_options, "bias_correction")
    supports_complex = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        bias_correction: BiasCorrectionMode = "global",
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @classmethod
    def check_options(cls, group: dict[str, Any]) -> None:
        """Refuse an eps of 0, as torch does: a gradient of 0 would become 0 / 0."""
        check_positive("eps", group["eps"])

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULES[adam.uses_per_row(group)]


@document_args(like=SparseAdam)
def sparse_adam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    **shared: Unpack[FunctionOptions],
) -> None:
    """One step of :class:`sparsestep.SparseAdam`.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.sparse_adam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[:, 0].round(decimals=3).tolist()
        [0.0, -0.5, 0.0]
    """
    if isinstance(param, Tensor) and param.is_complex():  # as SparseAdam
        raise InputError(message("sparse_adam_: the parameter must be real", param.dtype))
    if not (isinstance(eps, float) and 0.0 < eps < math.inf):
        with error_prefix("sparse_adam_"):
            check_positive("eps", eps)
    hyperparams = {"lr": lr, "betas": betas, "eps": eps}
    rule, state = RULES[False], [exp_avg, exp_avg_sq]
    check_keywords("sparse_adam_", shared)
    apply_("sparse_adam_", rule, param, grad, state, step, hyperparams, **shared)


class FunctionalSparseAdam(FunctionalOptimizer, optimizer=SparseAdam):
    """:class:`sparsestep.SparseAdam` for gradients that you pass yourself."""

    @signature_from(SparseAdam)
    def __init__(self, *args: Any, **options: Any) -> None: ...
