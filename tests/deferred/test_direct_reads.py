"""Whoever reads a table directly under dense semantics: right, or told so.

Each case reads the table beside the lookups of a tracked model. The oracle is the same program
with dense gradients and torch's AdamW.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparsestep
from tests.deferred.tied_model import Model, close, ids_of, made, train
from tests.table import each_engine, running_on

pytestmark = pytest.mark.usefixtures("one_thread")


# What tracking alone makes right. Each takes model and optimizer, and gives numbers to compare.


def averaged(model: Model, opt: Any) -> Any:
    average = AveragedModel(model)
    for t in range(12):
        train(model, opt, range(t, t + 1))
        average.update_parameters(model)
    return average.module.table.weight.detach()


def averaged_exponentially(model: Model, opt: Any) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for t in range(12):
        train(model, opt, range(t, t + 1))
        average.update_parameters(nn.ModuleDict({"module": model})["module"])
    return average.module.table.weight.detach()


def tied_head_in_some_batches(model: Model, opt: Any) -> Any:
    losses = []
    for t in range(12):
        losses += train(model, opt, range(t, t + 1), with_head=t % 4 == 3)
    return losses


def tied_head_without_gradients(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    with torch.no_grad():
        return model.head(torch.ones(3).double())


def evaluation(model: Model, opt: Any) -> Any:
    """Over the whole weight, as a recommender ranks all items."""
    train(model, opt, range(10))
    assert model.eval() is model
    assert not model.table.training
    ranked = model.table.weight.detach().clone()
    losses = train(model.train(), opt, range(10, 12))
    nn.Sequential(model).eval()
    return torch.cat([ranked, model.table.weight.detach(), torch.tensor([[*losses, 0.0]]).double()])


def detached_parameters(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    detached = {name: param.detach() for name, param in model.named_parameters()}
    return functional_call(model, detached, (20,))


def pickled_root(model: Model, opt: Any) -> Any:
    if isinstance(opt, sparsestep.AdamW):
        opt.track(model.table)
    train(model, opt, range(10))
    return pickle.loads(pickle.dumps(model.table)).weight.detach()


def saved_root(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False).table.weight.detach()


def copied(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    return copy.copy(model.table).weight.detach().clone()


def saved_state(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    return nn.Sequential(model).state_dict()["0.head.weight"].clone()


def renormalised(model: Model, opt: Any) -> Any:
    """The rows that are looked up are written by torch; nobody has to be warned."""
    model.table.max_norm = 0.5
    if isinstance(opt, sparsestep.AdamW):
        opt.track(model.table)
    losses = train(model, opt, range(10))
    model.eval()
    return torch.cat([model.table.weight.detach().flatten(), torch.tensor(losses).double()])


TRACKED = [
    averaged,
    averaged_exponentially,
    tied_head_in_some_batches,
    tied_head_without_gradients,
    evaluation,
    detached_parameters,
    pickled_root,
    saved_root,
    copied,
    saved_state,
    renormalised,
]

# What tracking cannot see, and the guard makes right.


class Averages:
    """An average as many programs have it."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [param.detach().clone() for param in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for shadow, param in zip(self.shadow, model.parameters(), strict=True):
            shadow.lerp_(param.data, 0.1)


def own_average(model: Model, opt: Any) -> Any:
    average = Averages(model)
    for t in range(12):
        train(model, opt, range(t, t + 1))
        average.update(model)
    return average.shadow[0]


def one_vector(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    return parameters_to_vector(model.parameters()).detach()


def direct_lookups(model: Model, opt: Any) -> Any:
    losses = []
    for t in range(12):
        opt.zero_grad()
        found = functional.embedding(ids_of(t), model.table.weight, sparse=model.table.sparse)
        loss = model.layer(found).sin().sum()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def bags(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    ids = torch.tensor([[1, 2], [17, 3]])
    return functional.embedding_bag(ids, model.table.weight, mode="sum").detach()


def indexing(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    weight = model.table.weight.data
    rows = [weight[torch.tensor([3, 1])], weight[7], weight[2:4], weight.T[:, 5], weight[[8]]]
    rows += [weight[..., 0], weight.index_select(0, torch.tensor([11])), weight[weight.sum(1) > 0]]
    return torch.cat([each.flatten() for each in rows])


def module_elsewhere(model: Model, opt: Any) -> Any:
    other = nn.Embedding(20, 3, sparse=model.table.sparse, _weight=torch.zeros(20, 3))
    other.weight = model.table.weight
    train(model, opt, range(10))
    return other(torch.arange(20)).detach()


def old_alias(model: Model, opt: Any) -> Any:
    """A view that was taken before the steps."""
    alias = model.table.weight.detach()
    train(model, opt, range(10))
    return alias * 1


def detached_copies(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    copies = {name: param.detach().clone() for name, param in model.named_parameters()}
    return functional_call(model, copies, (20,))


def exported(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    return torch.from_numpy(model.table.weight.detach().numpy().copy())


def normalised(model: Model, opt: Any) -> Any:
    """The whole table is written by hand after each step, as knowledge graph embeddings do it."""
    losses = []
    for t in range(10):
        losses += train(model, opt, range(t, t + 1))
        weight = model.table.weight
        weight.data = functional.normalize(weight.data)
        with torch.no_grad():
            weight[3:5] *= 0.5
            weight.clamp_(-0.5, 0.5)
    return losses


def pickled_parameter(model: Model, opt: Any) -> Any:
    train(model, opt, range(10))
    weight = pickle.loads(pickle.dumps(model.table.weight))
    assert type(weight) is nn.Parameter
    assert not vars(weight)
    assert type(copy.deepcopy(model.table.weight)) is nn.Parameter
    return weight.detach()


GUARDED = [
    own_average,
    one_vector,
    direct_lookups,
    bags,
    indexing,
    module_elsewhere,
    old_alias,
    detached_copies,
    exported,
    normalised,
    pickled_parameter,
]


def name_of(case: Any) -> str:
    return case.__name__


def results(case: Callable[[Model, Any], Any], guard: bool, **options: Any) -> tuple[Any, Any]:
    model, opt = made(True, **options)
    opt.track(model, guard=guard)
    theirs, dense = made(False)
    return case(model, opt), case(theirs, dense)


@pytest.mark.parametrize("case", TRACKED, ids=name_of)
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_what_tracking_sees_is_as_in_the_dense_run(case: Any, guard: bool):
    assert close(*results(case, guard))


@pytest.mark.parametrize("case", GUARDED, ids=name_of)
@each_engine
def test_what_only_the_guard_sees_is_as_in_the_dense_run(case: Any, engine: str):
    with running_on(engine) as name:
        assert close(*results(case, True, engine=name))


@pytest.mark.parametrize("case", [own_average, module_elsewhere, old_alias], ids=name_of)
def test_without_the_guard_they_are_not(case: Any):
    """Or the tests above would show nothing."""
    assert not close(*results(case, False))


def test_a_model_that_is_not_tracked_is_said():
    """So its state dict, which is behind, does not come without a word."""
    model, opt = made(True)
    with pytest.warns(sparsestep.StaleWarning, match=r"Call optimizer.track\(model\) once"):
        train(model, opt, range(10))
