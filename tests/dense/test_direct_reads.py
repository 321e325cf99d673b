"""Whoever reads or writes a table directly under dense semantics: right, or told so.

Each case reads the table beside the look-ups of a tracked model. The oracle is the same program
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
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparsestep
from tests.table import each_engine, running_on, same_bits
from tests.torch_versions import compiles_generators


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the tensors are small


def ids_of(t: int) -> Tensor:
    generator = torch.Generator().manual_seed(t)
    return (18 * torch.rand(4, generator=generator) ** 2).long()


class Model(nn.Module):
    """A table, and a head of the same weight that is used in some batches."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=sparse)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, t: int, with_head: bool = False) -> Tensor:
        hidden = self.layer(self.table(ids_of(t)))
        loss = hidden.sin().sum()
        if with_head:
            loss = loss + 0.1 * self.head(hidden).cos().sum()
        return loss


def made(sparse: bool, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model(sparse).double()
    if not sparse:
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, sparsestep.AdamW(model.parameters(), lr=0.05, semantics="dense", **options)


def train(model: Any, opt: Any, steps: range, **how: Any) -> list[float]:
    losses = []
    for t in steps:
        opt.zero_grad()
        loss = model(t, **how)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def close(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)
    return ours == pytest.approx(theirs, rel=1e-11)


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


# The guard itself


def test_a_guard_reads_no_more_rows_than_are_asked_for():
    model, opt = made(True)
    opt.track(model, guard=True)
    train(model, opt, range(10))
    clock = opt._clocks[id(model.table.weight)]
    weight = model.table.weight
    behind = (clock.last.abs() < 9).nonzero().squeeze(1)
    assert behind.numel() > 4
    for read, rows in (
        (lambda: functional.embedding(behind[:1], weight), behind[:1]),
        (lambda: weight[behind[1:2]], behind[1:2]),
        (lambda: weight.index_select(0, behind[2:3]), behind[2:3]),
        (
            lambda: (weight.shape, weight.grad, weight.detach().T, weight.is_contiguous()),
            behind[:0],
        ),
    ):
        before = clock.last.clone()
        read()
        assert (clock.last != before).nonzero().squeeze(1).tolist() == rows.tolist()
    weight.sum()
    assert not clock.is_behind


def test_a_guard_that_is_removed_leaves_an_ordinary_parameter():
    model, opt = made(True)
    weight = model.table.weight
    handle = opt.track(model, guard=True)
    assert isinstance(weight, nn.Parameter)
    alias = weight.detach()
    train(model, opt, range(5))
    handle.remove()
    assert type(weight) is nn.Parameter
    assert not vars(weight)
    before = weight.clone()
    assert same_bits(alias.clone(), before)


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_may_guard_one_table(first: int):
    model, opt = made(True)
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    handles = [opt.track(model, guard=True), other.track(model, guard=True)]
    handles[first].remove()
    one = other if first == 0 else opt
    train(model, one, range(5))
    model.table.weight.sum()
    assert not one._clocks[id(model.table.weight)].is_behind
    handles[1 - first].remove()
    assert type(model.table.weight) is nn.Parameter


# What is said where tracking cannot make it right


def test_two_optimizers_of_one_table_are_said():
    model, opt = made(True)
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    opt.track(model)
    other.track(model)

    def step(t: int) -> None:
        opt.zero_grad()
        model(t).backward()
        opt.step()
        other.step()

    step(0)
    with pytest.warns(sparsestep.StaleWarning, match="by another optimizer or by hand"):
        step(1)
    for t in range(2, 6):  # once
        step(t)


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_a_table_that_was_written_while_rows_were_behind_is_said(how: str):
    model, opt = made(True)
    opt.track(model)
    train(model, opt, range(5))
    weight = model.table.weight
    with torch.no_grad():
        if how == "in place":
            weight /= weight.norm(dim=1, keepdim=True)
        else:
            weight.data = functional.normalize(weight.data)
    with pytest.warns(sparsestep.StaleWarning, match=r"optimizer.catch_up\(\) before"):
        train(model, opt, range(5, 6))


def test_a_table_that_was_written_when_all_was_current_is_not():
    model, opt = made(True)
    opt.track(model)
    for t in range(6):
        train(model, opt, range(t, t + 1))
        opt.catch_up()
        with torch.no_grad():
            model.table.weight.clamp_(-1, 1)


def test_rows_that_were_caught_up_by_hand_may_be_written():
    model, opt = made(True)
    opt.track(model)
    for t in range(6):
        train(model, opt, range(t, t + 1))
        opt.catch_up(model.table.weight, torch.tensor([1, 2]))
        with torch.no_grad():
            model.table.weight[1:3] = 0.1


def test_a_model_that_is_not_tracked_is_said():
    """So its state dict, which is behind, does not come without a word."""
    model, opt = made(True)
    with pytest.warns(sparsestep.StaleWarning, match=r"Call optimizer.track\(model\) once"):
        train(model, opt, range(10))


# Modules of one's own


class Direct(nn.Module):
    """Holds a table and looks rows up by itself."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 3))
        self.sparse = sparse

    def forward(self, t: int) -> Tensor:
        return functional.embedding(ids_of(t), self.weight, sparse=self.sparse).sin().sum()


class Saying(Direct):
    """And says which."""

    def rows_read(self, t: int) -> Any:
        yield self.weight, ids_of(t)


@pytest.mark.parametrize("cls", [Direct, Saying], ids=lambda c: c.__name__)
def test_a_module_that_holds_a_table_itself(cls: Any):
    """Right in any case; where it does not say which rows it reads, all of them, and said so."""
    losses = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = cls(sparse).double()
        if not sparse:
            losses.append(train(model, torch.optim.AdamW(model.parameters(), lr=0.05), range(12)))
            continue
        opt = sparsestep.AdamW(model.parameters(), lr=0.05, semantics="dense")
        opt.track(model)
        if cls is Saying:
            losses.append(train(model, opt, range(12)))
            assert opt._clocks[id(model.weight)].is_behind
        else:
            with pytest.warns(sparsestep.SlowWarning, match="Direct .*20 rows.*method rows_read"):
                losses.append(train(model, opt, range(12)))
    assert close(*losses)


def test_a_weight_that_is_computed_from_another():
    losses = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(20, 3).double()
        nn.utils.parametrizations.weight_norm(table)
        opt = (
            sparsestep.AdamW(table.parameters(), lr=0.05, semantics="dense")
            if sparse
            else torch.optim.AdamW(table.parameters(), lr=0.05)
        )
        if sparse:
            opt.track(table)
        losses.append(train(lambda t, table=table: table(ids_of(t)).sin().sum(), opt, range(5)))
    assert close(*losses)


# Compiled models


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
@compiles_generators
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_a_model_that_was_compiled_and_called_before_it_is_tracked(guard: bool):
    losses = []
    for sparse in (True, False):
        model, opt = made(sparse)
        run = torch.compile(model, backend="eager") if sparse else model
        run(0)
        if sparse:
            opt.track(model, guard=guard)
        losses.append(train(run, opt, range(10)))
    torch.compiler.reset()
    assert close(*losses)
