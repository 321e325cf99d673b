"""Stochastic gradient descent as ``torch.optim`` has it, for every kind of gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.sgd import sgd as torch_sgd
from typing_extensions import Unpack

from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.errors import InputError, error_prefix, message
from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import GeometricDrift, NoDrift
from sparsestep.rules.options import SharedOptions, check_options
from sparsestep.rules.rule import Rule, StateSpec


def update(param: Tensor, grad: Tensor, *, step: int, lr: float) -> tuple[Tensor]:
    """One step of gradient descent."""
    return (param - lr * grad,)


def update_with_momentum(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    step: int,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
) -> tuple[Tensor, Tensor]:
    """One step with momentum; the first one takes the gradient whole, as torch does."""
    keep, take = (0.0, 1.0) if step == 1 else (momentum, 1 - dampening)
    share, rest = (1.0, momentum) if nesterov else (0.0, 1.0)
    momentum_buffer = keep * momentum_buffer + take * grad
    return param - lr * (share * grad + rest * momentum_buffer), momentum_buffer


def _idle_step_size(step: int, hyperparams: Mapping[str, Any]) -> tuple[float, float]:
    return hyperparams["lr"] * (hyperparams["momentum"] if hyperparams["nesterov"] else 1.0), 1.0


_IDLE = GeometricDrift(
    buffer="momentum_buffer",
    decays=lambda hyperparams: {"momentum_buffer": hyperparams["momentum"]},
    size=_idle_step_size,
)
RULE = Rule("sgd", update, (), has_native_kernel=True, counts_steps=False, idle_update=NoDrift())
MOMENTUM = Rule(
    "sgd_momentum",
    update_with_momentum,
    (StateSpec("momentum_buffer", int8_format="signed"),),
    has_native_kernel=True,
    counts_steps=False,
    idle_update=_IDLE,
)


@passes_options
class SGD(RuleOptimizer, Optimizer):
    r"""Gradient descent for dense and sparse gradients; a drop-in for ``torch.optim.SGD``.

    For every entry of the gradient, with :math:`g` the sum of its duplicates:

    .. math::
        g &\leftarrow g + \lambda p \\
        b &\leftarrow \mu b + (1 - \tau) g \\
        p &\leftarrow p - lr \cdot b \quad \text{or, with Nesterov's momentum,} \quad
            p \leftarrow p - lr (g + \mu b)

    In a parameter's first step, :math:`b = g`; a row that is first touched later starts with
    :math:`b = (1 - \tau) g`. Without momentum, :math:`b` is :math:`g` itself, and there is no
    state. With dense gradients, the results are torch's up to rounding, and with ``foreach`` or
    ``fused`` set, bit for bit. Entries that are missing from a sparse gradient stay unchanged, and
    so does their momentum; torch's class would move them.

    The state is torch's: ``momentum_buffer``. Checkpoints load in both directions. Stochastic
    rounding adds a ``step``.

    Args:
        momentum: the momentum factor, :math:`\mu`.
        dampening: :math:`\tau`, the part of the gradient that does not go into the buffer.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.SGD(table.parameters(), lr=0.1, momentum=0.9)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()

    References:
        Sutskever, Martens, Dahl and Hinton, `On the importance of initialization and momentum in
        deep learning <https://proceedings.mlr.press/v28/sutskever13.html>`_, 2013.
    """

    group_options = (*RuleOptimizer.group_options, "decoupled_weight_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @staticmethod
    def torch_kernel(batch: DenseBatch) -> None:
        """Let torch's own kernel do the step of dense gradients."""
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize", "foreach")
        # With Nesterov's momentum torch's kernel for lists adds to the gradients themselves.
        in_lists = batch.group["foreach"] or not all(param.is_cpu for param in batch.params)
        copied = batch.group["nesterov"] and in_lists
        buffers = batch.state.get("momentum_buffer", [])
        options = {name: batch.group[name] for name in names}
        if batch.is_first:
            # Torch's kernel would allocate buffers and copy the gradients. To add a gradient to
            # -0.0 copies it as well, the sign of a zero included.
            options["dampening"] = 0
            for buffer in buffers:
                buffer.fill_(-0.0)
        torch_sgd(
            batch.params,
            [grad.clone() for grad in batch.grads] if copied else batch.grads,
            buffers,
            fused=batch.group["fused"],
            **options,
        )

    @classmethod
    def check_options(cls, group: dict[str, Any]) -> None:
        """Refuse Nesterov momentum without momentum, or with dampening."""
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise InputError("Nesterov momentum requires a momentum and zero dampening.")

    @classmethod
    def can_materialize_state(cls, group: dict[str, Any]) -> bool:
        """Not with dampening, which leaves out the first gradient of a parameter."""
        counted = bool(group.get("stochastic_rounding"))
        return counted or not group["momentum"] or not group["dampening"]

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        return MOMENTUM if group["momentum"] != 0 else RULE


@document_args(like=SGD)
def sgd_(
    param: Tensor,
    grad: Gradient,
    momentum_buffer: Tensor | None = None,
    *,
    step: int | Tensor = 2,
    lr: float | Tensor = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.SGD`; with momentum if you pass ``momentum_buffer``.

    With ``step=1``, the buffer is new and takes the whole gradient, without dampening.

    Example:
        >>> import torch, sparsestep
        >>> weight = torch.zeros(2, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1, 1]), torch.ones(2, 2))
        >>> sparsestep.functional.sgd_(weight, grad, lr=0.5)
        >>> weight[:, 0].tolist()
        [0.0, -1.0]
    """
    of_momentum = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    if nesterov is not False or momentum_buffer is None:
        with error_prefix("sgd_"):
            check_options(of_momentum)
            SGD.check_options(of_momentum)
    if momentum_buffer is None and momentum:
        requirement = "sgd_: momentum needs a momentum_buffer"
        raise InputError(message(requirement, "None", "Pass a tensor of zeros, and step=1"))
    if momentum_buffer is None:
        apply_("sgd_", RULE, param, grad, [], step, {"lr": lr}, **shared)
    else:
        hyperparams = {"lr": lr, **of_momentum}
        apply_("sgd_", MOMENTUM, param, grad, [momentum_buffer], step, hyperparams, **shared)


class FunctionalSGD(
    FunctionalOptimizer,
    optimizer=SGD,
    positional="lr momentum dampening weight_decay nesterov maximize foreach fused",
):
    """:class:`sparsestep.SGD` for gradients that you pass yourself.

    The default ``lr`` is 1e-3, as for ``torch.optim.SGD``; torch's functional class has 1e-2.
    """

    @signature_from(SGD)
    def __init__(self, *args: Any, **options: Any) -> None: ...
