"""The cases that property tests are fed: parameters of several shapes, their gradients, options."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

# Fewer examples for each of the many combinations; ``make fuzz-properties`` has no such limit.
IN_CI = settings.get_current_profile_name() == "ci"
EXAMPLES = 16 if IN_CI else settings.default.max_examples


def each_case(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """``given``, for a test that is run with many combinations of its other arguments.

    To draw a case takes longer than to test it. In CI all combinations have the same cases, so they
    are drawn once. Where a case fails, and where cases are random, it is ``given`` itself.
    """
    examples = settings(max_examples=EXAMPLES)

    def decorate(test: Callable[..., None]) -> Any:
        drawn: list[dict[str, Any]] = []
        seeded = seed(test.__name__)
        search = examples(given(**strategies)(test))

        @seeded
        @examples
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
class Gradient:
    """A COO gradient, or a dense one where ``indices`` is ``None``."""

    shape: tuple[int, ...]
    indices: Tensor | None
    values: Tensor
    coalesced: bool = False

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """A copy, so that it shows if somebody writes into it."""
        values = self.values.to(dtype, copy=True)
        if self.indices is None:
            return values
        coo = torch.sparse_coo_tensor(self.indices.clone(), values, self.shape)
        return coo.coalesce() if self.coalesced else coo

    def dense(self) -> Tensor:
        """The sum of all entries, in float64."""
        if self.indices is None:
            return self.values.double()
        return self.tensor(torch.float64).to_dense()

    def mask(self) -> Tensor:
        """Which elements are touched."""
        if self.indices is None:
            return torch.ones(self.shape, dtype=torch.bool)
        ones = torch.ones(self.values.shape, dtype=torch.float64)
        return torch.sparse_coo_tensor(self.indices, ones, self.shape).to_dense() > 0


@dataclass
class Case:
    """Params of several shapes, their gradients step by step, and options."""

    shapes: list[tuple[int, ...]]
    steps: list[list[Gradient | None]]
    options: dict[str, Any]
    seed: int

    def params(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(s, generator=generator).to(dtype) for s in self.shapes]

    def run(
        self, optimizer: Callable[..., Any], dtype: torch.dtype, **extra: Any
    ) -> tuple[list[Tensor], Any]:
        """Train through all steps; half of the params in a second group with another lr."""
        params = [torch.nn.Parameter(p) for p in self.params(dtype)]
        opt = optimizer(self.groups(params), **self.options, **extra)
        for gradients in self.steps:
            take_step(opt, params, gradients, dtype)
        return [p.detach() for p in params], opt

    def groups(self, params: list[Tensor]) -> list[dict[str, Any]]:
        half = (len(params) + 1) // 2
        groups: list[dict[str, Any]] = [{"params": params[:half]}]
        if params[half:]:
            groups.append({"params": params[half:], "lr": 0.05})
        return groups


def take_step(
    opt: torch.optim.Optimizer,
    params: list[Tensor],
    gradients: list[Gradient | None],
    dtype: torch.dtype,
) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = None if gradient is None else gradient.tensor(dtype)
    opt.step()


# Values are small multiples of 1/8, so that sums of duplicates are exact in every dtype and every
# order: what differs between two ways to compute a step is then the step alone.
def _values(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randint(-16, 17, shape, generator=generator) / 8


@st.composite
def gradients(draw: st.DrawFn, shape: tuple[int, ...], *, dense: bool = True) -> Gradient:
    if dense and draw(st.integers(0, 5)) == 0:
        return Gradient(shape, None, _values(draw, shape))
    sparse_dim = draw(st.integers(0, len(shape)))
    if not dense and len(shape) > 0:
        sparse_dim = max(1, sparse_dim)
    entries = draw(st.integers(0, 12)) if math.prod(shape[:sparse_dim]) else 0
    rows = [
        draw(st.lists(st.integers(0, max(0, size - 1)), min_size=entries, max_size=entries))
        for size in shape[:sparse_dim]
    ]
    indices = torch.tensor(rows, dtype=torch.int64).reshape(sparse_dim, entries)
    values = _values(draw, (entries, *shape[sparse_dim:]))
    return Gradient(shape, indices, values, coalesced=draw(st.booleans()))


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple) | st.sampled_from(
    [(), (1,), (40,), (7, 33), (3, 0), (0, 4), (4, 600)]
)


@st.composite
def cases(draw: st.DrawFn, *, dense: bool = True, max_steps: int = 6) -> Case:
    """``dense=False``: only what torch.optim.SparseAdam takes as well."""
    several = draw(st.lists(shapes, min_size=1, max_size=3))
    steps = [
        [draw(st.none() | gradients(shape, dense=dense)) for shape in several]
        for _ in range(draw(st.integers(1, max_steps)))
    ]
    options = {"maximize": draw(st.booleans()), "lr": draw(st.sampled_from([1e-3, 0.1, 1.0]))}
    return Case(several, steps, options, draw(st.integers(0, 2**16)))
