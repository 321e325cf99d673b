"""A user's autocast does not reach into what this library does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import sparsestep

SOURCES = Path(sparsestep.__file__).parent


def test_tensors_are_put_together_in_one_place_alone():
    """Under autocast torch's own functions have no rule for float16 on CPUs."""
    joins = re.compile(r"torch\.(cat|stack|hstack|vstack)\(")
    users = [
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if joins.search(path.read_text()) and "cli" not in path.relative_to(SOURCES).parts
    ]
    assert users == ["_torch.py"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_clipping_by_value_of_compact_gradients(dtype: torch.dtype):
    table = sparsestep.nn.Embedding(4, 2, dtype=dtype)
    for ids in ([0, 1], [1, 2]):
        table(torch.tensor(ids)).sum().backward()
    with torch.autocast("cpu"):
        sparsestep.clip_grad_value_(table.parameters(), 1.5)
    expected = torch.tensor([1.0, 1.5, 1.0, 0.0], dtype=dtype)
    assert torch.equal(table.weight.grad.to_dense(), expected[:, None].expand(4, 2))
