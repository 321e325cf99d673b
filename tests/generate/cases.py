"""Cases of property tests: parameters, their gradients step by step, masks and options."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.generate.grads import Drawn, Kind, any_grad
from tests.generate.params import DTYPES, any_mask, any_param, two_groups
from tests.generate.source import DrawnSource
from tests.subject import Subject, by_hand_class
from tests.table import Variant

# Fewer examples for each of the many combinations; SPARSESTEP_HYPOTHESIS=fuzz has no such limit.
IN_CI = settings.get_current_profile_name() in ("ci", "mutants")
EXAMPLES = 16 if IN_CI else settings.default.max_examples


def each_case(
    examples: int = EXAMPLES, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Any]:
    """``given``, for a test that is run with many combinations of its other arguments.

    To draw a case takes longer than to test it. In CI all combinations have the same cases, so they
    are drawn once. Where a case fails, and where cases are random, it is ``given`` itself.
    """
    limited = settings(max_examples=examples if IN_CI else settings.default.max_examples)

    def decorate(test: Callable[..., None]) -> Any:
        drawn: list[dict[str, Any]] = []
        seeded = seed(test.__name__)
        search = limited(given(**strategies)(test))

        @seeded
        @limited
        @given(**strategies)
        def draw(**case: Any) -> None:
            drawn.append(case)

        @wraps(test)
        def run(**arguments: Any) -> None:
            if not IN_CI:
                search(**arguments)
                return
            if not drawn:
                draw()
            try:
                for case in drawn:
                    test(**arguments, **case)
            except Exception:
                seeded(search)(**arguments)  # finds it again, and makes it small
                raise

        others = [p for n, p in inspect.signature(test).parameters.items() if n not in strategies]
        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


@dataclass
class Case:
    """Parameters, their gradients step by step, masks and options."""

    start: list[Tensor]  # parameters, with any strides
    steps: list[list[Drawn | None]]  # a gradient or none of each parameter
    masks: list[Tensor | None]  # of elements, or of rows
    by_hand: bool  # whether some gradients can only be passed to a functional optimizer
    options: dict[str, Any]  # lr and maximize

    def applies(self, variant: Variant) -> bool:
        return variant.cls.supports_complex or not self.start[0].is_complex()

    def params(self) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(copy.deepcopy(values)) for values in self.start]

    def subject(self, variant: Variant, engine: str, *, masked: bool = False) -> Subject:
        """A functional optimizer, or an optimizer with two groups of different rates."""
        params, options = self.params(), {**self.options, "engine": engine}
        masks = self.masks
        if self.by_hand:
            if not variant.has_twin and engine == "native":
                options["engine"] = "auto"
            front: Any = by_hand_class(variant.cls)(params, **{**variant.options, **options})
            if masked:
                front.param_group["mask"] = masks
            return Subject(front)
        front = variant(self.groups(params), **options)
        if masked:
            half = len(front.param_groups[0]["params"])
            for group, some in zip(front.param_groups, (masks[:half], masks[half:]), strict=False):
                group["mask"] = some
        return Subject(front)

    def groups(self, params: list[Any]) -> list[dict[str, Any]]:
        return two_groups(params)

    def run(self, variant: Variant, engine: str) -> Subject:
        """Take all steps."""
        subject = self.subject(variant, engine)
        for drawn in self.steps:
            subject.give(drawn)
            subject.step_on_any_engine()
        return subject


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    max_steps: int = 4,
    exact: bool = True,
    dtypes: dict[torch.dtype, int] = DTYPES,
    kinds: tuple[Kind, ...] = (),
) -> Case:
    """``exact=False``: sums of duplicates depend on their order."""
    chance = DrawnSource(draw, exact=exact)
    by_hand = not kinds and chance.one_in(2)
    dtype = chance.weighted(dtypes)
    params = [any_param(chance, dtype)[0] for _ in range(chance.integer(1, 3))]
    masks = [any_mask(chance, p) if p.dim() else None for p in params]

    def grad(param: Tensor) -> Drawn | None:
        if chance.one_in(6):
            return None
        return any_grad(chance, param, by_hand=by_hand, kinds=kinds)

    steps = [[grad(param) for param in params] for _ in range(chance.integer(1, max_steps))]
    options = {"maximize": chance.one_in(2), "lr": chance.pick([1e-3, 0.1, 1.0])}
    return Case([p.detach() for p in params], steps, masks, by_hand, options)
