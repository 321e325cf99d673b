"""Torch's kernels: what they are given; recorded on one element and replayed on others."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.engines import base, replay
from sparsestep.engines import torch_fused as torch_kernels
from sparsestep.engines.replay import CannotReplayError, Recording, Replay
from sparsestep.rules.options import NUMBERS
from tests.subject import refused
from tests.table import COUNTERPARTS, same_bits, saved_state

CASES: list[tuple[str, dict[str, Any]]] = [
    *((ours.__name__, {"weight_decay": 0.1}) for ours, _ in COUNTERPARTS),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
]
SHAPES = [(700,), (9, 99), (1, 257), (3, 5, 31), (), (0, 4)]


def made(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    found.append(torch.randn(30, 20, dtype=dtype).T)
    found.append(torch.randn(30, 20, dtype=dtype)[:, ::2])  # elements with gaps
    return [tensor.requires_grad_() for tensor in found]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_tensors_in_many_pieces_have_torchs_bits(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch_kernels, "PIECE", 64)
    monkeypatch.setattr(torch_kernels, "_FEW_PARAMS", 0)
    for dtype in (torch.float32, torch.float64, torch.complex64):
        # Torch has no such kernels for complex numbers.
        if not dtype.is_complex or not {"fused", "amsgrad"} & options.keys():
            assert_torchs_bits(name, options, dtype)


def assert_torchs_bits(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    params, ours = made(dtype), made(dtype)
    if options.get("fused"):  # torch's fused kernels write into the gaps
        del params[-1], ours[-1]
    theirs = getattr(torch.optim, name)(params, **{"lr": 0.01, **options})
    kernel = {} if {"foreach", "fused"} & options.keys() else {"foreach": False}
    optimizer = getattr(sparsestep, name)(ours, **{"lr": 0.01, **options, **kernel})
    for _ in range(3):
        for param, mine in zip(params, ours, strict=True):
            param.grad = torch.randn_like(param)
            mine.grad = param.grad.clone()
        theirs.step()
        optimizer.step()
    for param, mine in zip(params, ours, strict=True):
        assert same_bits(mine.detach(), param.detach())
        for key, value in theirs.state[param].items():
            if isinstance(value, Tensor):
                assert same_bits(saved_state(optimizer, mine)[key], value), key


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


def test_an_operation_that_fails_is_repeated_and_no_other():
    first = torch.ones(1)
    with Recording([first]) as recording:
        first.add_(1)
        (first * 3).neg_()
        first.mul_(2)
    tensor, failures = torch.ones(4), []
    replayed = Replay(recording)
    replayed.reserve(4)
    step = replayed._steps[1]

    def fails_twice(environment: list[Any]) -> Any:
        if len(failures) < 2:
            failures.append("failed")
            raise MemoryError
        return step(environment)

    replayed._steps[1] = fails_twice
    replayed.run([replayed.environment([tensor])])
    assert len(failures) == 2
    assert tensor.tolist() == [4.0] * 4


def test_a_kernel_that_reads_numbers_cannot_be_replayed():
    first = torch.ones(1)
    with pytest.raises(CannotReplayError), Recording([first]):
        first.mul_(2).item()


def test_what_fails_for_good_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "_MOST_FAILURES", 3)
    attempts = []

    def call() -> None:
        attempts.append("attempt")
        raise MemoryError("nothing left")

    with pytest.raises(MemoryError, match="nothing left"):
        base.finish([call])
    assert len(attempts) == 4


def test_temporaries_are_pieces_and_share_buffers():
    """A dense step needs no memory of a parameter's size."""
    assert replay.largest_piece(torch.empty(1 << 24, device="meta"), 1 << 17) == 1 << 17
    first = torch.ones(1)
    with Recording([first]) as recording:
        for _ in range(5):
            first.add_(first.sqrt().neg_())
    replayed = Replay(recording)
    replayed.reserve(1 << 17)
    assert [buffer.nbytes for buffer in replayed._buffers] == [4 << 17]
    replayed.release()
    assert not replayed._buffers


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
