"""Adagrad with one sum per row: an embedding's optimizer state shrinks to one number per row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import Unpack

from sparsestep.grads.layouts import Gradient
from sparsestep.optim._signatures import document_args, passes_options
from sparsestep.optim.adagrad import RULE as ADAGRAD
from sparsestep.optim.functional import DecayOptions, FunctionalOptimizer, apply_, signature_from
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import NoDrift
from sparsestep.rules.options import DenseMode, SharedOptions
from sparsestep.rules.rule import Rule, StateSpec


def update(
    param: Tensor, grad: Tensor, sum: Tensor, *, step: int, lr: float, eps: float
) -> tuple[Tensor, Tensor]:
    """One step; ``sum`` is a column beside the rows of ``param``."""
    sum = sum + (grad * grad).mean(dim=1, keepdim=True)
    return param - lr / (sum.sqrt() + eps) * grad, sum


_SUM = StateSpec("sum", "initial_accumulator_value", per_row=True)
RULE = Rule("rowwise_adagrad", update, (_SUM,), has_native_kernel=True, idle_update=NoDrift())


@passes_options
class RowwiseAdagrad(RuleOptimizer, Optimizer):
    r"""Adagrad with one sum per row, for embeddings.

    For every row of the gradient, with :math:`g` the sum of its duplicates and :math:`D`
    the length of a row:

    .. math::
        g &\leftarrow g + \lambda p \\
        s &\leftarrow s + \frac{1}{D} \sum_j g_j^2 \\
        p &\leftarrow p - lr \cdot \frac{g}{\sqrt{s} + \epsilon}

    FBGEMM calls this exact row-wise Adagrad. A row is a slice along the first dim, or a single
    element of a one-dimensional parameter. A complex row counts as twice as many real numbers.

    The state is ``step`` and ``sum``, which has one value per row.

    By default it is row-wise for every parameter, including dense layers: a ``Linear`` gets one sum
    per output. With ``dense="elementwise"``, parameters with dense gradients get :class:`Adagrad`'s
    formula and one sum per element, as in DLRM. The first gradient of a parameter decides, and its
    state keeps the decision: a later gradient of the other kind is updated by the same formula.

    Args:
        eps: added to the square root. The default is that of torch's Adagrad; FBGEMM's is 1e-8.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = sparsestep.RowwiseAdagrad(table.parameters(), lr=0.1)
        >>> table(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"].shape
        torch.Size([10])

        One optimizer for tables and layers, as in DLRM:

        >>> model = torch.nn.Sequential(table, torch.nn.Linear(4, 3))
        >>> optimizer = sparsestep.RowwiseAdagrad(model.parameters(), dense="elementwise")
        >>> model(torch.tensor([2, 7, 2])).square().sum().backward()
        >>> optimizer.step()
        >>> [tuple(optimizer.state[param]["sum"].shape) for param in model.parameters()]
        [(10,), (3, 4), (3,)]

    References:
        Mudigere et al., `Software-Hardware Co-design for Fast and Scalable Training of Deep
        Learning Recommendation Models <https://arxiv.org/abs/2104.05158>`_, 2021.
    """

    rule = RULE
    group_options = (*RuleOptimizer.group_options, "decoupled_weight_decay", "dense")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        dense: DenseMode = "rowwise",
        **shared: Unpack[SharedOptions],
    ) -> None: ...

    @classmethod
    def elementwise_rule_for(cls, group: dict[str, Any]) -> Rule | None:
        """Adagrad's rule, if dense gradients are updated element by element."""
        return ADAGRAD if group.get("dense") == "elementwise" else None


@document_args(like=RowwiseAdagrad)
def rowwise_adagrad_(
    param: Tensor,
    grad: Gradient,
    sum: Tensor,
    *,
    step: int | Tensor = 1,
    lr: float | Tensor = 1e-2,
    eps: float = 1e-10,
    **shared: Unpack[DecayOptions],
) -> None:
    """One step of :class:`sparsestep.RowwiseAdagrad`; ``sum`` has one value per row.

    Example:
        >>> import torch, sparsestep
        >>> weight, total = torch.zeros(2, 2), torch.zeros(2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.tensor([[1.0, 7.0]]))
        >>> sparsestep.functional.rowwise_adagrad_(weight, grad, total, lr=0.5)
        >>> weight[1], total
        (tensor([-0.1000, -0.7000]), tensor([ 0., 25.]))
    """
    apply_("rowwise_adagrad_", RULE, param, grad, [sum], step, {"lr": lr, "eps": eps}, **shared)


class FunctionalRowwiseAdagrad(FunctionalOptimizer, optimizer=RowwiseAdagrad):
    """:class:`sparsestep.RowwiseAdagrad` for gradients that you pass yourself."""

    @signature_from(RowwiseAdagrad)
    def __init__(self, *args: Any, **options: Any) -> None: ...
