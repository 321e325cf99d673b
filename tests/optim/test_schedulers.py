"""Learning rate schedulers drive our classes as they drive torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler, swa_utils

import sparsestep
from tests.table import all_same_bits, each_engine, running_on
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


def sequential(optimizer: Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=5), SCHEDULERS["lambda"](optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


# The other schedulers of torch run in tests/properties/test_torch_database.py.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": sequential,
    "averaging": lambda o: swa_utils.SWALR(o, swa_lr=0.005, anneal_epochs=4),
}


@steps_sequential_schedulers
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_drives_our_class_as_it_drives_torchs(scheduler: str):
    """The same options in every step; the same params, also where rows catch up later."""
    names = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "base_momentum")
    for cls, options in (("AdamW", {}), ("SGD", {"momentum": 0.9})):
        runs = []
        for module, more in (
            (torch.optim, {}),
            (sparsestep, {"foreach": False}),
            (sparsestep, {"semantics": "dense"}),
        ):
            is_dense = "semantics" in more
            model = Model(sparse=is_dense).double()
            groups = [
                {"params": model.table.parameters()},
                {"params": model.layer.parameters(), "weight_decay": 0.1 * (cls == "AdamW")},
            ]
            opt = getattr(module, cls)(groups, lr=0.05, **options, **more)
            if is_dense:
                opt.track(model)
            schedule = SCHEDULERS[scheduler](opt)
            seen = []
            for step in range(12):
                model.backward(step)
                opt.step()
                schedule.step(*[1.0] if scheduler == "plateau" else [])  # never better: it acts
                seen.append(
                    [{name: group.get(name) for name in names} for group in opt.param_groups]
                )
            runs.append((seen, model.state_dict()))
        (wanted, params), *others = runs
        assert any(each != wanted[0] for each in wanted)
        for seen, found in others:
            assert seen == wanted
            torch.testing.assert_close(found, params, rtol=1e-9, atol=1e-9)
        assert all_same_bits(others[0][1].values(), params.values())


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
