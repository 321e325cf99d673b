"""Storage decides nothing: the same entries give the same bits in any layout."""

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
from sparsestep.errors import InputError
from sparsestep.gradients.layouts import Gradient as AnyGradient
from sparsestep.gradients.layouts import touched
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer
from sparsestep.rules.functional import FUNCTIONAL
from tests.cases import Gradient
from tests.properties.test_properties import close, oracle_step
from tests.table import (
    ENGINES,
    EVERY,
    Variant,
    dtypes,
    each_optimizer,
    each_variant,
    on_each_engine,
    running_on,
    same_bits,
    state_tensors,
    steps_of,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
]

# There are many combinations, and each example goes through all layouts.
EXAMPLES = 5 if settings.get_current_profile_name() == "ci" else settings.default.max_examples

BY_HAND = {each.optimizer_class: each for each in FUNCTIONAL}


def by_hand(cls: type[RuleOptimizer]) -> type[FunctionalOptimizer]:
    """The functional optimizer of a class; one made up for a rule of a user."""
    return BY_HAND.get(cls) or type("Functional", (FunctionalOptimizer,), {"optimizer_class": cls})


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
# Instruction sets differ in nothing that these tests could see, but for the first.
each_kind = pytest.mark.parametrize("engine", list(dict.fromkeys([ENGINES[0], ENGINES[-1]])))


@pytest.fixture(autouse=True)
def _one_thread():
    """There is little to share out, and waking a thread costs more than a step."""
    torch.set_num_threads(1)


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
        pool = torch.full((len(places) + 3, 1), torch.nan, dtype=values.dtype)
        pool[among, 0] = values
        yield "touched source", Touched(places, pool.to(dtype), numel, 1, among)
        # Values that have still to be multiplied, by factors for which nothing is rounded.
        factors = torch.tensor([4.0, -0.5])[torch.arange(len(places)) % 2]
        later = pool.clone()
        later[among, 0] /= factors
        yield "touched scale", Touched(places, later.to(dtype), numel, 1, among, factors)
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
        if not self.variant.has_twin:
            self.engine = "auto"
        options = {**self.variant.options, **self.options, "engine": self.engine}
        self.by_hand = by_hand(self.variant.cls)([self.param], **options)
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


@on_each_engine(EVERY)
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
        held, exact, slack = oracle_step(first.optimizer, first.param, group, case.entries.oracle())
        places = [held, *(held.any(1) if kept.per_row else held for kept in rule.state)]
        for layout, (grad, mask) in case.entries.stored(dtype, by_row=rule.by_row).items():
            run = warm.again().step(grad, mask)
            if layout == "coo":
                first = run
            assert steps_of(run.optimizer, run.param) == steps_of(first.optimizer, first.param)
            if run.engine == "native" and run is not first:
                assert run.same_as(first), layout
                continue
            names = [kept.name for kept in rule.state]
            ours = [run.param, *(run.by_hand.state[run.param][each] for each in names)]
            was = [warm.param, *(warm.by_hand.state[warm.param][each] for each in names)]
            for our, old, place, value, room in zip(ours, was, places, exact, slack, strict=True):
                value, room = value.reshape(our.shape), room.reshape(our.shape)
                assert close(our[place], value[place], room[place]), layout
                assert same_bits(our[~place], old[~place]), layout


@each_of_a_few
def test_large_gradients_in_every_layout(variant: Variant):
    """Enough for several threads, buckets of positions and rows of several tiles."""
    for shape, unit in (((24, 1200), (4, 6)), ((600, 24), (2, 24))):
        entries = Entries.random(shape, unit, 0.4, seed=0)
        stored = entries.stored(torch.float32, by_row=variant.rule.by_row)
        torch.set_num_threads(1)
        first = Run(variant, "native", randn(shape)).step(*stored["coo"])
        torch.set_num_threads(2)
        for layout, (grad, mask) in stored.items():
            assert Run(variant, "native", randn(shape)).step(grad, mask).same_as(first), layout


@each_of_a_few
@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_rounding_in_every_layout(variant: Variant, engine: str, dtype: torch.dtype):
    """The random bits belong to the element, not to the place where its gradient is stored."""
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    options = {"stochastic_rounding": True, "state_dtype": dtype}
    torch.manual_seed(5)
    with running_on(engine) as name:
        first = None
        for layout, (grad, mask) in entries.stored(dtype, by_row=variant.rule.by_row).items():
            run = Run(variant, name, randn((6, 8)).to(dtype), options).step(grad, mask)
            first = first or run
            assert run.like(first), layout


NUMBERS = [v for v in FEW if v.cls._supports_complex]


@pytest.mark.parametrize("variant", NUMBERS, ids=str)
@each_kind
def test_complex_numbers_are_pairs_in_every_layout(variant: Variant, engine: str):
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    numbers = torch.complex(entries.values, -2 * entries.values)
    same = Entries(numbers, entries.held, entries.unit)
    start = torch.view_as_complex(randn((6, 8, 2)))
    pairs = _coo(entries.held.nonzero().t(), torch.view_as_real(numbers)[same.held], (6, 8, 2))
    with running_on(engine) as name:
        real = Run(variant, name, torch.view_as_real(start)).step(pairs)
        stored = same.stored(torch.complex64, by_row=variant.rule.by_row)
        # Torch may keep for later that a tensor is to be conjugated.
        places = same.held.reshape(-1).nonzero().squeeze(1)
        later = numbers[same.held].conj_physical().conj()
        stored["conjugated"] = (Touched(places, later, 48, 1), None)
        for layout, (grad, mask) in stored.items():
            run = Run(variant, name, start).step(grad, mask)
            run.param = torch.view_as_real(run.param)
            ours = [torch.view_as_real(t) if t.is_complex() else t for t in run.tensors]
            assert all(map(torch.allclose, ours, real.tensors)), layout
            assert name == "reference" or all(map(same_bits, ours, real.tensors)), layout


@pytest.mark.parametrize("layout", ["coo", "csr", "touched", "masked", "strided"])
@each_kind
def test_signs_that_torch_keeps_for_later(layout: str, engine: str):
    """The imaginary part of what is to be conjugated is to be negated."""
    numbers = torch.complex(torch.zeros(4, 6), randn((4, 6))).conj()
    values, held = numbers.imag, torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    assert values.is_neg()
    starts, columns, _ = compress(values, held, torch.sparse_csr)
    grad, mask = {
        "coo": (_coo(held.nonzero().t(), values[held], held.shape), None),
        "csr": (torch.sparse_csr_tensor(starts, columns, values[held], held.shape), None),
        "touched": (Touched(torch.arange(24), values, 24, 1), held),
        "masked": (masked_tensor(values, held), None),
        "strided": (values, held),
    }[layout]
    param = torch.zeros(4, 6)
    with running_on(engine) as name:
        functional.sgd_(param, grad, lr=1.0, engine=name, mask=mask)
    assert same_bits(param[held], -values.resolve_neg()[held])
    assert not param[~held].any()


@each_of_a_few
@each_kind
def test_values_may_be_one_number_that_stands_for_many(variant: Variant, engine: str):
    """As autograd makes them of a sum: strides of zero."""
    entries = Entries.random((4, 6), (1, 1), 0.5, seed=0)
    entries.values.fill_(0.5)
    count = int(entries.held.sum())
    many = torch.tensor(0.5).expand(count)
    starts, columns, _ = compress(entries.values, entries.held, torch.sparse_csr)
    places = entries.held.reshape(-1).nonzero().squeeze(1)
    with running_on(engine) as name:
        first = Run(variant, name, randn((4, 6))).step(entries.coo(torch.float32))
        for grad in (
            _coo(entries.held.nonzero().t(), many, entries.held.shape),
            torch.sparse_csr_tensor(starts, columns, many, entries.held.shape),
            Touched(places, many, 24, 1),
            Touched(places, many[:1], 24, 1, torch.zeros(count, dtype=torch.int64)),
        ):
            assert Run(variant, name, randn((4, 6))).step(grad).like(first)


@each_of_a_few
def test_a_parameter_may_have_strides(variant: Variant):
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    for layout, (grad, mask) in entries.stored(torch.float32, by_row=variant.rule.by_row).items():
        plain = Run(variant, "reference", randn((6, 8))).step(grad, mask)
        turned = Run(variant, "reference", randn((6, 8)).t().contiguous().t()).step(grad, mask)
        assert not turned.param.is_contiguous()
        assert turned.like(plain), layout


@each_of_a_few
@each_kind
def test_a_gradient_is_never_written(variant: Variant, engine: str):
    entries = Entries.random((6, 8), (2, 8), 0.5, seed=0)
    with running_on(engine) as name:
        for layout, (grad, mask) in entries.stored(
            torch.float32, by_row=variant.rule.by_row
        ).items():
            before = [part.clone() for part in parts(grad)]
            Run(variant, name, randn((6, 8)), {"maximize": True}).step(grad, mask)
            after = parts(grad)
            assert all(map(same_parts, before, after)), layout


def parts(grad: AnyGradient) -> list[Tensor]:
    if isinstance(grad, Touched):
        return [part for part in grad if isinstance(part, Tensor)]
    if isinstance(grad, MaskedTensor):
        return [*parts(grad.get_data()), *parts(grad.get_mask())]
    if grad.layout is torch.strided:
        return [grad]
    if grad.layout is torch.sparse_coo:
        return [grad._indices(), grad._values()]
    by_row = grad.layout in BY_ROW
    starts = grad.crow_indices() if by_row else grad.ccol_indices()
    return [starts, grad.col_indices() if by_row else grad.row_indices(), grad.values()]


def same_parts(one: Tensor, other: Tensor) -> bool:
    return same_bits(one, other) if one.is_floating_point() else torch.equal(one, other)


# Batches, dense dims, slots of any size


@each_compressed
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("dense", [(), (2,), (3, 2)], ids=str)
@each_kind
def test_batches_and_dense_dims(
    layout: torch.layout, batch: tuple[int, ...], dense: tuple[int, ...], engine: str
):
    block = (2, 3) if layout in BLOCKED else (1, 1)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.zeros(*batch, 8 // block[0], 9 // block[1], dtype=torch.bool)
    for each in blocks.reshape(-1, *blocks.shape[-2:]):  # as many in each batch
        each.reshape(-1)[torch.randperm(each.numel(), generator=generator)[:5]] = True
    held = blocks.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    shape = (*held.shape, *dense)
    values = torch.randint(-16, 17, shape, generator=generator) / 8
    made = [
        compress(v, h, layout, block)
        for v, h in zip(values.reshape(-1, 8, 9, *dense), held.reshape(-1, 8, 9), strict=True)
    ]
    starts, others, inside = (torch.stack(each) for each in zip(*made, strict=True))
    grad = torch.sparse_compressed_tensor(
        *(each.reshape(*batch, *each.shape[1:]) for each in (starts, others, inside)),
        shape,
        layout=layout,
    )
    coo = _coo(held.nonzero().t(), values[held], shape)
    with running_on(engine) as name:
        for variant in FEW:
            first = Run(variant, name, randn(shape)).step(coo)
            assert Run(variant, name, randn(shape)).step(grad).like(first), variant


@each_of_a_few
@each_kind
@pytest.mark.parametrize("shape", [(48,), (4, 12), (12, 4), (4, 3, 4), (1, 48), (48, 1)], ids=str)
def test_slots_of_every_size(variant: Variant, engine: str, shape: tuple[int, ...]):
    """A Touched may cut a parameter into any equal pieces, whatever its dims are."""
    generator = torch.Generator().manual_seed(0)
    with running_on(engine) as name:
        for slots in (n for n in range(1, 49) if 48 % n == 0):
            block = 48 // slots
            positions = torch.randint(0, slots, (min(slots, 5),), generator=generator)
            values = torch.randint(-16, 17, (len(positions), block), generator=generator) / 8
            elements = (positions[:, None] * block + torch.arange(block)).reshape(-1)
            indices = torch.stack(torch.unravel_index(elements, shape))
            coo = torch.sparse_coo_tensor(indices, values.reshape(-1), shape)
            # The same rows of values through a source, back to front.
            source = torch.arange(len(positions)).flip(0)
            first = Run(variant, name, randn(shape)).step(coo)
            for grad in (
                Touched(positions, values, slots, block),
                Touched(positions, values.flip(0), slots, block, source),
            ):
                assert Run(variant, name, randn(shape)).step(grad).like(first), slots


@each_kind
def test_a_touched_without_positions_is_a_dense_gradient(engine: str):
    values = randn((4, 6), 1)
    with running_on(engine) as name:
        results = []
        for grad in (values, Touched(None, values), Touched(None, values.t().contiguous().t())):
            param, sums = randn((4, 6)), torch.zeros(4, 6)
            functional.adagrad_(param, grad, sums, step=1, engine=name)
            results.append((param, sums))
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


def test_one_number_is_a_parameter_too():
    for grad in (
        torch.tensor(2.0),
        Touched(torch.tensor([0]), torch.tensor([2.0])),
        Touched(torch.tensor([0, 0]), torch.tensor([1.5, 0.5]), 1, 1),
        masked_tensor(torch.tensor(2.0), torch.tensor(True)),
        torch.sparse_coo_tensor(torch.zeros(0, 2), torch.tensor([1.5, 0.5]), ()),
    ):
        param = torch.tensor(1.0)
        functional.sgd_(param, grad, lr=0.25, engine="native")
        assert param.item() == 0.5


# Nothing to do


def empty(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> dict[str, Stored]:
    """Gradients that hold nothing."""
    return Entries(torch.zeros(shape), torch.zeros(shape, dtype=torch.bool), shape).stored(dtype)


@each_variant
@each_kind
def test_a_gradient_that_holds_nothing_counts_and_moves_nothing(variant: Variant, engine: str):
    with running_on(engine) as name:
        warm = Run(variant, name, randn((4, 6))).step(
            _coo(torch.tensor([[1]]), randn((1, 6)), (4, 6))
        )
        for layout, (grad, mask) in empty((4, 6)).items():
            if layout == "strided, elements masked" and variant.rule.by_row:
                continue
            run = warm.again().step(grad, mask)
            assert same_bits(run.param, warm.param), layout
            for kept in variant.rule.state:
                ours, theirs = (r.by_hand.state[r.param][kept.name] for r in (run, warm))
                assert same_bits(ours, theirs), layout
            count = steps_of(run.optimizer, run.param)
            assert count == (None if count is None else 2), layout


@each_of_a_few
@each_kind
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_a_parameter_without_elements(variant: Variant, engine: str, shape: tuple[int, int]):
    nothing = torch.zeros(0, dtype=torch.int64)
    zeros = torch.zeros(shape)
    with running_on(engine) as name:
        for grad in (
            zeros.to_sparse_coo(),
            zeros.to_sparse_csr(),
            zeros.to_sparse_csc(),
            zeros.to_sparse_bsr((2, 2)),
            zeros.to_sparse_bsc((1, 4)),
            masked_tensor(zeros, zeros > 0),
            masked_tensor(zeros.to_sparse_coo(), (zeros > 0).to_sparse_coo()),
            Touched(nothing, torch.zeros(0, shape[1])),
            Touched(nothing, torch.zeros(0), 0, 1),
            Touched(nothing, torch.zeros(0, 3), 3, 0, nothing),
            Touched(None, zeros),
        ):
            run = Run(variant, name, zeros).step(grad)
            assert run.param.shape == shape


# Rules with numbers per row


@each_kind
def test_of_a_row_only_what_is_held_moves_and_all_of_it_counts(engine: str):
    """The mean is over the whole row; what is not held adds nothing to it."""
    held = torch.tensor([[False, True, False, True], [False] * 4, [True, False, False, False]])
    values = torch.tensor([[9.0, 3.0, 9.0, 4.0], [9.0] * 4, [2.0, 9.0, 9.0, 9.0]])
    mean_square = torch.tensor([25 / 4, 0.0, 4 / 4])
    entries = Entries(values, held)
    with running_on(engine) as name:
        for layout, (grad, _) in entries.stored(torch.float32, by_row=True).items():
            param, sums = torch.ones(3, 4), torch.full((3,), 0.5)
            functional.rowwise_adagrad_(param, grad, sums, lr=0.1, engine=name)
            assert torch.equal(sums, 0.5 + mean_square), layout
            expected = 1 - 0.1 * values / sums[:, None].sqrt()
            assert torch.allclose(param[held], expected[held], rtol=1e-6), layout
            assert torch.equal(param[~held], torch.ones(9)), layout

            param, mean, square = torch.ones(3, 4), torch.full((3, 4), 5.0), torch.full((3,), 2.0)
            functional.rowwise_adam_(param, grad, mean, square, step=1, lr=0.1, engine=name)
            touched_rows = torch.tensor([True, False, True])
            moved = torch.where(touched_rows, 0.999 * 2 + 0.001 * mean_square, 2.0)
            assert torch.allclose(square, moved, rtol=1e-6), layout
            assert torch.allclose(mean[held], (4.5 + 0.1 * values)[held], rtol=1e-6), layout
            assert torch.equal(mean[~held], torch.full((9,), 5.0)), layout
            assert torch.equal(param[~held], torch.ones(9)), layout


@each_kind
def test_a_row_counts_one_update_however_many_of_its_elements_are_held(engine: str):
    entries = Entries.random((6, 8), (1, 1), 0.15, seed=3)
    variant = Variant(sparsestep.SparseAdam, {"bias_correction": "per_row"})
    rows = entries.held.any(1)
    assert rows.any()
    assert not rows.all()
    with running_on(engine) as name:
        for layout, (grad, mask) in entries.stored(torch.float32, by_row=True).items():
            run = Run(variant, name, randn((6, 8))).step(grad, mask)
            counts = run.by_hand.state[run.param]["row_step"]
            assert torch.equal(counts, rows.float()), layout


# Masks beside layouts


@pytest.mark.parametrize(
    "variant", [*FEW, Variant(sparsestep.RowwiseAdagrad, {"weight_decay": 0.1})], ids=str
)
@each_kind
def test_a_mask_lets_a_part_of_any_layout_through(variant: Variant, engine: str):
    whole = Entries.random((6, 8), (2, 2), 0.6, seed=0)
    by_row = variant.rule.by_row
    for mask in (randn((6,), 1) > 0, randn((6, 8), 2) > 0):
        if by_row and mask.dim() > 1:
            continue  # refused
        inside = mask if mask.dim() > 1 else mask[:, None].expand(6, 8)
        part = Entries(whole.values, whole.held & inside).coo(torch.float32)
        with running_on(engine) as name:
            first = Run(variant, name, randn((6, 8))).step(part)
            for layout, (grad, own) in whole.stored(torch.float32, by_row=True).items():
                assert own is None
                run = Run(variant, name, randn((6, 8))).step(grad, mask)
                assert run.like(first), layout


# Dense semantics beside layouts


@pytest.mark.parametrize(
    "variant",
    [
        Variant(sparsestep.AdamW, {"lr": 0.1}),
        Variant(sparsestep.SGD, {"lr": 0.1, "momentum": 0.5}),
        Variant(sparsestep.RowwiseAdam, {"lr": 0.1}),
    ],
    ids=str,
)
@each_kind
@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
def test_what_is_not_held_is_zero_where_that_is_asked_for(variant: Variant, engine: str):
    """In any layout, the numbers of the gradient that has zeros there."""
    steps = [Entries.random((6, 8), (2, 2), 0.3, seed) for seed in range(4)]
    with running_on(engine) as name:
        dense = Run(variant, name, randn((6, 8)))
        for entries in steps:
            dense.step(torch.where(entries.held, entries.values, 0.0))
        stored = [entries.stored(torch.float32, by_row=True) for entries in steps]
        for layout in stored[0]:
            run = Run(variant, name, randn((6, 8)), {"semantics": "dense"})
            for each in stored:
                run.step(*each[layout])
            run.optimizer.catch_up()
            assert torch.allclose(run.param, dense.param, rtol=1e-5, atol=1e-6), layout


# Gradients that torch lets one assign


@each_optimizer
@each_kind
def test_masked_tensors_as_grad(optimizer: type[RuleOptimizer], engine: str):
    """The optimizer classes take from .grad what their functional twins are handed."""
    steps = [Entries.random((6, 8), (1, 1), 0.4, seed).stored(torch.float32) for seed in range(3)]
    with running_on(engine) as name:
        for layout in ("masked", "masked strides", "masked coo", "masked coo rows", "coo"):
            run = Run(Variant(optimizer, {}), name, randn((6, 8)))
            param = torch.nn.Parameter(randn((6, 8)))
            opt = optimizer([param], engine=name)
            for stored in steps:
                grad, _ = stored[layout]
                assert isinstance(grad, Tensor)
                run.step(grad)
                param.grad = grad
                opt.step()
                opt.zero_grad()
                assert param.grad is None
            ours = [param.detach(), *state_tensors(opt)]
            assert all(map(same_bits, ours, run.tensors)), layout


@pytest.mark.parametrize("name", ["csr", "csc", "torch.sparse_bsr (2, 2)", "masked csr"])
def test_what_torch_does_not_let_one_assign(name: str):
    """If this fails, torch has become more generous, and the documentation should say so."""
    stored = Entries.random((6, 8), (2, 2), 0.4, seed=0).stored(torch.float32)
    param = torch.nn.Parameter(torch.zeros(6, 8))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient"):
        param.grad = stored[name][0]


def test_two_of_four_is_for_other_devices():
    with pytest.raises(RuntimeError, match="Only CUDA tensors are currently supported"):
        torch.sparse.to_sparse_semi_structured(torch.ones(64, 64, dtype=torch.float16))


# The example of the MaskedTensor notebook (torch's issue 1369)


def notebook() -> tuple[Tensor, Entries, Tensor]:
    """Its parameter, gradient and sum of squares; the step size is 0.1, eps 1e-10."""
    values = torch.zeros(2, 4)
    values[[0, 1, 1], [2, 0, 2]] = torch.tensor([3.0, 4.0, 5.0])
    return torch.arange(8.0).reshape(2, 4), Entries(values, values != 0), torch.full((2, 4), 0.5)


@each_kind
def test_the_example_of_the_notebook(engine: str):
    start, entries, _ = notebook()
    theirs = torch.nn.Parameter(start.clone())
    opt = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-10, initial_accumulator_value=0.5)
    theirs.grad = entries.coo(torch.float32)
    opt.step()
    sums = torch.tensor([[0.5, 0.5, 9.5, 0.5], [16.5, 0.5, 25.5, 0.5]])
    assert torch.equal(opt.state[theirs]["sum"], sums)
    expected = start - 0.1 * entries.values / (sums.sqrt() + 1e-10)
    assert torch.allclose(theirs, expected, rtol=1e-7)

    stored = entries.stored(torch.float32)
    for block in ((1, 2), (2, 1), (2, 2), (1, 4), (2, 4)):
        # Blocks hold zeros too, by which Adagrad moves nothing.
        stored[f"bsr {block}"] = (entries.values.to_sparse_bsr(block), None)
        stored[f"bsc {block}"] = (entries.values.to_sparse_bsc(block), None)
    with running_on(engine) as name:
        for layout, (grad, mask) in stored.items():
            param, _, state_sum = notebook()
            functional.adagrad_(
                param, grad, state_sum, step=1, lr=0.1, eps=1e-10, mask=mask, engine=name
            )
            assert torch.equal(state_sum, sums), layout
            assert torch.allclose(param, theirs, rtol=1e-7), layout
            assert same_bits(param[~entries.held], start[~entries.held]), layout


# Nothing is made dense

LARGE = """
import sys, warnings
import torch, sparsestep
from sparsestep import Touched, functional
from sparsestep.memory import pages

warnings.simplefilter("ignore")

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

SHAPE = torch.Size([2**17, 2**14])  # 4 GB for each tensor, were it touched
param, state = (
    pages.zeros(SHAPE, torch.float16, torch.device("cpu"), touches=64) for _ in range(2)
)
rows, columns = torch.arange(7, 2**17, 2**14), torch.arange(5, 2**14, 2**11)
values = torch.ones(8, dtype=torch.float16)
starts = torch.zeros(2**17 + 1, dtype=torch.int64)
starts[rows + 1] = 1
starts = starts.cumsum(0)
across = torch.zeros(2**14 + 1, dtype=torch.int64)
across[columns + 1] = 1
across = across.cumsum(0)
coo = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, SHAPE)
csr = torch.sparse_csr_tensor(starts, columns, values, SHAPE)
csr_mask = torch.sparse_csr_tensor(starts, columns, values > 0, SHAPE)
grads = {
    "coo": coo,
    "csr": csr,
    "csc": torch.sparse_csc_tensor(across, rows, values, SHAPE),
    "bsr": torch.sparse_bsr_tensor(
        starts, columns // 2, values[:, None, None].repeat(1, 1, 2), SHAPE
    ),
    "masked": torch.masked.masked_tensor(csr, csr_mask),
    "touched": Touched(rows * 2**14 + columns, values, 2**31, 1),
}
sums = torch.zeros(2**17)
before = resident()
for engine in ("native", "reference"):
    for name, grad in grads.items():
        functional.adagrad_(param, grad, state, step=1, engine=engine)
        functional.rowwise_adagrad_(param, grad, sums, engine=engine)
        grown = resident() - before
        assert grown < 200, f"{engine} {name}: {grown} MiB"
assert param[rows, columns].max() < 0
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_handful_of_entries_takes_memory_for_a_handful():
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr


# What is refused


def broken(
    starts: list[Any],
    others: list[Any],
    values: Tensor,
    layout: torch.layout = torch.sparse_csr,
    shape: tuple[int, ...] = (4, 6),
) -> Callable[[], Tensor]:
    return lambda: torch.sparse_compressed_tensor(
        torch.tensor(starts), torch.tensor(others), values, shape, layout=layout
    )


def by_hand_with(*args: Any, **kwargs: Any) -> Callable[[], Touched]:
    return lambda: Touched(*args, **kwargs)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


ONES = torch.ones(2, 6)
CSR, CSC, BSR, BSC = torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
# For a parameter of 4 x 6: a gradient, and what the message must say.
BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "position too large": (by_hand_with(ids(0, 4), ONES), r"must be in \[0, 4\). Got 4"),
    "position negative": (by_hand_with(ids(0, -1), ONES), r"must be in \[0, 4\). Got -1"),
    "position 2**62": (by_hand_with(ids(0, 2**62), ONES), r"\[0, 4\). Got 4611686018427387904"),
    "position 2**62 of slots that are cut": (
        by_hand_with(ids(0, 2**62), torch.ones(2, 8), 3, 8),
        r"\[0, 3\). Got 4611686018427387904",
    ),
    "position of an element": (
        by_hand_with(ids(0, 24), torch.ones(2), 24, 1),
        r"must be in \[0, 24\). Got 24",
    ),
    "source too large": (
        by_hand_with(ids(0, 1), ONES, 4, 6, ids(0, 2)),
        r"source must number rows of values, in \[0, 2\). Got 2",
    ),
    "source negative": (
        by_hand_with(ids(0, 1), ONES, 4, 6, ids(-1, 0)),
        r"source must number rows of values, in \[0, 2\). Got -1",
    ),
    "source too short": (
        by_hand_with(ids(0, 1), ONES, 4, 6, ids(0)),
        "2 positions need as many numbers in source. Got 1",
    ),
    "source without positions": (
        by_hand_with(None, torch.ones(4, 6), source=ids(0)),
        "source must be None where positions are",
    ),
    "scale too short": (
        by_hand_with(ids(0, 1), ONES, scale=torch.ones(1)),
        "2 positions need as many numbers in scale. Got 1",
    ),
    "scale of integers": (
        by_hand_with(ids(0, 1), ONES, scale=ids(1, 1)),
        "the scale of a Touched must be of a float dtype. Got torch.int64",
    ),
    "scale without positions": (
        by_hand_with(None, torch.ones(4, 6), scale=torch.ones(4)),
        "scale must be None where positions are",
    ),
    "scale that is no tensor": (
        by_hand_with(ids(0, 1), ONES, scale=2.0),
        "the scale of a Touched must be a strided tensor. Got float",
    ),
    "more positions than values": (
        by_hand_with(ids(0, 1, 2), ONES),
        r"3 positions need as many rows of 6 values. Got values of shape \(2, 6\)",
    ),
    "fewer positions than values": (
        by_hand_with(ids(0), ONES),
        r"1 positions need as many rows of 6 values. Got values of shape \(2, 6\)",
    ),
    "values of half a row": (
        by_hand_with(ids(0, 1), torch.ones(2, 3)),
        "2 positions need as many rows of 6 values",
    ),
    "values of half a row with a source": (
        by_hand_with(ids(0, 1), torch.ones(5), 4, 6, ids(0, 0)),
        "the values must be rows of 6",
    ),
    "dense values of another shape": (
        by_hand_with(None, torch.ones(6, 4)),
        r"without positions the values must have shape \(4, 6\). Got \(6, 4\)",
    ),
    "slots x block": (
        by_hand_with(ids(0, 1), ONES, 5, 6),
        "slots x block must be the parameter's 24 elements. Got 5 x 6",
    ),
    "slots without block": (by_hand_with(ids(0, 1), ONES, 4), "24 elements. Got 4 x 0"),
    "negative slots": (by_hand_with(ids(0, 1), ONES, -4, -6), "24 elements. Got -4 x -6"),
    "slots that are no whole number": (by_hand_with(ids(0), ONES, 4.0, 6), "Got 4.0 x 6"),
    "float positions": (
        by_hand_with(torch.tensor([0.0, 1.0]), ONES),
        "positions of a Touched must be int64 or int32. Got torch.float32",
    ),
    "bool positions": (
        by_hand_with(torch.tensor([True, False]), ONES),
        "positions of a Touched must be int64 or int32. Got torch.bool",
    ),
    "float source": (
        by_hand_with(ids(0, 1), ONES, 4, 6, torch.tensor([0.0, 1.0])),
        "source of a Touched must be int64 or int32. Got torch.float32",
    ),
    "list of positions": (
        by_hand_with([0, 1], ONES),
        "positions of a Touched must be a strided tensor. Got list",
    ),
    "sparse values": (
        by_hand_with(ids(0, 1), ONES.to_sparse_coo()),
        "values of a Touched must be a strided tensor. Got layout torch.sparse_coo",
    ),
    "no values": (
        by_hand_with(ids(0, 1), None),
        "values of a Touched must be a strided tensor. Got NoneType",
    ),
    "integer values": (by_hand_with(ids(0, 1), ONES.long()), "like dtype. Got torch.int64"),
    "complex values": (by_hand_with(ids(0, 1), ONES * 1j), "like dtype. Got torch.complex64"),
    "values elsewhere": (by_hand_with(ids(0, 1), ONES.to("meta")), "must be on cpu. Got meta"),
    "held": (
        by_hand_with(ids(0, 1), ONES, held=ONES > 0),
        "held is for the library's own use",
    ),
    "held without positions": (
        by_hand_with(None, torch.ones(4, 6), held=torch.ones(4, 6) > 0),
        "held is for the library's own use",
    ),
    "crow that falls": (
        broken([0, 2, 1, 3, 3], [0, 1, 2], torch.ones(3)),
        r"must rise from 0 to the number of entries, 3. Got \[0, 2, 1, 3, 3\]",
    ),
    "crow that begins late": (broken([1, 1, 2, 2, 2], [0, 1], torch.ones(2)), "must rise from 0"),
    "crow that ends early": (broken([0, 0, 1, 1, 1], [0, 1], torch.ones(2)), "must rise from 0"),
    "ccol that falls": (
        broken([0, 2, 1, 3, 3, 3, 3], [0, 1, 2], torch.ones(3), CSC),
        "must rise from 0",
    ),
    "crow too short": (broken([0, 1, 2], [0, 1], torch.ones(2)), r"must fit its shape, \(4, 6\)"),
    "crow too long": (broken([0] * 5 + [1, 2], [0, 1], torch.ones(2)), "must fit its shape"),
    "no crow": (broken([], [0], torch.ones(1)), "must fit its shape"),
    "crow of floats": (broken([0.0, 1, 1, 1, 1], [0], torch.ones(1)), "torch.float32 indices"),
    "crow of a batch": (broken([[0, 1, 1, 1, 1]], [[0]], torch.ones(1, 1)), "must fit its shape"),
    "fewer values than columns": (
        broken([0, 1, 2, 2, 2], [0, 1], torch.ones(1)),
        r"must fit its shape, \(4, 6\). Got .* values of shape \(1,\)",
    ),
    "more values than columns": (
        broken([0, 1, 2, 2, 2], [0, 1], torch.ones(3)),
        r"must fit its shape, \(4, 6\). Got .* values of shape \(3,\)",
    ),
    "column too large": (
        broken([0, 1, 2, 2, 2], [0, 6], torch.ones(2)),
        r"indices of dim 1 must be in \[0, 6\). Got 6",
    ),
    "column negative": (
        broken([0, 1, 2, 2, 2], [0, -1], torch.ones(2)),
        r"indices of dim 1 must be in \[0, 6\). Got -1",
    ),
    "row too large": (
        broken([0, 1, 2, 2, 2, 2, 2], [0, 4], torch.ones(2), CSC),
        r"indices of dim 0 must be in \[0, 4\). Got 4",
    ),
    "column of blocks too large": (
        broken([0, 1, 2], [0, 2], torch.ones(2, 2, 3), BSR),
        r"indices of dim 1 must be in \[0, 2\). Got 2",
    ),
    "row of blocks too large": (
        broken([0, 1, 2], [0, 2], torch.ones(2, 2, 3), BSC),
        r"indices of dim 0 must be in \[0, 2\). Got 2",
    ),
    "blocks that do not divide the shape": (
        broken([0, 1], [0], torch.ones(1, 3, 4), BSR),
        r"must fit its shape, \(4, 6\). Got .* values of shape \(1, 3, 4\)",
    ),
    "blocks without elements": (broken([0, 0], [], torch.ones(0, 0, 0), BSR), "must fit its shape"),
    "values that are no blocks": (broken([0, 1, 1], [0], torch.ones(1), BSR), "must fit its shape"),
    "COO index out of its dim": (
        lambda: torch.sparse_coo_tensor([[1, 0], [-1, 3]], torch.ones(2), (4, 6)),
        r"indices of dim 1 must be in \[0, 6\). Got -1",
    ),
    "COO row out of its dim": (
        lambda: torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 6), (4, 6)),
        r"indices of dim 0 must be in \[0, 4\). Got 4",
    ),
    "CSR of another shape": (
        broken([0, 1, 2], [0, 1], torch.ones(2), shape=(2, 6)),
        r"the parameter's shape, \(4, 6\). Got \(2, 6\)",
    ),
    "strided of another shape": (lambda: torch.ones(6, 4), r"shape, \(4, 6\). Got \(6, 4\)"),
    "CSR of integers": (
        broken([0, 1, 1, 1, 1], [0], torch.ones(1, dtype=torch.int64)),
        "like dtype. Got torch.int64",
    ),
    "MaskedTensor of another shape": (
        lambda: masked_tensor(torch.ones(6, 4), torch.ones(6, 4) > 0),
        r"the parameter's shape, \(4, 6\). Got \(6, 4\)",
    ),
    "MaskedTensor of integers": (
        lambda: masked_tensor(torch.ones(4, 6).long(), torch.ones(4, 6) > 0),
        "like dtype. Got torch.int64",
    ),
    "a layout that nobody knows": (
        lambda: torch.ones(4, 6).to_mkldnn(),
        "must be a strided, COO, CSR, CSC, BSR or BSC tensor, a MaskedTensor or a Touched",
    ),
}


@pytest.mark.parametrize("bad", BROKEN)
@each_kind
def test_what_is_broken_is_refused_in_one_sentence_and_changes_nothing(bad: str, engine: str):
    make, message = BROKEN[bad]
    param, mean, square, sums = randn((4, 6)), randn((4, 6), 1), randn((4, 6), 2), randn((4,), 3)
    tensors = [param, mean, square, sums]
    before = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    with running_on(engine) as name:
        opt = sparsestep.FunctionalAdam([param], engine=name)
        rowwise = sparsestep.FunctionalRowwiseAdagrad([param], engine=name)
        calls: dict[str, Callable[[Any], None]] = {
            "adam_: ": lambda g: functional.adam_(param, g, mean, square, step=1, engine=name),
            "rowwise_adagrad_: ": lambda g: functional.rowwise_adagrad_(
                param, g, sums, engine=name
            ),
            "Adam: param 0 of group 0: ": lambda g: opt.step([g]),
            "RowwiseAdagrad: param 0 of group 0: ": lambda g: rowwise.step_param(param, g),
        }
        for who, call in calls.items():
            with pytest.raises(InputError, match=message) as raised:
                call(make())
            text = str(raised.value)
            assert text.startswith(who)
            assert text.endswith(".")
            assert "\n" not in text
    assert all(map(same_bits, tensors, before))
    assert [tensor._version for tensor in tensors] == versions
    assert len(opt.state) == 0
    assert not rowwise.state


def test_a_parameter_of_another_kind_refuses_values_of_this_one():
    for dtype, values in ((torch.complex64, ONES), (torch.float32, ONES * 1j)):
        with pytest.raises(InputError, match="must be of a like dtype"):
            touched(torch.zeros(4, 6, dtype=dtype), Touched(ids(0, 1), values))
