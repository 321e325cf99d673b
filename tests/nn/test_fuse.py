"""``fuse``: our modules in place of torch's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from sparsestep.nn import Embedding, EmbeddingBag, EmbeddingBagCollection, fuse
from tests.nn.cases import copies, same

IDS = torch.tensor([[1, 2, 1]])


class Zeros(nn.Embedding):
    """Another beginning, as in Spotlight; its forward is torch's."""

    name = "zeros"

    def __init__(self, rows: int, dim: int, factor: float = 1.0) -> None:
        self.factor = factor
        super().__init__(rows, dim)

    def reset_parameters(self) -> None:
        self.weight.data.fill_(self.factor)


class Mean(nn.EmbeddingBag):
    def extra_repr(self) -> str:
        return "mine"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "was_pickled": True}


class Forward(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.weight.norm()


def all_kinds() -> nn.ModuleDict:
    shared = nn.Embedding(10, 3)
    return nn.ModuleDict(
        {
            "bag": nn.EmbeddingBag(10, 3, mode="max"),
            "inner": nn.Sequential(shared, nn.Linear(3, 3)),
            "again": shared,
            "zeros": Zeros(10, 3, 2.0),
            "mean": Mean(10, 3),
            "ours": Embedding(10, 3),
        }
    )


def test_the_modules_stay_the_same_objects():
    model = all_kinds()
    before, shared = dict(model.named_parameters()), model["again"]
    assert fuse(model) is model
    assert [type(model[name]) for name in ("bag", "again", "ours")] == [
        EmbeddingBag,
        Embedding,
        Embedding,
    ]
    assert model["again"] is model["inner"][0] is shared
    assert (model["bag"].name, shared.name, model["ours"].name) == ("bag", "inner.0", "")
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is param for name, param in before.items())
    with pytest.raises(sparsestep.InputError, match=r"Embedding 'inner\.0' \(10 x 3\): ids must"):
        shared(torch.tensor([10]))
    fuse(model)  # once more changes nothing
    assert shared.name == "inner.0"


def test_subclasses_that_inherit_forward():
    model = fuse(all_kinds())
    zeros, mean = model["zeros"], model["mean"]
    for table, kinds in ((zeros, (Zeros, Embedding)), (mean, (Mean, EmbeddingBag))):
        assert all(isinstance(table, kind) for kind in kinds)
    assert (repr(zeros), repr(mean)) == (
        "Zeros(10, 3, sparse=True, fused=True)",
        "Mean(mine, fused=True)",
    )
    assert (zeros.name, mean.name) == ("zeros", "mean")
    zeros.factor = 3.0
    zeros.reset_parameters()
    assert zeros.weight[0].tolist() == [3.0] * 3
    (zeros(IDS).sum() + mean(IDS).sum()).backward()
    assert isinstance(zeros.weight.grad, CompactGrad)
    assert isinstance(mean.weight.grad, CompactGrad)
    assert type(zeros) is type(fuse(Zeros(4, 2)))
    other = type(zeros)(7, 3, factor=2.0)  # made with its own arguments
    assert (other.num_embeddings, other.factor, other.sparse) == (7, 2.0, True)
    for copied in copies(nn.Sequential(zeros, mean)):
        assert [type(each) for each in copied] == [type(zeros), type(mean)]
        assert (copied[0].factor, hasattr(copied[1], "was_pickled")) == (3.0, True)
        assert same(copied[0](IDS), zeros(IDS))
        assert same(copied[1](IDS), mean(IDS))
        copied.load_state_dict(nn.Sequential(Zeros(10, 3), Mean(10, 3)).state_dict())


def refused() -> nn.ModuleDict:
    replaced = nn.Embedding(10, 3)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    return nn.ModuleDict(
        {
            "table": nn.Embedding(10, 3),
            "own": Forward(10, 3),
            "computed": nn.utils.parametrizations.weight_norm(nn.Embedding(10, 3)),
            "replaced": replaced,
        }
    )


def test_what_is_left_alone_is_said():
    """Where the warning is an error, nothing changes."""
    model = refused()
    before = [type(each) for each in model.values()]
    with pytest.raises(UserWarning, match="keep torch's gradient"):
        fuse(model)
    assert [type(each) for each in model.values()] == before
    with pytest.warns(UserWarning, match="fuse") as caught:
        fuse(model)
    assert str(caught[0].message) == (
        "fuse: these tables keep torch's gradient: own (Forward has a forward of its own), "
        "computed (its weight is computed from others), replaced (its forward was replaced)."
    )
    assert caught[0].filename == __file__
    assert [type(each) for each in model.values()] == [Embedding, *before[1:]]
    for other, only in ((nn.Linear(2, 2), None), (nn.Embedding(2, 2), [])):
        with pytest.warns(UserWarning, match="fuse: nothing to do"):
            fuse(other, only=only)


@pytest.mark.parametrize(
    ("only", "fused"),
    [
        ("bag", {"bag"}),
        ("inner", {"inner.0"}),
        ("again", {"inner.0"}),
        (["zeros", "inner.0"], {"zeros", "inner.0"}),
        ("", {"bag", "inner.0", "zeros", "mean"}),
        (lambda name, table: table.num_embeddings == 10 and name != "bag",
         {"inner.0", "zeros", "mean"}),
    ],
)  # fmt: skip
def test_only_some(only: Any, fused: set[str]):
    model = all_kinds()
    del model["ours"]
    fuse(model, only=only)
    ours = (Embedding, EmbeddingBag)
    assert {name for name, each in model.named_modules() if isinstance(each, ours)} == fused


def test_what_only_leaves_out_is_not_mentioned_and_what_was_fused_is_logged(caplog: Any):
    model = refused()
    with pytest.raises(sparsestep.InputError):
        fuse(model, only=["table", "tabel"])
    assert type(model["table"]) is nn.Embedding
    with caplog.at_level(logging.INFO, logger="sparsestep"):
        fuse(model, only=["table"])
    assert caplog.messages == ["fused table, Embedding(10, 3, sparse=True, fused=True)"]


def test_tables_of_a_collection():
    model = EmbeddingBagCollection([Mean(10, 3)])
    assert isinstance(model.tables[0], Mean)
    model([IDS])[0].sum().backward()
    assert isinstance(model.tables[0].weight.grad, CompactGrad)
    own = type("Own", (nn.EmbeddingBag,), {"forward": lambda *args: args})
    with pytest.raises(sparsestep.InputError, match="Own has a forward of its own"):
        EmbeddingBagCollection([own(10, 3)])


def test_fuse_keeps_hooks_training_and_optimizers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)).eval()
    twin = copy.deepcopy(model)
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    optimizers = [sparsestep.Adam(each.parameters(), semantics="dense") for each in (model, twin)]
    for optimizer, each in zip(optimizers, (model, twin), strict=True):
        optimizer.track(each)
    fuse(model)
    assert not model[0].training
    for step in range(6):
        for optimizer, each in zip(optimizers, (model, twin), strict=True):
            optimizer.zero_grad()
            each(IDS + step).sin().sum().backward()
            optimizer.step()
    assert len(seen) == 6
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert same(ours, theirs)
    handle.remove()
    model(IDS)
    assert len(seen) == 6


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_model_is_fused_before_it_is_wrapped():
    """DistributedDataParallel looks for sparse gradients once, and fails in backward() later."""
    model = nn.Sequential(nn.Embedding(9, 2), nn.Embedding(9, 2, sparse=True), nn.Linear(2, 1))
    ddp = nn.parallel.DistributedDataParallel(model)
    for wrapped, name in ((model, "0"), (ddp, "module.0")):
        for call in (fuse, lambda m: sparsestep.nn.optimizer_for(m, sparsestep.AdamW)):
            with pytest.raises(sparsestep.InputError, match=f"Got '{name}', which is wrapped"):
                call(wrapped)
    assert type(model[0]) is type(model[1]) is nn.Embedding
    fuse(model, only="1")  # what was sparse may be fused at any time
    assert type(model[1]) is Embedding
    fuse(nn.Embedding(9, 2))  # another model

    fused = fuse(nn.Sequential(nn.EmbeddingBag(9, 2), nn.Linear(2, 1)))
    ddp = nn.parallel.DistributedDataParallel(fused)
    opt = sparsestep.nn.optimizer_for(fused, sparsestep.AdamW, lr=0.1)
    ddp(torch.tensor([[1, 2]])).sum().backward()
    opt.step()


@pytest.mark.usefixtures("one_process")
def test_tables_that_are_sharded_by_torch_keep_its_gradient():
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    model = nn.Sequential(nn.Embedding(9, 2))
    mesh = init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh))
    with pytest.warns(UserWarning, match="0 .its weight is a DTensor, whose gradient is dense"):
        fuse(model)
    assert type(model[0]) is nn.Embedding
