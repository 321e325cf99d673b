"""RMSprop as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.rmsprop import rmsprop as torch_rmsprop
from typing_extensions import Unpack

from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.errors import InputError, error_prefix, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim._docs import document_args
from sparsestep.optim.functional import FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer, run_torch_kernel
from sparsestep.rules import options as checks
from sparsestep.rules.idle import GeometricDrift, IdleUpdate, NoDrift
from sparsestep.rules.options import EngineName, SharedOptions
from sparsestep.rules.rule import Rule, StateSpec


def _squared(grad: Tensor, square_avg: Tensor, alpha: float) -> Tensor:
    return alpha * square_avg + (1 - alpha) * grad * grad


def update(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    *,
    step: int,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float,
) -> tuple[Tensor, ...]:
    """One step of RMSprop."""
    square_avg = _squared(grad, square_avg, alpha)
    return param - lr * grad / (square_avg.sqrt() + eps), square_avg


def update_with_momentum(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    momentum_buffer: Tensor,
    *,
    step: int,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float,
) -> tuple[Tensor, ...]:
    """One step with momentum."""
    square_avg = _squared(grad, square_avg, alpha)
    momentum_buffer = momentum * momentum_buffer + grad / (square_avg.sqrt() + eps)
    return param - lr * momentum_buffer, square_avg, momentum_buffer


def update_centered(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    grad_avg: Tensor,
    *,
    step: int,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float,
) -> tuple[Tensor, ...]:
    """One step that divides by the variance instead of the mean square."""
    square_avg = _squared(grad, square_avg, alpha)
    grad_avg = grad_avg + (1 - alpha) * (grad - grad_avg)
    root = (square_avg - grad_avg * grad_avg).sqrt() + eps
    return param - lr * grad / root, square_avg, grad_avg


def update_centered_with_momentum(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    momentum_buffer: Tensor,
    grad_avg: Tensor,
    *,
    step: int,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float,
) -> tuple[Tensor, ...]:
    """Both."""
    square_avg = _squared(grad, square_avg, alpha)
    grad_avg = grad_avg + (1 - alpha) * (grad - grad_avg)
    root = (square_avg - grad_avg * grad_avg).sqrt() + eps
    momentum_buffer = momentum * momentum_buffer + grad / root
    return param - lr * momentum_buffer, square_avg, momentum_buffer, grad_avg


_SQUARE = StateSpec("square_avg", int8_format="unsigned")
_BUFFER = StateSpec("momentum_buffer", int8_format="signed")
_MEAN = StateSpec("grad_avg")  # a variance that is a difference of rounded numbers may be negative


def _idle_update(*states: StateSpec) -> IdleUpdate:
    def decays(hyperparams: Mapping[str, Any]) -> dict[str, float]:
        return {
            each.name: hyperparams["momentum" if each is _BUFFER else "alpha"] for each in states
        }

    if _BUFFER not in states:
        return NoDrift(decays=decays)
    return GeometricDrift(
        buffer=_BUFFER.name, decays=decays, size=lambda step, hyperparams: (hyperparams["lr"], 1.0)
    )


def _make_rule(name: str, formula: Callable[..., tuple[Tensor, ...]], *states: StateSpec) -> Rule:
    return Rule(name, formula, states, has_native_kernel=True, idle_update=_idle_update(*states))


# By whether it is centered and whether it has momentum.
RULES = {
    (False, False): _make_rule("rmsprop", update, _SQUARE),
    (False, True): _make_rule("rmsprop_momentum", update_with_momentum, _SQUARE, _BUFFER),
    (True, False): _make_rule("rmsprop_centered", update_centered, _SQUARE, _MEAN),
    (True, True): _make_rule(
        "rmsprop_centered_momentum", update_centered_with_momentum, _SQUARE, _BUFFER, _MEAN
    ),
}


@document_args()
class RMSprop(RuleOptimizer, Optimizer):
    r"""RMSprop for dense and sparse gradients; a drop-in for ``torch.optim.RMSprop``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        v &\leftarrow \alpha v + (1 - \alpha) g^2 \\
        p &\leftarrow p - lr \cdot \frac{g}{\sqrt{v} + \epsilon}

    With ``centered``, the squared running average of the gradient is subtracted from :math:`v`.
    With momentum, the quotient goes through a buffer first. Dense gradients run in torch's own
    kernel, so the results are torch's bit for bit.

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

    group_options: ClassVar[tuple[str, ...]] = (
        *RuleOptimizer.group_options,
        "decoupled_weight_decay",
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
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "alpha": alpha,
            "eps": eps,
            "centered": centered,
            "weight_decay": weight_decay,
            "capturable": capturable,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
        }
        super().__init__(params, defaults, decoupled_weight_decay=decoupled_weight_decay, **shared)

    @staticmethod
    def torch_kernel(batch: DenseBatch) -> None:
        """Run torch's own kernel on dense gradients."""
        names = ("square_avg", "grad_avg", "momentum_buffer")
        run_torch_kernel(torch_rmsprop, batch, *names)

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
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
    mask: Tensor | None = None,
    engine: EngineName = "auto",
    seed: int | None = None,
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
            checks.check_options({"momentum": momentum})
    if momentum_buffer is None and momentum:
        requirement = "rmsprop_: momentum needs a momentum_buffer"
        raise InputError(message(requirement, "None", "Pass a tensor of zeros"))
    apply_(
        *("rmsprop_", rule, param, grad, state, step, hyperparams),
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        maximize=maximize,
        mask=mask,
        engine=engine,
        seed=seed,
    )


class FunctionalRMSprop(
    FunctionalOptimizer,
    optimizer=RMSprop,
    positional=(
        "lr",
        "alpha",
        "eps",
        "weight_decay",
        "momentum",
        "centered",
        "foreach",
        "maximize",
    ),
):
    """:class:`sparsestep.RMSprop` for gradients that you pass yourself."""

    @signature_from(RMSprop)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
