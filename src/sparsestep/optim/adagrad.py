"""Adagrad as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.adagrad import adagrad as torch_adagrad
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.errors import InputError, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer, kernel_of
from sparsestep.rules.idle import NoDrift
from sparsestep.rules.options import SharedOptions
from sparsestep.rules.rule import Rule, StateSpec


def update(
    param: Tensor, grad: Tensor, sum: Tensor, *, step: int, lr: float, lr_decay: float, eps: float
) -> tuple[Tensor, Tensor]:
    """One step of Adagrad."""
    sum = sum + grad * grad
    step_size = lr / (1 + (step - 1) * lr_decay)
    return param - step_size * grad / (sum.sqrt() + eps), sum


_SUM = StateSpec("sum", "initial_accumulator_value", int8_format="unsigned")
RULE = Rule("adagrad", update, (_SUM,), has_native_kernel=True, idle_update=NoDrift())


@passes_options
class Adagrad(RuleOptimizer, Optimizer):
    r"""Adagrad for dense and sparse gradients; a drop-in for ``torch.optim.Adagrad``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        s &\leftarrow s + g^2 \\
        p &\leftarrow p - \frac{lr}{1 + (t - 1) \eta} \cdot \frac{g}{\sqrt{s} + \epsilon}

    With dense gradients, the results are torch's up to rounding, and with ``foreach`` or ``fused``
    set, bit for bit. Unlike torch's class, it supports weight decay with sparse gradients.
    Decoupled weight decay shrinks the parameter by :math:`lr \lambda`, whatever :math:`\eta` is.

    The state is torch's: ``step`` and ``sum``, created with the optimizer. Checkpoints load in both
    directions.

    Args:
        lr_decay: :math:`\eta`, how fast the learning rate falls with the steps.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.Adagrad(table.parameters(), lr=0.1, weight_decay=0.01)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()

    References:
        Duchi, Hazan and Singer, `Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization <https://jmlr.org/papers/v12/duchi11a.html>`_, 2011.
    """

    rule = RULE
    has_initial_state = True
    group_options = (*RuleOptimizer.group_options, "decoupled_weight_decay")
    torch_kernel = staticmethod(kernel_of(torch_adagrad, "sum"))

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...


@document_args(like=Adagrad)
def adagrad_(
    param: Tensor,
    grad: Gradient,
    sum: Tensor,
    *,
    step: int | Tensor | None = None,
    lr: float | Tensor = 1e-2,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.Adagrad`. Without ``lr_decay``, ``step`` does not matter.

    Example:
        >>> import torch, sparsestep
        >>> weight, total = torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.adagrad_(weight, grad, total, lr=0.5)
        >>> weight[:, 0].tolist(), total[:, 0].tolist()
        ([0.0, -0.5], [0.0, 1.0])
    """
    if step is None and lr_decay:
        requirement = "adagrad_: with lr_decay, step must be the number of this update"
        raise InputError(message(requirement, "None"))
    step = 1 if step is None else step
    hyperparams = {"lr": lr, "lr_decay": lr_decay, "eps": eps}
    apply_("adagrad_", RULE, param, grad, [sum], step, hyperparams, **shared)


class FunctionalAdagrad(
    FunctionalOptimizer,
    optimizer=Adagrad,
    positional="lr lr_decay weight_decay initial_accumulator_value warmup_lr_multiplier "
    "warmup_num_iters eps coalesce_grad foreach fused maximize",
    torch_only={
        "warmup_lr_multiplier": 1.0,
        "warmup_num_iters": 0.0,
        "coalesce_grad": True,
    },
):
    """:class:`sparsestep.Adagrad` for gradients that you pass yourself."""

    @signature_from(Adagrad)
    def __init__(self, *args: Any, **options: Any) -> None: ...
