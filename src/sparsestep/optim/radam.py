"""RAdam as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.radam import radam as torch_radam
from typing_extensions import Unpack

from sparsestep.grads.layouts import Gradient
from sparsestep.optim import adam
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer, kernel_of
from sparsestep.rules.options import Betas, SharedOptions
from sparsestep.rules.rule import Rule


def rectified(step: int, lr: float, betas: Betas) -> tuple[float, bool]:
    """The size of a step, and whether it divides by the root of the second moment."""
    size, root = adam.global_correction(step, lr, betas)
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
    betas: Betas,
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
RULE = Rule("radam", update, adam.MOMENTS, has_native_kernel=True)


@passes_options
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
    of its own. ``semantics="dense"`` is not supported. With dense gradients, the results are
    torch's up to rounding, and with ``foreach`` set, bit for bit.

    The state is torch's: ``step``, ``exp_avg`` and ``exp_avg_sq``. Checkpoints load in both
    directions.

    Args:
        eps: added to the square root before bias correction.

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

    rule = RULE
    torch_kernel = staticmethod(kernel_of(torch_radam, "exp_avg", "exp_avg_sq"))

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...


@document_args(like=RAdam)
def radam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.RAdam`.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.tensor([[1.0, 4.0]]))
        >>> sparsestep.functional.radam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[1].tolist()
        [-0.5, -2.0]
    """
    hyperparams = {"lr": lr, "betas": betas, "eps": eps}
    apply_("radam_", RULE, param, grad, [exp_avg, exp_avg_sq], step, hyperparams, **shared)


class FunctionalRAdam(FunctionalOptimizer, optimizer=RAdam):
    """:class:`sparsestep.RAdam` for gradients that you pass yourself."""

    @signature_from(RAdam)
    def __init__(self, *args: Any, **options: Any) -> None: ...
