"""The Triton engine in Triton's interpreter: the bits of the core, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.engines import triton as engine
from sparsestep.errors import InputError
from tests.subject import refused
from tests.table import EVERY, VARIANTS, Variant, needs_triton, same_bits, state_tensors

pytestmark = needs_triton

ROWS, COLUMNS = 20, 12
COUNTED_BY_ROW = "per_row"  # bias correction, with powers in float64


def train(
    variant: Callable[..., Any],
    engine: str,
    gradient: Callable[[torch.Generator, torch.dtype], Any],
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[Tensor]:
    """The parameter and its state after three steps with random gradients."""
    draw = torch.Generator().manual_seed(7)
    param = torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=draw).to(dtype))
    optimizer = variant([param], engine=engine, **options)
    for _ in range(3):
        param.grad = gradient(draw, dtype)
        optimizer.step()
    return [param.detach(), *state_tensors(optimizer)]


def coo(draw: torch.Generator, dtype: torch.dtype, entries: int = 33) -> Tensor:
    rows = torch.randint(0, ROWS, (1, entries), generator=draw)
    values = torch.randn(entries, COLUMNS, generator=draw).to(dtype)
    return torch.sparse_coo_tensor(rows, values, (ROWS, COLUMNS))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert [same_bits(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)


HALF = {"stochastic_rounding": True, "rounding_seed": 3}
TREATMENTS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {"maximize": True}),
    (torch.float64, {}),
    (torch.bfloat16, {}),
    (torch.float16, {"maximize": True}),
    (torch.bfloat16, {**HALF, "state_dtype": torch.bfloat16}),
    (torch.float16, {**HALF, "state_dtype": torch.float16}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_rule_has_the_bits_of_the_core(variant: Variant):
    """Also those that sum up rows: the kernel adds in the order in which the core does."""
    for dtype, options in TREATMENTS:
        ours = train(variant, "triton", coo, dtype, **options)
        theirs = train(variant, "native", coo, dtype, **options)
        if COUNTED_BY_ROW in str(variant) and dtype == torch.float64:
            # Here the interpreter's powers show, which are less exact than those of a GPU.
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        else:
            assert_same(ours, theirs)


# Forms of gradients


def bags(draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Of an embedding bag: rows of values that several entries share, each with a factor."""
    module = sparsestep.nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", dtype=dtype)
    ids = torch.randint(0, ROWS, (4, 6), generator=draw)
    factors = torch.randn(4, 6, generator=draw).to(dtype)
    weights = torch.randn(4, COLUMNS, generator=draw).to(dtype)
    (module(ids, per_sample_weights=factors) * weights).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def elements(draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Single elements; a rule with numbers per row gets rows that are held in part."""
    places = torch.stack(
        [torch.randint(0, n, (15,), generator=draw) for n in (ROWS, COLUMNS)]
    ).long()
    values = torch.randn(15, generator=draw).to(dtype)
    return torch.sparse_coo_tensor(places, values, (ROWS, COLUMNS))


def dense(draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=draw).to(dtype)


def nothing(draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    return coo(draw, dtype, entries=0)


SOME_ROWS = torch.arange(ROWS) % 3 == 0
SOME_ELEMENTS = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 5 == 0
LAYOUTS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "bags": (bags, {}),
    "elements": (elements, {}),
    "dense": (dense, {}),
    "masked rows": (dense, {"mask": SOME_ROWS}),
    "masked elements": (dense, {"mask": SOME_ELEMENTS}),
    "masked lookups": (coo, {"mask": SOME_ROWS}),
    "nothing": (nothing, {}),
}
FEW = [
    Variant(sparsestep.SparseAdam, {}),
    Variant(sparsestep.RowwiseAdagrad, {"weight_decay": 0.1}),
    Variant(sparsestep.Lion, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_a_gradient_has_the_bits_of_the_core(layout: str):
    gradient, options = LAYOUTS[layout]
    for variant in FEW:
        if variant.rule.needs_whole_rows and layout == "masked elements":
            continue
        for dtype in (torch.float32, torch.bfloat16):
            ours = train(variant, "triton", gradient, dtype, **options)
            assert_same(ours, train(variant, "native", gradient, dtype, **options))


@pytest.mark.parametrize("shape", [(5, 3, 2), (4, 1500), (7,), ()], ids=str)
def test_any_shape(shape: tuple[int, ...]):
    def moved(engine: str) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        param = torch.randn(shape, generator=draw, dtype=torch.complex64).requires_grad_()
        param.grad = torch.randn(shape, generator=draw, dtype=torch.complex64)
        sparsestep.RowwiseAdagrad([param], engine=engine).step()
        return param.detach()

    assert same_bits(moved("triton"), moved("native"))


@pytest.mark.parametrize("entries", [64, 65, 130, 300])
def test_long_runs_are_summed_in_blocks(entries: int):
    """First the blocks of 64, each in order, then their sums in order."""
    draw = torch.Generator().manual_seed(entries)
    rows = torch.randint(0, 3, (entries,), generator=draw)
    rows[: entries // 2] = 1
    values = torch.randn(entries, 4, generator=draw) * 10 ** torch.randn(entries, 1, generator=draw)
    param = torch.zeros(3, 4)
    grad = sparsestep.IndexedGrad(rows, values)
    sparsestep.functional.sgd_(param, grad, lr=1.0, engine="triton")

    def in_order(parts: Any) -> Tensor:
        first, *others = parts
        for other in others:
            first = first + other
        return first

    for row in range(3):
        blocks = values[rows == row].split(64)
        assert same_bits(param[row], -in_order(in_order(block) for block in blocks))


@pytest.mark.parametrize("variant", EVERY[-4:], ids=str)
def test_rules_of_users_run_too(variant: Variant):
    ours = train(variant, "triton", coo)
    for tensor, theirs in zip(ours, train(variant, "reference", coo), strict=True):
        torch.testing.assert_close(tensor, theirs, rtol=3e-7, atol=3e-7)


# Refusals


def two_tables() -> tuple[list[Tensor], sparsestep.Adam]:
    params = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5, 2))]
    optimizer = sparsestep.Adam(params, engine="triton")
    for param in params:
        values = torch.ones(2, param.shape[1])
        param.grad = torch.sparse_coo_tensor([[0, 1]], values, param.shape)
    optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("index", [-1, 5])
def test_a_bad_index_changes_nothing(index: int):
    params, optimizer = two_tables()
    params[1].grad = torch.sparse_coo_tensor(
        torch.tensor([[0, index]]), torch.ones(2, 2), (5, 2), check_invariants=False
    )
    with refused(optimizer, match=f"param 1 of group 0: .*{index}"):
        optimizer.step()


@sparsestep.rule()
def branching(param, grad, *, lr=0.1):
    return param - lr * grad if bool(grad > 0) else param


@pytest.mark.parametrize(
    ("cls", "weight", "options", "words"),
    [
        (sparsestep.Adam, torch.ones(3, 4).T, {}, "contiguous"),
        (sparsestep.Adam, torch.ones(4, 3), {"state_dtype": torch.int8}, "torch.int8"),
        (branching, torch.ones(4, 3), {}, "'branching': it branches on values"),
    ],
)
def test_what_a_kernel_cannot_be_printed_for(cls: Any, weight: Tensor, options: Any, words: str):
    param = torch.nn.Parameter(weight)
    param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (4, 3))
    optimizer = cls([param], engine="triton", **options)
    with refused(optimizer, match=words):
        optimizer.step()


def test_the_cpu_is_refused_but_in_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    _, optimizer = two_tables()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match="GPU"):
        optimizer.step()


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install"):
        sparsestep.Adam([torch.ones(2)], engine="triton")
