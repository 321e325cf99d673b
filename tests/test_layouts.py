"""Storage decides nothing: the same entries in any layout move the same elements to the same bits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.masked import MaskedTensor, masked_tensor

import sparsestep
from sparsestep import Touched, functional
from sparsestep.by_hand import FUNCTIONAL, FunctionalOptimizer
from sparsestep.errors import InputError
from sparsestep.layouts import Gradient as AnyGradient
from sparsestep.layouts import touched
from sparsestep.optimizer import RuleOptimizer
from sparsestep.rules import OPTIMIZERS
from tests.table import (
    VARIANTS,
    Gradient,
    Variant,
    dtypes,
    each_engine,
    each_optimizer,
    each_variant,
    running_on,
    same_bits,
    state_tensors,
    steps_of,
)
from tests.test_properties import close, oracle_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
]

# There are many combinations, and each example goes through all layouts.
EXAMPLES = 6 if settings.get_current_profile_name() == "ci" else settings.default.max_examples

BY_HAND = {each.optimizer_class: each for each in FUNCTIONAL}
BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, *BLOCKED)
each_compressed = pytest.mark.parametrize("layout", COMPRESSED, ids=str)
# One of each kind: per element, with decay, with numbers per row, without any state.
FEW = [
    Variant(sparsestep.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    Variant(sparsestep.SparseAdam, {"bias_correction": "per_row"}),
    Variant(sparsestep.RowwiseAdagrad, {}),
    Variant(sparsestep.RowwiseAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sparsestep.SGD, {}),
]
each_of_a_few = pytest.mark.parametrize("variant", FEW, ids=str)


# The same entries in every layout


@dataclass
class Entries:
    """What a gradient of a matrix holds: ``values`` where ``held`` is true.

    Attributes:
        values: numbers whose sums are exact; what is not held does not count.
        held: which elements are touched, in whole blocks of ``unit``.
        unit: how high and how wide these blocks are.
    """

    values: Tensor
    held: Tensor
    unit: tuple[int, int] = (1, 1)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @classmethod
    def random(
        cls, shape: tuple[int, int], unit: tuple[int, int], share: float, seed: int
    ) -> Entries:
        generator = torch.Generator().manual_seed(seed)
        grid = (shape[0] // unit[0], shape[1] // unit[1])
        blocks = torch.rand(grid, generator=generator) < share
        held = blocks.repeat_interleave(unit[0], 0).repeat_interleave(unit[1], 1)
        values = torch.randint(-16, 17, shape, generator=generator) / 8
        values[torch.rand(shape, generator=generator) < 0.1] = -0.0  # held, and keeps its sign
        return cls(values, held, unit, generator)

    @property
    def rows(self) -> Tensor | None:
        """The rows that are touched, where they are touched as a whole."""
        whole = self.unit[1] == self.held.shape[1]
        return self.held[:, 0].nonzero().squeeze(1) if whole else None

    def oracle(self) -> Gradient:
        return Gradient(tuple(self.held.shape), self.held.nonzero().t(), self.values[self.held])

    def scattered(self, places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """In any order, and some of it in parts that are to be summed."""
        for _ in range(2):
            # Not zeros: they have a sign, which a sum of parts would lose.
            chosen = torch.rand(len(values), generator=self.generator) < 0.3
            chosen &= (values != 0).unsqueeze(-1).flatten(1).all(1)
            parts = torch.randint(-8, 9, values[chosen].shape, generator=self.generator) / 8
            values = torch.cat([values, parts])
            values[: len(chosen)][chosen] -= parts
            places = torch.cat([places, places[chosen]])
        order = torch.randperm(len(values), generator=self.generator)
        return places[order], values[order]

    def stored(self, dtype: torch.dtype, *, by_row: bool = False) -> dict[str, Stored]:
        """Every way to store it that there is; ``by_row`` without masks of elements."""
        found = {
            "coo": (self.coo(dtype), None),
            "coo unsorted": (self.unsorted_coo(dtype), None),
            "csr": (self.compressed(torch.sparse_csr, dtype), None),
            "csr int32": (self.compressed(torch.sparse_csr, dtype, indices=torch.int32), None),
            "csr strides": (self.compressed(torch.sparse_csr, dtype, strides=True), None),
            "csc": (self.compressed(torch.sparse_csc, dtype), None),
            **{name: (grad, None) for name, grad in self._blocked(dtype)},
            **{name: (grad, None) for name, grad in self._by_hand(dtype)},
        }
        if dtype in (torch.float16, torch.float32, torch.float64):  # what torch's class takes
            found |= {name: (grad, None) for name, grad in self._masked(dtype)}
        if not by_row:
            found["strided, elements masked"] = (self._strided(dtype), self.held)
        if self.rows is not None:
            found["strided, rows masked"] = (self._strided(dtype), self.held[:, 0])
            values = self.values[self.rows]
            found["coo rows"] = (_coo(self.rows[None], values.to(dtype), self.held.shape), None)
            rows, values = self.scattered(self.rows, values)
            unsorted = _coo(rows[None], values.to(dtype), self.held.shape)
            found["coo rows unsorted"] = (unsorted, None)
            found["touched rows"] = (Touched(rows.int(), values.to(dtype)), None)
        return found

    def coo(self, dtype: torch.dtype) -> Tensor:
        return _coo(self.held.nonzero().t(), self.values[self.held].to(dtype), self.held.shape)

    def unsorted_coo(self, dtype: torch.dtype) -> Tensor:
        places, values = self.scattered(self.held.nonzero(), self.values[self.held])
        return torch.sparse_coo_tensor(places.t(), values.to(dtype), self.held.shape)

    def compressed(
        self,
        layout: torch.layout,
        dtype: torch.dtype,
        block: tuple[int, int] = (1, 1),
        *,
        indices: torch.dtype = torch.int64,
        strides: bool = False,
    ) -> Tensor:
        starts, others, values = compress(self.values, self.held, layout, block)
        values = values.to(dtype)
        if strides:
            values = values.repeat_interleave(2, 0)[::2]
        return torch.sparse_compressed_tensor(
            starts.to(indices), others.to(indices), values, self.held.shape, layout=layout
        )

    def _blocked(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        high, wide = self.unit
        for block in {(high, wide), (high, 1), (1, wide)}:
            for layout in BLOCKED:
                yield f"{layout} {block}", self.compressed(layout, dtype, block)

    def _strided(self, dtype: torch.dtype) -> Tensor:
        """With something outside that must not get anywhere."""
        return torch.where(self.held, self.values, torch.nan).to(dtype)

    def _masked(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        data, shape = self._strided(dtype), self.held.shape
        yield "masked", masked_tensor(data, self.held)
        transposed = masked_tensor(data.t().contiguous().t(), self.held.t().contiguous().t())
        yield "masked strides", transposed
        # The layouts inside hold more than the mask lets through.
        more = self.held | (torch.rand(shape, generator=self.generator) < 0.2)
        places = more.nonzero().t()
        yield (
            "masked coo",
            masked_tensor(_coo(places, data[more], shape), _coo(places, self.held[more], shape)),
        )
        rows = more.any(1).nonzero().squeeze(1)
        yield (
            "masked coo rows",
            masked_tensor(
                _coo(rows[None], data[rows], shape), _coo(rows[None], self.held[rows], shape)
            ),
        )
        starts, columns, _ = compress(data, more, torch.sparse_csr)
        yield (
            "masked csr",
            masked_tensor(
                torch.sparse_csr_tensor(starts, columns, data[more], shape),
                torch.sparse_csr_tensor(starts, columns, self.held[more], shape),
            ),
        )

    def _by_hand(self, dtype: torch.dtype) -> Iterator[tuple[str, Touched]]:
        flat, numel = self.held.reshape(-1), self.held.numel()
        places, values = flat.nonzero().squeeze(1), self.values.reshape(-1)[flat]
        yield "touched", Touched(places, values.to(dtype), numel, 1)
        several, parts = self.scattered(places, values)
        yield "touched unsorted", Touched(several, parts.to(dtype), numel, 1)
        # The values in another order, and some that nobody asks for between them.
        among = torch.randperm(len(places) + 3, generator=self.generator)[: len(places)]
        pool = torch.full((len(places) + 3, 1), torch.nan)
        pool[among, 0] = values
        yield "touched source", Touched(places, pool.to(dtype), numel, 1, among)
        # Runs as wide as the blocks, with strides.
        wide = self.unit[1]
        runs = self.held.reshape(-1, wide)[:, 0].nonzero().squeeze(1)
        blocks = self.values.reshape(-1, wide)[runs].to(dtype)
        blocks = blocks.repeat_interleave(2, 1)[:, ::2]
        yield "touched runs", Touched(runs.int(), blocks, numel // wide, wide)


Stored = tuple[AnyGradient, Tensor | None]  # with the mask that goes with it


def _coo(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


def compress(
    values: Tensor, held: Tensor, layout: torch.layout, block: tuple[int, int] = (1, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """The two kinds of indices and the values: ``[entries, *dense]``, or with blocks between."""
    (rows, columns), (high, wide), dense = held.shape, block, values.shape[2:]
    grid = held.reshape(rows // high, high, columns // wide, wide)[:, 0, :, 0]
    by_row = layout in BY_ROW
    grouped, others = (grid if by_row else grid.t()).nonzero(as_tuple=True)
    starts = torch.zeros(grid.shape[0 if by_row else 1] + 1, dtype=torch.int64)
    starts[1:] = grid.sum(1 if by_row else 0).cumsum(0)
    down, along = (grouped, others) if by_row else (others, grouped)
    blocks = values.reshape(rows // high, high, columns // wide, wide, *dense).transpose(1, 2)
    found = blocks[down, along]
    return starts, others, found if layout in BLOCKED else found[:, 0, 0]


@dataclass
class Case:
    """A step to be taken from a state that is not the first."""

    before: Entries
    entries: Entries
    options: dict[str, Any]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 40)]))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4) | st.just(15)))
    shape = (unit[0] * grid[0], unit[1] * grid[1])
    share = st.sampled_from([0.2, 0.5, 0.5, 1.0])
    seeds = st.integers(0, 2**16)
    before, entries = (Entries.random(shape, unit, draw(share), draw(seeds)) for _ in range(2))
    options = {"maximize": draw(st.booleans()), "lr": draw(st.sampled_from([1e-3, 0.1, 1.0]))}
    return Case(before, entries, options, draw(seeds))


# One step with one gradient


@dataclass
class Run:
    """A parameter and its optimizer, whose state may be that of another."""

    variant: Variant
    engine: str
    start: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.param = self.start.clone()
        self.by_hand: FunctionalOptimizer = BY_HAND[self.variant.cls](
            [self.param], **self.variant.options, **self.options, engine=self.engine
        )
        if self.state is not None:
            self.by_hand.load_state_dict(self.state)

    @property
    def optimizer(self) -> RuleOptimizer:
        return self.by_hand._optimizer

    def again(self) -> Run:
        """From where this one has arrived."""
        state = self.by_hand.state_dict()
        return Run(self.variant, self.engine, self.param, self.options, state)

    def step(self, grad: AnyGradient, mask: Tensor | None = None) -> Run:
        if mask is not None:
            self.by_hand.param_group["mask"] = mask
        self.by_hand.step([grad])
        return self

    @property
    def tensors(self) -> list[Tensor]:
        return [self.param, *state_tensors(self.optimizer)]

    def same_as(self, other: Run) -> bool:
        ours, theirs = self.tensors, other.tensors
        return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))

    def like(self, other: Run) -> bool:
        """The same bits, or the last places of the reference engine: torch's square root depends
        on where in a tensor a number stands."""
        if self.engine == "native":
            return self.same_as(other)
        rtol = 1e-2 if self.param.dtype in (torch.float16, torch.bfloat16) else 1e-6
        ours, theirs = self.tensors, other.tensors
        return len(ours) == len(theirs) and all(
            torch.allclose(our, their, rtol=rtol, atol=1e-7, equal_nan=True)
            for our, their in zip(ours, theirs, strict=True)
        )


def randn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Every rule in every layout


@each_variant
@each_engine
@given(case=cases(), dtype=dtypes)
@settings(max_examples=EXAMPLES)
def test_the_layout_decides_nothing(variant: Variant, engine: str, case: Case, dtype: torch.dtype):
    """All layouts give one result, which is the rule, in float64, on what is held."""
    start = randn(tuple(case.entries.held.shape), case.seed).to(dtype)
    rule = variant.rule
    with running_on(engine) as name:
        warm = Run(variant, name, start, case.options).step(case.before.coo(dtype))
        first = warm.again()
        group = first.by_hand.param_group
        held, exact, slack = oracle_step(
            first.optimizer, first.param, group, case.entries.oracle()
        )
        places = [held, *(held.any(1) if kept.per_row else held for kept in rule.state)]
        for layout, (grad, mask) in case.entries.stored(dtype, by_row=rule.by_row).items():
            run = warm.again().step(grad, mask)
            if layout == "coo":
                first = run
            assert name == "reference" or run.same_as(first), layout
            assert steps_of(run.optimizer, run.param) == steps_of(first.optimizer, first.param)
            if name == "native" and run is not first:
                continue  # the same bits as those that were looked at
            names = [kept.name for kept in rule.state]
            ours = [run.param, *(run.by_hand.state[run.param][each] for each in names)]
            was = [warm.param, *(warm.by_hand.state[warm.param][each] for each in names)]
            for our, old, place, value, room in zip(ours, was, places, exact, slack, strict=True):
                value, room = value.reshape(our.shape), room.reshape(our.shape)
                assert close(our[place], value[place], room[place]), layout
                assert same_bits(our[~place], old[~place]), layout
