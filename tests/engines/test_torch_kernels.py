"""Torch's kernels are given only what they can take."""

from __future__ import annotations

import pytest
import torch

import sparsestep

CLASSES = [sparsestep.Adam, sparsestep.AdamW, sparsestep.Adagrad]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["fused", "foreach"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_count_of_any_dtype(cls: type, way: str, dtype: torch.dtype):
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = cls(params, lr=0.1, **{way: True})
    for _ in range(2):
        for param in params:
            param.grad = torch.full((3, 2), 0.5)
        optimizer.step()
        if dtype is not torch.float32 and optimizer.state[params[0]]["step"].dtype != dtype:
            optimizer.state[params[0]]["step"] = torch.tensor(1, dtype=dtype)
    assert int(optimizer.state[params[0]]["step"]) == 2
    torch.testing.assert_close(params[0], params[1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [(), "x", None, [0.1]], ids=repr)
def test_an_option_that_the_formula_does_not_look_at_must_be_a_number(value: object, fused: bool):
    """Without momentum SGD has no dampening, but torch's kernel is given it."""
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = sparsestep.SGD([param], lr=0.1, fused=fused)
    optimizer.param_groups[0]["dampening"] = value
    param.grad = torch.ones(3, 2)
    with pytest.raises(sparsestep.InputError, match="param group 0: dampening must be a number"):
        optimizer.step()
    assert bool((param == 1).all())
