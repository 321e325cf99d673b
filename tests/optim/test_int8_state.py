"""``state_dtype=torch.int8``: the same training from a quarter of the state."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests import table
from tests.table import INSTRUCTION_SETS, running_on, state_tensors

# For each optimizer whose state may be int8, the variant with the most of it.
LARGEST = {}
for each in sorted(table.VARIANTS, key=lambda variant: len(variant.rule.state)):
    per_element = [spec for spec in each.rule.state if not spec.per_row]
    if per_element and all(spec.int8_format for spec in per_element):
        LARGEST[each.cls] = (each.cls, each.options)
VARIANTS = list(LARGEST.values())
each_variant = pytest.mark.parametrize(
    ("cls", "options"), VARIANTS, ids=lambda v: v.__name__ if isinstance(v, type) else ""
)


def sparse(shape: tuple[int, ...], rows: list[int], seed: int, dtype=torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rows), *shape[1:], generator=generator).to(dtype)
    index = torch.tensor(rows).view(1, -1)
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=True)


def trained(cls, options, engine="native", dtype=torch.float32, shape=(9, 5), steps=4, **more):
    param = torch.linspace(-1, 1, shape[0] * shape[1]).view(shape).to(dtype).requires_grad_()
    optimizer = cls([param], lr=0.01, **options, engine=engine, rounding_seed=3, **more)
    for step in range(steps):
        rows = [step % shape[0], 4, 4, 7]
        param.grad = sparse(shape, rows, step, dtype)
        optimizer.step()
    return param.detach(), optimizer


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_both_engines_store_the_same_codes(cls, options, dtype):
    native = trained(cls, options, "native", dtype, state_dtype=torch.int8)
    reference = trained(cls, options, "reference", dtype, state_dtype=torch.int8)
    for ours, theirs in zip(state_tensors(native[1]), state_tensors(reference[1]), strict=True):
        assert ours.dtype == theirs.dtype
        if ours.dtype is torch.int8:
            # A last bit that torch rounds otherwise may be another code, seldom.
            apart = (ours.int() - theirs.int()).abs()
            assert apart.max() <= 1
            assert apart.float().mean() < 0.05
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(native[0], reference[0], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("columns", [1, 3, 64, 513, 1500])
def test_bits_depend_on_neither_threads_nor_instruction_sets(columns):
    rows = torch.randint(0, 40, (700,), generator=torch.Generator().manual_seed(0)).tolist()

    def run(isa, threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with running_on(isa):
                param = torch.ones(40, columns, requires_grad=True)
                optimizer = sparsestep.Adam([param], rounding_seed=1, state_dtype=torch.int8)
                for step in range(2):
                    param.grad = sparse((40, columns), rows, step)
                    optimizer.step()
                return [param.detach(), *state_tensors(optimizer)]
        finally:
            torch.set_num_threads(before)

    first = run(INSTRUCTION_SETS[0], 1)
    for isa in INSTRUCTION_SETS:
        for threads in (1, 2, 5):
            assert all(map(torch.equal, run(isa, threads), first))


@each_variant
def test_it_trains_as_float32_state_does(cls, options):
    target = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))

    def loss_of(**more):
        param = torch.zeros(50, 16, requires_grad=True)
        optimizer = cls([param], lr=0.02, **options, **more)
        for step in range(300):
            rows = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(step))
            values = (param.detach()[rows] - target[rows]).sign()
            param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape)
            optimizer.step()
        return (param.detach() - target).abs().mean()

    assert loss_of(state_dtype=torch.int8, rounding_seed=0) <= 1.05 * loss_of() + 0.01


@given(st.integers(1, 64), st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_memory(rows, columns):
    param = torch.zeros(rows, columns, requires_grad=True)

    def size(dtype):
        optimizer = sparsestep.Adam([param], state_dtype=dtype)
        optimizer.materialize_state()
        record = optimizer.state[param].items()
        return sum(v.nbytes for k, v in record if k != "step")

    assert size(torch.int8) == 2 * rows * (columns + 4)
    if columns >= 64:
        assert size(torch.int8) <= 0.27 * size(None)


@each_variant
def test_rows_that_no_gradient_holds_are_unchanged(cls, options):
    param, optimizer = trained(cls, options, state_dtype=torch.int8, steps=1)
    before = [param.clone(), *(t.clone() for t in state_tensors(optimizer))]
    (owner,) = optimizer.param_groups[0]["params"]
    owner.grad = sparse((9, 5), [1], 5)
    optimizer.step()
    others = torch.arange(9) != 1
    for was, now in zip(before, [param, *state_tensors(optimizer)], strict=True):
        if was.dim():
            assert torch.equal(was[others], now[others])


def test_dense_gradients_masks_and_elements():
    for engine in ("native", "reference"):
        param = torch.ones(6, 4, requires_grad=True)
        mask = torch.zeros(6, dtype=torch.bool)
        mask[2] = True
        groups = [{"params": [param], "mask": mask}]
        optimizer = sparsestep.AdamW(groups, state_dtype=torch.int8, engine=engine, rounding_seed=0)
        param.grad = torch.full((6, 4), 0.5)
        optimizer.step()
        assert torch.equal((param != 1).any(dim=1), mask)
        free = torch.ones(6, 4, requires_grad=True)
        optimizer = sparsestep.AdamW([free], state_dtype=torch.int8, engine=engine)
        free.grad = torch.full((6, 4), 0.5)
        optimizer.step()
        assert optimizer.state[free]["exp_avg"].dtype is torch.int8
        assert (free < 1).all()


def test_single_elements_of_a_row():
    layout = torch.eye(3, 4)
    results = []
    for engine in ("native", "reference"):
        param = torch.ones(3, 4)
        optimizer = sparsestep.FunctionalAdam([param], state_dtype=torch.int8, engine=engine)
        optimizer.step([layout.to_sparse()])
        assert torch.equal(param != 1, layout != 0)
        results.append(param)
    torch.testing.assert_close(*results)


@each_variant
def test_checkpoints_go_from_float32_to_int8_and_back(cls, options):
    _, plain = trained(cls, options)
    _, coded = trained(cls, options, state_dtype=torch.int8)
    (param,) = coded.param_groups[0]["params"]
    saved = copy.deepcopy(plain.state_dict())
    coded.load_state_dict({**saved, "param_groups": coded.state_dict()["param_groups"]})
    for name, value in coded.state[param].items():
        if isinstance(value, Tensor) and value.dtype is torch.int8:
            assert f"{name}_scale" in coded.state[param]
    _, again = trained(cls, options, steps=1)
    groups = again.state_dict()["param_groups"]
    again.load_state_dict({**coded.state_dict(), "param_groups": groups})
    (param,) = again.param_groups[0]["params"]
    (old,) = plain.param_groups[0]["params"]
    assert again.state[param].keys() == plain.state[old].keys()
    for name, value in plain.state[old].items():
        if isinstance(value, Tensor) and value.dim() == 2:
            found = again.state[param][name]
            assert found.dtype is torch.float32
            largest = value.abs().amax(1, keepdim=True)
            # Half of an eighth is lost, and what is small beside the largest of its row.
            assert ((found - value).abs() <= value.abs() / 16 + largest / 250_000).all()
            assert (found * value >= 0).all()


def test_resuming_is_as_if_nothing_had_happened():
    through = trained(sparsestep.Adam, {}, state_dtype=torch.int8, steps=6)
    param, optimizer = trained(sparsestep.Adam, {}, state_dtype=torch.int8, steps=3)
    resumed = param.clone().requires_grad_()
    other = sparsestep.Adam([resumed], lr=0.01, state_dtype=torch.int8, rounding_seed=3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        resumed.grad = sparse((9, 5), [step % 9, 4, 4, 7], step)
        other.step()
    assert torch.equal(resumed.detach(), through[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: sparsestep.Ftrl([p], state_dtype=torch.int8), "tolerates 8 bits"),
        (
            lambda p: sparsestep.RMSprop([p], centered=True, state_dtype=torch.int8),
            "tolerates 8 bits",
        ),
        (
            lambda p: sparsestep.Adam([p], state_dtype=torch.int8, semantics="dense"),
            "does not support int8 state",
        ),
        (lambda p: sparsestep.Adam([p], state_dtype=torch.int16), "torch.int8 or None"),
    ],
)
def test_refused(make, words):
    with pytest.raises(InputError, match=words):
        make(torch.zeros(2, 2, requires_grad=True))


def test_a_change_of_the_dtype_in_mid_training_is_refused():
    _, optimizer = trained(sparsestep.Adam, {})
    group = optimizer.param_groups[0]
    group["state_dtype"] = torch.int8
    group["params"][0].grad = sparse((9, 5), [1], 0)
    before = group["params"][0].detach().clone()
    with pytest.raises(InputError, match="int8"):
        optimizer.step()
    assert torch.equal(group["params"][0], before)
