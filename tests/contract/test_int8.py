"""Codes and scales: what is stored for values, and what comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsestep
from sparsestep.contract import int8
from sparsestep.contract.rule import Rule, State
from sparsestep.rules import OPTIMIZERS

SIGNED, ROOT = (
    int8.stored_as_int8(Rule("one", lambda: None, (State("value", int8=code),))).state
    for code in ("signed", "root")
)
each_code = pytest.mark.parametrize("state", [SIGNED, ROOT], ids=["signed", "root"])

rows = st.integers(1, 5).flatmap(
    lambda n: st.lists(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=n, max_size=n), min_size=1, max_size=4
    )
)


def stored(state, values, chance=1 << 15):
    codes, scale = int8.encoded(state, [values])
    return int8.rounded(state[0], codes, chance), scale


@each_code
@given(rows)
@settings(max_examples=100)
def test_what_comes_back_is_within_one_code(state, rows):
    values = torch.tensor(rows)
    if state is ROOT:
        values = values.abs()
    codes, scale = stored(state, values)
    (back,) = int8.decoded(state, [codes.float(), scale])
    if state is SIGNED:
        # The smallest float32 numbers are denormal: their roots are not exact.
        apart = back.abs() ** 0.25 - values.abs() ** 0.25
        assert (apart.abs() <= 0.51 * scale + 1e-11).all()
        assert (back.sign() * values.sign() >= 0).all()
    else:
        # What is above zero has at least the code 1.
        assert ((back**0.25 - values**0.25).abs() <= 1.01 * scale + 1e-11).all()
        usable = (scale > 0).expand_as(values)
        assert ((back > 0) == (values > 0))[usable].all()


@each_code
def test_rounding_at_random_is_right_on_average(state):
    values = torch.tensor([[1.0, 0.3, 0.0123]])
    chances = (torch.arange(4096) * 16)[:, None].expand(-1, 3)
    codes, _ = int8.encoded(state, [values])
    rounded = int8.rounded(state[0], codes.expand(4096, 3), chances).float().mean(0)
    offset = 0 if state is SIGNED else -128
    torch.testing.assert_close(rounded, codes[0] + offset, atol=3e-4, rtol=0)


@each_code
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_one_number_that_is_none_makes_the_row_so_and_no_other(state, broken):
    values = torch.tensor([[1.0, broken, 2.0], [1.0, 0.25, 2.0]])
    codes, scale = stored(state, values)
    (back,) = int8.decoded(state, [codes.float(), scale])
    assert back[0].isnan().all()
    assert back[1].isfinite().all()


@each_code
def test_rows_of_zeros_and_of_almost_nothing_are_zero(state):
    codes, scale = stored(state, torch.tensor([[0.0, 0.0], [1e-42, 0.0]]))
    (back,) = int8.decoded(state, [codes.float(), scale])
    assert torch.equal(back[0], torch.zeros(2))
    assert back.isfinite().all()


def test_zero_pages_are_zeros():
    (back,) = int8.decoded(ROOT, [torch.zeros(2, 3), torch.zeros(2, 1)])
    assert torch.equal(back, torch.zeros(2, 3))


def test_every_rule_says_whether_its_state_may_be_int8():
    def is_refused(cls):
        try:
            cls([torch.zeros(2, 2)], lr=0.1, state_dtype=torch.int8)
        except sparsestep.errors.InputError as error:
            return "state_dtype=torch.int8" in str(error)
        return False

    refused = {cls.__name__ for cls in OPTIMIZERS if is_refused(cls)}
    assert refused == {"Ftrl"}


@given(rows)
@settings(max_examples=50)
def test_saved_codes_become_values_and_values_codes(rows):
    values = torch.tensor(rows).abs()
    kept = {"step": 3, "value": values}
    coded = int8.recoded(Rule("one", lambda: None, ROOT), kept)
    assert coded["value"].dtype is torch.int8
    assert coded["value_scale"].shape == values.shape[:1]
    assert kept["value"] is values
    plain = int8.recoded(Rule("one", lambda: None, (State("value", int8="root"),)), coded)
    assert plain.keys() == kept.keys()
    again = int8.recoded(Rule("one", lambda: None, ROOT), plain)
    assert torch.equal(again["value"], coded["value"])
