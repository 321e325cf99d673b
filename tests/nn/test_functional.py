"""Functions of embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from sparsestep.nn import lookup
from sparsestep.nn.functional import embedding_dot, embedding_l2
from tests.table import INSTRUCTION_SETS, running_on


def ids_of(*shape: int) -> Tensor:
    return torch.randint(30, shape, generator=torch.Generator().manual_seed(len(shape)))


IDS = {
    "one each": ids_of(9),
    "several each": ids_of(9, 4),
    "none each": ids_of(9, 0),
    "shared": ids_of(1, 6),
    "int32": ids_of(9, 4).int(),
    "not contiguous": ids_of(4, 9).T,
}


def tables(
    dtype: torch.dtype = torch.float64, dim: int = 37, **options: Any
) -> list[sparsestep.nn.Embedding]:
    torch.manual_seed(1)
    return [sparsestep.nn.Embedding(30, dim, dtype=dtype, **options) for _ in range(3)]


def plain(table: nn.Module) -> nn.Embedding:
    return nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)


def expected(left: Any, left_ids: Tensor, right: Any, ids: Tensor, factors: Any = 1) -> Tensor:
    rows = left(left_ids) * factors
    return (
        (rows.unsqueeze(1) * right(ids.view(len(ids), -1)))
        .sum(-1)
        .view(ids.shape if len(ids) == len(left_ids) else (len(left_ids), -1))
    )


def close(one: Tensor, other: Tensor, rtol: float = 1e-12) -> None:
    one = one.to_dense() if one.is_sparse else one
    torch.testing.assert_close(one, other, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_results_and_gradients_are_those_of_the_formula(
    ids: Tensor, same: bool, native: bool, frozen: int | None, monkeypatch: pytest.MonkeyPatch
):
    if not native:
        monkeypatch.setattr(lookup, "ext", None)
    left, right, relation = made = tables()
    right = left if same else right
    if frozen is not None:
        made[frozen].requires_grad_(False)
    left_ids, relation_ids = torch.randint(30, (9,)), torch.randint(30, (9,))
    ours = embedding_dot(left, left_ids, right, ids, diagonal=relation, diagonal_ids=relation_ids)
    copies = {table: plain(table) for table in (left, right, relation)}
    theirs = expected(copies[left], left_ids, copies[right], ids, copies[relation](relation_ids))
    close(ours, theirs)
    grad = torch.randn(ours.shape, dtype=ours.dtype)
    ours.backward(grad)
    theirs.backward(grad)
    for table, copied in copies.items():
        if table.weight.requires_grad:
            assert isinstance(table.weight.grad, CompactGrad)
            close(table.weight.grad, copied.weight.grad)
        else:
            assert table.weight.grad is None


def test_an_empty_batch_has_empty_results_and_gradients():
    none = torch.empty(0, dtype=torch.long)
    for shape in ((0,), (0, 4)):
        left, right, _ = tables()
        found = embedding_dot(left, none, right, none.view(shape))
        assert found.shape == shape
        found.sum().backward()
        assert not left.weight.grad.to_dense().any()
        assert not right.weight.grad.to_dense().any()


def test_weights_and_torchs_modules():
    left, right, _ = tables()
    one, several = torch.arange(9), IDS["several each"]
    wanted = embedding_dot(left, one, right, several)
    assert embedding_dot(left.weight, one, right.weight, several).equal(wanted)
    close(embedding_dot(plain(left), one, plain(right), several), wanted)
    wanted.sum().backward()
    for table in (left, right):  # not a row for each pair
        assert table.weight.grad.indexed().values.shape == (9, 37)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_padding_has_no_gradient_and_rows_are_renormalized(max_norm: float | None):
    left, right, _ = tables(padding_idx=3, max_norm=max_norm, scale_grad_by_freq=True)
    ids = torch.full((9, 2), 3)
    ids[:, 0] = 5
    embedding_dot(left, torch.arange(9), right, ids).sum().backward()
    assert right.weight.grad.coalesce().indices().tolist() == [[5]]
    by_freq = left.weight[:9].detach().mean(0)  # of nine gradients of one row
    close(right.weight.grad.coalesce().values()[0], by_freq)
    assert max_norm is None or (left.weight[:9].norm(dim=1) <= 0.5 + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_threads_or_instruction_set(dtype: torch.dtype):
    left, right, _ = tables(dtype, dim=70)
    ids = torch.randint(30, (500, 20))
    one = torch.randint(30, (500,))
    found = []
    for name in INSTRUCTION_SETS:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with running_on(name):
                found.append(embedding_dot(left, one, right, ids))
    assert all(each.equal(found[0]) for each in found)
    wanted = expected(left.double(), one, right.double(), ids)
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("products", [1, 2])
def test_deferred_rows_catch_up_before_they_are_read(guard: bool, products: int):
    """By products and by penalties; of two products of one table, the second catches up others."""
    ours = nn.ModuleList(tables()[:2])
    theirs = nn.ModuleList(map(plain, ours))
    optimizer = sparsestep.AdamW(ours.parameters(), lr=0.1, semantics="dense")
    optimizer.track(ours, guard=guard)
    dense = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(3)
    for _ in range(6):
        one, positive = torch.randint(30, (2, 5), generator=chance)
        negative = torch.randint(30, (5, 2), generator=chance)
        for both, score, opt in ((ours, embedding_dot, optimizer), (theirs, expected, dense)):
            opt.zero_grad()
            scores = [score(both[0], one, both[1], ids) for ids in (negative, positive)[:products]]
            sum(each.sin().sum() for each in scores).backward()
            opt.step()
        rows = theirs[1].weight.detach()[[3, 9]].square().sum()
        close(embedding_l2(ours[1], torch.tensor([9, 3, 9])).detach(), rows, 1e-6)
    optimizer.catch_up()
    for param, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(param, its, rtol=1e-6, atol=1e-8)


def test_a_table_that_was_written_before_backward_is_refused():
    left, right, _ = tables()
    optimizer = sparsestep.AdamW([left.weight, right.weight], semantics="dense")
    optimizer.track(nn.ModuleList([left, right]))
    scores = embedding_dot(left, torch.tensor([3]), right, torch.tensor([[4, 5]]))
    with torch.no_grad():
        right.weight[4] = 0.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


# Penalties

L2_IDS = {**IDS, "scalar": torch.tensor(7), "3-D": ids_of(2, 3, 4)}
MODULES = [sparsestep.nn.Embedding, nn.Embedding, sparsestep.nn.EmbeddingBag, nn.EmbeddingBag]


@pytest.mark.parametrize("ids", L2_IDS.values(), ids=L2_IDS)
@pytest.mark.parametrize("padding_idx", [None, 7])
@pytest.mark.parametrize("module", MODULES)
def test_an_l2_penalty_counts_each_row_once(module: Any, padding_idx: int | None, ids: Tensor):
    """With weights, each id as often as its weight says; padding never."""
    table = module(30, 5, padding_idx=padding_idx, dtype=torch.float64)
    nn.init.normal_(table.weight)
    for weights in (None, torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)):
        copy = table.weight.detach().clone().requires_grad_()
        counted = [0.0] * 30
        for number, row in enumerate(ids.flatten().tolist()):
            if weights is None:
                counted[row] = 1.0
            elif row != padding_idx:
                counted[row] = counted[row] + weights.flatten()[number]
        if padding_idx is not None:
            counted[padding_idx] = 0.0
        wanted = sum(n * row.square().sum() for n, row in zip(counted, copy, strict=True))
        penalty = embedding_l2(table, ids, weights=weights)
        assert penalty.shape == ()
        close(penalty, wanted)
        inputs = [] if weights is None else [weights]
        grad, *others = torch.autograd.grad(3 * penalty, [table.weight, *inputs])
        wanted_grad, *wanted_others = torch.autograd.grad(
            3 * wanted, [copy, *inputs], materialize_grads=True
        )
        assert isinstance(grad, CompactGrad)
        assert grad.coalesce().indices().tolist() == [[n for n in range(30) if counted[n]]]
        close(grad, wanted_grad)
        for one, other in zip(others, wanted_others, strict=True):
            close(one, other)


def test_an_l2_penalty_on_a_weight_or_a_complex_table():
    ids, table = torch.tensor([2, 2, 5]), tables()[0]
    close(embedding_l2(table.weight, ids), embedding_l2(table, ids))
    copy = plain(table)
    (table(ids).cos().sum() + 0.5 * embedding_l2(table, ids)).backward()
    (copy(ids).cos().sum() + 0.5 * copy.weight[[2, 5]].square().sum()).backward()
    assert isinstance(table.weight.grad, CompactGrad)
    close(table.weight.grad, copy.weight.grad)
    weight = torch.randn(9, 4, dtype=torch.complex128, requires_grad=True)
    penalty = embedding_l2(weight, ids)
    penalty.backward()
    close(penalty, weight.detach()[[2, 5]].abs().square().sum())
    assert weight.grad is not None
    close(weight.grad.to_dense()[[2, 5]], 2 * weight.detach()[[2, 5]])


def test_a_penalty_rescales_rows_as_a_lookup_does():
    table = sparsestep.nn.Embedding(30, 4, max_norm=0.5)
    close(embedding_l2(table, torch.tensor([3, 3, 8])), torch.tensor(0.5), 1e-5)
    norms = table.weight.norm(dim=1)
    assert [n for n in range(30) if norms[n] <= 0.5] == [3, 8]
