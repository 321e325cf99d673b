"""``sparsestep.nn.grow``: more rows, and all goes on as if they had always been there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.nn import grow
from tests.subject import refused
from tests.table import STATEFUL, Variant, same_bits, state_tensors

TABLES = [
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    sparsestep.nn.Embedding,
    sparsestep.nn.EmbeddingBag,
]


def filled(table: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        weight = table.weight
        assert isinstance(weight, Tensor)
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    return table


def train(table: Any, optimizer: Any, ids: list[int]) -> None:
    optimizer.zero_grad()
    table(torch.tensor([ids])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize("variant", STATEFUL, ids=str)
def test_a_grown_table_goes_on_as_one_that_was_made_so_large(variant: Variant, semantics: str):
    """Bit for bit, state included: small and then grown, against large from the start."""
    if semantics == "dense" and (
        variant.rule.idle_update is None or "weight_decay" in str(variant)
    ):
        return
    whole = filled(torch.nn.Embedding(6, 3, sparse=True))
    table = torch.nn.Embedding(4, 3, sparse=True)
    with torch.no_grad():
        table.weight.copy_(whole.weight[:4])
    optimizers = []
    for each in (whole, table):
        optimizers.append(variant(each.parameters(), semantics=semantics))
        if semantics == "dense":
            optimizers[-1].track(each)
        for ids in ([0, 1, 1], [2], [1, 3]):
            train(each, optimizers[-1], ids)
    optimizers[1].zero_grad()
    if semantics == "dense":  # growing is a reason to bring rows up to date
        optimizers[0].catch_up()
    weight, new = table.weight, whole.weight[4:].detach().clone()
    grow(table, 6, optimizers[1], init=lambda rows: rows.copy_(new))
    assert table.weight is weight
    assert table.num_embeddings == 6
    for each, optimizer in zip((whole, table), optimizers, strict=True):
        for ids in ([4, 0], [5, 4], [2]):
            train(each, optimizer, ids)
        optimizer.catch_up()
    results = [
        [each.weight.detach(), *state_tensors(optimizer)]
        for each, optimizer in zip((whole, table), optimizers, strict=True)
    ]
    for ours, theirs in zip(*results, strict=True):
        # A row that was brought up to date in two parts is rounded twice.
        near = semantics == "dense" and torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        assert near or same_bits(ours, theirs)


@pytest.mark.parametrize("kind", TABLES)
def test_every_kind_of_table_grows(kind: Any):
    """As often as needed; a checkpoint of the grown table goes on with the same bits."""
    torch.manual_seed(3)
    table = kind(4, 3, padding_idx=1)
    optimizer = sparsestep.Adam(table.parameters())
    train(table, optimizer, [0, 2])
    for rows in (9, 9, 12):
        optimizer.zero_grad()
        before = table.weight.detach().clone()
        grow(table, rows, optimizer)
        assert table.weight.shape == (rows, 3)
        assert same_bits(table.weight.detach()[: len(before)], before)
        train(table, optimizer, [rows - 1, 0])
        assert optimizer.state[table.weight]["exp_avg"][rows - 1].abs().sum() > 0
    assert 0.1 < table.weight[4:].std() < 3  # normal, as the constructor's
    assert table.padding_idx == 1
    other = kind(12, 3, padding_idx=1)
    other.load_state_dict(table.state_dict())
    loaded = sparsestep.Adam(other.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    train(table, optimizer, [7, 0])
    train(other, loaded, [7, 0])
    assert same_bits(table.weight.detach(), other.weight.detach())


def test_hooks_and_steps_in_backward_go_on():
    table = sparsestep.nn.Embedding(3, 2)
    optimizer, calls = sparsestep.Adam(table.parameters()), []
    table.weight.register_hook(lambda grad: calls.append(grad.shape))
    handle = optimizer.step_in_backward()
    for rows in (3, 6):
        table(torch.tensor([rows - 1])).sum().backward()
        grow(table, 6, optimizer)
    assert calls == [(3, 2), (6, 2)]
    assert int(optimizer.state[table.weight]["step"]) == 2
    assert optimizer.state[table.weight]["exp_avg"][5].abs().sum() > 0
    handle.remove()


@pytest.mark.parametrize("guard", [False, True])
def test_a_tracked_model_stays_tracked(guard: bool):
    """No deferred row is read before it has caught up, an old or a new one."""
    model = torch.nn.Sequential(sparsestep.nn.Embedding(3, 2), torch.nn.Linear(2, 1))
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1, semantics="dense")
    handle = optimizer.track(model, guard=guard)
    for rows in (3, 7):
        for ids in ([0, rows - 1], [1], [0, rows - 1]):
            optimizer.zero_grad()
            model(torch.tensor(ids)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        grow(model[0], 7, optimizer)
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (7, 2)
    handle.remove()


def test_large_tables_wait_for_huge_pages_again():
    table = sparsestep.nn.Embedding(300_000, 8)
    optimizer = sparsestep.SGD(table.parameters(), lr=0.1)
    train(table, optimizer, [1])
    optimizer.zero_grad()
    grow(table, 300_001, optimizer)
    assert all(each.tensor() is not table.weight for each in optimizer.store.huge_pages._waiting)
    train(table, optimizer, [300_000])


def test_a_vocabulary_grows_with_its_tables():
    vocabulary = sparsestep.nn.Vocabulary(3, admit=2)
    tables = [sparsestep.nn.Embedding(3, 2), torch.nn.EmbeddingBag(8, 1)]
    optimizer = sparsestep.Adam([table.weight for table in tables])
    for table in tables:
        vocabulary.attach(table, optimizer)
    assert vocabulary(torch.tensor([7, 7, 8, 8, 9, 9, 5])).tolist() == [1, 1, 2, 2, 0, 0, 0]
    tables[0].weight.grad = torch.zeros(3, 2)
    with pytest.raises(InputError, match="must have no gradient"):
        vocabulary.grow(5)
    assert [vocabulary.rows, *(len(table.weight) for table in tables)] == [3, 3, 8]
    optimizer.zero_grad()
    vocabulary.grow(5)
    assert [vocabulary.rows, *(len(table.weight) for table in tables)] == [5, 5, 8]
    assert vocabulary(torch.tensor([7, 8, 9, 5])).tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match=r"rows must be a whole number in \[5"):
        vocabulary.grow(4)


def test_what_cannot_grow_is_refused_and_stays_as_it_is():
    """messages.txt has what is said."""
    table = sparsestep.nn.Embedding(4, 2)
    optimizer = sparsestep.Adam(table.parameters())
    masked = sparsestep.Adam([{"params": table.parameters(), "mask": torch.ones(4).bool()}])
    train(table, optimizer, [1])
    random = torch.get_rng_state()
    with refused(optimizer, match="must have no gradient"):
        grow(table, 5, optimizer)
    optimizer.zero_grad()
    cases: list[tuple[tuple[Any, ...], Any]] = [
        ((table, 3, optimizer), InputError),
        ((table, 5.0, optimizer), InputError),
        ((table, 5, optimizer, masked), InputError),
        ((table, 5, optimizer, torch.optim.Adam(table.parameters())), InputError),
        ((table, 2**62, optimizer), InputError),
        ((table, 2**48, optimizer), MemoryError),
    ]
    for arguments, error in cases:
        with refused(optimizer, error=error):
            grow(*arguments)
        assert table.num_embeddings == 4
    assert torch.equal(torch.get_rng_state(), random)
    for init, error in ((lambda rows: 1 // 0, ZeroDivisionError), (5, InputError)):
        with refused(optimizer, error=error):
            grow(table, 5, optimizer, init=init)
