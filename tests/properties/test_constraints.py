"""``max_norm`` and ``normalize``: the formula, then the constraint on rows that it has updated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests.generate.cases import Case, cases, each_case
from tests.properties.marks import QUIET
from tests.subject import Subject
from tests.table import EVERY, INSTRUCTION_SETS, PLAIN, Variant, on_each_engine, running_on

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]

CONSTRAINTS = st.sampled_from([{"max_norm": 1.0}, {"max_norm": 0.01}, {"normalize": True}])


def constrained(case: Case, variant: Variant, more: dict[str, Any]) -> Case | None:
    """The case with a constraint; ``None`` if a parameter has no rows."""
    has_rows = all(values.dim() > 1 for values in case.start)
    applies = has_rows and case.applies(variant)
    return replace(case, options={**case.options, **more}) if applies else None


@on_each_engine(EVERY)
@each_case(case=cases(max_steps=3), more=CONSTRAINTS, masked=st.booleans())
def test_updated_rows_are_constrained(
    variant: Variant, engine: str, case: Case, more: dict[str, Any], masked: bool
):
    """Any layout and dtype: whole rows, also where a few of their elements were updated."""
    chosen = constrained(case, variant, more)
    if chosen is None:
        return
    with running_on(engine) as name:
        subject = chosen.subject(variant, name, masked=masked)
        for drawn in case.steps:
            subject.checked_step(drawn)


@on_each_engine(PLAIN)
@each_case(examples=5, case=cases(exact=False), more=CONSTRAINTS)
def test_bits_do_not_depend_on_threads_or_instruction_set(
    variant: Variant, engine: str, case: Case, more: dict[str, Any]
):
    chosen = constrained(case, variant, more)
    if chosen is None or engine == "reference":
        return
    results: list[Subject] = []
    for instruction_set in INSTRUCTION_SETS:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with running_on(instruction_set) as name:
                results.append(chosen.run(variant, name))
    assert all(each.same_as(results[0]) for each in results[1:])
