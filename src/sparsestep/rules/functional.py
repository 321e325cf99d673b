"""The functional optimizers: one for each optimizer class, with gradients passed by hand.

Each takes the options of its class, and by position those that torch's functional class takes so.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sparsestep import rules
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer, signature_of, takes


class FunctionalSparseAdam(FunctionalOptimizer):
    """:class:`sparsestep.SparseAdam` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.SparseAdam
    positional: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "maximize")

    @takes(rules.SparseAdam)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalAdam(FunctionalOptimizer):
    """:class:`sparsestep.Adam` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.Adam
    positional: ClassVar[tuple[str, ...]] = (
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused"),
    )

    @takes(rules.Adam)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalAdamW(FunctionalAdam):
    """:class:`sparsestep.AdamW` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.AdamW

    @takes(rules.AdamW)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalRAdam(FunctionalOptimizer):
    """:class:`sparsestep.RAdam` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.RAdam
    positional: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    @takes(rules.RAdam)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalAdagrad(FunctionalOptimizer):
    """:class:`sparsestep.Adagrad` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.Adagrad
    positional: ClassVar[tuple[str, ...]] = (
        *("lr", "lr_decay", "weight_decay", "initial_accumulator_value"),
        *("warmup_lr_multiplier", "warmup_num_iters", "eps", "coalesce_grad"),
        *("foreach", "fused", "maximize"),
    )
    only_in_torch: ClassVar[dict[str, Any]] = {
        "warmup_lr_multiplier": 1.0,
        "warmup_num_iters": 0.0,
        "coalesce_grad": True,
    }

    @takes(rules.Adagrad)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalRowwiseAdagrad(FunctionalOptimizer):
    """:class:`sparsestep.RowwiseAdagrad` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.RowwiseAdagrad
    positional: ClassVar[tuple[str, ...]] = (
        "lr",
        "weight_decay",
        "initial_accumulator_value",
        "eps",
    )

    @takes(rules.RowwiseAdagrad)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalRowwiseAdam(FunctionalOptimizer):
    """:class:`sparsestep.RowwiseAdam` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.RowwiseAdam
    positional: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay")

    @takes(rules.RowwiseAdam)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalSGD(FunctionalOptimizer):
    """:class:`sparsestep.SGD` with gradients passed by hand.

    Its ``lr`` is 1e-3 by default, as that of ``torch.optim.SGD``; torch's functional class has
    1e-2.
    """

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.SGD
    positional: ClassVar[tuple[str, ...]] = (
        *("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        *("maximize", "foreach", "fused"),
    )

    @takes(rules.SGD)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalRMSprop(FunctionalOptimizer):
    """:class:`sparsestep.RMSprop` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.RMSprop
    positional: ClassVar[tuple[str, ...]] = (
        *("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "foreach", "maximize"),
    )

    @takes(rules.RMSprop)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalLion(FunctionalOptimizer):
    """:class:`sparsestep.Lion` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.Lion
    positional: ClassVar[tuple[str, ...]] = ("lr", "betas", "weight_decay")

    @takes(rules.Lion)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


class FunctionalFtrl(FunctionalOptimizer):
    """:class:`sparsestep.Ftrl` with gradients passed by hand."""

    optimizer_class: ClassVar[type[RuleOptimizer]] = rules.Ftrl
    positional: ClassVar[tuple[str, ...]] = ("lr", "beta", "l1", "l2")

    @takes(rules.Ftrl)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)


# For each optimizer, in their order.
FUNCTIONAL: tuple[type[FunctionalOptimizer], ...] = tuple(
    globals()[f"Functional{each.__name__}"] for each in rules.OPTIMIZERS
)

for _each in FUNCTIONAL:  # for help() and Sphinx
    vars(_each)["__init__"].__signature__ = signature_of(_each)
