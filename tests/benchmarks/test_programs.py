"""Programs: every contestant trains the same model."""

from __future__ import annotations

import pytest
import torch

from benchmarks import training_iterations as programs
from benchmarks.harness.cases import SUITES, Program, program
from sparsestep.grads.compact import CompactGrad

SMALL = {
    "dlrm": program("dlrm", 50, 8, 24, "zipf", 3, length=4),
    "node2vec": program("node2vec", 60, 8, 30, "zipf", length=7),
    "transe": program("transe", 60, 8, 40, "uniform", length=18),
}


def test_there_is_a_small_one_of_each():
    kinds = {each.kind for each in SUITES["programs"] if isinstance(each, Program)}
    assert kinds == set(SMALL) == set(programs.KINDS)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("kind", SMALL)
def test_all_train_the_same_model(kind: str):
    racers = programs.contestants(SMALL[kind])
    before = [p.detach().clone() for p in racers[0].model.parameters()]
    for step in range(4):
        for racer in racers:
            racer.before(step)
            racer.step()
    plain, *others = ([p.detach() for p in racer.model.parameters()] for racer in racers)
    assert not any(torch.equal(*pair) for pair in zip(plain, before, strict=True))
    for each in others:
        for ours, theirs in zip(each, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    grads = [p.grad for p in racers[-1].model.parameters() if p.grad.is_sparse]
    assert grads
    assert all(type(grad) is CompactGrad for grad in grads)


@pytest.mark.parametrize("scale", [1, 1000])
def test_a_program_is_measured(scale: float):
    smaller = SMALL["node2vec"].scaled(scale)
    assert isinstance(smaller, Program)
    result = programs.measure(smaller, "programs", 0.001)
    names = {timing.contestant for timing in result.timings}
    assert names == {programs.TORCH, programs.PLAIN, programs.FUSED}
    torchs = result.timing(programs.TORCH)
    assert torchs is not None
    assert torchs.times_torch == 1
