"""Learning rate schedulers drive our classes as they drive torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler, swa_utils

import sparsestep
from tests.table import each_engine, running_on, same_bits
from tests.torch_versions import steps_sequential_schedulers


class Model(torch.nn.Module):
    """One table with sparse gradients, one layer with dense ones."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(12, 4, sparse=sparse)
        self.layer = torch.nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def backward(self, step: int) -> None:
        ids = torch.randint(0, 11, (9,), generator=torch.Generator().manual_seed(step))
        self.zero_grad()
        self.layer(self.table(ids)).square().mean().backward()


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
        [SCHEDULERS["ConstantLR"](o), SCHEDULERS["ExponentialLR"](o)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [SCHEDULERS["LinearLR"](o), SCHEDULERS["CosineAnnealingLR"](o)], milestones=[3]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=4),
}
each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS)
DRIVEN: dict[str, dict[str, Any]] = {"AdamW": {}, "SGD": {"momentum": 0.9}}


def test_every_scheduler_of_torch_is_here():
    known = {
        name
        for name, found in vars(lr_scheduler).items()
        if isinstance(found, type) and issubclass(found, lr_scheduler.LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler"} <= SCHEDULERS.keys()


def options_now(opt: Optimizer) -> list[dict[str, Any]]:
    """What schedulers set: rates, and the momenta of cycles."""
    names = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "base_momentum")
    return [
        {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k in names}
        for group in opt.param_groups
    ]


def run(model: Model, opt: Optimizer, scheduler: str) -> tuple[list[Any], Any]:
    schedule = SCHEDULERS[scheduler](opt)
    seen = [options_now(opt)]
    for step in range(12):
        model.backward(step)
        opt.step()
        schedule.step(*[1.0] if scheduler == "ReduceLROnPlateau" else [])  # never better: it acts
        seen.append(options_now(opt))
    return seen, schedule.state_dict().keys()


@steps_sequential_schedulers
@each_scheduler
def test_a_scheduler_drives_our_class_as_it_drives_torchs(scheduler: str):
    """The same rates and momenta, and in torch's own kernel the same params to the last bit."""
    for name, options in DRIVEN.items():
        for lr in (0.05, torch.tensor(0.05)):
            runs, models = [], []
            for module in (sparsestep, torch.optim):
                model = Model(sparse=False)
                groups = [
                    {"params": model.table.parameters()},
                    {"params": model.layer.parameters(), "weight_decay": 0.1},
                ]
                rate = lr.clone() if isinstance(lr, Tensor) else lr
                opt = getattr(module, name)(groups, lr=rate, foreach=False, **options)
                runs.append(run(model, opt, scheduler))
                models.append(model)
            assert runs[0] == runs[1]
            assert any(each != runs[0][0][0] for each in runs[0][0])
            assert all(map(same_bits, models[0].parameters(), models[1].parameters()))


@steps_sequential_schedulers
@each_scheduler
def test_deferred_rows_catch_up_with_the_rates_of_the_steps_that_they_missed(scheduler: str):
    for name, options in DRIVEN.items():
        states = []
        for module, dense in ((sparsestep, {"semantics": "dense"}), (torch.optim, {})):
            model = Model(sparse=bool(dense)).double()
            opt = getattr(module, name)(model.parameters(), lr=0.05, **options, **dense)
            if dense:
                opt.track(model)
            run(model, opt, scheduler)
            states.append(model.state_dict())
        torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)


@each_engine
def test_options_are_checked_only_in_groups_with_a_gradient(engine: str):
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
        with pytest.raises(ValueError, match=r"param group 0: .*beta"):
            opt.step()
