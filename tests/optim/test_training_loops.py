"""What people write around an optimizer: scalers, averages, accumulation, closures."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import swa_utils

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.training import Model, batch, loss_of
from tests.table import (
    each_engine,
    each_optimizer,
    running_on,
    same_bits,
    snapshot,
    state_tensors,
    steps_of,
    unchanged,
)


def counts(opt: RuleOptimizer) -> set[int]:
    """The step counts of all params; SGD has none."""
    return {int(kept["step"]) for kept in opt.state.values() if "step" in kept}


def same_training(one: tuple[Model, RuleOptimizer], other: tuple[Model, RuleOptimizer]) -> bool:
    ours, theirs = ([*model.bits(), *state_tensors(opt)] for model, opt in (one, other))
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


# Mixed precision


@each_optimizer
@each_engine
@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled by hand", "unscaled by step"])
def test_a_scaler_skips_what_overflowed_and_changes_nothing_else(
    optimizer: type[RuleOptimizer], engine: str, unscale: bool
):
    """Scales are powers of two, so that training with them has the bits of training without."""
    scaled, plain = Model(), Model()
    scaler = GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    with running_on(engine) as name:
        opts = [optimizer(m.parameters(), lr=0.01, engine=name) for m in (scaled, plain)]
        for step in range(6):
            overflows = step in (0, 3)
            before, scale = snapshot(opts[0]), scaler.get_scale()
            opts[0].zero_grad()
            loss = loss_of(scaled, step) * (math.inf if overflows else 1.0)
            scaler.scale(loss).backward()
            assert scaled.table.weight.grad.is_sparse
            if unscale:
                scaler.unscale_(opts[0])
            scaler.step(opts[0])
            scaler.update()
            assert unchanged(opts[0], before) == overflows
            assert (scaler.get_scale() < scale) == overflows
            if not overflows:
                opts[1].zero_grad()
                loss_of(plain, step).backward()
                opts[1].step()
            assert same_training((scaled, opts[0]), (plain, opts[1]))
    assert counts(opts[0]) <= {4}


@each_optimizer
@pytest.mark.parametrize("where", ["table", "layer"])
def test_a_scaler_finds_an_overflow_in_either_kind_of_gradient(
    optimizer: type[RuleOptimizer], where: str
):
    model = Model()
    opt = optimizer(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(opt)
    scaler.update()
    before = snapshot(opt)
    opt.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    grad = getattr(model, where).weight.grad
    (grad._values() if grad.is_sparse else grad)[0, 0] = math.nan
    scaler.step(opt)
    scaler.update()
    assert unchanged(opt, before)


@each_optimizer
def test_grad_scaler_skips_a_step_with_inf(optimizer: type[RuleOptimizer]):
    table = torch.nn.Embedding(5, 2, sparse=True)
    opt = optimizer(table.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = table.weight.detach().clone()
    for factor, moved in ((float("inf"), False), (1.0, True)):
        opt.zero_grad()
        scaler.scale(factor * table(torch.tensor([1, 2])).sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert steps_of(opt, table.weight) in (int(moved), None)
        assert torch.equal(table.weight, before) != moved
        assert same_bits(table.weight.detach(), before) != moved


# Averaged weights


@each_optimizer
def test_averaged_weights(optimizer: type[RuleOptimizer]):
    model = Model()
    opt = optimizer(model.parameters(), lr=0.05)
    averaged = swa_utils.AveragedModel(model)
    schedule = swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    passed: list[list[Tensor]] = []
    for step in range(5):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        schedule.step()
        averaged.update_parameters(model)
        passed.append(model.bits())
    for average, *values in zip(averaged.module.parameters(), *passed, strict=True):
        assert torch.allclose(average, torch.stack(values).mean(dim=0), rtol=1e-5, atol=1e-6)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.01)


# Accumulation


@each_optimizer
@each_engine
@pytest.mark.parametrize("clipped", [False, True], ids=["not clipped", "clipped"])
def test_gradients_of_several_batches_count_as_their_sum(
    optimizer: type[RuleOptimizer], engine: str, clipped: bool
):
    """Against a model whose table has dense gradients: what was touched agrees, the rest rests."""
    sparse, dense = Model(), Model(sparse=False)
    start = sparse.bits()[0]
    held = torch.cat([batch(step) for step in range(3)]).unique()
    with running_on(engine) as name:
        opts = [optimizer(m.parameters(), lr=0.01, engine=name) for m in (sparse, dense)]
        for model in (sparse, dense):
            for step in range(3):
                (loss_of(model, step) / 3).backward()
        assert sparse.table.weight.grad.is_sparse
        assert not sparse.table.weight.grad.is_coalesced()
        if clipped:
            ours = sparsestep.clip_grad_norm_(sparse.parameters(), max_norm=0.1)
            theirs = torch.nn.utils.clip_grad_norm_(dense.parameters(), max_norm=0.1)
            assert ours.item() > 0.1
            assert torch.allclose(ours, theirs)
        for opt in opts:
            opt.step()
    table, *layer = sparse.bits()
    their_table, *their_layer = dense.bits()
    for our, their in [(table[held], their_table[held]), *zip(layer, their_layer, strict=True)]:
        assert torch.allclose(our, their, rtol=1e-5, atol=1e-6)
    rest = [row for row in range(12) if row not in held]
    assert 11 in rest
    assert same_bits(table[rest], start[rest])
    assert counts(opts[0]) <= {1}


@each_optimizer
@each_engine
def test_accumulation_with_a_scaler_and_clipping(optimizer: type[RuleOptimizer], engine: str):
    """The order that torch's documentation has: scale, accumulate, unscale, clip, step, update."""
    scaled, plain = Model(), Model()
    scaler = GradScaler("cpu", init_scale=2.0**10)
    with running_on(engine) as name:
        opts = [optimizer(m.parameters(), lr=0.01, engine=name) for m in (scaled, plain)]
        for step in range(3):
            for part in range(2):
                scaler.scale(loss_of(scaled, 2 * step + part)).backward()
                loss_of(plain, 2 * step + part).backward()
            scaler.unscale_(opts[0])
            for model in (scaled, plain):
                sparsestep.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(opts[0])
            scaler.update()
            opts[1].step()
            for opt in opts:
                opt.zero_grad()
    assert same_training((scaled, opts[0]), (plain, opts[1]))


# Closures and zero_grad


@each_optimizer
@each_engine
def test_a_closure_is_called_once_and_its_loss_is_returned(
    optimizer: type[RuleOptimizer], engine: str
):
    closed, open_ = Model(), Model()
    calls = []
    with running_on(engine) as name:
        opts = [optimizer(m.parameters(), lr=0.01, engine=name) for m in (closed, open_)]
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                calls.append(torch.is_grad_enabled())
                opts[0].zero_grad()
                loss = loss_of(closed, step)
                loss.backward()
                return loss

            with torch.no_grad():
                returned = opts[0].step(closure)
            opts[1].zero_grad()
            loss = loss_of(open_, step)
            loss.backward()
            assert opts[1].step() is None
            assert same_bits(returned.detach(), loss.detach())
    assert calls == [True] * 4
    assert same_training((closed, opts[0]), (open_, opts[1]))


@each_optimizer
@each_engine
def test_gradients_may_be_dropped_or_emptied(optimizer: type[RuleOptimizer], engine: str):
    """By the optimizer or the model; what is emptied takes part with nothing in it."""
    zero: list[Callable[[Model, RuleOptimizer], None]] = [
        lambda model, opt: opt.zero_grad(),
        lambda model, opt: opt.zero_grad(set_to_none=True),
        lambda model, opt: opt.zero_grad(set_to_none=False),
        lambda model, opt: model.zero_grad(),
        lambda model, opt: model.zero_grad(set_to_none=False),
    ]
    runs = []
    with running_on(engine) as name:
        for clear in zero:
            model = Model()
            opt = optimizer(model.parameters(), lr=0.01, engine=name)
            for step in range(4):
                clear(model, opt)
                loss_of(model, step).backward()
                opt.step()
            runs.append((model, opt))
    for other in runs[1:]:
        assert same_training(runs[0], other)


@each_optimizer
@each_engine
def test_an_emptied_sparse_gradient_moves_nothing(optimizer: type[RuleOptimizer], engine: str):
    """A dense gradient of zeros is a gradient; a sparse one without entries touches nothing."""
    model = Model()
    with running_on(engine) as name:
        opt = optimizer(model.parameters(), lr=0.01, engine=name)
        loss_of(model, 0).backward()
        opt.step()
        before = model.bits()[0]
        opt.zero_grad(set_to_none=False)
        opt.step()
    assert same_bits(model.bits()[0], before)
    assert counts(opt) <= {2}


@each_optimizer
def test_a_table_that_the_batch_did_not_use_is_left_alone(optimizer: type[RuleOptimizer]):
    """Its gradient is None, hence no step of it is counted."""
    model = Model()
    opt = optimizer(model.parameters(), lr=0.01)
    before = model.bits()
    model.layer(torch.ones(3, 4)).sum().backward()
    opt.step()
    assert same_bits(model.bits()[0], before[0])
    assert not same_bits(model.bits()[1], before[1])
    assert int(opt.state.get(model.table.weight, {}).get("step", 0)) == 0
