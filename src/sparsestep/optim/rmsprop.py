"""RMSprop as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.rmsprop import rmsprop as torch_rmsprop
from typing_extensions import Unpack

from sparsestep.errors import InputError, error_prefix, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer, kernel_of
from sparsestep.rules.idle import GeometricDrift, IdleUpdate, NoDrift
from sparsestep.rules.options import SharedOptions, check_options
from sparsestep.rules.rule import Rule, StateSpec

_SQUARE = StateSpec("square_avg", int8_format="unsigned")
_BUFFER = StateSpec("momentum_buffer", int8_format="signed")
_MEAN = StateSpec("grad_avg")  # a variance that is a difference of rounded numbers may be negative


def _make_update(*, centered: bool, has_momentum: bool) -> Callable[..., tuple[Tensor, ...]]:
    def update(
        param: Tensor,
        grad: Tensor,
        square_avg: Tensor,
        *buffers: Tensor,
        step: int,
        lr: float,
        alpha: float,
        eps: float,
        momentum: float,
    ) -> tuple[Tensor, ...]:
        """One step of RMSprop; the buffers are ``momentum_buffer`` and ``grad_avg``."""
        square_avg = alpha * square_avg + (1 - alpha) * grad * grad
        variance = square_avg
        means: tuple[Tensor, ...] = ()
        if centered:
            grad_avg = buffers[-1] + (1 - alpha) * (grad - buffers[-1])
            variance, means = square_avg - grad_avg * grad_avg, (grad_avg,)
        root = variance.sqrt() + eps
        if not has_momentum:
            return param - lr * grad / root, square_avg, *means
        momentum_buffer = momentum * buffers[0] + grad / root
        return param - lr * momentum_buffer, square_avg, momentum_buffer, *means

    return update


def _make_rule(name: str, *, centered: bool, has_momentum: bool) -> Rule:
    state = (_SQUARE, *[_BUFFER] * has_momentum, *[_MEAN] * centered)

    def decays(hyperparams: Mapping[str, Any]) -> dict[str, float]:
        rates = {_BUFFER.name: hyperparams["momentum"]}
        return {spec.name: rates.get(spec.name, hyperparams["alpha"]) for spec in state}

    idle_update: IdleUpdate = NoDrift(decays=decays)
    if has_momentum:
        idle_update = GeometricDrift(
            buffer=_BUFFER.name,
            decays=decays,
            size=lambda step, hyperparams: (hyperparams["lr"], 1.0),
        )
    update = _make_update(centered=centered, has_momentum=has_momentum)
    return Rule(name, update, state, has_native_kernel=True, idle_update=idle_update)


# By whether it is centered and whether it has momentum.
RULES = {
    (False, False): _make_rule("rmsprop", centered=False, has_momentum=False),
    (False, True): _make_rule("rmsprop_momentum", centered=False, has_momentum=True),
    (True, False): _make_rule("rmsprop_centered", centered=True, has_momentum=False),
    (True, True): _make_rule("rmsprop_centered_momentum", centered=True, has_momentum=True),
}


@passes_options
class RMSprop(RuleOptimizer, Optimizer):
    r"""RMSprop for dense and sparse gradients; a drop-in for ``torch.optim.RMSprop``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        v &\leftarrow \alpha v + (1 - \alpha) g^2 \\
        p &\leftarrow p - lr \cdot \frac{g}{\sqrt{v} + \epsilon}

    With ``centered``, the squared running average of the gradient is subtracted from :math:`v`.
    With momentum, the quotient goes through a buffer first. With dense gradients, the results are
    torch's up to rounding, and with ``foreach`` set, bit for bit.

    The state is torch's: ``step``, ``square_avg`` and, if needed, ``momentum_buffer`` and
    ``grad_avg``. Checkpoints load in both directions.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.RMSprop(table.parameters(), lr=0.01, centered=True)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()

    References:
        Hinton, Srivastava and Swersky, `Neural Networks for Machine Learning, lecture 6a
        <https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf>`_, 2012.
    """

    group_options = (*RuleOptimizer.group_options, "decoupled_weight_decay")
    torch_kernel = staticmethod(
        kernel_of(torch_rmsprop, "square_avg", "grad_avg", "momentum_buffer")
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return RULES[bool(group["centered"]), bool(group["momentum"] > 0)]


@document_args(like=RMSprop)
def rmsprop_(
    param: Tensor,
    grad: Gradient,
    square_avg: Tensor,
    momentum_buffer: Tensor | None = None,
    grad_avg: Tensor | None = None,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.RMSprop`; centered if you pass ``grad_avg``.

    Example:
        >>> import torch, sparsestep
        >>> weight, square = torch.zeros(2, 2), torch.zeros(2, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
        >>> sparsestep.functional.rmsprop_(weight, grad, square, lr=0.5)
        >>> weight[:, 0].round(decimals=3).tolist()
        [0.0, -5.0]
    """
    hyperparams = {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum}
    rule = RULES[grad_avg is not None, momentum_buffer is not None]
    state = [t for t in (square_avg, momentum_buffer, grad_avg) if t is not None]
    if momentum_buffer is None:
        with error_prefix("rmsprop_"):
            check_options({"momentum": momentum})
            if momentum:
                requirement = "momentum needs a momentum_buffer"
                raise InputError(message(requirement, "None", "Pass a tensor of zeros"))
    apply_("rmsprop_", rule, param, grad, state, step, hyperparams, **shared)


class FunctionalRMSprop(
    FunctionalOptimizer,
    optimizer=RMSprop,
    positional="lr alpha eps weight_decay momentum centered foreach maximize",
):
    """:class:`sparsestep.RMSprop` for gradients that you pass yourself."""

    @signature_from(RMSprop)
    def __init__(self, *args: Any, **options: Any) -> None: ...
