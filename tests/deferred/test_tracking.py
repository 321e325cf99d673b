"""``optimizer.track(model)``: rows are current whenever the model reads them, or a warning says so.

Warnings are errors here, so each test also shows that there is none.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.deferred.models import (
    Nested,
    OneTable,
    Tied,
    WeightedBags,
    close,
    each_model,
    ids_of,
    made,
    train,
)
from tests.deferred.runs import on_both_engines
from tests.table import running_on, same_bits
from tests.torch_versions import compiles_generators

pytestmark = pytest.mark.usefixtures("one_thread")


def tracked(cls: Any = OneTable, *args: Any, **options: Any) -> tuple[Any, Any]:
    model, opt = made(cls, True, *args, **options)
    opt.track(model)
    return model, opt


@each_model
@on_both_engines
def test_a_model_reads_what_the_dense_run_reads(model: Any, engine: str):
    """The losses agree, so every row was current when it was read; so is the state dict."""
    theirs, dense = made(model, False)
    wanted = train(theirs, dense, range(16))
    with running_on(engine) as name:
        ours, opt = tracked(model, engine=name)
        assert close(train(ours, opt, range(16)), wanted)
        assert close(copy.deepcopy(ours.state_dict()), theirs.state_dict())


@pytest.mark.parametrize("optimizer", [sparsestep.SGD, sparsestep.Lion, sparsestep.Ftrl])
@on_both_engines
def test_rows_that_are_read_again_are_left_alone(engine: str, optimizer: Any):
    """They are current, so autograd must not be told that they have changed."""
    with running_on(engine) as name:
        ours, opt = tracked(WeightedBags, optimizer, engine=name)
        losses = train(ours, opt, range(12))
    assert close(losses, train(*made(WeightedBags, False, optimizer), range(12)))


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_both_engines
def test_reading_without_gradients(mode: Any, engine: str):
    results = []
    with running_on(engine) as name:
        for model, opt in (tracked(engine=name), made(OneTable, False)):
            train(model, opt, range(8))
            with mode():
                results.append([float(model(20))])
            results[-1] += train(model, opt, range(8, 12))
    assert close(*results)


# Handles


def test_a_removed_handle_watches_no_longer():
    model, opt = made(Nested, True)

    def hooks() -> list[int]:
        return [
            len(each)
            for module in model.modules()
            for each in (
                module._forward_pre_hooks,
                module._state_dict_pre_hooks,
                module._load_state_dict_pre_hooks,
            )
        ]

    before = hooks()
    handle = opt.track(model)
    assert hooks() != before
    handle.remove()
    handle.remove()
    assert hooks() == before
    train(model, opt, range(1))
    with pytest.warns(sparsestep.StaleWarning):
        train(model, opt, range(1, 5))


def test_torchs_averaged_model_is_as_before_when_nothing_is_tracked():
    gc.collect()  # models of other tests
    before = AveragedModel.update_parameters
    model, opt = made(Nested, True)
    handles = [opt.track(model), opt.track(model.table)]
    for handle in handles:
        assert AveragedModel.update_parameters is not before
        handle.remove()
        handle.remove()
    assert AveragedModel.update_parameters is before
    opt.track(model)
    del model, opt
    gc.collect()
    assert AveragedModel.update_parameters is before


def test_two_handles_are_as_good_as_one():
    model, opt = tracked(Nested)
    second = opt.track(model.table)
    losses = train(model, opt, range(6))
    second.remove()
    losses += train(model, opt, range(6, 12))
    assert close(losses, train(*made(Nested, False), range(12)))


def test_two_optimizers_of_one_model():
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = Nested(sparse).double()
        more = {"semantics": "dense"} if sparse else {}
        first = sparsestep.AdamW(model.table.parameters(), lr=0.1, **more)
        second = sparsestep.SGD(model.parts.parameters(), lr=0.1, momentum=0.9, **more)
        if sparse:
            first.track(model)
            second.track(model)
        first.register_step_post_hook(lambda *_, opt=second: opt.step())
        first.register_step_post_hook(lambda *_, opt=second: opt.zero_grad())
        results.append(train(model, first, range(15)))
    assert close(*results)


def test_modules_whose_weight_is_not_in_the_optimizer_are_ignored():
    torch.manual_seed(0)
    model = Nested(True).double()
    opt = sparsestep.AdamW(model.parts.parameters(), semantics="dense")
    opt.track(model)
    assert not model.table._forward_pre_hooks
    assert model.parts["a"][0]._forward_pre_hooks
    before = model.table.weight.detach().clone()
    train(model, opt, range(5))
    model.state_dict()
    assert same_bits(model.table.weight.detach(), before)


def test_what_cannot_be_tracked_is_refused():
    """Where it would do nothing, it is a mistake: another optimizer, or a copy of the model."""
    model, opt = made(OneTable, True)
    masked = sparsestep.AdamW(model.parameters())
    with pytest.raises(
        InputError, match=r"AdamW: track needs semantics='dense'.*Got semantics='mas"
    ):
        masked.track(model)
    with pytest.raises(InputError, match=r"parameters of this optimizer. Got a OneTable with none"):
        opt.track(copy.deepcopy(model))
    with pytest.raises(InputError, match=r"track needs a model, an nn.Module. Got Parameter"):
        opt.track(model.table.weight)
    assert not model.table._forward_pre_hooks
    assert "train" not in vars(model.table)


BAD_IDS = [
    (nn.Embedding, torch.tensor([1, 5])),
    (nn.Embedding, torch.tensor([-1, 2])),
    (nn.Embedding, torch.tensor([1.5])),
    (nn.Embedding, [1, 2]),
    (nn.EmbeddingBag, torch.tensor([[1, 5]])),
    (nn.EmbeddingBag, torch.tensor([1, 2])),  # no offsets
    (nn.EmbeddingBag, torch.tensor(1)),
]


@pytest.mark.parametrize(("cls", "ids"), BAD_IDS, ids=str)
def test_bad_ids_give_the_error_of_the_module(cls: Any, ids: Any):
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
    if cls is nn.Embedding:
        assert table(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 2)


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


class Normalized(nn.Module):
    """Its weight is computed from others."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3)
        nn.utils.parametrizations.weight_norm(self.table)

    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 4)).sin().sum()


def test_a_weight_that_is_computed_from_others():
    losses = train(*tracked(Normalized), range(5))
    assert close(losses, train(*made(Normalized, False), range(5)))


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


def test_the_state_dict_of_a_part_and_of_a_model_around():
    ours, opt = tracked(Nested)
    theirs, dense = made(Nested, False)
    train(ours, opt, range(15))
    train(theirs, dense, range(15))
    part, around = ours.table.state_dict(), nn.ModuleList([ours]).state_dict()
    assert close(part, theirs.table.state_dict())
    assert close(around, nn.ModuleList([theirs]).state_dict())


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
        results.append(copy.deepcopy(model.state_dict()))
    assert close(*results)


def through_a_file(saved: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, **options)


def test_a_run_is_resumed_from_checkpoints_of_model_and_optimizer():
    model, opt = tracked(Nested)
    train(model, opt, range(10))
    saved = {"model": model.state_dict(), "opt": opt.state_dict()}
    saved = through_a_file(saved, weights_only=True)
    losses = train(model, opt, range(10, 20))
    resumed, again = tracked(Nested)
    train(resumed, again, range(30, 35))  # something else, all of which is forgotten
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["opt"])
    assert train(resumed, again, range(10, 20)) == losses
    wanted = model.state_dict()
    for name, tensor in resumed.state_dict().items():
        assert same_bits(tensor, wanted[name]), name


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: through_a_file(m, weights_only=False),
}


@pytest.mark.parametrize("root", [True, False], ids=["a table", "a model"])
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_model_is_current_and_on_its_own(root: bool, how: str):
    """It does not hold the optimizer, with all its state."""
    model, opt = made(OneTable, True)
    of = model.table if root else model
    opt.track(of)
    train(model, opt, range(10))
    copied = COPIES[how](of)
    table = copied if root else copied.table
    opt.catch_up()
    assert same_bits(table.weight.detach(), model.table.weight.detach())
    assert not {"train", "__getstate__"} & vars(table).keys()
    weight = table.weight.detach().clone()
    train(model, opt, range(10, 15))
    table(torch.arange(20))
    copied.state_dict()
    assert same_bits(table.weight.detach(), weight)
    for hook in table._forward_pre_hooks.values():
        assert not any(isinstance(v, RuleOptimizer) for v in vars(hook.__self__).values())


# Warnings


def test_a_stale_read_warns_once_at_the_call_of_step_with_the_remedy():
    model, opt = made(OneTable, True)
    train(model, opt, range(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, opt, range(1, 10))
    (warning,) = caught
    assert warning.category is sparsestep.StaleWarning
    assert warning.filename == train.__code__.co_filename
    for remedy in (
        "optimizer.track(model)",
        "optimizer.catch_up(param, rows)",
        "semantics='dense'",
    ):
        assert remedy in str(warning.message)


def test_no_warning_if_rows_catch_up_by_hand():
    model, opt = made(OneTable, True)
    for t in range(10):
        opt.catch_up(model.table.weight, ids_of(t, 2, 2))
        train(model, opt, range(t, t + 1))


MISSES: list[tuple[Any, str]] = [
    (sparsestep.Adam, "touched"),
    (sparsestep.SGD, "touched"),
    (sparsestep.Lion, "touched"),
    (sparsestep.AdamW, "all"),  # it decays rows that never had a gradient
    (sparsestep.Adagrad, "none"),
    (sparsestep.RowwiseAdagrad, "none"),
    (sparsestep.RMSprop, "none"),
]


@pytest.mark.parametrize(("optimizer", "missing"), MISSES)
@on_both_engines
def test_which_rows_miss_something(optimizer: Any, missing: str, engine: str):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, optimizer, engine=name)

        def step(row: int) -> None:
            opt.zero_grad()
            model.table(torch.tensor([row])).sum().backward()
            opt.step()

        step(0)
        if missing == "all":
            with pytest.warns(sparsestep.StaleWarning):
                step(1)
            return
        for row in range(1, 20):
            step(row)
        if missing == "none":
            step(3)
        else:
            with pytest.warns(sparsestep.StaleWarning):
                step(3)


def test_two_optimizers_of_one_table_warn_once():
    model, opt = tracked(Tied)
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    other.track(model)
    opt.register_step_post_hook(lambda *_: other.step())
    train(model, opt, range(1))
    with pytest.warns(sparsestep.StaleWarning, match="by another optimizer or by your own code"):
        train(model, opt, range(1, 2))
    train(model, opt, range(2, 6))


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_a_table_that_is_written_while_rows_are_deferred_warns(how: str):
    model, opt = tracked(Tied)
    train(model, opt, range(5))
    weight = model.table.weight
    with torch.no_grad():
        if how == "in place":
            weight /= weight.norm(dim=1, keepdim=True)
        else:
            weight.data = functional.normalize(weight.data)
    with pytest.warns(sparsestep.StaleWarning, match=r"optimizer.catch_up\(\) first"):
        train(model, opt, range(5, 6))


@pytest.mark.parametrize("rows", [None, torch.tensor([1, 2])], ids=["all", "some"])
def test_rows_that_caught_up_may_be_written(rows: Tensor | None):
    model, opt = tracked(Tied)
    weight = model.table.weight
    for t in range(6):
        train(model, opt, range(t, t + 1))
        opt.catch_up() if rows is None else opt.catch_up(weight, rows)
        with torch.no_grad():
            weight[slice(None) if rows is None else rows] = 0.1


def recreated(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """As PyKEEN does it."""
    options = optimizer.state_dict()["param_groups"][0]
    del options["params"]
    return type(optimizer)(model.parameters(), **options)


def test_an_optimizer_of_tracked_parameters_that_lost_its_semantics_warns():
    model, opt = made(Nested, True)
    handle = opt.track(model)
    with pytest.warns(sparsestep.StaleWarning, match=r"AdamW has semantics='masked'.*track\(model"):
        recreated(opt, model)
    other = sparsestep.SGD([torch.zeros(1)])
    with pytest.raises(sparsestep.StaleWarning):
        other.add_param_group({"params": model.parameters()})
    assert len(other.param_groups) == 1  # where the warning is an error, nothing is added
    sparsestep.AdamW([torch.zeros(1)])
    sparsestep.AdamW(model.parts["a"][1].parameters())  # the layer is not read by rows
    sparsestep.AdamW(model.parameters(), semantics="dense")
    handle.remove()
    recreated(opt, model)
