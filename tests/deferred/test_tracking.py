"""``optimizer.track(model)``: rows are current whenever the model reads them, or a warning says so.

Warnings are errors here, so each test also shows that there is none.
"""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.deferred.models import (
    MODELS,
    Nested,
    OneTable,
    Tied,
    WeightedBags,
    close,
    ids_of,
    made,
    train,
)
from tests.deferred.runs import on_both_engines
from tests.nn.cases import copies
from tests.table import running_on, same_bits
from tests.torch_versions import compiles_generators

pytestmark = pytest.mark.usefixtures("one_thread")


def tracked(cls: Any = OneTable, *args: Any, **options: Any) -> tuple[Any, Any]:
    model, opt = made(cls, True, *args, **options)
    opt.track(model)
    return model, opt


READERS: list[tuple[Any, Any]] = [(model, sparsestep.AdamW) for model in MODELS]
# Rows that are read again are current: autograd must not be told that they have changed.
READERS += [(WeightedBags, cls) for cls in (sparsestep.SGD, sparsestep.Lion, sparsestep.Ftrl)]


@pytest.mark.parametrize(("model", "optimizer"), READERS, ids=lambda each: each.__name__)
@on_both_engines
def test_a_model_reads_what_the_dense_run_reads(model: Any, optimizer: Any, engine: str):
    """Results agree, with and without gradients: every row was current when it was read."""

    def run(ours: Any, opt: Any) -> tuple[list[float], Any]:
        losses = train(ours, opt, range(5))
        with torch.inference_mode():
            losses.append(float(ours(20)))
        losses += train(ours, opt, range(5, 10))
        return losses, copy.deepcopy(ours.state_dict())

    wanted = run(*made(model, False, optimizer))
    with running_on(engine) as name:
        assert all(map(close, run(*tracked(model, optimizer, engine=name)), wanted))


@on_both_engines
def test_rows_that_miss_nothing_are_not_changed(engine: str):
    """Without decay, rows that never had a gradient: nothing but the bookkeeping is written."""
    with running_on(engine) as name:
        model, opt = tracked(OneTable, sparsestep.Adam, engine=name)
        train(model, opt, range(5))
        version = model.table.weight._version
        model.table(torch.tensor([18, 19]))
        assert model.table.weight._version == version


@on_both_engines
def test_other_rows_in_the_same_forward_must_catch_up_before_it(engine: str):
    with running_on(engine) as name:
        model, opt = tracked(WeightedBags, engine=name)
        train(model, opt, range(8))
        both = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [6, 7]])
        loss = model.read(*both)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        train(model, opt, range(8, 10))
        opt.catch_up(model.table.weight, torch.cat(both))
        model.read(*both).backward()


def test_a_removed_handle_watches_no_longer():
    model, opt = made(Nested, True)

    def hooks() -> int:
        names = ("forward_pre_hooks", "state_dict_pre_hooks", "load_state_dict_pre_hooks")
        return sum(len(getattr(module, f"_{name}")) for module in model.modules() for name in names)

    handle = opt.track(model)
    assert hooks()
    handle.remove()
    handle.remove()
    assert not hooks()
    train(model, opt, range(1))
    with pytest.warns(sparsestep.StaleWarning):
        train(model, opt, range(1, 5))


def test_torchs_averaged_model_is_as_before_when_nothing_is_tracked():
    gc.collect()  # models of other tests
    before = AveragedModel.update_parameters
    model, opt = made(Nested, True)
    for handle in [opt.track(model), opt.track(model.table)]:
        assert AveragedModel.update_parameters is not before
        handle.remove()
    assert AveragedModel.update_parameters is before
    opt.track(model)
    del model, opt
    gc.collect()
    assert AveragedModel.update_parameters is before


def test_two_handles_and_two_optimizers_of_one_model():
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = Nested(sparse).double()
        more = {"semantics": "dense"} if sparse else {}
        first = sparsestep.AdamW(model.table.parameters(), lr=0.1, **more)
        second = sparsestep.SGD(model.parts.parameters(), lr=0.1, momentum=0.9, **more)
        handles = [each.track(model) for each in (first, first, second) if sparse]
        first.register_step_post_hook(lambda *_, opt=second: opt.step())
        first.register_step_post_hook(lambda *_, opt=second: opt.zero_grad())
        results.append(train(model, first, range(8)))
        for handle in handles[:1]:
            handle.remove()
        results[-1] += train(model, first, range(8, 15))
    assert close(*results)


def test_bad_ids_give_the_error_of_the_module():
    for cls, ids in (
        (nn.Embedding, torch.tensor([-1, 2])),
        (nn.Embedding, torch.tensor([1.5])),
        (nn.Embedding, [1, 2]),
        (nn.EmbeddingBag, torch.tensor([[1, 5]])),
        (nn.EmbeddingBag, torch.tensor(1)),
    ):
        table = cls(5, 2, sparse=True)
        with pytest.raises(Exception) as plain:  # noqa: PT011 - whichever it is
            table(ids)
        opt = sparsestep.AdamW(table.parameters(), semantics="dense")
        opt.track(table)
        table(torch.tensor([[1, 2]])).sum().backward()
        opt.step()
        with pytest.raises(type(plain.value)) as tracked:
            table(ids)
        assert str(tracked.value) == str(plain.value)
        with pytest.raises(TypeError):
            table()


# Modules that hold or compute a table themselves, and compiled models


class Direct(nn.Module):
    """Holds a table and looks rows up by itself."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 3))
        self.sparse = sparse

    def forward(self, t: int) -> Tensor:
        return functional.embedding(ids_of(t, 4), self.weight, sparse=self.sparse).sin().sum()


class Declaring(Direct):
    """And declares which."""

    def rows_read(self, t: int) -> Any:
        yield self.weight, ids_of(t, 4)


@pytest.mark.parametrize("cls", [Direct, Declaring], ids=lambda c: c.__name__)
def test_a_module_that_holds_a_table_itself(cls: Any):
    """Right in any case; all rows catch up, with a warning, unless it declares which it reads."""
    model, opt = tracked(cls)
    if cls is Declaring:
        losses = train(model, opt, range(12))
        assert opt.deferred[id(model.weight)].has_deferred
    else:
        with pytest.warns(sparsestep.SlowWarning, match="Direct .*20 rows.*method rows_read"):
            losses = train(model, opt, range(12))
    assert close(losses, train(*made(cls, False), range(12)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
@compiles_generators
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_a_model_that_was_compiled_and_called_before_it_is_tracked(guard: bool):
    model, opt = made(Tied, True)
    compiled = torch.compile(model, backend="eager")
    compiled(0)
    opt.track(model, guard=guard)
    losses = train(compiled, opt, range(10))
    torch.compiler.reset()
    assert close(losses, train(*made(Tied, False), range(10)))


# State dicts and copies of a tracked model


@pytest.mark.parametrize("part", [False, True], ids=["the model", "a part of it"])
def test_what_is_loaded_into_a_model_stays(part: bool):
    """As in the dense run: rows do not catch up with what they had missed before."""
    results = []
    for model, opt in (tracked(Nested), made(Nested, False)):
        of = model.table if part else model
        best = copy.deepcopy(of.state_dict())
        train(model, opt, range(10))
        of.load_state_dict(best)
        opt.catch_up()
        for name, tensor in of.state_dict().items():
            assert same_bits(tensor, best[name])
        train(model, opt, range(10, 20))
        alone = copy.deepcopy(model.table.state_dict())
        results.append((alone, nn.ModuleList([model]).state_dict()))
    assert all(map(close, *results))


@pytest.mark.parametrize("root", [True, False], ids=["a table", "a model"])
def test_a_copy_of_the_model_is_current_and_on_its_own(root: bool):
    """It does not hold the optimizer, with all its state."""
    model, opt = made(OneTable, True)
    of = model.table if root else model
    opt.track(of)
    train(model, opt, range(10))
    for copied in copies(of):
        table = copied if root else copied.table
        opt.catch_up()
        weight = table.weight.detach().clone()
        assert same_bits(weight, model.table.weight.detach())
        assert not {"train", "__getstate__"} & vars(table).keys()
        train(model, opt, range(10, 15))
        table(torch.arange(20))
        copied.state_dict()
        assert same_bits(table.weight.detach(), weight)
        for hook in table._forward_pre_hooks.values():
            assert not any(isinstance(v, RuleOptimizer) for v in vars(hook.__self__).values())


def test_a_stale_read_warns_once_at_the_call_of_step():
    model, opt = made(OneTable, True)
    train(model, opt, range(1))
    with pytest.warns(sparsestep.StaleWarning, match=r"optimizer.track\(model\)") as caught:
        train(model, opt, range(1, 10))
    (warning,) = caught
    assert warning.filename == train.__code__.co_filename


def test_two_optimizers_of_one_table_warn_once():
    model, opt = tracked(Tied)
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    other.track(model)
    opt.register_step_post_hook(lambda *_: other.step())
    train(model, opt, range(1))
    with pytest.warns(sparsestep.StaleWarning, match="by another optimizer or by your own code"):
        train(model, opt, range(1, 2))
    train(model, opt, range(2, 6))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_table_that_is_written_while_rows_are_deferred_warns(in_place: bool):
    model, opt = tracked(Tied)
    train(model, opt, range(5))
    weight = model.table.weight
    with torch.no_grad():
        if in_place:
            weight /= weight.norm(dim=1, keepdim=True)
        else:
            weight.data = functional.normalize(weight.data)
    with pytest.warns(sparsestep.StaleWarning, match=r"optimizer.catch_up\(\) first"):
        train(model, opt, range(5, 6))
    for rows in (None, torch.tensor([1, 2])):  # rows that have caught up may be written
        opt.catch_up() if rows is None else opt.catch_up(weight, rows)
        with torch.no_grad():
            weight[slice(None) if rows is None else rows] = 0.1
        train(model, opt, range(6, 7))


def created_again(opt: Any, model: Any, how: str) -> Any:
    options = {k: v for k, v in opt.state_dict()["param_groups"][0].items() if k != "params"}
    options = opt.defaults if how == "defaults" else options  # PyKEEN takes those of the group
    return type(opt)(model.parameters(), **options)


@pytest.mark.parametrize("how", ["defaults", "group"])
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_an_optimizer_that_is_created_again_before_the_first_step_tracks_the_model(
    guard: bool, how: str
):
    runs = [made(Nested, True) for _ in range(2)]
    for model, opt in runs:
        opt.track(model, guard=guard)
        opt.zero_grad()  # as PyKEEN does when it tries batch sizes
    (model, opt), (expected, other) = runs
    again = created_again(opt, model, how)
    assert again.semantics == "dense"
    train(model, again, range(9))
    train(expected, other, range(9))
    assert all(map(same_bits, model.state_dict().values(), expected.state_dict().values()))
    with pytest.warns(sparsestep.StaleWarning):  # the first one is not to be used any more
        train(model, opt, range(9))


def test_an_optimizer_of_tracked_parameters_that_lost_its_semantics_warns():
    """As one with other options, or one that is created again after a step."""
    model, opt = made(Nested, True)
    handle, loses = opt.track(model), r"AdamW has semantics='masked'.*track\(model"
    others = {**opt.param_groups[0], "semantics": "masked"}  # with all options of the first one
    del others["params"]
    for options in ({}, {"lr": 1e-3}, others):
        with pytest.warns(sparsestep.StaleWarning, match=loses):
            another = sparsestep.AdamW(model.parameters(), **options)
        assert another.semantics == "masked"
    train(model, opt, range(1))  # still tracked: no warning
    with pytest.warns(sparsestep.StaleWarning, match=loses):
        created_again(opt, model, "group")
    other = sparsestep.SGD([torch.zeros(1)])
    with pytest.raises(sparsestep.StaleWarning):
        other.add_param_group({"params": model.parameters()})
    assert len(other.param_groups) == 1  # where the warning is an error, nothing is added
    sparsestep.AdamW([torch.zeros(1)])
    sparsestep.AdamW(model.parts["a"][1].parameters())  # the layer is not read by rows
    sparsestep.AdamW(model.parameters(), semantics="dense")
    handle.remove()
    sparsestep.AdamW(model.parameters())


def test_an_optimizer_may_replace_another_that_is_behind():
    """As when a cell of a notebook runs again: no warning, and nothing is lost."""
    losses = []
    for sparse in (True, False):
        model, _ = made(Tied, sparse)
        found: list[float] = []
        for steps in (range(10), range(10, 20)):
            kind = partial(sparsestep.AdamW, semantics="dense") if sparse else torch.optim.AdamW
            opt = kind(model.parameters(), lr=0.05)
            if sparse:
                opt.track(model)
            found += train(model, opt, steps)
        losses.append(torch.tensor(found))
    assert close(*losses)


@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_fused_bags_with_weights_may_be_read_several_times(guard: bool):
    """Backward reads the rows again; another lookup may have caught up others in the meantime."""
    grads = []
    for sparse in (True, False):
        model, opt = made(WeightedBags, sparse)
        if sparse:
            sparsestep.nn.fuse(model)
            opt.track(model, guard=guard)
        train(model, opt, range(8))
        opt.zero_grad()
        model.read(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [6, 7]])).backward()
        grads.append([param.grad.to_dense() for param in model.parameters()])
    assert all(map(close, *grads))
