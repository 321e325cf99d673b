"""MixedOptimizer: param groups with update rules of several classes, in one optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from sparsestep.engines.torch_fused import DenseBatch
from sparsestep.errors import InputError, error_prefix, message
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.param_groups import ParamGroup


def _by_group(name: str) -> Any:
    """Return a method that calls the method of the group's own optimizer."""

    def call(self: MixedOptimizer, group: dict[str, Any], *args: Any) -> Any:
        return getattr(self.optimizer_of(group), name)(group, *args)

    return call


class MixedOptimizer(RuleOptimizer, Optimizer):
    """One optimizer with param groups of several classes, as ``nn.optimizer_for`` makes it.

    The key ``"optimizer"`` of a param group is the name of its class. Everything else is as for any
    optimizer of this library: a step updates all parameters or none, and there is one checkpoint.

    Args:
        params: param groups.
        optimizers: an optimizer of each class, whose options are the defaults of its groups. They
            lose their parameters. A group without a name has the first.

    Raises:
        InputError: a group names another class, or has options that its class refuses.
    """

    def __init__(
        self, params: Sequence[ParamGroup], optimizers: Sequence[RuleOptimizer], **options: Any
    ) -> None:
        self.optimizers = {type(each).__name__: each for each in optimizers}
        super().__init__(params, {}, **options)
        for each in optimizers:
            each.param_groups.clear()
        self.defaults = optimizers[0].defaults

    def optimizer_of(self, group: Mapping[str, Any]) -> RuleOptimizer:
        """Return the optimizer whose class a param group has."""
        name = group.get("optimizer", next(iter(self.optimizers)))
        found = self.optimizers.get(name)
        if found is None:
            requirement = f"'optimizer' must be one of {', '.join(self.optimizers)}"
            raise InputError(message(requirement, repr(name)))
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options of its own, as torch's optimizers do."""
        with error_prefix(f"{type(self).__name__}: param group {len(self.param_groups)}"):
            chosen = self.optimizer_of(param_group)
            filled = {name: chosen.defaults[name] for name in chosen.option_names}
            chosen.check_group({**filled, **param_group})
        before, self.defaults = self.defaults, chosen.defaults
        try:
            super().add_param_group({"optimizer": type(chosen).__name__, **param_group})
        finally:
            self.defaults = before

    # Attributes of a class, read from the group's own.

    @property
    def group_options(self) -> tuple[str, ...]:  # type: ignore[override]
        """The options of all classes, and the name of the class."""
        names = ((*each.option_names, *each.group_options) for each in self.optimizers.values())
        return tuple(dict.fromkeys(name for each in (("optimizer",), *names) for name in each))

    def check_params(self, group_index: int, group: ParamGroup) -> None:
        """Refuse parameters that the optimizer cannot work with."""
        self.optimizer_of(group).check_params(group_index, group)

    def torch_kernel(self, batch: DenseBatch, /) -> None:  # type: ignore[override]
        """Run torch's own kernel on dense gradients."""
        self.optimizer_of(batch.group).torch_kernel(batch)

    can_materialize_state: Any = _by_group("can_materialize_state")
    check_group: Any = _by_group("check_group")
    check_values: Any = _by_group("check_values")
    elementwise_rule_for: Any = _by_group("elementwise_rule_for")
    rule_for: Any = _by_group("rule_for")
    stored_rule_for: Any = _by_group("stored_rule_for")
    stored_rules_for: Any = _by_group("stored_rules_for")
    supports_torch_kernel: Any = _by_group("supports_torch_kernel")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}
