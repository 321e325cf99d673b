"""Kernels compiled for GPUs that are not here: their code, and the types that a launch passes.

A sample; ``make gpu-check`` compiles every rule for every target.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_python
from tests.table import needs_triton

pytestmark = needs_triton

SCRIPT = """
import json, warnings
import sparsestep, torch
from tests.engines import triton_compile as ahead
from tests.table import Variant
warnings.simplefilter("ignore")
found = []
for options in ({}, {"dtype": torch.bfloat16, "stochastic_rounding": True, "maximize": True}):
    for target in (ahead.TARGETS[1], ahead.TARGETS[-1]):
        kernels = ahead.launches(Variant(sparsestep.RowwiseAdam, {}), target, **options)
        found += [(k.signature, list(k.faults())) for k in kernels]
kernels = ahead.launches(Variant(sparsestep.Adam, {"capturable": True}), ahead.TARGETS[1])
found += [(k.signature, list(k.faults())) for k in kernels]
forbidden = "fma.rn.f32 div.full.f32 sqrt.approx.f32 atom.global red.global add.ftz.f32".split()
unseen = [word for word in forbidden if not ahead.FORBIDDEN_PTX.search(f" {word} ")]
print(json.dumps([found, unseen]))
"""


def test_what_a_launch_compiles(tmp_path: Path):
    """In a process of its own: this one has Triton's interpreter."""
    root, cache = str(Path(__file__).parents[2]), str(tmp_path)
    printed = run_python(
        "-c", SCRIPT, TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache, PYTHONPATH=root
    )
    kernels, unseen = json.loads(printed.splitlines()[-1])
    assert unseen == []
    assert len(kernels) == 10  # sums of blocks, and the step: of five steps
    for signature, faults in kernels:
        assert faults == []
        # A launch passes a number as float32, unless it is told otherwise.
        numbers = [kind for name, kind in signature.items() if name[:1] == "n" and name != "n"]
        assert set(numbers) <= {"fp64"}
        assert signature["n"] == "i64"
