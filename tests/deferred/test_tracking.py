"""``optimizer.track(model)``: rows are current whenever the model reads them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsestep
from sparsestep.errors import InputError
from tests.deferred.models import Nested, OneTable, each_model, finish, ids_of, made, train
from tests.table import each_engine, running_on, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


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
        InputError, match=r"AdamW: track needs semantics='dense'.*Got semantics='mas"
    ):
        masked.track(model)
    with pytest.raises(InputError, match=r"parameters of this optimizer. Got a OneTable with none"):
        opt.track(copy.deepcopy(model))
    with pytest.raises(InputError, match=r"track needs a model, an nn.Module. Got Parameter"):
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
