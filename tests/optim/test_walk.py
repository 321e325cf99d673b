"""How many Python functions a warm step goes through; CONTRIBUTING.md has the walk."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sparsestep._native import ext
from tests.torch_versions import needs_tensors_that_the_core_reads

HOUSE = Path(__file__).parents[2] / "packaging" / "house.py"


@needs_tensors_that_the_core_reads
@pytest.mark.skipif(ext is None, reason="the walk through the core")
@pytest.mark.parametrize(("figure", "most"), [("bag", 30), ("dense", 30), ("functional", 4)])
def test_the_walk_of_a_step(figure: str, most: int):
    assert int(runpy.run_path(str(HOUSE))[f"frames_{figure}"]()) <= most
