"""Torch's kernels, recorded on one element and replayed on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.engines import finishing, replay
from sparsestep.engines import torch_fused as torch_kernels
from sparsestep.engines.replay import CannotReplayError, Recording, Replay, pieces
from tests.table import same_bits

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"foreach": True}),
    ("Adam", {"fused": True}),
    ("AdamW", {"lr": torch.tensor(0.01)}),
    ("RAdam", {"weight_decay": 0.1}),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_tensors_in_many_pieces_have_torchs_bits(
    name: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    if dtype.is_complex and (options.get("fused") or options.get("amsgrad")):
        pytest.skip("torch has no such kernel for complex numbers")
    monkeypatch.setattr(torch_kernels, "PIECE", 64)
    monkeypatch.setattr(torch_kernels, "_FEW_PARAMS", 0)
    params, ours = made(dtype), made(dtype)
    if options.get("fused"):  # torch's fused kernels write into the gaps
        del params[-1], ours[-1]
    theirs = getattr(torch.optim, name)(params, **{"lr": 0.01, **options})
    optimizer = getattr(sparsestep, name)(ours, **{"lr": 0.01, **options})
    for _ in range(7):
        for param, mine in zip(params, ours, strict=True):
            param.grad = torch.randn_like(param)
            mine.grad = param.grad.clone()
        theirs.step()
        optimizer.step()
    for param, mine in zip(params, ours, strict=True):
        assert same_bits(mine.detach(), param.detach())
        for key, value in theirs.state[param].items():
            if isinstance(value, Tensor):
                assert same_bits(optimizer.state[mine][key], value), key


def test_first_gradients_become_momentum_with_the_sign_of_zeros():
    param = torch.zeros(3).requires_grad_()
    optimizer = sparsestep.SGD([param], lr=0.1, momentum=0.9, dampening=0.5)
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


def test_temporaries_share_buffers():
    first = torch.ones(1)
    with Recording([first]) as recording:
        for _ in range(5):
            first.add_(first.sqrt().neg_())
    replayed = Replay(recording)
    replayed.reserve(4)
    assert len(replayed._buffers) == 1
    replayed.release()
    assert not replayed._buffers


def test_a_kernel_that_reads_numbers_cannot_be_replayed():
    first = torch.ones(1)
    with pytest.raises(CannotReplayError), Recording([first]):
        first.mul_(2).item()


def test_pieces_of_tensors_that_lie_apart():
    tensors = [torch.arange(12).view(4, 3)[:, :2], torch.arange(8).view(2, 4).T]
    found = [[part.tolist() for part in parts] for parts in pieces(tensors, 4)]
    assert found == [
        [[[0, 1], [3, 4]], [[0, 4], [1, 5]]],
        [[[6, 7], [9, 10]], [[2, 6], [3, 7]]],
    ]


def test_what_fails_for_good_is_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finishing, "_MOST_FAILURES", 3)
    attempts = []

    def call() -> None:
        attempts.append("attempt")
        raise MemoryError("nothing left")

    with pytest.raises(MemoryError, match="nothing left"):
        finishing.finish([call])
    assert len(attempts) == 4


def test_a_dense_step_needs_no_memory_of_a_parameters_size():
    """Temporaries are pieces, however large the parameter is."""
    first = torch.ones(1)
    with Recording([first]) as recording:
        first.sqrt()
    assert replay.largest_piece(torch.empty(1 << 24, device="meta"), 1 << 17) == 1 << 17
    replayed = Replay(recording)
    replayed.reserve(1 << 17)
    assert sum(buffer.nbytes for buffer in replayed._buffers) == 4 << 17
