"""What a user's script may look like; pyright has nothing to say against it in strict mode.

It is not run: ``tests/test_typing.py`` has pyright read it.
"""
# pyright: strict

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import sparsestep
from sparsestep import functional


class Model(torch.nn.Module):
    """Two kinds of tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = sparsestep.nn.Embedding(3, 2)
        self.bags = sparsestep.nn.EmbeddingBag(5, 2, mode="sum", dtype=torch.float32)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """A number for each id."""
        return self.layer(self.words(ids) + self.bags(ids.unsqueeze(1)))


def train(model: Model, batches: list[Tensor]) -> None:
    """The usual loop, with dense semantics."""
    optimizer = sparsestep.AdamW(model.parameters(), lr=1e-3, semantics="dense")
    optimizer.track(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    for ids in batches:
        optimizer.zero_grad()
        model(ids).sum().backward()
        norm = sparsestep.clip_grad_norm_(model.parameters(), max_norm=1.0)
        assert_type(norm, Tensor)
        sparsestep.clip_grad_value_(model.parameters(), clip_value=0.5)
        assert_type(optimizer.step(), None)
        scheduler.step()
    optimizer.catch_up()
    optimizer.catch_up(model.words.weight, torch.tensor([1, 2]))
    assert_type(optimizer.step(lambda: 0.5), float)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_type(sparsestep.nn.optimizer_for(model, sparsestep.Adam, lr=0.1), sparsestep.Adam)


def choose(model: Model) -> list[torch.optim.Optimizer]:
    """Every option by its name."""
    params = list(model.parameters())
    mask = torch.tensor([True, False, True])
    groups = [{"params": [model.words.weight], "mask": mask}]
    return [
        sparsestep.SparseAdam(params, bias_correction="per_row", engine="reference"),
        sparsestep.Adam(groups, state_dtype=torch.bfloat16),
        sparsestep.NAdam(params, momentum_decay=0.01, semantics="dense"),
        sparsestep.RAdam(params, weight_decay=0.1, decoupled_weight_decay=True),
        sparsestep.Adagrad(params, stochastic_rounding=True, rounding_seed=7),
        sparsestep.RowwiseAdagrad(params, decoupled_weight_decay=True, dense="elementwise"),
        sparsestep.RowwiseAdam(params, betas=(0.9, 0.99)),
        sparsestep.SGD(params, 0.1, 0.9, mask=[mask, None, None, None]),
        sparsestep.RMSprop(model.named_parameters(), centered=True),
        sparsestep.Lion(params, engine="native"),
        sparsestep.Ftrl(params, l1=0.1),
    ]


def by_hand(weight: Tensor, grad: Tensor) -> None:
    """Gradients that the script has itself."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    functional.adam_(weight, grad, mean, square, step=1, lr=0.1, weight_decay=0.01, maximize=True)
    held = sparsestep.IndexedGrad(torch.tensor([1]), torch.ones(1, 2))
    functional.sgd_(weight, held, lr=0.1, engine="auto")
    optimizer = sparsestep.FunctionalAdam([weight], lr=0.1, semantics="dense")
    optimizer.step([held])
    optimizer.step_param(weight, grad)


@sparsestep.rule(state={"sum": 0.0})
def adagrad(
    param: Tensor, grad: Tensor, sum: Tensor, *, lr: float, eps: float = 1e-10
) -> tuple[Tensor, Tensor]:
    """A rule of one's own."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


def descent(param: Tensor, grad: Tensor, *, lr: float) -> Tensor:
    """Another, which stays a function."""
    return param - lr * grad


def own_rules(model: Model) -> None:
    """They are optimizer classes."""
    optimizer = adagrad(model.parameters(), lr=0.1, engine="reference")
    optimizer.step()
    handle = sparsestep.rule(descent)(model.parameters(), lr=0.1).step_in_backward()
    handle.remove()


def tables() -> None:
    """Many tables, and those of an existing model."""
    collection = sparsestep.nn.EmbeddingBagCollection({"country": (200, 8)}, mode="sum")
    collection({"country": torch.tensor([[44], [49]])})
    model = sparsestep.nn.fuse(Model(), only="words")
    assert_type(model, Model)
    sparsestep.distributed.register()
