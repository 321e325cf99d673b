"""A step is the rule on the entries of the gradient, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tests.generate.cases import Case, cases, each_case
from tests.properties.marks import QUIET
from tests.table import EVERY, PLAIN, Variant, on_each_engine, running_on

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


@on_each_engine(EVERY)
@each_case(case=cases())
def test_a_step_is_the_rule_on_the_entries_of_the_gradient(
    variant: Variant, engine: str, case: Case
):
    """Any layout, strides and dtype; entries that are not held keep their bits, as do gradients."""
    if not case.applies(variant):
        return
    with running_on(engine) as name:
        subject = case.subject(variant, name)
        for drawn in case.steps:
            subject.checked_step(drawn)


@on_each_engine(EVERY)
@each_case(case=cases(max_steps=3))
def test_a_masked_step_is_the_rule_on_what_the_mask_selects(
    variant: Variant, engine: str, case: Case
):
    if not case.applies(variant):
        return
    with running_on(engine) as name:
        subject = case.subject(variant, name, masked=True)
        for drawn in case.steps:
            subject.checked_step(drawn)


@on_each_engine(PLAIN)
@each_case(examples=4, case=cases(max_steps=2, dtypes={torch.float32: 1}))
def test_state_and_parameter_may_have_different_dtypes(variant: Variant, engine: str, case: Case):
    in_half = Variant(variant.cls, {**variant.options, "state_dtype": torch.bfloat16})
    with running_on(engine) as name:
        subject = case.subject(in_half, name)
        for drawn in case.steps:
            subject.checked_step(drawn)
