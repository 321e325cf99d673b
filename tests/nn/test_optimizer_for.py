"""``optimizer_for(model, cls, tables=...)``: another rule for tables, in one optimizer."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.nn import NgramEmbedding, optimizer_for
from tests.ranks import Rank, ranks
from tests.subject import refused
from tests.table import all_same_bits
from tests.torch_versions import needs_means_over_gloo

TOKENS, DIM, ROWS = 30, 4, 101
ROWWISE = partial(sparsestep.RowwiseAdam, lr=0.02, betas=(0.0, 0.99))


class Scaled(nn.Embedding):
    """As Gemma has them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


class LanguageModel(nn.Module):
    """A tied head, positions, an embedding per layer, and a memory of n-grams."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(TOKENS, DIM)
        self.positions = nn.Embedding(8, DIM)
        self.per_layer = Scaled(TOKENS, DIM)
        self.memory = NgramEmbedding(ROWS, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, TOKENS)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        found = self.words(ids) + self.positions(places) + self.per_layer(ids) + self.memory(ids)
        return self.head(self.norm(found))


TABLES = ["positions.weight", "per_layer.weight", "memory.weight"]


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: range = range(6)) -> None:
    for step in steps:
        model.zero_grad()
        ids = torch.randint(TOKENS, (2, 5), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()


def by_hand(kind: Any, **options: Any) -> nn.Module:
    """The oracle: two optimizers, each for its own parameters, on dense gradients."""
    model = LanguageModel()
    named = dict(model.named_parameters())
    tables = kind([named.pop(name) for name in TABLES], **options)

    def densify(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad.to_dense()

    model.memory.weight.register_post_accumulate_grad_hook(densify)
    train(model, sparsestep.AdamW(named.values(), lr=0.01), tables)
    return model


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        (ROWWISE, ROWWISE),
        (sparsestep.Adagrad, sparsestep.Adagrad),
        (partial(sparsestep.SGD, lr=0.1, momentum=0.9), None),
        ({"lr": 0.1, "weight_decay": 0.0}, partial(sparsestep.AdamW, lr=0.1, weight_decay=0.0)),
        (sparsestep.AdamW, partial(sparsestep.AdamW, lr=0.01)),
    ],
    ids=["RowwiseAdam", "Adagrad", "SGD", "options", "same class"],
)
@pytest.mark.parametrize("foreach", [None, True])
def test_tables_train_as_with_an_optimizer_of_their_own(tables: Any, expected: Any, foreach: Any):
    model = LanguageModel()
    optimizer = optimizer_for(model, sparsestep.AdamW, lr=0.01, foreach=foreach, tables=tables)
    train(model, optimizer)
    oracle = by_hand(expected or tables)
    torch.testing.assert_close(model.state_dict(), oracle.state_dict(), rtol=1e-5, atol=1e-6)
    per_layer = model.per_layer.weight
    assert not torch.equal(per_layer, LanguageModel().per_layer.weight)
    assert not model.words.weight.grad.is_sparse


def test_groups_and_their_options():
    """Options of a group override those of tables; a group is divided, with its names and masks."""
    model = LanguageModel()
    named = list(model.named_parameters())
    matrices = [(name, param) for name, param in named if param.dim() > 1]
    others = [(name, param) for name, param in named if param.dim() < 2]
    mask = torch.arange(ROWS) % 2 == 0
    masks = [mask if name == "memory.weight" else None for name, _ in matrices]
    groups = [
        {"params": matrices, "weight_decay": 0, "mask": masks},
        {"params": others, "weight_decay": 0.0},
    ]
    decays = partial(ROWWISE, weight_decay=0.1, decoupled_weight_decay=True)
    opt = optimizer_for(model, sparsestep.AdamW, 0.01, params=groups, tables=decays)
    assert [group["param_names"] for group in opt.param_groups] == [
        ["words.weight"],
        TABLES,
        [name for name, _ in others],
    ]
    assert [group["weight_decay"] for group in opt.param_groups] == [0, 0, 0.0]
    assert [group["lr"] for group in opt.param_groups] == [0.01, 0.02, 0.01]
    assert opt.param_groups[1]["mask"][:2] == [None, None]
    before = model.memory.weight.detach().clone()
    train(model, opt)
    moved = (model.memory.weight != before).any(dim=1)
    assert moved.any()
    assert not moved[~mask].any()


def test_a_tied_head_stays_dense_and_explain_says_so():
    model = LanguageModel()
    optimizer = optimizer_for(model, sparsestep.AdamW, tables=ROWWISE)
    train(model, optimizer, steps=range(1))
    assert type(model.words) is nn.Embedding
    found = {each.name: each for each in optimizer.explain(model)}
    assert found["words.weight"].reason == "tied to head: dense gradient, every row is updated."
    assert all("tied" not in found[name].reason for name in TABLES)
    tied = nn.ModuleDict({"words": nn.Embedding(9, 2), "head": nn.Linear(2, 9, bias=False)})
    tied["head"].weight = tied["words"].weight
    with pytest.warns(UserWarning, match="tables= has no effect"):
        assert type(optimizer_for(tied, sparsestep.AdamW, tables=ROWWISE)) is sparsestep.AdamW


def made() -> tuple[Any, Any]:
    model = LanguageModel()
    return model, optimizer_for(model, sparsestep.AdamW, lr=0.01, tables=ROWWISE)


@pytest.mark.parametrize("how", ["state_dict", "torch.save", "pickle", "deepcopy"])
def test_training_goes_on_from_a_checkpoint(how: str):
    model, opt = made()
    train(model, opt, steps=range(3))
    if how in ("pickle", "deepcopy"):
        both: Any = copy.deepcopy((model, opt))
        if how == "pickle":
            both = pickle.loads(pickle.dumps((model, opt)))
        other, resumed = both
        resumed.track(other)
    else:
        saved = model.state_dict(), opt.state_dict()
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file)  # nothing but tensors and numbers
        other, resumed = made()
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
    assert type(resumed) is type(opt)
    for each, optimizer in ((model, opt), (other, resumed)):
        train(each, optimizer, steps=range(3, 6))
    assert all_same_bits(model.state_dict().values(), other.state_dict().values())


def test_a_checkpoint_without_classes_keeps_those_of_the_groups_and_their_defaults():
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))
    opt = optimizer_for(model, sparsestep.AdamW, tables=sparsestep.SparseAdam)
    saved = copy.deepcopy(opt.state_dict())
    classes = [group.pop("optimizer") for group in saved["param_groups"]]
    opt.load_state_dict(saved)
    assert [group["optimizer"] for group in opt.param_groups] == classes
    for name in classes:
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "optimizer": name})
        assert ("differentiable" in opt.param_groups[-1]) == (name == "AdamW")


def test_schedulers_and_zero_grad():
    model, opt = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    train(model, opt, steps=range(1))
    scheduler.step()
    assert [group["lr"] for group in opt.param_groups] == [0.005, 0.01]
    assert isinstance(opt, torch.optim.Optimizer)
    opt.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "amsgrad": True})
    assert opt.param_groups[-1]["optimizer"] == "AdamW"
    wrong = {"params": [nn.Parameter(torch.ones(2, 2))], "optimizer": "RowwiseAdam"}
    with pytest.raises(sparsestep.InputError, match="param group 3: it may only set lr, betas"):
        opt.add_param_group({**wrong, "amsgrad": True})
    with pytest.raises(sparsestep.InputError, match="'optimizer' must be one of AdamW, Row"):
        opt.add_param_group({**wrong, "optimizer": "Lion"})
    assert len(opt.param_groups) == 3


@pytest.mark.parametrize("bad", ["norm.weight", "memory.weight"])
def test_a_step_that_raises_has_changed_nothing(bad: str):
    model, opt = made()
    train(model, opt, steps=range(2))
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    param = dict(model.named_parameters())[bad]
    param.grad = torch.sparse_coo_tensor([[-1]], torch.ones(1, *param.shape[1:]), param.shape)
    with refused(opt):
        opt.step()


def half_step(param: Any, grad: Any, *, lr: float) -> Any:
    return (param - lr * grad).round()


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (sparsestep.AdamW([torch.zeros(1)]), {}),
    (sparsestep.AdamW, {"lr": -1.0}),
    (sparsestep.AdamW, {"semantics": "sparse"}),
    (sparsestep.AdamW, {"params": [torch.zeros(1)]}),
    (sparsestep.rule()(half_step), {"lr": 0.1}),
    (sparsestep.AdamW, {"tables": ROWWISE, "engine": "cuda"}),
]
TABLES_REFUSED = [
    torch.optim.Adam,
    partial(torch.optim.Adam, lr=0.1),
    partial(sparsestep.Adam, 0.1),
    sparsestep.Adam([torch.zeros(1)]),
    "RowwiseAdam",
    {"lr": -1.0},
    {"momentum": 0.9},
    partial(sparsestep.RowwiseAdam, betas=(2.0, 0.9)),
    partial(sparsestep.RowwiseAdam, semantics="masked"),
    partial(sparsestep.RowwiseAdam, weight_decay=0.1),
]


def test_what_is_refused_leaves_the_model_alone():
    model = LanguageModel()
    before = list(map(type, model.modules()))
    for cls, options in (*REFUSED, *((sparsestep.AdamW, {"tables": t}) for t in TABLES_REFUSED)):
        with pytest.raises(sparsestep.InputError):
            optimizer_for(model, cls, **options)
        assert list(map(type, model.modules())) == before
        assert not any(module._forward_pre_hooks for module in model.modules())


class Memory(nn.Module):
    """A table that can be sharded, and layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.memory = NgramEmbedding(ROWS, DIM)
        self.body = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.memory(ids)))


@needs_means_over_gloo
@ranks(2)
@pytest.mark.parametrize("layers", ["DDP", "FSDP2"])
def test_layers_on_ranks_beside_sharded_tables(rank: Rank, layers: str):
    """Ranks have the same batch, so they train as one process does."""
    ids, outputs = torch.randint(TOKENS, (2, 7)), []
    for is_sharded in (False, True):
        model: Any = Memory()
        run = model
        if is_sharded:
            sparsestep.distributed.shard(model, plan="rows")
            if layers == "DDP":
                run = nn.parallel.DistributedDataParallel(model)
            else:
                from torch.distributed.fsdp import fully_shard
                from torch.distributed.tensor import init_device_mesh

                mesh = init_device_mesh("cpu", (2,))
                for layer in (model.body, model.head):
                    fully_shard(layer, mesh=mesh)
        optimizer = optimizer_for(model, sparsestep.AdamW, lr=0.01, tables=ROWWISE)
        assert [group["optimizer"] for group in optimizer.param_groups] == ["AdamW", "RowwiseAdam"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            train(run, optimizer)
            outputs.append(run(ids).detach())
    torch.testing.assert_close(*outputs)
    assert not torch.allclose(outputs[0], Memory()(ids))
