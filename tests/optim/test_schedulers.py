"""Learning rate schedulers drive our classes as they drive torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler, swa_utils

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.training import Model, loss_of
from tests.table import each_engine, each_optimizer, running_on, same_bits
from tests.torch_versions import steps_sequential_schedulers

Make = Callable[[Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(o, factor=0.5, total_iters=4),
            lr_scheduler.ExponentialLR(o, gamma=0.8),
        ]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=3),
            lr_scheduler.CosineAnnealingLR(o, T_max=5),
        ],
        milestones=[3],
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=4),
}
DRIVEN = {
    "AdamW": {"lr": 0.05},
    "AdamW-tensor": {"lr": torch.tensor(0.05)},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "SGD-tensor": {"lr": torch.tensor(0.05), "momentum": 0.9},
}


def test_every_scheduler_of_torch_is_here():
    known = {
        name
        for name, found in vars(lr_scheduler).items()
        if isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


def options_now(opt: Optimizer) -> list[dict[str, Any]]:
    """What schedulers touch: rates, and the momenta of cycles."""
    names = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "base_momentum")
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k in names}
        for group in opt.param_groups
    ]


@each_engine
def test_options_matter_where_there_is_a_gradient_alone(engine: str):
    """Torch's suite cycles beta1 up to 22 in an optimizer that has no gradient."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    with running_on(engine) as name:
        opt = sparsestep.Adam([{"params": [param]} for param in params], engine=name)
        opt.param_groups[0]["betas"] = (22.0, 0.999)
        opt.step()
        params[1].grad = torch.ones(4)
        opt.step()
        assert torch.equal(params[0], torch.ones(4))
        assert (params[1] < 1).all()
        params[0].grad = torch.ones(4)
        with pytest.raises(
            ValueError, match=r"Adam: param group 0: Invalid beta parameter at index 0: 22\.0"
        ):
            opt.step()


@steps_sequential_schedulers
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("driven", DRIVEN)
def test_a_scheduler_drives_our_class_as_it_drives_torchs(scheduler: str, driven: str):
    """The same rates and momenta, and for dense gradients the same params to the last bit."""
    name = driven.removesuffix("-tensor")
    runs = []
    for module in (sparsestep, torch.optim):
        model = Model(sparse=False)
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in DRIVEN[driven].items()}
        opt = getattr(module, name)(
            [
                {"params": model.table.parameters()},
                {"params": model.layer.parameters(), "weight_decay": 0.1},
            ],
            **options,
        )
        schedule = SCHEDULERS[scheduler](opt)
        seen = [options_now(opt)]
        for step in range(12):
            opt.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            opt.step()
            if scheduler == "ReduceLROnPlateau":
                schedule.step(1.0)  # never better: it has to act
            else:
                schedule.step()
            seen.append(options_now(opt))
        runs.append((seen, model.bits(), schedule.state_dict().keys()))
    (ours, our_bits, our_keys), (theirs, their_bits, their_keys) = runs
    assert ours == theirs
    assert any(options != theirs[0] for options in theirs)
    assert our_keys == their_keys
    assert all(map(same_bits, our_bits, their_bits))


@each_optimizer
@each_engine
def test_a_scheduled_rate_is_the_rate_of_the_next_sparse_step(
    optimizer: type[RuleOptimizer], engine: str
):
    """Once the rate is zero nothing moves, and once it is back everything does."""
    model = Model()
    with running_on(engine) as name:
        opt = optimizer(model.parameters(), lr=0.1, engine=name)
        rates = [1.0, 0.0, 1.0]
        schedule = lr_scheduler.LambdaLR(opt, lambda epoch: rates[min(epoch, 2)])
        for rate in rates:
            before = model.bits()
            opt.zero_grad()
            loss_of(model, 0).backward()
            opt.step()
            schedule.step()
            moved = [not same_bits(*pair) for pair in zip(model.bits(), before, strict=True)]
            assert moved == [rate > 0] * 3


@each_optimizer
def test_a_cycle_moves_the_momentum_where_there_is_one(optimizer: type[RuleOptimizer]):
    """Torch's cycles ask for betas or momentum; classes without either take the rate alone."""
    options = {"momentum": 0.9} if "momentum" in optimizer([torch.zeros(1)]).defaults else {}
    model = Model()
    opt = optimizer(model.parameters(), lr=0.01, **options)
    has_one = {"betas", "momentum"} & opt.defaults.keys()
    schedule = lr_scheduler.OneCycleLR(
        opt, max_lr=0.1, total_steps=10, cycle_momentum=bool(has_one)
    )
    seen = set()
    for step in range(8):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        schedule.step()
        group = opt.param_groups[0]
        seen.add(group["betas"][0] if "betas" in group else group.get("momentum"))
    assert (len(seen) > 4) == bool(has_one)


@steps_sequential_schedulers
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("driven", ["AdamW", "SGD"])
def test_under_a_scheduler_rows_that_waited_are_where_dense_training_has_them(
    scheduler: str, driven: str
):
    """Each missed step counts with the rate and the momentum that it had."""
    runs = []
    for module, dense in ((sparsestep, {"semantics": "dense"}), (torch.optim, {})):
        model = Model(sparse=bool(dense)).double()
        opt = getattr(module, driven)(model.parameters(), **DRIVEN[driven], **dense)
        if dense:
            opt.track(model)
        schedule = SCHEDULERS[scheduler](opt)
        for step in range(12):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
            schedule.step(*[1.0] if scheduler == "ReduceLROnPlateau" else [])
        runs.append(model.state_dict())
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-9)
