"""The usual loop, in every variant, gives the bits that it gives with torch's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from tests.nn.cases import OPTIMIZERS, each_optimizer, plain, same_run

pytestmark = pytest.mark.usefixtures("one_thread")


def ids_of(step: int, *shape: int) -> Tensor:
    """Few ids often, many rarely."""
    generator = torch.Generator().manual_seed(step)
    return (30 * torch.rand(shape, generator=generator) ** 2).long()


class Once(nn.Module):
    """Tables of every kind, each of which is read once."""

    def __init__(self, kinds: Any, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sparse = {"sparse": True, "dtype": dtype}
        self.sums = kinds.EmbeddingBag(30, 4, mode="sum", **sparse)
        self.means = kinds.EmbeddingBag(30, 4, mode="mean", padding_idx=0, **sparse)
        self.rows = kinds.Embedding(30, 4, **sparse)
        self.out = nn.Linear(4, 1, dtype=dtype)

    def forward(self, step: int) -> Tensor:
        offsets = torch.tensor([0, 3, 3, 5])
        found = self.sums(ids_of(step, 8), offsets) + self.means(ids_of(step + 2, 4, 5))
        return self.out((found * self.rows(ids_of(step + 3, 4))).sin()).square().sum()


class Several(Once):
    """One of the tables is read twice, and one weight is shared by two modules."""

    def __init__(self, kinds: Any, dtype: torch.dtype) -> None:
        super().__init__(kinds, dtype)
        self.tied = kinds.EmbeddingBag(30, 4, mode="sum", sparse=True, dtype=dtype)
        self.tied.weight = self.rows.weight

    def forward(self, step: int) -> Tensor:
        factors = torch.linspace(-1, 2, 12, dtype=self.out.weight.dtype).view(4, 3)
        found = self.sums(ids_of(step + 1, 4, 3)) + self.sums(ids_of(step + 5, 4, 2))
        found = found * self.tied(ids_of(step + 4, 4, 3), per_sample_weights=factors)
        return super().forward(step) + self.out(found.sin()).square().sum()


Loop = Callable[[nn.Module, Any, int], None]


def usual(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(step).backward()
    optimizer.step()


def zeroed(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(step).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        model(3 * step + part).backward()
    optimizer.step()


def closed(model: nn.Module, optimizer: Any, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(step)
        loss.backward()
        return loss

    optimizer.step(closure)


def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(step).backward()
    assert sparsestep.clip_grad_norm_(model.parameters(), 0.01) > 0.01
    optimizer.step()


def clamped(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(step).backward()
    sparsestep.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()


def averaged(model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients divided by hand, as after accumulation."""
    accumulated(model, _Nothing(optimizer), step)
    for param in model.parameters():
        param.grad.div_(3)
        param.grad *= torch.tensor(2.0)
    optimizer.step()


class _Nothing:
    """An optimizer that forgets gradients and does no more."""

    def __init__(self, optimizer: Any) -> None:
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        pass


def hooked(model: nn.Module, optimizer: Any, step: int) -> None:
    """A hook on the weight that changes its gradient."""
    handles = [p.register_hook(lambda grad: grad * 0.5) for p in model.parameters()]
    usual(model, optimizer, step)
    for handle in handles:
        handle.remove()


def by_torchs_grad(model: nn.Module, optimizer: Any, step: int) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(model(step), params), strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


ALONE = [usual, zeroed, closed, clipped, clamped, hooked, by_torchs_grad]  # one backward a step
LOOPS = [*ALONE, accumulated, averaged]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def each_of(loops: list[Loop]) -> Any:
    return pytest.mark.parametrize("loop", loops, ids=lambda loop: loop.__name__)


def made(model: nn.Module, name: str) -> Any:
    optimizer = OPTIMIZERS[name](model.parameters())
    if optimizer.semantics == "dense":
        optimizer.track(model)
    return optimizer


def run(model: nn.Module, name: str, loop: Loop, steps: int = 5) -> Any:
    optimizer = made(model, name)
    for step in range(steps):
        loop(model, optimizer, step)
    return optimizer


@each_optimizer
@each_of(ALONE)
@both_dtypes
def test_the_bits_of_torchs_modules(name: str, loop: Loop, dtype: torch.dtype):
    ours = run(Once(sparsestep.nn, dtype), name, loop)
    theirs = run(Once(nn, dtype), name, loop)
    assert same_run(ours, theirs)


@each_optimizer
@each_of(LOOPS)
def test_the_numbers_of_torchs_modules(name: str, loop: Loop):
    """Where gradients are added up, torch sums some duplicates before others."""
    ours, theirs = Several(sparsestep.nn, torch.float64), Several(nn, torch.float64)
    run(ours, name, loop)
    run(theirs, name, loop)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)


@each_optimizer
@each_of([usual, zeroed, accumulated])
@both_dtypes
def test_the_bits_of_what_is_written_out(name: str, loop: Loop, dtype: torch.dtype):
    """Where gradients are added up, they are as if one were written after the other."""
    ours = run(Several(sparsestep.nn, dtype), name, loop)

    def written_out(model: nn.Module, optimizer: Any, step: int) -> None:
        loop(model, _Nothing(optimizer), step)
        for param in model.parameters():
            if isinstance(param.grad, CompactGrad):
                param.grad = plain(param.grad)
        optimizer.step()
        optimizer.zero_grad()

    assert same_run(ours, run(Several(sparsestep.nn, dtype), name, written_out))


COMPACT = [usual, zeroed, accumulated, clipped, averaged, hooked]


@each_of(COMPACT)
def test_the_gradient_stays_compact(loop: Loop):
    model = Several(sparsestep.nn, torch.float32)
    run(model, "Adam", loop)
    for name, param in model.named_parameters():
        if not name.startswith("out"):
            assert isinstance(param.grad, CompactGrad)
            assert not param.grad.is_materialized


@each_optimizer
@pytest.mark.parametrize("backwards", [1, 2])
def test_steps_in_backward(name: str, backwards: int):
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Several(kinds, torch.float64)
        optimizer = made(model, name)
        optimizer.step_in_backward(backwards=backwards)
        for step in range(6):
            model(step).backward()
        assert all(param.grad is None for param in model.parameters())
        runs.append(model)
    for p, q in zip(*(model.parameters() for model in runs), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-11)


@each_optimizer
@both_dtypes
def test_a_grad_scaler(name: str, dtype: torch.dtype):
    """Its scale is no power of two, so that what it divides by shows; one step overflows."""
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Once(kinds, dtype)
        optimizer = made(model, name)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            loss = model(step)
            scaler.scale(loss * float("inf") if step == 3 else loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                sparsestep.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        runs.append(optimizer)
        assert scaler.get_scale() != 3.0
    assert same_run(*runs)


def test_a_step_without_a_new_gradient_counts():
    """As with torch's modules: after zero_grad(set_to_none=False) there is an empty gradient."""
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Once(kinds, torch.float32)
        optimizer = run(model, "Adam", usual)
        optimizer.zero_grad(set_to_none=False)
        for param in model.parameters():
            assert param.grad is not None
        optimizer.step()
        runs.append(optimizer)
    assert same_run(*runs)


TORCHS = {
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


@pytest.mark.parametrize("name", TORCHS)
@each_of([usual, zeroed, hooked])
def test_torchs_own_optimizers(name: str, loop: Loop):
    runs = []
    for kinds in (sparsestep.nn, nn):
        model = Once(kinds, torch.float32)
        tables = [p for n, p in model.named_parameters() if not n.startswith("out")]
        optimizer = TORCHS[name](tables)
        for step in range(5):
            loop(model, optimizer, step)
        runs.append(optimizer)
    assert same_run(*runs)


def test_a_copy_of_a_model_trains_alike():
    model = Several(sparsestep.nn, torch.float32)
    optimizer = run(model, "Adam", usual)
    copied, other = copy.deepcopy((model, optimizer))
    for step in range(5, 8):
        usual(model, optimizer, step)
        usual(copied, other, step)
    assert same_run(optimizer, other)
