"""Codes and scales: what is stored for values, and what comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsestep.rules import int8
from sparsestep.rules.rule import Rule, StateSpec

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
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_nan_and_inf_poison_the_row_and_no_other(state, broken):
    values = torch.tensor([[1.0, broken, 2.0], [1.0, 0.25, 2.0]])
    codes, scale = stored(state, values)
    (back,) = int8.decode(state, [codes.float(), scale])
    assert back[0].isnan().all()
    assert back[1].isfinite().all()


@each_code
def test_rows_of_zeros_and_of_almost_nothing_are_zero(state):
    codes, scale = stored(state, torch.tensor([[0.0, 0.0], [1e-42, 0.0]]))
    (back,) = int8.decode(state, [codes.float(), scale])
    assert torch.equal(back[0], torch.zeros(2))
    assert back.isfinite().all()
    assert (back[1] >= 0).all()
    (zeros,) = int8.decode(state, [torch.zeros(2, 3), torch.zeros(2, 1)])
    assert state is SIGNED or not zeros.any()  # of a page that was never written
