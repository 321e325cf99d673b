"""AdamW: Adam's formula with decoupled weight decay, as ``torch.optim`` has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.errors import InputError, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.adam import RULES, Adam
from sparsestep.optim.functional import (
    FunctionalOptimizer,
    FunctionOptions,
    WeightDecay,
    apply_,
    signature_from,
)
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.options import Betas, BiasCorrectionMode, SharedOptions, format_value


@passes_options
class AdamW(RuleOptimizer, Optimizer):
    r"""Adam with decoupled weight decay; a drop-in for ``torch.optim.AdamW``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        p &\leftarrow (1 - lr \lambda) p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{lr}{1 - \beta_1^t} \cdot
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    State, checkpoints and the treatment of dense gradients are the same as for :class:`Adam`.

    Args:
        eps: added to the square root after bias correction.
        decoupled_weight_decay: always ``True``.

    Example:
        Only the rows of three new tokens are trained; all others stay bit-for-bit unchanged.

        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4)
        >>> new = torch.arange(10) >= 7
        >>> optimizer = sparsestep.AdamW([{"params": [table.weight], "mask": new}])
        >>> before = table.weight.detach().clone()
        >>> table(torch.tensor([1, 8, 9])).square().sum().backward()
        >>> optimizer.step()
        >>> (table.weight != before).any(dim=1).nonzero().flatten().tolist()
        [7, 8, 9]

    References:
        Loshchilov and Hutter, `Decoupled Weight Decay Regularization
        <https://arxiv.org/abs/1711.05101>`_, 2017.
    """

    foreach_supports_tensor_lr = False  # unless capturable
    group_options = Adam.group_options
    torch_kernel = staticmethod(Adam.torch_kernel)
    rule_for = Adam.rule_for

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = True,
        bias_correction: BiasCorrectionMode = "global",
        **shared: Unpack[SharedOptions],
    ) -> None:
        if decoupled_weight_decay is not True:
            requirement = "AdamW: decoupled_weight_decay must be True"
            raise InputError(message(requirement, format_value(decoupled_weight_decay), "Use Adam"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of Adam does not turn this into Adam
            group["decoupled_weight_decay"] = True


@document_args(like=AdamW)
def adamw_(
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
    weight_decay: float = 1e-2,
    **shared: Unpack[FunctionOptions],
) -> None:
    """One step of :class:`sparsestep.AdamW`: Adam with decoupled weight decay.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.adamw_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[:, 0]
        tensor([1.0000, 0.4950])
    """
    hyperparams = {"lr": lr, "betas": betas, "eps": eps}
    rule = RULES[max_exp_avg_sq is not None][False]
    state = [exp_avg, exp_avg_sq, max_exp_avg_sq][: len(rule.state)]
    decay = WeightDecay(weight_decay=weight_decay, decoupled_weight_decay=True)
    apply_("adamw_", rule, param, grad, state, step, hyperparams, **decay, **shared)


class FunctionalAdamW(
    FunctionalOptimizer,
    optimizer=AdamW,
    positional="lr betas eps weight_decay amsgrad maximize foreach fused",
):
    """:class:`sparsestep.AdamW` for gradients that you pass yourself."""

    @signature_from(AdamW)
    def __init__(self, *args: Any, **options: Any) -> None: ...
