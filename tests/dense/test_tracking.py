"""``optimizer.track(model)``: rows are current whenever the model reads them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optimizer.base import RuleOptimizer
from tests.table import each_engine, running_on, same_bits


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the tensors are small


def ids_of(t: int, *shape: int) -> Tensor:
    """Few ids often, many rarely; the last two never."""
    generator = torch.Generator().manual_seed(t)
    return (18 * torch.rand(shape, generator=generator) ** 2).long()


# Models that read a table of twenty rows, called with the number of a step.


class OneTable(nn.Module):
    """The table itself, with ids of several dims."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=sparse)

    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 2, 2)).sin().sum()


class ByKeyword(OneTable):
    def forward(self, t: int) -> Tensor:
        return self.table(input=ids_of(t, 3).int()).sin().sum()


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 3, mode="sum", sparse=sparse)


class BagWithOffsets(Bag):
    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 5), torch.tensor([0, 2])).sin().sum()


class BagOfRows(Bag):
    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 2, 3)).sin().sum()


class BagByKeyword(Bag):
    def forward(self, t: int) -> Tensor:
        weights = torch.ones(5, dtype=self.table.weight.dtype)
        offsets = torch.tensor([0, 0, 4])
        bag = self.table(input=ids_of(t, 5), offsets=offsets, per_sample_weights=weights)
        return bag.sin().sum()


class Nested(nn.Module):
    """Two tables, one of them used twice, and layers with dense gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a": nn.Sequential(nn.Embedding(20, 3, sparse=sparse), nn.Linear(3, 3))}
        )
        self.table = nn.Embedding(20, 3, sparse=sparse)

    def forward(self, t: int) -> Tensor:
        read = self.table(ids_of(t, 2)) * self.table(ids_of(t + 1, 2))
        return (self.parts["a"](ids_of(t, 2)) + read).sin().sum()


MODELS = [OneTable, ByKeyword, BagWithOffsets, BagOfRows, BagByKeyword, Nested]
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)


def made(
    cls: Any, sparse: bool, optimizer: Any = sparsestep.AdamW, **more: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = cls(sparse).double()
    if sparse:
        more = {"semantics": "dense", **more}
    options = {"momentum": 0.9} if optimizer is sparsestep.SGD else {}
    return model, optimizer(model.parameters(), lr=0.05, **options, **more)


def train(model: nn.Module, opt: Any, steps: range) -> Iterator[float]:
    for t in steps:
        opt.zero_grad()
        loss = model(t)
        loss.backward()
        opt.step()
        yield float(loss.detach())


def finish(model: nn.Module, opt: Any, steps: range) -> list[float]:
    return list(train(model, opt, steps))


@each_model
@each_engine
@pytest.mark.parametrize("optimizer", [sparsestep.AdamW, sparsestep.SGD])
def test_what_is_read_is_what_the_dense_run_reads(model: Any, engine: str, optimizer: Any):
    """The losses agree, so every row was current when it was read."""
    theirs, dense = made(model, False, optimizer)
    with running_on(engine) as name:
        ours, opt = made(model, True, optimizer, engine=name)
        opt.track(ours)
        for loss, wanted in zip(
            train(ours, opt, range(16)), train(theirs, dense, range(16)), strict=True
        ):
            assert loss == pytest.approx(wanted, rel=1e-11)
        opt.catch_up()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-11, atol=1e-13)


@each_model
def test_rows_are_current_at_forward(model: Any):
    """Just before each module reads them, they are those of the dense run."""
    ours, opt = made(model, True)
    theirs, dense = made(model, False)
    opt.track(ours)
    pairs = {
        a: b for a, b in zip(ours.modules(), theirs.modules(), strict=True) if hasattr(a, "sparse")
    }
    seen = []

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        ids = (args[0] if args else kwargs["input"]).reshape(-1).long()
        wanted = pairs[module].weight[ids]
        seen.append(len(ids))
        assert torch.allclose(module.weight[ids], wanted, rtol=1e-12, atol=1e-14)

    for module in pairs:
        module.register_forward_pre_hook(look, with_kwargs=True)
    for step in zip(train(ours, opt, range(20)), train(theirs, dense, range(20)), strict=True):
        assert len(step) == 2
    assert len(seen) >= 20


class SkipGram(nn.Module):
    """Two tables, a positive and some negative samples, as word2vec has it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 8, sparse=sparse)
        self.contexts = nn.Embedding(200, 8, sparse=sparse)
        with torch.no_grad():
            self.contexts.weight.mul_(0.1)

    def forward(self, words: Tensor, contexts: Tensor, labels: Tensor) -> Tensor:
        scores = (self.words(words)[:, None] * self.contexts(contexts)).sum(-1)
        return functional.binary_cross_entropy_with_logits(scores, labels)


def test_a_skip_gram_model_trains_as_with_dense_adamw():
    """Against torch's own AdamW with dense gradients, in float32, batch by batch."""
    generator = torch.Generator().manual_seed(0)
    models, losses = [], []
    for sparse in (True, False):
        torch.manual_seed(1)
        models.append(SkipGram(sparse))
    ours, theirs = models
    opt = sparsestep.AdamW(ours.parameters(), lr=5e-3, weight_decay=0.05, semantics="dense")
    dense = torch.optim.AdamW(theirs.parameters(), lr=5e-3, weight_decay=0.05)
    opt.track(ours)
    labels = torch.zeros(16, 4)
    labels[:, 0] = 1.0
    for _ in range(300):
        words = (200 * torch.rand(16, generator=generator) ** 3).long()
        near = (words[:, None] + torch.randint(1, 4, (16, 1), generator=generator)) % 200
        far = (200 * torch.rand(16, 3, generator=generator) ** 2).long()
        contexts = torch.cat([near, far], dim=1)
        losses.append([])
        for model, one in ((ours, opt), (theirs, dense)):
            one.zero_grad()
            loss = model(words, contexts, labels)
            loss.backward()
            one.step()
            losses[-1].append(loss.item())
    for our, their in losses:
        assert our == pytest.approx(their, rel=1e-4)
    assert sum(our for our, _ in losses[-20:]) < 0.95 * sum(our for our, _ in losses[:20])
    saved = ours.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(saved[name], tensor, rtol=1e-4, atol=1e-5)


# Saving and loading


@each_model
def test_the_state_dict_of_a_model_is_current(model: Any):
    ours, opt = made(model, True)
    theirs, dense = made(model, False)
    opt.track(ours)
    finish(ours, opt, range(15))
    finish(theirs, dense, range(15))
    saved = copy.deepcopy(ours.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(saved[name], tensor, rtol=1e-11, atol=1e-13)


def test_the_state_dict_of_a_part_and_of_what_is_around_it():
    ours, opt = made(Nested, True)
    theirs, dense = made(Nested, False)
    opt.track(ours)
    finish(ours, opt, range(15))
    finish(theirs, dense, range(15))
    part, around = ours.table.state_dict(), nn.ModuleList([ours]).state_dict()
    assert torch.allclose(part["weight"], theirs.table.weight, rtol=1e-11, atol=1e-13)
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(around[f"0.{name}"], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("part", [False, True], ids=["the model", "a part of it"])
def test_what_is_loaded_into_a_model_stands(part: bool):
    """As in the dense run: what rows had missed before is not made up for after."""
    results = []
    for sparse in (True, False):
        model, opt = made(Nested, sparse)
        if sparse:
            opt.track(model)
        of = model.table if part else model
        best = copy.deepcopy(of.state_dict())
        finish(model, opt, range(10))
        of.load_state_dict(best)
        if sparse:
            opt.catch_up()
        for name, tensor in of.state_dict().items():
            assert same_bits(tensor, best[name])
        finish(model, opt, range(10, 20))
        results.append(copy.deepcopy(model.state_dict()))
    ours, theirs = results
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-11, atol=1e-13)


def test_a_run_is_resumed_from_checkpoints_of_model_and_optimizer():
    model, opt = made(Nested, True)
    opt.track(model)
    finish(model, opt, range(10))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    losses = finish(model, opt, range(10, 20))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, again = made(Nested, True)
    again.track(resumed)
    finish(resumed, again, range(30, 35))  # something else, all of which is forgotten
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["opt"])
    assert finish(resumed, again, range(10, 20)) == losses
    for (name, ours), theirs in zip(
        resumed.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert same_bits(ours, theirs), name


# Copies of the model


@pytest.mark.parametrize("root", [True, False], ids=["a table", "a model"])
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), None],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_the_model_is_current_and_on_its_own(root: bool, how: Any):
    """It does not drag the optimizer along, with all its state."""
    model, opt = made(OneTable, True)
    opt.track(model.table if root else model)
    finish(model, opt, range(10))
    if how is None:
        file = io.BytesIO()
        torch.save(model.table if root else model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = how(model.table if root else model)
    table = copied if root else copied.table
    opt.catch_up()
    assert same_bits(table.weight.detach(), model.table.weight.detach())
    assert not {"train", "__getstate__"} & vars(table).keys()
    weight = table.weight.detach().clone()
    finish(model, opt, range(10, 15))
    table(torch.arange(20))
    copied.state_dict()
    assert same_bits(table.weight.detach(), weight)
    for hook in table._forward_pre_hooks.values():
        assert not any(isinstance(v, RuleOptimizer) for v in vars(hook.__self__).values())


# What is watched


def test_a_handle_that_is_removed_watches_no_longer():
    model, opt = made(Nested, True)
    hooks = [
        (module._forward_pre_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks)
        for module in model.modules()
    ]
    before = [[len(each) for each in three] for three in hooks]
    handle = opt.track(model)
    assert [[len(each) for each in three] for three in hooks] != before
    handle.remove()
    handle.remove()
    assert [[len(each) for each in three] for three in hooks] == before
    finish(model, opt, range(1))
    with pytest.warns(sparsestep.StaleWarning):
        finish(model, opt, range(1, 5))


def test_two_handles_are_as_good_as_one():
    model, opt = made(Nested, True)
    theirs, dense = made(Nested, False)
    opt.track(model)
    second = opt.track(model.table)
    wanted = finish(theirs, dense, range(12))
    losses = finish(model, opt, range(6))
    second.remove()
    losses += finish(model, opt, range(6, 12))
    assert losses == pytest.approx(wanted, rel=1e-11)


def test_two_optimizers_of_one_model():
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = Nested(sparse).double()
        more = {"semantics": "dense"} if sparse else {}
        opts = [
            sparsestep.AdamW(model.table.parameters(), lr=0.1, **more),
            sparsestep.SGD(model.parts.parameters(), lr=0.1, momentum=0.9, **more),
        ]
        if sparse:
            for opt in opts:
                opt.track(model)
        losses = []
        for t in range(15):
            model.zero_grad()
            loss = model(t)
            loss.backward()
            for opt in opts:
                opt.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-11)


def test_modules_whose_weight_is_not_in_the_optimizer_are_ignored():
    torch.manual_seed(0)
    model = Nested(True).double()
    opt = sparsestep.AdamW(model.parts.parameters(), semantics="dense")
    opt.track(model)
    assert not model.table._forward_pre_hooks
    assert model.parts["a"][0]._forward_pre_hooks
    before = model.table.weight.detach().clone()
    finish(model, opt, range(5))
    model.state_dict()
    assert same_bits(model.table.weight.detach(), before)


def test_what_cannot_be_tracked_is_refused():
    """Where it would do nothing, it is a mistake: another optimizer, or a copy of the model."""
    model, opt = made(OneTable, True)
    masked = sparsestep.AdamW(model.parameters())
    with pytest.raises(
        InputError, match=r"AdamW: only under semantics='dense'.*Got semantics='mas"
    ):
        masked.track(model)
    with pytest.raises(InputError, match=r"parameters of this optimizer. Got OneTable with none"):
        opt.track(copy.deepcopy(model))
    with pytest.raises(InputError, match=r"must be a model, an nn.Module. Got Parameter"):
        opt.track(model.table.weight)
    assert not model.table._forward_pre_hooks
    assert "train" not in vars(model.table)


@pytest.mark.parametrize(
    ("table", "ids"),
    [
        (nn.Embedding(5, 2, sparse=True), torch.tensor([1, 5])),
        (nn.Embedding(5, 2, sparse=True), torch.tensor([-1, 2])),
        (nn.Embedding(5, 2, sparse=True), torch.tensor([1.5])),
        (nn.Embedding(5, 2, sparse=True), [1, 2]),
        (nn.EmbeddingBag(5, 2, sparse=True), torch.tensor([[1, 5]])),
        (nn.EmbeddingBag(5, 2, sparse=True), torch.tensor([1, 2])),  # no offsets
        (nn.EmbeddingBag(5, 2, sparse=True), torch.tensor(1)),
    ],
    ids=str,
)
def test_bad_ids_give_the_error_of_the_module(table: nn.Module, ids: Any):
    with pytest.raises(Exception) as plain:  # noqa: PT011 - whichever it is
        table(ids)
    opt = sparsestep.AdamW(table.parameters(), semantics="dense")
    handle = opt.track(table)
    good = torch.tensor([[1, 2]])
    table(good).sum().backward()
    opt.step()
    with pytest.raises(type(plain.value)) as tracked:
        table(ids)
    assert str(tracked.value) == str(plain.value)
    with pytest.raises(TypeError):
        table()
    handle.remove()


def test_no_ids_at_all():
    model, opt = made(OneTable, True)
    opt.track(model)
    finish(model, opt, range(3))
    assert model.table(torch.zeros(0, dtype=torch.int64)).shape == (0, 3)
    assert model.table(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@each_engine
def test_reading_without_gradients(mode: Any, engine: str):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, engine=name)
        theirs, dense = made(OneTable, False)
        opt.track(model)
        for one, its in ((model, opt), (theirs, dense)):
            finish(one, its, range(8))
        with mode():
            assert float(model(20)) == pytest.approx(float(theirs(20)), rel=1e-11)
        losses = [finish(one, its, range(8, 12)) for one, its in ((model, opt), (theirs, dense))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)


# Backward, which must find the weights that forward has read


class WeightedBags(nn.Module):
    """Reads a table twice, with weights that need a gradient: for that, backward reads it again."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 3, mode="sum", sparse=sparse)
        self.weights = nn.Parameter(torch.ones(2, 4))

    def forward(self, t: int) -> Tensor:
        return self.read(ids_of(t, 2, 2), ids_of(t, 2, 2).flip(0))

    def read(self, *both: Tensor) -> Tensor:
        bags = [
            self.table(ids, per_sample_weights=weights.view(2, 2))
            for ids, weights in zip(both, self.weights, strict=True)
        ]
        return (bags[0] * bags[1]).sin().sum()


@each_engine
@pytest.mark.parametrize(
    "optimizer", [sparsestep.AdamW, sparsestep.SGD, sparsestep.Lion, sparsestep.Ftrl]
)
def test_rows_that_are_read_again_are_left_alone(engine: str, optimizer: Any):
    """They are current, so autograd must not be told that they have changed."""
    with running_on(engine) as name:
        ours, opt = made(WeightedBags, True, optimizer, engine=name)
        theirs, dense = made(WeightedBags, False, optimizer)
        opt.track(ours)
        losses = [finish(one, its, range(12)) for one, its in ((ours, opt), (theirs, dense))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-11)


@each_engine
def test_rows_that_miss_nothing_are_not_changed(engine: str):
    """Without decay, rows that never had a gradient: nothing but the bookkeeping is written."""
    with running_on(engine) as name:
        model, opt = made(OneTable, True, sparsestep.Adam, engine=name)
        opt.track(model)
        finish(model, opt, range(5))
        version = model.table.weight._version
        model.table(torch.tensor([18, 19]))
        assert model.table.weight._version == version


@each_engine
def test_other_rows_in_the_same_forward_are_to_be_caught_up_before_it(engine: str):
    with running_on(engine) as name:
        model, opt = made(WeightedBags, True, engine=name)
        opt.track(model)
        finish(model, opt, range(8))
        both = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [6, 7]])
        loss = model.read(*both)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        finish(model, opt, range(8, 10))
        opt.catch_up(model.table.weight, torch.cat(both))
        model.read(*both).backward()


# What is said where nobody watches


def test_a_stale_read_is_said_once_with_the_remedy():
    model, opt = made(OneTable, True)
    finish(model, opt, range(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        finish(model, opt, range(1, 10))
    (warning,) = said
    assert warning.category is sparsestep.StaleWarning
    assert "optimizer.track(model)" in str(warning.message)
    assert "optimizer.catch_up(param, rows)" in str(warning.message)
    assert "semantics='dense'" in str(warning.message)


def test_the_warning_points_at_the_call_of_step():
    model, opt = made(OneTable, True)
    with pytest.warns(sparsestep.StaleWarning) as said:
        finish(model, opt, range(10))
    assert said[0].filename == __file__


@each_model
@each_engine
def test_nothing_is_said_where_rows_are_tracked(model: Any, engine: str):
    with running_on(engine) as name:
        ours, opt = made(model, True, engine=name)
        opt.track(ours)
        finish(ours, opt, range(20))


def test_nothing_is_said_where_rows_are_caught_up_by_hand():
    model, opt = made(OneTable, True)
    for t in range(10):
        opt.catch_up(model.table.weight, ids_of(t, 2, 2))
        finish(model, opt, range(t, t + 1))


@each_engine
@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.SGD, sparsestep.Lion])
def test_rows_that_never_had_a_gradient_miss_nothing_without_decay(engine: str, optimizer: Any):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, optimizer, engine=name)
        for row in range(20):
            opt.zero_grad()
            model.table(torch.tensor([row])).sum().backward()
            opt.step()
        opt.zero_grad()
        model.table(torch.tensor([3])).sum().backward()
        with pytest.warns(sparsestep.StaleWarning):
            opt.step()


@each_engine
def test_rows_that_never_had_a_gradient_do_miss_decay(engine: str):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, engine=name)
        model.table(torch.tensor([0])).sum().backward()
        opt.step()
        opt.zero_grad()
        model.table(torch.tensor([1])).sum().backward()
        with pytest.warns(sparsestep.StaleWarning):
            opt.step()


@pytest.mark.parametrize(
    "optimizer", [sparsestep.Adagrad, sparsestep.RowwiseAdagrad, sparsestep.RMSprop]
)
@each_engine
def test_nothing_is_said_of_rules_whose_idle_rows_do_not_move(optimizer: Any, engine: str):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, optimizer, engine=name)
        finish(model, opt, range(10))
