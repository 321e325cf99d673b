"""``semantics="dense"``: any gradient comes to what its dense form comes to."""

from __future__ import annotations

import pytest
import torch

from tests.deferred.runs import assert_close, each_kind, kept, on_both_engines, room_for
from tests.generate.cases import Case, cases, each_case
from tests.generate.grads import Drawn
from tests.properties.marks import QUIET
from tests.table import Variant, running_on, steps_of

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


def dense(drawn: Drawn | None) -> Drawn | None:
    return drawn and Drawn(drawn.dense, drawn.dense, torch.ones_like(drawn.held))


@each_kind
@on_both_engines
@each_case(case=cases(max_steps=5, dtypes={torch.float64: 1}))
def test_a_deferred_run_is_the_dense_run(variant: Variant, engine: str, case: Case):
    """0-d to 4-d, empty, any layout, gradients that hold nothing, or none at all; two groups."""
    deferred = Variant(variant.cls, {**variant.options, "semantics": "dense"})
    with running_on(engine) as name:
        ours, theirs = case.subject(deferred, name), case.subject(variant, name)
        for drawn in case.steps:
            ours.optimizer.catch_up()
            ours.give(drawn)
            theirs.give([dense(each) for each in drawn])
            ours.step_on_any_engine()
            theirs.step_on_any_engine()
        ours.optimizer.catch_up()
    for (_, _, p), (_, _, q) in zip(ours.each(), theirs.each(), strict=True):
        if p.numel():
            assert_close(kept(ours, p), kept(theirs, q), room_for(variant))
        assert steps_of(ours.optimizer, p) == steps_of(theirs.optimizer, q)
