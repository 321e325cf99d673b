"""Steps in which an allocation fails."""

from __future__ import annotations

import pytest

from tests.faults import allocations
from tests.faults.steps import SCENARIOS

pytestmark = pytest.mark.skipif(
    allocations.shim() is None, reason="failing allocations needs a C compiler and glibc"
)
QUICK = [
    "Adam, amsgrad",
    "Adam, undone",
    "SGD, first step",
    "reference",
    "dense semantics, history doubles",
]


def swept(*arguments: str) -> None:
    result = allocations.run("-m", "tests.faults.steps", *arguments, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_step_in_which_allocations_fail_is_done_or_refused():
    """The n-th alone, or that and all later ones."""
    swept(*QUICK, "--min-bytes", "512", "--modes", "once", "persistent")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_kind_of_step(scenario: str):
    swept(scenario, "--min-bytes", "512", "--modes", "once", "persistent")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["Adam", "Adam, undone", "SGD, first step", "Adam, fused"])
def test_a_step_in_which_a_few_bytes_cannot_be_had(scenario: str):
    """Such as a scalar that torch wraps in a tensor."""
    swept(scenario, "--min-bytes", "0")
