"""NAdam as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.nadam import nadam as torch_nadam
from torch.optim.optimizer import Optimizer, ParamsT, StateDict
from typing_extensions import Unpack

from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.grads.layouts import Gradient
from sparsestep.optim import adam
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer, kernel_of
from sparsestep.rules.idle import AdamDrift
from sparsestep.rules.options import Betas, SharedOptions, as_float
from sparsestep.rules.rule import Rule

_NEGLIGIBLE = 1e-20  # 1 minus this is 1


def momentum(step: int, beta1: float, momentum_decay: float) -> float:
    """The momentum of a step, which grows from half of ``beta1`` to ``beta1``."""
    return beta1 * (1 - 0.5 * math.pow(0.96, step * momentum_decay))


def momentum_product(step: int, beta1: float, momentum_decay: float) -> float:
    """The product of the momentum of all steps so far; 0 if it no longer matters.

    It is rounded to float32 after each step, as in torch under its default dtype.
    """
    known = _known_products(beta1, momentum_decay)
    for i in range(len(known), step + 1):
        if known[i - 1] < _NEGLIGIBLE:
            return 0.0
        product = torch.tensor(known[i - 1], dtype=torch.float32, device="cpu")
        known[i] = (product * momentum(i, beta1, momentum_decay)).item()
    return known[step]


@lru_cache(maxsize=64)
def _known_products(beta1: float, momentum_decay: float) -> dict[int, float]:
    return {0: 1.0}


def step_sizes(
    step: int, lr: float, betas: Betas, momentum_decay: float
) -> tuple[float, float, float]:
    """Return the step sizes along gradient and average, and the root of the correction."""
    now, following = (momentum(i, betas[0], momentum_decay) for i in (step, step + 1))
    product = momentum_product(step, betas[0], momentum_decay)
    along_grad = lr * (1 - now) / (1 - product)
    along_average = lr * following / (1 - product * following)
    return along_grad, along_average, math.sqrt(1 - betas[1] ** step)


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
    momentum_decay: float,
) -> tuple[Tensor, ...]:
    """One step of NAdam; eps is added after bias correction."""
    beta1, beta2 = betas
    along_grad, along_average, root = step_sizes(step, lr, betas, momentum_decay)
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    move = (along_grad * grad + along_average * exp_avg) / (exp_avg_sq.sqrt() / root + eps)
    return param - move, exp_avg, exp_avg_sq


def _idle_step_size(step: int, hyperparams: Mapping[str, Any]) -> tuple[float, float]:
    return step_sizes(step, *(hyperparams[name] for name in ("lr", "betas", "momentum_decay")))[1:]


_IDLE = AdamDrift(buffer="exp_avg", square="exp_avg_sq", decays=adam.decays, size=_idle_step_size)


def _torch_product(group: Mapping[str, Any], step: Tensor) -> Tensor:
    """Return torch's ``mu_product``."""
    beta1, momentum_decay = as_float(group["betas"][0]), as_float(group["momentum_decay"])
    product = momentum_product(int(step), beta1, momentum_decay)
    return torch.full_like(step, product, dtype=torch.float32)


_torch_kernel = kernel_of(torch_nadam, "exp_avg", "exp_avg_sq", "mu_product")
RULE = Rule("nadam", update, adam.MOMENTS, has_native_kernel=True, idle_update=_IDLE)


@passes_options
class NAdam(RuleOptimizer, Optimizer):
    r"""Adam with Nesterov momentum; a drop-in for ``torch.optim.NAdam``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - lr \left(\frac{1 - \mu_t}{1 - \prod_{i \le t} \mu_i} \, g +
            \frac{\mu_{t+1}}{1 - \prod_{i \le t+1} \mu_i} \, m\right) \Big/
            \left(\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon\right)

    where the momentum :math:`\mu_t = \beta_1 (1 - 0.5 \cdot 0.96^{t \psi})` grows with the steps of
    the parameter. With dense gradients, the results are torch's up to rounding, and with
    ``foreach`` set, bit for bit. Entries that are missing from a sparse gradient stay unchanged,
    and so do their moments.

    The state is ``step``, ``exp_avg`` and ``exp_avg_sq``. Torch also keeps ``mu_product``, the
    product above. Here it follows from ``step`` and the options; ``state_dict()`` has it, so
    checkpoints load in both directions.

    Args:
        eps: added to the square root after bias correction.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.NAdam(table.parameters(), lr=0.01)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()

    References:
        Dozat, `Incorporating Nesterov Momentum into Adam
        <https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ>`_, 2016.
    """

    rule = RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @staticmethod
    def torch_kernel(batch: DenseBatch) -> None:
        """Let torch's own kernel do the step of dense gradients."""
        products = [_torch_product(batch.group, step) for step in batch.steps]
        _torch_kernel(replace(batch, state={**batch.state, "mu_product": products}))

    def state_dict(self, *, packed: bool = False) -> StateDict:
        """Like torch's, with ``mu_product``. All rows catch up first."""
        found = super().state_dict(packed=packed)
        for group in found["param_groups"]:
            for key in group["params"]:
                param_state = found["state"].get(key)
                if param_state:
                    product = _torch_product(group, param_state["step"])
                    found["state"][key] = {**param_state, "mu_product": product}
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for param_state in self.state.values():
            if isinstance(param_state, dict):  # a checkpoint may have other entries
                param_state.pop("mu_product", None)


@document_args(like=NAdam)
def nadam_(
    param: Tensor,
    grad: Gradient,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | Tensor,
    lr: float | Tensor = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    momentum_decay: float = 4e-3,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.NAdam`.

    Example:
        >>> import torch, sparsestep
        >>> weight, mean, square = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.nadam_(weight, grad, mean, square, step=1, lr=0.5)
        >>> weight[:, 0]
        tensor([ 0.0000, -0.5282,  0.0000])
    """
    hyperparams = {"lr": lr, "betas": betas, "eps": eps, "momentum_decay": momentum_decay}
    apply_("nadam_", RULE, param, grad, [exp_avg, exp_avg_sq], step, hyperparams, **shared)


class FunctionalNAdam(FunctionalOptimizer, optimizer=NAdam):
    """:class:`sparsestep.NAdam` for gradients that you pass yourself."""

    @signature_from(NAdam)
    def __init__(self, *args: Any, **options: Any) -> None: ...
