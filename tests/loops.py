"""Training loops as people write them, each a function of a training and a step."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer, lr_scheduler

import sparsestep
from tests.table import all_same_bits, state_tensors, steps_of


def ids_of(step: int, *shape: int) -> Tensor:
    """Few ids often, many rarely."""
    generator = torch.Generator().manual_seed(step)
    return (30 * torch.rand(shape, generator=generator) ** 2).long()


class Model(nn.Module):
    """Tables of every kind, each read once, and a layer.

    ``several``: a table is read twice, and two modules share a weight. A table is not used in
    every fourth batch, and bags of every fifth are empty.
    """

    def __init__(
        self,
        kinds: Any = nn,
        dtype: torch.dtype = torch.float32,
        *,
        sparse: bool = True,
        several: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"sparse": sparse, "dtype": dtype}
        self.sums = kinds.EmbeddingBag(30, 4, mode="sum", **options)
        self.means = kinds.EmbeddingBag(30, 4, mode="mean", padding_idx=0, **options)
        self.rows = kinds.Embedding(30, 4, **options)
        self.out = nn.Linear(4, 1, dtype=dtype)
        self.tied = None
        if several:
            self.tied = kinds.EmbeddingBag(30, 4, mode="sum", **options)
            self.tied.weight = self.rows.weight

    def forward(self, step: int) -> Tensor:
        found = self.means(ids_of(step + 2, 4, 5))
        if step % 5 == 4:
            found = found + self.sums(ids_of(0, 0), torch.zeros(4, dtype=torch.int64))
        elif step % 4 != 3:
            found = found + self.sums(ids_of(step, 8), torch.tensor([0, 3, 3, 5]))
        loss = self.out((found * self.rows(ids_of(step + 3, 4))).sin()).square().sum()
        if self.tied is not None:
            factors = torch.linspace(-1, 2, 12, dtype=self.out.weight.dtype).view(4, 3)
            found = self.sums(ids_of(step + 1, 4, 3)) + self.sums(ids_of(step + 5, 4, 2))
            found = found * self.tied(ids_of(step + 4, 4, 3), per_sample_weights=factors)
            loss = loss + self.out(found.sin()).square().sum()
        return loss


@dataclass
class Training:
    """A model and its optimizer, which tracks it under dense semantics."""

    model: nn.Module
    optimizer: Any

    @classmethod
    def of(cls, model: nn.Module, make: Callable[..., Any], **options: Any) -> Training:
        """Two groups with learning rates of their own."""
        params = list(model.parameters())
        groups = [{"params": params[::2], "lr": 2.0**-6}, {"params": params[1::2], "lr": 2.0**-7}]
        optimizer = make(groups, **options)
        if getattr(optimizer, "semantics", "masked") == "dense":
            optimizer.track(model)
        return cls(model, optimizer)

    def run(self, loop: Loop, steps: int = 6) -> Training:
        step = loop(self)
        for number in range(steps):
            step(number)
        if hasattr(self.optimizer, "catch_up"):
            self.optimizer.catch_up()
        return self

    def backward(self, step: int) -> None:
        self.model(step).backward()

    @property
    def tensors(self) -> list[Tensor]:
        params = [param.detach() for param in self.model.parameters()]
        return [*params, *state_tensors(self.optimizer)]

    def same_as(self, other: Training) -> bool:
        """The same bits, and the same step counts."""
        counts = (
            [steps_of(each.optimizer, param) for param in each.model.parameters()]
            for each in (self, other)
        )
        return all_same_bits(self.tensors, other.tensors) and next(counts) == next(counts)

    def close_to(self, other: Training, rtol: float = 1e-9, atol: float = 1e-11) -> bool:
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.allclose(ours, theirs, rtol=rtol, atol=atol) for ours, theirs in pairs)


Step = Callable[[int], None]
Loop = Callable[[Training], Step]


def each_step(work: Callable[[Training, int], None]) -> Loop:
    """A loop that does the same in every step."""

    @functools.wraps(work)
    def loop(training: Training) -> Step:
        return functools.partial(work, training)

    return loop


@each_step
def plain(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    training.backward(number)
    training.optimizer.step()


@each_step
def plain_but_overflows(training: Training, number: int) -> None:
    """What a scaler's steps come to."""
    if number not in OVERFLOWS:
        plain(training)(number)


@each_step
def step_first(training: Training, number: int) -> None:
    """The gradients are dropped after the step."""
    training.backward(number)
    training.optimizer.step()
    training.model.zero_grad()


@each_step
def zeroed(training: Training, number: int) -> None:
    """Gradients are emptied: one that a batch does not use takes part with nothing in it."""
    training.optimizer.zero_grad(set_to_none=False)
    training.backward(number)
    training.optimizer.step()


@each_step
def closure(training: Training, number: int) -> None:
    calls = []

    def close() -> Tensor:
        calls.append(torch.is_grad_enabled())
        training.optimizer.zero_grad()
        loss = training.model(number)
        loss.backward()
        return loss

    with torch.no_grad():
        assert training.optimizer.step(close) is not None
    assert calls == [True]


OVERFLOWS = (1, 4)


def scaled(training: Training, *, unscale: bool = False, clip: bool = False) -> Step:
    """Scales are powers of two, so that training with them has the bits of training without."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(number: int) -> None:
        training.optimizer.zero_grad()
        loss = training.model(number) * (math.inf if number in OVERFLOWS else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(training.optimizer)
        if clip:
            sparsestep.clip_grad_norm_(training.model.parameters(), 0.01)
        scale = scaler.get_scale()
        scaler.step(training.optimizer)
        scaler.update()
        assert (scaler.get_scale() < scale) == (number in OVERFLOWS)

    return step


def unscaled(training: Training) -> Step:
    return scaled(training, unscale=True)


def unscaled_and_clipped(training: Training) -> Step:
    return scaled(training, unscale=True, clip=True)


def in_backward(training: Training) -> Step:
    training.optimizer.step_in_backward()

    def step(number: int) -> None:
        training.backward(number)
        assert all(param.grad is None for param in training.model.parameters())
        training.optimizer.step()  # what is left for it is nothing

    return step


@each_step
def copied(training: Training, number: int) -> None:
    """A deep copy goes on."""
    if number == 3:
        training.optimizer.zero_grad()
        both = (training.model, training.optimizer)
        training.model, training.optimizer = copy.deepcopy(both)
    plain(training)(number)


@each_step
def resumed(training: Training, number: int) -> None:
    """From a checkpoint of its own."""
    if number == 3:
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    plain(training)(number)


@each_step
def accumulated(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    for part in range(3):
        training.backward(3 * number + part)
    training.optimizer.step()


def in_three_backwards(training: Training) -> Step:
    training.optimizer.step_in_backward(backwards=3)

    def step(number: int) -> None:
        for part in range(3):
            training.backward(3 * number + part)

    return step


def changed(change: Callable[[Any], None]) -> Loop:
    """A loop that does something to the gradients before it steps."""

    @each_step
    def loop(training: Training, number: int) -> None:
        training.optimizer.zero_grad()
        training.backward(number)
        change(training.model.parameters())
        training.optimizer.step()

    return loop


def clip_norm(params: Any) -> None:
    assert sparsestep.clip_grad_norm_(params, 0.01) > 0.01


def clip_value(params: Any) -> None:
    sparsestep.clip_grad_value_(params, 0.05)


def divide(params: Any) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.div_(4)
            param.grad *= torch.tensor(2.0)


def hooked(training: Training) -> Step:
    for param in training.model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    return plain(training)


@each_step
def by_autograd_grad(training: Training, number: int) -> None:
    params = list(training.model.parameters())
    grads = torch.autograd.grad(training.model(number), params, allow_unused=True)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    training.optimizer.step()


def scheduled(*makers: Callable[[Optimizer], Any]) -> Loop:
    """A loop with schedulers of learning rates."""

    def loop(training: Training) -> Step:
        step, schedules = plain(training), [make(training.optimizer) for make in makers]

        def scheduled_step(number: int) -> None:
            step(number)
            for schedule in schedules:
                never_better = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
                schedule.step(*[1.0] * never_better)

        return scheduled_step

    return loop


# Loops that come to the same as another loop, to the last bit.
SAME: dict[Loop, Loop] = {
    step_first: plain,
    closure: plain,
    by_autograd_grad: plain,
    in_backward: plain,
    copied: plain,
    resumed: plain,
    scaled: plain_but_overflows,
    unscaled: plain_but_overflows,
    in_three_backwards: accumulated,
}
# Loops for which a reference is the same loop with other modules or gradients.
LOOPS: dict[str, Loop] = {
    **{loop.__name__: loop for loop in (plain, zeroed, accumulated, hooked)},
    "scheduled": scheduled(lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.5)),
    **{change.__name__: changed(change) for change in (clip_norm, clip_value, divide)},
    **{loop.__name__: loop for loop in (unscaled_and_clipped, in_backward, in_three_backwards)},
}
