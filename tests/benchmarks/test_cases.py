"""Cases of ``python -m benchmarks``: distributions and suites."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.cases import SUITES, case


@pytest.mark.parametrize("distribution", ["uniform", "zipf", "half", "distinct"])
def test_positions(distribution: str) -> None:
    made = case(1000, 16, 600, distribution)
    positions = made.positions(seed=3)
    assert positions.dtype == torch.int64
    assert positions.shape == (600,)
    assert 0 <= int(positions.min()) <= int(positions.max()) < 1000
    assert torch.equal(positions, made.positions(seed=3))
    assert not torch.equal(positions, made.positions(seed=4))


def test_uniform_lookups_are_spread_evenly() -> None:
    counts = case(10, 16, 10_000, "uniform").positions(seed=0).bincount(minlength=10)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_zipf_lookups_are_skewed_and_scattered() -> None:
    made = case(10_000, 16, 50_000, "zipf")
    popular = made.positions(seed=0).bincount(minlength=10_000).topk(100)
    weights = torch.arange(1.0, 10_001, dtype=torch.float64) ** -1.05
    expected = 50_000 * weights / weights.sum()
    assert popular.values[0] == pytest.approx(float(expected[0]), rel=0.05)
    assert popular.values.sum() == pytest.approx(float(expected[:100].sum()), rel=0.05)
    assert popular.indices.double().std() > 2000  # not all at one end of the table
    # Another batch has the same popular rows.
    other = made.positions(seed=1).bincount(minlength=10_000).topk(100)
    assert torch.equal(popular.indices[:3], other.indices[:3])


@pytest.mark.parametrize("lookups", [1, 2, 1000, 1001])
def test_half_has_exactly_half(lookups: int) -> None:
    counts = case(50, 16, lookups, "half").positions(seed=0).bincount(minlength=50)
    assert counts[25] == lookups // 2
    assert counts.sum() == lookups


def test_distinct_rows_are_distinct() -> None:
    positions = case(1000, 16, 450, "distinct").positions(seed=0)
    assert len(positions.unique()) == 450


def test_suites() -> None:
    assert list(SUITES) == [
        *("peers", "large", "small", "lookups", "rows", "density", "skew", "threads"),
        *("rules", "programs"),
    ]
    assert [each.lookups for each in SUITES["lookups"]] == [
        2**n for n in (8, 10, 12, 14, 16, 18, 20)
    ]
    density = [each.lookups / each.rows for each in SUITES["density"]]
    assert density == [0.01, 0.05, 0.1, 0.25, 0.45]
    assert [each.threads for each in SUITES["threads"]] == [1, None]
    for cases in SUITES.values():
        assert len({each.name for each in cases}) == len(cases)


@pytest.mark.parametrize("scale", [1, 2.5, 1000, 1_000_000])
def test_every_case_can_be_scaled(scale: float) -> None:
    for each in (each for cases in SUITES.values() for each in cases):
        smaller = each.scaled(scale)
        assert smaller.rows == max(2, int(each.rows / scale))
        assert smaller.lookups == max(1, int(each.lookups / scale))
        assert f"{smaller.lookups:,}" in smaller.name
        assert replace(smaller, name="", rows=0, lookups=0) == replace(
            each, name="", rows=0, lookups=0
        )
        if scale >= 1000:
            assert smaller.positions(0).shape == (smaller.lookups,)
