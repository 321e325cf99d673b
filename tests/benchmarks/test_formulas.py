"""Formulas of the suite "rules": every contestant of a case computes the same update."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import formulas
from benchmarks.harness.cases import SUITES, Formula, formula
from benchmarks.harness.contestants import OptimizerContestant
from benchmarks.harness.results import Report, new_report
from benchmarks.harness.workload import Workload
from sparsestep import _native

pytestmark = pytest.mark.skipif(_native.ext is None, reason="they are measured on the core")


def test_the_suite_has_every_formula():
    named = {each.rule for each in SUITES["rules"] if isinstance(each, Formula)}
    assert named == formulas.FORMULAS.keys()


@pytest.mark.parametrize("rule", formulas.FORMULAS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_all_contestants_move_alike(rule: str):
    case = formula(rule, 50, 16, 20, "zipf")
    names, racers, refused = formulas.contestants(case, Workload(case))
    assert not refused
    assert names == ["sparsestep", "sparsestep.rule", formulas.FORMULAS[rule].torch_name, "limit"]
    found = []
    for racer in racers[:3]:
        assert isinstance(racer, OptimizerContestant)
        for group in racer.optimizer.param_groups:
            group["lr"] = 0.01
        for number in range(3):
            racer.before(number)
            racer.step()
        found.append(racer.params[0].detach())
    ours, mine, theirs = found
    # SparseAdam adds eps in another place; a sign of nearly nothing is anybody's.
    assert torch.allclose(ours, mine, rtol=1e-5, atol=1e-6)
    assert float((ours - theirs).abs().max()) < 1e-3


def test_a_case_is_measured_and_kept():
    case = SUITES["rules"][0].scaled(20_000)
    assert isinstance(case, Formula)
    result = formulas.measure(case, "rules", 0.01)
    assert {each.contestant for each in result.timings} >= {"sparsestep", "sparsestep.rule"}
    report = new_report(1.0, 0.01)
    report.cases.append(result)
    (kept,) = Report.from_json(report.to_json()).cases
    assert kept.case == case
