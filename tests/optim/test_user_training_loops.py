"""A user's own formula in training loops: schedulers, scalers, closures, steps in backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.optim.own_rules import adagrad, close, randn, seeded, trained
from tests.table import same_bits, sign_sgd, snapshot, unchanged


def model_of() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(randn(*param.shape, seed=number))
    return model


def loss_of(model: torch.nn.Module, step: int) -> Tensor:
    return model(torch.randint(0, 9, (7,), generator=seeded(step))).square().mean()


def bits_of(model: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_a_scheduler_drives_it():
    runs = []
    for make in (adagrad, torch.optim.Adagrad):
        model = model_of()
        opt = make(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
        for step in range(5):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
            schedule.step()
        assert opt.param_groups[0]["lr"] == pytest.approx(0.0)
        runs.append(bits_of(model))
    assert all(map(close, *runs))


def test_a_cycle_drives_its_momentum():
    model = model_of()
    opt = sign_sgd(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
    seen = set()
    for step in range(5):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        schedule.step()
        seen.add(opt.param_groups[0]["momentum"])
    assert len(seen) > 3


def test_a_scaler_skips_what_overflowed_and_changes_nothing_else():
    scaled, plain = model_of(), model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    opts = [adagrad(model.parameters(), lr=0.1) for model in (scaled, plain)]
    for step in range(4):
        overflows = step == 1
        before = snapshot(opts[0])
        opts[0].zero_grad()
        scaler.scale(loss_of(scaled, step) * (math.inf if overflows else 1.0)).backward()
        scaler.step(opts[0])
        scaler.update()
        assert unchanged(opts[0], before) == overflows
        if not overflows:
            opts[1].zero_grad()
            loss_of(plain, step).backward()
            opts[1].step()
    assert all(map(same_bits, bits_of(scaled), bits_of(plain)))


def test_a_closure():
    closed, plain = model_of(), model_of()
    opts = [adagrad(model.parameters(), lr=0.1) for model in (closed, plain)]

    def closure() -> Tensor:
        opts[0].zero_grad()
        loss = loss_of(closed, 0)
        loss.backward()
        return loss

    loss = opts[0].step(closure)
    loss_of(plain, 0).backward()
    opts[1].step()
    assert loss.item() == loss_of(model_of(), 0).item()
    assert all(map(same_bits, bits_of(closed), bits_of(plain)))


def test_it_steps_in_backward():
    watched, plain = model_of(), model_of()
    opts = [adagrad(model.parameters(), lr=0.1) for model in (watched, plain)]
    handle = opts[0].step_in_backward()
    for step in range(3):
        loss_of(watched, step).backward()
        opts[1].zero_grad()
        loss_of(plain, step).backward()
        opts[1].step()
    handle.remove()
    assert all(map(same_bits, bits_of(watched), bits_of(plain)))


def test_autograd_does_not_see_the_formula():
    seen = set()

    @sparsestep.rule
    def watched(param, grad, *, lr):
        new = param - lr * grad
        seen.add((param.requires_grad, new.requires_grad, torch.is_grad_enabled()))
        return new

    with torch.enable_grad():
        trained(watched, lr=0.1, engine="reference")
    assert seen == {(False, False, False)}
