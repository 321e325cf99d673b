"""How many Python functions a warm step goes through; CONTRIBUTING.md has the walk."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep._native import ext
from tests.torch_versions import needs_tensors_that_the_core_reads

OURS = str(Path(sparsestep.__file__).parent)
IDS = torch.tensor([1, 5, 1, 7])

pytestmark = pytest.mark.skipif(ext is None, reason="the walk through the core")


def functions_called(work: Callable[[], object]) -> list[str]:
    """The functions of this package that it goes through, in order."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            found.append(f"{Path(code.co_filename).relative_to(OURS)}:{code.co_name}")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def warm(module: torch.nn.Module, **options: Any) -> Callable[[], None]:
    """A step of an optimizer that has seen steps like it."""
    optimizer = sparsestep.Adam(module.parameters(), lr=0.1, **options)
    if options:
        optimizer.track(module)
    for _ in range(3):
        module(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    module(IDS).sum().backward()
    return optimizer.step


@needs_tensors_that_the_core_reads
def test_the_walk_of_a_step():
    replayed = functions_called(warm(torch.nn.Embedding(10, 4, sparse=True)))
    assert len(replayed) <= 3, replayed
    assert replayed[0] == "optim/optimizer.py:step"
    assert replayed[-1] == "engines/native.py:replay_step"
    compact = functions_called(warm(sparsestep.nn.Embedding(10, 4)))
    assert len(compact) <= 3, compact
    deferred = functions_called(warm(torch.nn.Embedding(10, 4, sparse=True), semantics="dense"))
    assert len(deferred) <= 30, deferred


@needs_tensors_that_the_core_reads
def test_the_walk_of_a_function():
    weight, buffer = torch.zeros(10, 4), torch.zeros(10, 4)
    grad = sparsestep.IndexedGrad(IDS, torch.ones(4, 4))

    def step() -> None:
        sparsestep.functional.sgd_(weight, grad, buffer, lr=0.1, momentum=0.9)

    step()
    found = functions_called(step)
    assert len(found) <= 5, found
    optimizer = sparsestep.FunctionalAdam([weight])
    for _ in range(4):
        optimizer.step([grad])
        optimizer.step_param(weight, grad)
    for work in (lambda: optimizer.step([grad]), lambda: optimizer.step_param(weight, grad)):
        found = functions_called(work)
        assert len(found) <= 10, found
