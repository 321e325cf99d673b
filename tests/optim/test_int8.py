"""``state_dtype=torch.int8``: codes and scales; the same training from a quarter of the state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import OPTIMIZERS
from sparsestep.rules import int8
from sparsestep.rules.rule import Rule, StateSpec
from tests.subject import refused
from tests.table import VARIANTS, Variant, all_same_bits, state_tensors

# For each optimizer whose state may be int8, the variant with the most of it.
LARGEST: dict[type, Variant] = {}
for each in sorted(VARIANTS, key=lambda variant: len(variant.rule.state)):
    per_element = [spec for spec in each.rule.state if not spec.per_row]
    if per_element and all(spec.int8_format for spec in per_element):
        LARGEST[each.cls] = each
each_variant = pytest.mark.parametrize("variant", LARGEST.values(), ids=str)
ADAM = Variant(sparsestep.Adam, {})
SHAPE = (9, 5)


def sparse(
    shape: tuple[int, ...], rows: list[int], seed: int, dtype: Any = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(len(rows), *shape[1:], generator=generator).to(dtype)
    return torch.sparse_coo_tensor([rows], values, shape, check_invariants=True)


def train(param: Tensor, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        param.grad = sparse(SHAPE, [step % 9, 4, 4, 7], step, param.dtype)
        opt.step()


def trained(
    variant: Variant, steps: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, Any]:
    param = torch.linspace(-1, 1, 45).view(SHAPE).to(dtype).requires_grad_()
    opt = variant([param], lr=0.01, rounding_seed=3, **options)
    train(param, opt, range(steps))
    return param, opt


@each_variant
def test_both_engines_store_the_same_codes(variant: Variant):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        (ours, native), (theirs, reference) = (
            trained(variant, dtype=dtype, engine=engine, state_dtype=torch.int8)
            for engine in ("native", "reference")
        )
        for mine, its in zip(state_tensors(native), state_tensors(reference), strict=True):
            assert mine.dtype == its.dtype
            if mine.dtype is torch.int8:
                # A last bit that torch rounds otherwise may be another code, seldom.
                apart = (mine.int() - its.int()).abs()
                assert apart.max() <= 1
                assert apart.float().mean() < 0.05
            else:
                torch.testing.assert_close(mine, its, rtol=1e-5, atol=0)
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)


@each_variant
def test_it_trains_as_float32_state_does(variant: Variant):
    target = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))

    def loss_of(**options: Any) -> Tensor:
        param = torch.zeros(50, 16, requires_grad=True)
        opt = variant([param], lr=0.02, **options)
        for step in range(300):
            rows = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(step))
            values = (param.detach()[rows] - target[rows]).sign()
            param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape)
            opt.step()
        return (param.detach() - target).abs().mean()

    assert loss_of(state_dtype=torch.int8, rounding_seed=0) <= 1.05 * loss_of() + 0.01


@each_variant
def test_rows_that_no_gradient_holds_are_unchanged(variant: Variant):
    param, opt = trained(variant, steps=1, state_dtype=torch.int8)
    before = [param.detach().clone(), *(t.clone() for t in state_tensors(opt))]
    param.grad = sparse(SHAPE, [1], 5)
    opt.step()
    others = torch.arange(9) != 1
    for was, now in zip(before, [param, *state_tensors(opt)], strict=True):
        assert not was.dim() or torch.equal(was[others], now[others])


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_dense_gradients_masks_and_elements(engine: str):
    options = {"state_dtype": torch.int8, "engine": engine, "rounding_seed": 0}
    rows, elements = torch.arange(6) == 2, torch.eye(6, 4)
    for mask, grad, moved in (
        (rows, torch.full((6, 4), 0.5), rows[:, None].expand(6, 4)),
        (None, torch.full((6, 4), 0.5), torch.ones(6, 4) > 0),
        (None, elements.to_sparse(), elements > 0),
    ):
        param = torch.ones(6, 4, requires_grad=True)
        opt = sparsestep.AdamW([{"params": [param], "mask": mask}], weight_decay=0.0, **options)
        param.grad = grad
        opt.step()
        assert opt.state[param]["exp_avg"].dtype is torch.int8
        assert torch.equal(param < 1, moved)
        torch.testing.assert_close(param[moved], torch.full_like(param[moved], 0.999))


@each_variant
def test_checkpoints_go_from_float32_to_int8_and_back(variant: Variant):
    old, plain = trained(variant)
    param, coded = trained(variant, state_dtype=torch.int8)
    saved = copy.deepcopy(plain.state_dict())
    coded.load_state_dict({**saved, "param_groups": coded.state_dict()["param_groups"]})
    for name, value in coded.state[param].items():
        if isinstance(value, Tensor) and value.dtype is torch.int8:
            assert f"{name}_scale" in coded.state[param]
    param, again = trained(variant, steps=1)
    groups = again.state_dict()["param_groups"]
    again.load_state_dict({**coded.state_dict(), "param_groups": groups})
    assert again.state[param].keys() == plain.state[old].keys()
    for name, value in plain.state[old].items():
        if isinstance(value, Tensor) and value.dim() == 2:
            found = again.state[param][name]
            assert found.dtype is torch.float32
            largest = value.abs().amax(1, keepdim=True)
            # Half of an eighth is lost, and what is small beside the largest of its row.
            assert ((found - value).abs() <= value.abs() / 16 + largest / 250_000).all()
            assert (found * value >= 0).all()


def test_which_optimizers_have_it_and_from_when_on():
    rows_only = {sparsestep.RowwiseAdagrad}
    assert set(OPTIMIZERS) - LARGEST.keys() - rows_only == {sparsestep.Ftrl}
    with pytest.raises(InputError):
        sparsestep.RMSprop([torch.zeros(2, 2)], centered=True, state_dtype=torch.int8)
    _, opt = trained(ADAM)  # with float32 state
    opt.param_groups[0]["state_dtype"] = torch.int8
    with refused(opt):
        opt.step()


def test_a_parameter_without_rows_keeps_float32_state():
    """One scale for each element would be larger than what the codes save."""
    layer = torch.nn.Linear(4, 3)
    opt = sparsestep.AdamW(layer.parameters(), state_dtype=torch.int8)
    for _ in range(2):
        layer(torch.ones(2, 4)).square().sum().backward()
        opt.step()
    dtypes = {name: value.dtype for name, value in opt.state[layer.bias].items()}
    assert dtypes == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), torch.float32)
    assert opt.state[layer.weight]["exp_avg"].dtype is torch.int8
    again = sparsestep.AdamW(layer.parameters(), state_dtype=torch.int8)
    again.materialize_state()
    assert again.state[layer.bias].keys() == dtypes.keys()
    again.load_state_dict(opt.state_dict())
    assert all_same_bits(state_tensors(again), state_tensors(opt))


# Codes and scales: what is stored for values, and what comes back


SIGNED, UNSIGNED = (
    int8.with_int8_state(Rule("one", lambda: None, (StateSpec("value", int8_format=code),))).state
    for code in ("signed", "unsigned")
)
each_code = pytest.mark.parametrize("state", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])

rows = st.integers(1, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=n, max_size=n), min_size=1, max_size=4
    )
)


HALF = 1 << int8.DROPPED_BITS - 1


def stored(state, values, chance=HALF):
    codes, scale = int8.encode(state, [values])
    return int8.round_codes(state[0], codes, chance), scale


@each_code
@given(rows)
@settings(max_examples=100)
def test_what_comes_back_is_within_one_code(state, rows):
    values = torch.tensor(rows)
    if state is UNSIGNED:
        values = values.abs()
    codes, scale = stored(state, values)
    (back,) = int8.decode(state, [codes.float(), scale])
    # A code is an eighth of what it stands for and 2; half of that is lost at most.
    most = (values.abs() + 2 * scale) / 16
    if state is UNSIGNED:
        most = most.clamp(min=scale / 4)  # what is above zero has at least the code 1
        assert ((back > 0) == (values > 0)).all()
    assert ((back - values).abs() <= most * 1.0001).all()
    assert (back.sign() * values.sign() >= 0).all()


@each_code
@given(rows, st.integers(0, (1 << int8.DROPPED_BITS) - 1))
@settings(max_examples=100)
def test_what_has_not_moved_keeps_its_code(state, rows, chance):
    values = torch.tensor(rows)
    codes, scale = stored(state, values.abs() if state is UNSIGNED else values)
    (back,) = int8.decode(state, [codes.float(), scale])
    again, same = stored(state, back, chance)
    # Where the largest value was rounded up, it may want the next scale.
    kept = (scale == same).expand_as(again)
    assert torch.equal(again[kept], codes[kept])
    (twice,) = int8.decode(state, [again.float(), same])
    assert torch.equal(twice[kept], back[kept])


@each_code
def test_rounding_at_random_is_right_on_average(state):
    values = torch.tensor([[1.0, 0.3, 0.0123, 0.0004]])
    chances = (torch.arange(4096) << int8.DROPPED_BITS - 12)[:, None]
    codes, scale = int8.encode(state, [values.expand(4096, 4)])
    rounded = int8.round_codes(state[0], codes, chances)
    (back,) = int8.decode(state, [rounded.float(), scale])
    torch.testing.assert_close(back.mean(0), values[0], atol=0, rtol=3e-3)


def test_the_last_code_is_never_passed():
    exact = 2.0 ** torch.arange(-20, 20)
    values = torch.cat([exact * k for k in (1, 1.5, 1.7499, 1.75, 1.9, 1.9999)])[:, None]
    for state, last in ((SIGNED, 127), (UNSIGNED, 255)):
        codes, _ = stored(state, values, (1 << int8.DROPPED_BITS) - 1)
        found = codes.int() & 0xFF
        assert found.max() <= last
        assert found.min() >= last - 9  # and little more than an octave is left unused


@each_code
def test_nan_and_inf_poison_the_row_and_no_other(state):
    values = torch.tensor([[1.0, 0.25, 2.0], [1.0, torch.nan, 2.0], [torch.inf, 0.0, 2.0]])
    codes, scale = stored(state, values)
    (back,) = int8.decode(state, [codes.float(), scale])
    assert back[0].isfinite().all()
    assert back[1:].isnan().all()


@each_code
def test_rows_of_zeros_and_of_almost_nothing_are_zero(state):
    codes, scale = stored(state, torch.tensor([[0.0, 0.0], [1e-42, 0.0]]))
    (back,) = int8.decode(state, [codes.float(), scale])
    assert torch.equal(back[0], torch.zeros(2))
    assert back.isfinite().all()
    assert (back[1] >= 0).all()
    (zeros,) = int8.decode(state, [torch.zeros(2, 3), torch.zeros(2, 1)])
    assert state is SIGNED or not zeros.any()  # of a page that was never written
