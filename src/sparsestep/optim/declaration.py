"""What an optimizer class declares: its rule, its options, how it counts steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim import Optimizer

from sparsestep.engines.torch_fused import Batch
from sparsestep.errors import InputError, message
from sparsestep.rules import options
from sparsestep.rules import options as checks
from sparsestep.rules.int8 import stored_as_int8
from sparsestep.rules.rule import Rule

# At run time the base of our classes is not torch's Optimizer; each of them also derives from it.
# Whoever goes through the subclasses of Optimizer (class_resolver, hence PyKEEN) takes a class that
# is not in the package of its own base for somebody else's. Below a base of ours, our Adam would
# come up as a second Adam.
if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


class Declaration(_Base):
    """What a class declares, and what a param group of it means."""

    semantics: str
    engine: str
    option_names: tuple[str, ...]

    # Whether torch has a kernel for dense gradients under the same formula.
    has_torch_kernel: ClassVar[bool] = False
    # Whether its foreach form takes tensors for lr and betas.
    foreach_supports_tensor_lr: ClassVar[bool] = True
    # Torch's SparseAdam counts in a Python number, its other classes in a tensor.
    step_is_tensor: ClassVar[bool] = True
    # Keys of a param group that are there only where somebody sets them.
    group_options: ClassVar[tuple[str, ...]] = (
        *("mask", "state_dtype", "stochastic_rounding", "rounding_seed"),
    )
    # Options of other optimizers, and what values of them ask for nothing.
    no_op_values: ClassVar[Mapping[str, tuple[Any, ...]]] = options.NEUTRAL
    supports_complex: ClassVar[bool] = True
    always_decoupled: ClassVar[bool] = False
    # Options that a user's formula takes itself, though they usually are everybody's.
    formula_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def _required_options(self) -> frozenset[str]:
        """The keys that every param group has."""
        return frozenset(self.option_names) - frozenset(self.group_options)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse a param group with an unknown, missing or invalid option."""
        options.check_keys(group, [*self.option_names, *self.group_options], self.no_op_values)
        missing = self._required_options - group.keys()
        if missing:
            got = f"no {', '.join(sorted(missing))}"
            raise InputError(message("it must have every option", got))
        self.check_values(group)

    @classmethod
    def check_values(cls, group: dict[str, Any]) -> None:
        """Refuse options of the wrong kind, out of range, or in a wrong combination."""
        checks.check(group, cls.formula_options)
        if cls.has_torch_kernel:
            checks.torch_kernel(group, takes_tensors=cls.foreach_supports_tensor_lr)
        cls.check_options(group)

    @classmethod
    def check_options(cls, group: dict[str, Any]) -> None:
        """Refuse what this class refuses beyond the table of all options."""

    @classmethod
    def rule_for(cls, group: dict[str, Any]) -> Rule:
        """The rule that a param group's options select."""
        raise NotImplementedError

    @classmethod
    def stored_rule_for(cls, group: dict[str, Any]) -> Rule:
        """The same, with its state as the group wants it stored."""
        rule = cls.rule_for(group)
        return stored_as_int8(rule) if options.read(group, "state_dtype") is torch.int8 else rule

    @classmethod
    def uses_torch_kernel(cls, group: dict[str, Any]) -> bool:
        """Whether torch's kernel computes what the group asks for."""
        return (
            cls.has_torch_kernel
            and not options.read(group, "stochastic_rounding")
            and options.read(group, "state_dtype") is not torch.int8
            and options.read(group, "bias_correction") == "global"
            and (
                "decoupled_weight_decay" not in cls.group_options
                or not options.read(group, "decoupled_weight_decay")
            )
        )

    @staticmethod
    def torch_kernel(batch: Batch) -> None:
        """Let torch's own kernel do the step of dense gradients."""
        raise NotImplementedError

    @classmethod
    def can_materialize_state(cls, group: dict[str, Any]) -> bool:
        """Whether state that was made in advance does as well as none at the first step."""
        return True


@contextmanager
def speaking(who: str) -> Iterator[None]:
    """Put the name of who refuses in front of what is refused."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{who}: {error}") from None
