"""``sparsestep.nn.train_rows``: some rows of a model's embedding are trained, and nothing else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.nn import train_rows
from tests.ranks import Rank, ranks
from tests.table import FEW, Variant, same_bits
from tests.torch_versions import SUMS_SHARDED_GRADIENTS

TOKENS, NEW = 12, [3, 10, 11]


class LanguageModel(nn.Module):
    """As Transformers has them: positions are an embedding, too."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, 4)
        self.positions = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, TOKENS)
        self.has_head = head != "none"
        if head == "tied":
            self.head.weight = self.words.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head if self.has_head else None

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        return self.head(self.body(self.words(ids) + self.positions(places)))


@pytest.mark.parametrize("head", ["tied", "untied", "none"])
@pytest.mark.parametrize("variant", FEW, ids=str)
def test_other_rows_and_parameters_keep_their_bits(variant: Variant, head: str):
    torch.manual_seed(0)
    model = LanguageModel(head)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = train_rows(model, NEW)
    expected = [model.words.weight, *([model.head.weight] if head == "untied" else [])]
    assert [group["params"] for group in groups] == [[weight] for weight in expected]
    optimizer = variant(groups)
    for _ in range(3):
        optimizer.zero_grad()
        ids = torch.tensor([[1, 3, 10, 4, 11]])
        model(ids).square().sum().backward()
        optimizer.step()
    trained = {"words.weight", *(["head.weight"] if head != "none" else [])}
    for name, value in model.state_dict().items():
        moved = (value != before[name]).flatten(1).any(1) if value.dim() > 1 else None
        if name in trained:
            assert moved is not None
            assert moved.nonzero().flatten().tolist() == NEW
        else:
            assert same_bits(value, before[name])


def test_rows_may_be_given_in_several_forms():
    for rows in (
        NEW,
        (row for row in NEW),
        torch.tensor([11, 3, 10, 3], dtype=torch.int32),
        torch.tensor([row in NEW for row in range(TOKENS)]),
    ):
        (group,) = train_rows(nn.Embedding(TOKENS, 4), rows)
        assert group["mask"].nonzero().flatten().tolist() == NEW


def test_the_only_embedding_of_a_model_is_found():
    """Frozen weights are trained again, under several names or one."""
    table = nn.EmbeddingBag(TOKENS, 4)
    model = nn.ModuleDict({"a": table, "b": nn.Embedding(TOKENS, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = table.weight
    model.requires_grad_(False)
    with pytest.raises(sparsestep.InputError, match="rows must be in"):
        train_rows(model, [TOKENS])
    assert not table.weight.requires_grad
    (group,) = train_rows(model, NEW)
    assert group["params"] == [table.weight]
    assert [name for name, param in model.named_parameters() if param.requires_grad] == ["a.weight"]


def test_a_model_that_does_not_know_its_embeddings():
    class Body(nn.Sequential):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    model = Body(nn.Embedding(TOKENS, 4), nn.Linear(4, 4))
    assert train_rows(model, NEW)[0]["params"] == [model[0].weight]


def test_a_head_with_other_rows_is_refused():
    """Rows of one would not be the tokens of the other."""
    model = LanguageModel("untied")
    model.head = nn.Linear(4, TOKENS - 2)
    model.requires_grad_(False)
    with pytest.raises(sparsestep.InputError, match="Got 10 for 12"):
        train_rows(model, NEW)
    assert not model.words.weight.requires_grad
    assert len(train_rows(model.words, NEW)) == 1


def test_an_embedding_that_is_wrapped():
    """As PEFT wraps the modules that it saves: the weight is found through an attribute."""

    class Wrapper(nn.Module):
        def __init__(self, table: nn.Module) -> None:
            super().__init__()
            self.modules_to_save = nn.ModuleDict({"default": table})

        @property
        def weight(self) -> Any:
            return self.modules_to_save["default"].weight

    model = LanguageModel("untied")
    model.words = Wrapper(model.words)  # type: ignore[assignment]
    weights = [model.words.weight, model.head.weight]
    assert [group["params"] for group in train_rows(model, NEW)] == [[each] for each in weights]
    model.requires_grad_(False)
    model.peft_config = {}  # type: ignore[assignment]
    assert [group["params"] for group in train_rows(model, NEW)] == [weights[:1]]
    assert not model.head.weight.requires_grad


def train(model: nn.Module, opt: torch.optim.Optimizer, times: float = 1.0) -> None:
    for step in range(4):
        opt.zero_grad()
        ids = torch.tensor([[1, 3, 10, 11, 5 + step]])  # sums of duplicates depend on their order
        (times * model(ids).square().sum()).backward()
        opt.step()


def prepared(head: str) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(head)
    model.requires_grad_(False)
    train_rows(model, NEW)
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@ranks(2)
@pytest.mark.parametrize(
    ("how", "head"),
    [
        ("DDP", "tied"),
        ("DDP", "untied"),
        ("DDP, fused", "untied"),
        ("FSDP2", "tied"),
        ("FSDP2, rowwise", "untied"),
    ],
)
def test_row_freezing_is_exact_on_ranks(rank: Rank, how: str, head: str):
    """Ranks have the same batch, so the mean of their gradients is that of one process."""
    cls: Any = sparsestep.RowwiseAdam if "rowwise" in how else sparsestep.AdamW
    options = {"lr": 0.05, "weight_decay": 0.1}
    alone = prepared(head)
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    opt = cls(train_rows(alone, NEW), **options)
    is_summed = "FSDP2" in how and SUMS_SHARDED_GRADIENTS
    train(alone, opt, times=2.0 if is_summed else 1.0)
    model: Any = prepared(head)
    if "FSDP2" in how:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import init_device_mesh

        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        groups = train_rows(model, NEW)
    else:
        if "fused" in how:
            sparsestep.nn.fuse(model)
        groups = train_rows(model, NEW)
        model = nn.parallel.DistributedDataParallel(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # no harm here
        train(model, cls(groups, **options))
    inner = getattr(model, "module", model)
    trained = {"words.weight", "head.weight"}
    for (name, value), expected in zip(
        inner.state_dict().items(), alone.state_dict().values(), strict=True
    ):
        whole = full(value)
        assert same_bits(whole, expected), name
        moved = (whole != before[name]).reshape(len(whole), -1).any(1).nonzero().flatten().tolist()
        assert moved == (NEW if name in trained else [])
