"""torch's own database of optimizer inputs and error inputs, with our class swapped in."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from sparsestep.optim import OPTIMIZERS
from tests.table import ENGINES, running_on, steps_of


def info_of(ours: type) -> OptimizerInfo:
    return next(info for info in optim_db if info.optim_cls.__name__ == ours.__name__)


PAIRS = [(ours, info_of(ours)) for ours in OPTIMIZERS if hasattr(torch.optim, ours.__name__)]
each_pair = pytest.mark.parametrize(("ours", "info"), PAIRS, ids=[o.__name__ for o, _ in PAIRS])
INPUTS = [
    (ours, info, given)
    for ours, info in PAIRS
    for given in info.optim_inputs_func(device="cpu", dtype=torch.float32)
]
# Engines differ in what they do with sparse gradients.
RUNS = [
    (*each, engine)
    for each in INPUTS
    for engine in (ENGINES if each[1].only_supports_sparse_grads else ENGINES[-1:])
]
ERRORS = [
    (ours, error)
    for ours, info in PAIRS
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
]


def train(cls, kwargs, *, sparse: bool, steps: int = 15):
    """A small regression whose loss must fall (or rise, when maximizing)."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(12, 5, sparse=sparse)
    opt = cls(list(table.parameters()), **kwargs)
    ids = torch.randint(0, 12, (steps, 20))
    losses = []
    for batch in ids:

        def closure(batch=batch):
            opt.zero_grad()
            loss = (table(batch) - 1).square().mean()
            loss.backward()
            return loss

        losses.append(opt.step(closure).item())
    return table, opt, losses


@pytest.mark.parametrize(
    ("ours", "info", "given", "engine"),
    RUNS,
    ids=[f"{engine}-{ours.__name__}-{given.desc}" for ours, _, given, engine in RUNS],
)
def test_inputs_train_like_torch(ours, info, given, engine):
    kwargs = copy.deepcopy(given.kwargs)
    sparse = info.only_supports_sparse_grads
    with running_on(engine) as name:
        table, opt, losses = train(ours, {**kwargs, "engine": name}, sparse=sparse)
    their_table, their_opt, their_losses = train(info.optim_cls, kwargs, sparse=sparse)
    assert losses == pytest.approx(their_losses, rel=1e-6)
    assert torch.allclose(table.weight, their_table.weight, rtol=1e-6, atol=1e-7)
    mine, theirs = opt.state_dict(), their_opt.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for number, kept in mine["state"].items():
        assert kept.keys() == theirs["state"][number].keys()
    assert mine["param_groups"][0].keys() == theirs["param_groups"][0].keys()


@each_pair
def test_every_scheduler_of_the_database_runs(ours, info):
    for scheduler_inputs in info.scheduler_inputs or [[]]:
        table, opt, _ = train(ours, {}, sparse=True, steps=1)
        table.weight.grad = None
        schedulers = [make(opt) for make in scheduler_inputs]
        for _ in range(5):
            table(torch.tensor([1, 2])).sum().backward()
            opt.step()
            for scheduler in schedulers:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(1.0)
                else:
                    scheduler.step()
        assert steps_of(opt, table.weight) in (6, None)


@pytest.mark.parametrize(
    ("ours", "error"), ERRORS, ids=[e.optimizer_error_input.desc for _, e in ERRORS]
)
def test_error_inputs(ours, error):
    given, when = error.optimizer_error_input, str(error.error_on)
    params = given.params
    if params is None:
        params = [torch.nn.Parameter(torch.randn(2, 3))]
    if "CONSTRUCTION" in when:
        with pytest.raises(error.error_type, match=error.error_regex):
            ours(params, **given.kwargs)
    else:
        opt = ours(params, **given.kwargs)
        with pytest.raises(error.error_type, match=error.error_regex):
            opt.step()
