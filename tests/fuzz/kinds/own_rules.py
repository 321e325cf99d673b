"""``sparsestep.rule``: a random formula, run by the core and called as it is, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.fuzz.surroundings import any_surroundings
from tests.fuzz.world import INSTRUCTION_SETS, Say
from tests.generate.grads import any_grad
from tests.generate.params import any_mask, any_param, written
from tests.generate.source import NotApplicableError, Source
from tests.oracle import FindingError
from tests.rules.random_formulas import BINARY, UNARY, Formula, computed
from tests.table import same_bits

# Where these jump, a rounding decides.
_JUMPS = {"sign", "where", "not"}
_NAMES = sorted((UNARY.keys() | BINARY.keys()) - _JUMPS)
# What a formula may come to on its way, so that a rounding there is small beside the results.
_LARGEST = 1e4
_ROOM = 1e-8


def any_formula(chance: Source) -> Formula:
    return [
        (chance.pick(_NAMES), chance.integer(0, 99), chance.integer(0, 99))
        for _ in range(chance.integer(1, 12))
    ]


class Own:
    """A rule of random parts; what it came to on its way is noted where it is called on tensors."""

    def __init__(self, chance: Source) -> None:
        self.formula = any_formula(chance)
        self.largest = 0.0
        self.by_row = chance.one_in(2)
        bias = chance.one_in(2)

        def mixed(values: list[Any]) -> list[Any]:
            found = computed(self.formula, values)
            if isinstance(values[0], Tensor):
                for each in found:
                    if each.numel():
                        self.largest = max(self.largest, float(each.abs().nan_to_num(1e9).max()))
            return found

        def update(param: Any, grad: Any, mean: Any, *, step: int, lr: float = 0.1) -> Any:
            found = mixed([param, grad, mean])
            size = lr / (1 - 0.5**step) if bias else lr
            return param - size * found[-1], 0.75 * mean + 0.25 * found[-2]

        def by_row(param: Any, grad: Any, mean: Any, row: Any, *, lr: float = 0.1) -> Any:
            found = mixed([param, grad, mean, row])
            row = row + (found[-1] + grad).abs().mean(1, keepdim=True)
            return param - lr * found[-1] / (row + 1), 0.5 * mean + grad, row

        if self.by_row:
            rows = {"row": 0.0}
            self.cls = sparsestep.rule(by_row, state={"mean": 0.0}, row_state=rows)
        else:
            self.cls = sparsestep.rule(update, state={"mean": 0.0})

    @property
    def is_of_elements(self) -> bool:
        """Whether it does not depend on what a layout takes for a row."""
        return self.by_row or not any("row" in name for name, _, _ in self.formula)


def own_rules(chance: Source, say: Say) -> None:
    own = Own(chance)
    if not own.is_of_elements:
        raise NotApplicableError
    options: dict[str, Any] = {"lr": chance.pick([0.0, 0.01, 0.1])}
    if chance.one_in(3):
        options["weight_decay"] = 0.1
        options["decoupled_weight_decay"] = chance.one_in(2)
    options["maximize"] = chance.one_in(4)
    given, text = any_param(chance, torch.float64)
    if own.by_row and not given.dim():
        raise NotApplicableError
    say(f"{own.formula}, by row {own.by_row}: {written(options)}; param {text}")
    if given.dim() and chance.one_in(4):
        options["mask"] = any_mask(chance, given, by_row=own.by_row)
    ours, theirs = given, torch.nn.Parameter(given.detach().clone())
    fast, slow = own.cls([ours], **options), own.cls([theirs], engine="reference", **options)
    fast.materialize_state()  # for what inference mode makes can only be used there
    for number in range(chance.integer(1, 4)):
        drawn = any_grad(chance, ours, by_hand=False)
        around, name = any_surroundings(chance)
        say(f"step {number + 1}: {drawn.text} {name}")
        ours.grad, theirs.grad = drawn.grad, drawn.grad
        other = _with_other_instructions(chance, fast, ours)
        with around:
            fast.step()
        slow.step()
        if own.largest > _LARGEST:
            raise NotApplicableError
        _compare(fast, slow, ours, theirs)
        if other is not None and not same_bits(other, ours.detach()):
            raise FindingError("other bits with another instruction set", str(own.formula))


def _with_other_instructions(chance: Source, fast: RuleOptimizer, param: Tensor) -> Tensor | None:
    """What a step comes to on a copy, with another instruction set.

    A copy is contiguous, and of a dense gradient that decides which engine it is.
    """
    if not chance.one_in(4) or len(INSTRUCTION_SETS) < 2 or not param.is_contiguous():
        return None
    grad, param.grad = param.grad, None  # not every gradient can be copied
    again = copy.deepcopy(fast)
    (copied,) = again.params()
    param.grad = copied.grad = grad
    now = sparsestep._native.instruction_set()
    sparsestep._native.use_instruction_set(chance.pick(INSTRUCTION_SETS))
    again.step()
    sparsestep._native.use_instruction_set(now)
    return copied.detach()


def _compare(fast: RuleOptimizer, slow: RuleOptimizer, ours: Tensor, theirs: Tensor) -> None:
    kept, wanted = fast.state[ours], slow.state[theirs]
    pairs = {"param": (ours.detach(), theirs.detach())}
    pairs |= {name: (kept[name], wanted[name]) for name in wanted if name != "step"}
    for name, (found, right) in pairs.items():
        if not torch.allclose(found, right, rtol=_ROOM, atol=_ROOM * _LARGEST, equal_nan=True):
            off = float((found - right).abs().max())
            raise FindingError(f"other numbers than the formula's: {name}", f"off by {off}")
    if float(kept.get("step", 0)) != float(wanted.get("step", 0)):
        raise FindingError("another step count", f"{kept.get('step')}, {wanted.get('step')}")


KINDS: dict[Callable[[Source, Say], None], int] = {own_rules: 4}
