"""The table that the property tests run over, and the cases they are fed.

An optimizer that is registered in ``sparsestep.rules.OPTIMIZERS`` is in the table, with its default
options and with those of ``OPTIONS``. An engine is the reference engine or the native one with each
instruction set that this machine has. ``EVERY`` also has rules that a user might write.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import core, functional
from sparsestep.contract.rule import Rule
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.rules import OPTIMIZERS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INSTRUCTION_SETS = [name for name, available in core.instruction_sets().items() if available]
# The widest alone, unless everything is to be tested: that all have the same bits is a property of
# its own (tests/properties).
EVERYTHING = os.environ.get("SPARSESTEP_TESTS") == "all"
ENGINES = ["reference", *(INSTRUCTION_SETS if EVERYTHING else INSTRUCTION_SETS[-1:])]

# Options that select another formula or another treatment of it.
OPTIONS: dict[type[RuleOptimizer], list[dict[str, Any]]] = {
    sparsestep.SparseAdam: [{"bias_correction": "per_row"}],
    sparsestep.Adam: [
        {"weight_decay": 0.1},
        {"amsgrad": True},
        {"bias_correction": "per_row"},
        {"amsgrad": True, "bias_correction": "per_row"},
    ],
    sparsestep.RAdam: [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
    sparsestep.Adagrad: [
        {"lr_decay": 0.5, "initial_accumulator_value": 0.25, "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
    sparsestep.RowwiseAdagrad: [{"weight_decay": 0.1}],
    sparsestep.RowwiseAdam: [
        {"bias_correction": "per_row", "weight_decay": 0.1, "decoupled_weight_decay": True}
    ],
    sparsestep.SGD: [
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    sparsestep.RMSprop: [
        {"momentum": 0.9},
        {"centered": True, "eps": 0.5},
        {"centered": True, "momentum": 0.9, "eps": 0.5},
    ],
    sparsestep.Lion: [{"weight_decay": 0.1}],
    sparsestep.Ftrl: [{"l1": 0.5, "l2": 0.25, "initial_accumulator_value": 0.25}],
}


@dataclass(frozen=True)
class Variant:
    """An optimizer class with options; called like the class."""

    cls: type[RuleOptimizer]
    options: dict[str, Any]

    def __call__(self, params: Any, **more: Any) -> RuleOptimizer:
        if more.get("engine") == "native" and not self.has_twin:
            more["engine"] = "auto"
        return self.cls(params, **{**self.options, **more})

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *(f"{k}={v}" for k, v in self.options.items())])

    @property
    def rule(self) -> Rule:
        return self.cls._rule_for(self([torch.zeros(1)]).param_groups[0])

    @cached_property
    def has_twin(self) -> bool:
        return self.rule.is_native


VARIANTS = [Variant(cls, options) for cls in OPTIMIZERS for options in [{}, *OPTIONS.get(cls, [])]]

# The optimizers that have dense semantics.
WITH_DENSE = [cls for cls in OPTIMIZERS if Variant(cls, {}).rule.motion is not None]

# The function of each optimizer: sparse_adam_ for SparseAdam, adamw_ for AdamW.
FUNCTIONS: dict[type[RuleOptimizer], Callable[..., None]] = {
    cls: getattr(functional, re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", cls.__name__).lower() + "_")
    for cls in OPTIMIZERS
}

STATEFUL = [Variant(cls, {"momentum": 0.9} if cls is sparsestep.SGD else {}) for cls in OPTIMIZERS]


@sparsestep.rule(state={"momentum_buffer": 0.0})
def sign_sgd(param, grad, momentum_buffer, *, lr=0.1, momentum=0.5):
    """A step of the length lr, along the sign of the momentum."""
    momentum_buffer = momentum * momentum_buffer + grad
    return param - lr * momentum_buffer.sign(), momentum_buffer


@sparsestep.rule(row_state={"accumulator": 0.0})
def sm3_by_rows(param, grad, accumulator, *, lr=0.1, eps=1e-10):
    """SM3 with rows as its only cover: one number for each row bounds the squares in it."""
    bound = accumulator + grad.square()
    return param - lr * grad / (bound.sqrt() + eps), bound.amax(dim=1, keepdim=True)


# They have no native twin, so the native engine is "auto" for them.
USER_RULES = [
    Variant(sign_sgd, {}),
    Variant(sign_sgd, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sm3_by_rows, {}),
    Variant(sm3_by_rows, {"weight_decay": 0.1}),
]
EVERY = [*VARIANTS, *USER_RULES]
PLAIN = [Variant(cls, {}) for cls in (*OPTIMIZERS, sign_sgd, sm3_by_rows)]

each_stateful = pytest.mark.parametrize("variant", STATEFUL, ids=lambda v: v.cls.__name__)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
each_variant = pytest.mark.parametrize("variant", EVERY, ids=str)
each_engine = pytest.mark.parametrize("engine", ENGINES)


def on_each_engine(variants: list[Variant]) -> pytest.MarkDecorator:
    """Every variant with every engine that makes a difference to it."""
    runs = [
        (v, e) for e in ENGINES for v in variants if v.has_twin or e in (ENGINES[0], ENGINES[-1])
    ]
    ids = [f"{engine}-{variant}" for variant, engine in runs]
    return pytest.mark.parametrize(("variant", "engine"), runs, ids=ids)


dtypes = st.sampled_from(DTYPES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

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


@contextmanager
def running_on(engine: str) -> Iterator[str]:
    """The ``engine=`` argument for an engine of the table, with its instruction set in use."""
    if engine == "reference":
        yield "reference"
        return
    before = core.instruction_set()
    assert before is not None
    core.use_instruction_set(engine)
    try:
        yield "native"
    finally:
        core.use_instruction_set(before)


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


def state_tensors(opt: torch.optim.Optimizer) -> list[Tensor]:
    """All state tensors in the order of the params, then of the names."""
    return [
        value
        for group in opt.param_groups
        for param in group["params"]
        for _, value in sorted(opt.state.get(param, {}).items())
        if isinstance(value, Tensor)
    ]


def steps_of(opt: torch.optim.Optimizer, param: Tensor) -> int | None:
    """A param's step count; ``None`` where its optimizer keeps none."""
    count = opt.state.get(param, {}).get("step")
    return None if count is None else int(count)


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the last bit: NaN equals NaN of the same bits, 0.0 does not equal -0.0."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    return torch.equal(ours.contiguous().view(integers), theirs.contiguous().view(integers))


def snapshot(opt: torch.optim.Optimizer) -> list[Any]:
    """Everything a step may change: params, state tensors and step counts."""
    kept = []
    for group in opt.param_groups:
        for param in group["params"]:
            state = opt.state.get(param, {})
            kept.append(param.detach().clone())
            kept.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()})
    return kept


def unchanged(opt: torch.optim.Optimizer, before: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        return same_bits(a, b) if isinstance(a, Tensor) else bool(a == b)

    after = snapshot(opt)
    return len(after) == len(before) and all(map(same, after, before))
