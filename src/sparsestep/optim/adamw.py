"""AdamW: Adam's formula with decoupled weight decay, as ``torch.optim`` has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from sparsestep.errors import InputError, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim.adam import RULES, FunctionalAdam, _AdamBase
from sparsestep.optim.functional import FunctionalOptimizer, apply_, signature_from
from sparsestep.rules import options as checks
from sparsestep.rules.options import BiasCorrectionMode, EngineName, Mask, Semantics, shared_options


class AdamW(_AdamBase, Optimizer):
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
        params: parameters or param groups, as for every torch optimizer.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the running averages of the gradient and its square.
        eps: added to the square root after bias correction.
        weight_decay: :math:`\lambda`.
        amsgrad: divide by the largest second moment so far.
        maximize: maximize the objective instead of minimizing it.
        foreach: for torch's kernel.
        capturable: for torch's kernel.
        differentiable: for torch's kernel; dense gradients only.
        fused: for torch's kernel.
        decoupled_weight_decay: always ``True``.
        bias_correction: by the steps of the parameter (``"global"``) or the row (``"per_row"``).
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        semantics: what a missing entry means: no update (``"masked"``) or zero (``"dense"``).
        mask: a bool tensor that selects rows or elements to train; a list for several parameters.
        state_dtype: the dtype of the state. By default the parameter's, but at least float32.
        stochastic_rounding: round half-precision parameters and state up or down at random.
        rounding_seed: seed for stochastic rounding; by default that of ``torch.manual_seed``.

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
        engine: EngineName = "auto",
        semantics: Semantics = "masked",
        mask: Mask = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        rounding_seed: int | None = None,
    ) -> None:
        if decoupled_weight_decay is not True:
            requirement = "AdamW: decoupled_weight_decay must be True"
            raise InputError(
                message(requirement, checks.format_value(decoupled_weight_decay), "Use Adam")
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            bias_correction=bias_correction,
            **shared_options(
                engine, semantics, mask, state_dtype, stochastic_rounding, rounding_seed
            ),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of Adam does not turn this into Adam
            group["decoupled_weight_decay"] = True


def adamw_(
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
    weight_decay: float = 1e-2,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: EngineName = "auto",
    seed: int | None = None,
) -> None:
    """One step of :class:`sparsestep.AdamW`: Adam with decoupled weight decay.

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
        weight_decay: decoupled; the parameter is multiplied by ``1 - lr * weight_decay``.
        maximize: maximize the objective instead of minimizing it.
        mask: a bool tensor that selects the rows or elements to update.
        engine: ``"auto"``, ``"native"``, ``"reference"``, or ``"triton"`` for a GPU; they agree.
        seed: turns on stochastic rounding of half-precision tensors; use a new one for each step.

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
    apply_(
        *("adamw_", rule, param, grad, state, step, hyperparams),
        weight_decay=weight_decay,
        decoupled_weight_decay=True,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


class FunctionalAdamW(FunctionalOptimizer, optimizer=AdamW, positional=FunctionalAdam.positional):
    """:class:`sparsestep.AdamW` for gradients that you pass yourself."""

    @signature_from(AdamW)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
