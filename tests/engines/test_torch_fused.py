"""Torch's kernels: what they are given, and that their bits are torch's."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.engines import base
from sparsestep.rules.options import NUMBERS
from tests.subject import refused
from tests.table import COUNTERPARTS, all_same_bits, same_bits


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_any_strides_have_the_bits_of_torch(name: str, kernel: str):
    """Fused kernels take elements in the order of memory, and torch rounds by strides."""
    options = {"lr": 0.01, **({"momentum": 0.9} if name == "SGD" else {}), kernel: True}
    torch.manual_seed(0)
    start = [torch.randn(30, 20).T, torch.randn(3, 5, 31)]
    if kernel == "foreach":  # fused kernels would write into the gaps
        start.append(torch.randn(30, 20)[:, ::2])
    both = [copy.deepcopy(start) for _ in range(2)]
    optimizers = [
        getattr(module, name)([value.requires_grad_() for value in values], **options)
        for module, values in zip((torch.optim, sparsestep), both, strict=True)
    ]
    for _ in range(3):
        for theirs, mine in zip(*both, strict=True):
            theirs.grad = torch.randn_like(theirs)
            mine.grad = theirs.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all_same_bits(*both)


@pytest.mark.parametrize("cls", [ours for ours, _ in COUNTERPARTS], ids=lambda cls: cls.__name__)
def test_options_may_be_tensors(cls: Any):
    results = []
    for convert in (float, partial(torch.tensor, dtype=torch.float64)):
        param = torch.ones(3, 2, requires_grad=True)
        optimizer = cls([param], lr=0.1)
        (group,) = optimizer.param_groups
        numbers = {name: convert(group[name]) for name in NUMBERS & group.keys() - {"lr"}}
        group.update(numbers, foreach=True)
        for step in range(2):
            param.grad = torch.full((3, 2), 0.5 + step)
            optimizer.step()
        results.append(param.detach())
    assert same_bits(*results)


def test_first_gradients_become_momentum_with_the_sign_of_zeros():
    param = torch.zeros(3).requires_grad_()
    optimizer = sparsestep.SGD([param], lr=0.1, momentum=0.9, dampening=0.5, foreach=False)
    param.grad = torch.tensor([-0.0, 0.0, 2.0])
    optimizer.step()
    assert same_bits(optimizer.state[param]["momentum_buffer"], param.grad)


def test_a_kernel_that_fails_after_it_has_written_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = sparsestep.Adam(params, foreach=False)
    right = optimizer.torch_kernel

    def fail(batch: Any) -> None:
        right(batch)
        raise MemoryError("nothing left")

    for _ in range(2):
        for param in params:
            param.grad = torch.ones(3)
        with monkeypatch.context() as patch, refused(optimizer, error=MemoryError):
            patch.setattr(optimizer, "torch_kernel", fail)
            optimizer.step()
        optimizer.step()


def test_views_of_one_memory_are_updated_one_after_the_other():
    results = []
    for cls in (torch.optim.SGD, sparsestep.SGD):
        memory = torch.ones(4)
        views = [memory[:3].requires_grad_(), memory[1:].requires_grad_()]
        optimizer = cls(views, lr=0.5, weight_decay=0.5, foreach=False)
        for view in views:
            view.grad = torch.ones(3)
        optimizer.step()
        results.append(memory)
    assert same_bits(*results)


def test_what_fails_for_good_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "_MOST_FAILURES", 3)
    attempts = []

    def call() -> None:
        attempts.append("attempt")
        raise MemoryError("nothing left")

    with pytest.raises(MemoryError, match="nothing left"):
        base.finish([call])
    assert len(attempts) == 4


# What they are given


@pytest.mark.parametrize("way", ["fused", "foreach"])
@pytest.mark.parametrize("cls", [sparsestep.Adam, sparsestep.AdamW, sparsestep.Adagrad])
def test_a_count_of_any_dtype(cls: Any, way: str):
    for dtype in (torch.float16, torch.int64, torch.float32, torch.float64):
        params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
        optimizer = cls(params, lr=0.1, **{way: True})
        for _ in range(2):
            for param in params:
                param.grad = torch.full((3, 2), 0.5)
            optimizer.step()
            if dtype is not torch.float32 and optimizer.state[params[0]]["step"].dtype != dtype:
                optimizer.state[params[0]]["step"] = torch.tensor(1, dtype=dtype)
        assert int(optimizer.state[params[0]]["step"]) == 2
        torch.testing.assert_close(*params)


@pytest.mark.parametrize("fused", [False, True])
def test_an_option_that_the_formula_does_not_read_must_be_a_number(fused: bool):
    """Without momentum SGD has no dampening, but torch's kernel is given it."""
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = sparsestep.SGD([param], lr=0.1, fused=fused)
    param.grad = torch.ones(3, 2)
    for value in ((), "x", None, [0.1]):
        optimizer.param_groups[0]["dampening"] = value
        with refused(optimizer, match="dampening"):
            optimizer.step()


def test_a_count_that_is_none_is_refused_before_the_kernel_runs():
    for foreach, count in product((None, False), (-1.0, float("nan"))):
        param = torch.nn.Parameter(torch.ones(4, 3))
        optimizer = sparsestep.Adam([param], foreach=foreach)
        param.grad = torch.ones(4, 3)
        optimizer.step()
        optimizer.state[param]["step"].fill_(count)
        with refused(optimizer, match="number of steps taken"):
            optimizer.step()
