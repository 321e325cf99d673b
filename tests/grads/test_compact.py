"""CompactGrad: its sums, products and parts; a sparse gradient like any other."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsestep
from sparsestep._native import ext
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.dedup import iter_sums, slot_norms
from sparsestep.grads.indexed import IndexedGrad
from tests.nn.cases import DTYPES, plain, same
from tests.torch_versions import loads_sparse_tensors, needs_tensors_that_the_core_reads

SHAPE = torch.Size([6, 4])


@st.composite
def parts(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> IndexedGrad:
    """Rows or elements; with and without ``source`` and ``scale``."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    slots, block = draw(st.sampled_from([(6, 4), (24, 1)]))
    entries, rows = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    source = draw(st.booleans())
    return IndexedGrad(
        torch.randint(slots, (entries,), generator=generator),
        torch.randn(rows if source else entries, block, generator=generator).to(dtype),
        slots,
        block,
        torch.randint(rows, (entries,), generator=generator) if source else None,
        torch.randn(entries, generator=generator).to(dtype) if draw(st.booleans()) else None,
    )


several = st.lists(parts(), max_size=3)
LIKE = torch.zeros(0, dtype=torch.float64)


def dense(some: list[IndexedGrad]) -> Tensor:
    """In plain loops."""
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for part in some:
        assert part.indices is not None
        for entry, slot in enumerate(part.indices.tolist()):
            row = entry if part.value_index is None else int(part.value_index[entry])
            factor = 1.0 if part.scale is None else float(part.scale[entry])
            total.view(part.num_slots, part.slot_size)[slot] += factor * part.values[row].double()
    return total


def example() -> CompactGrad:
    bags = torch.tensor([0, 0, 1])
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 0.0, 2.0]])
    part = IndexedGrad(torch.tensor([3, 1, 3]), values, 6, 4, bags, torch.tensor([1.0, 2.0, 3.0]))
    return CompactGrad.of([part], SHAPE, values)


@given(some=several)
def test_what_it_stands_for(some: list[IndexedGrad]):
    grad = CompactGrad.of(some, SHAPE, LIKE)
    assert torch.allclose(plain(grad).to_dense(), dense(some))
    joined = grad.indexed()
    assert joined.num_slots * joined.slot_size == 24
    assert torch.allclose(dense([joined]), dense(some))
    rows = sum(part.values.numel() for part in some)
    assert joined.values.numel() == rows  # nothing was written out
    assert not grad.is_materialized


@given(first=several, second=several)
def test_sums(first: list[IndexedGrad], second: list[IndexedGrad]):
    wanted = dense(first) + dense(second)
    one, two = (CompactGrad.of(some, SHAPE, LIKE) for some in (first, second))
    ordinary = plain(two)
    for total in (one + two, torch.add(one, two), one + ordinary, ordinary + one):
        assert torch.allclose(plain(total).to_dense(), wanted)
    total = one + two.to_dense()
    assert type(total) is Tensor
    assert torch.allclose(total, wanted)
    assert torch.allclose(two.to_dense() + one, wanted)
    changed = one.clone()
    changed += two
    assert torch.allclose(plain(changed).to_dense(), wanted)
    assert torch.allclose(one.to_dense(), dense(first))
    changed.add_(torch.ones(SHAPE, dtype=torch.float64))
    assert (changed.is_sparse, changed.layout) == (False, torch.strided)
    assert torch.allclose(changed.to_dense(), wanted + 1)


SCALED: dict[str, tuple[Callable[[Any], Any], float]] = {
    "mul": (lambda g: g * 3, 3),
    "rmul": (lambda g: 3 * g, 3),
    "a tensor": (lambda g: g * torch.tensor(3.0), 3),
    "a tensor first": (lambda g: torch.tensor(3.0) * g, 3),
    "torch.mul": (lambda g: torch.mul(g, 3), 3),
    "mul_": (lambda g: g.mul_(3), 3),
    "imul": (lambda g: g.__imul__(3), 3),
    "mul_ by a tensor": (lambda g: g.mul_(torch.tensor(3.0)), 3),
    "div": (lambda g: g / 4, 0.25),
    "div_": (lambda g: g.div_(4), 0.25),
    "torch.div": (lambda g: torch.div(g, torch.tensor(4.0)), 0.25),
    "neg": (lambda g: -g, -1),
    "neg_": (lambda g: g.neg_(), -1),
    "detach": (lambda g: g.detach(), 1),
    "detach_": (lambda g: g.detach_(), 1),
    "clone": (lambda g: g.clone(), 1),
    "requires_grad_": (lambda g: g.requires_grad_(False), 1),
    "data": (lambda g: g.data, 1),
}


@pytest.mark.parametrize("name", SCALED)
@given(some=several, dtype=st.sampled_from(DTYPES))
def test_numbers_leave_it_compact(name: str, some: list[IndexedGrad], dtype: torch.dtype):
    function, factor = SCALED[name]
    grad = CompactGrad.of([_as(part, dtype) for part in some], SHAPE, LIKE.to(dtype))
    wanted = function(plain(grad)) if name == "data" else None
    values = [part.values.clone() for part in grad.parts]
    given_values = [part.values for part in grad.parts]
    result = function(grad)
    if name == "data":
        assert same(result.to_dense(), wanted.to_dense())
        return
    in_place = name.endswith("_") or "_ " in name or name == "imul"
    assert (result is grad) == in_place
    found = plain(result)
    assert found.dtype == dtype
    rows = [part._replace(values=part.values * factor) for part in some]
    near = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    assert torch.allclose(found.to_dense().double(), dense(rows), rtol=near, atol=near)
    for before, now in zip(values, given_values, strict=True):
        assert same(before, now)  # autograd's memory is not written to


def _as(part: IndexedGrad, dtype: torch.dtype) -> IndexedGrad:
    scale = None if part.scale is None else part.scale.to(dtype)
    return part._replace(values=part.values.to(dtype), scale=scale)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("whole", [False, True])
def test_clipping_in_chunks(monkeypatch: Any, norm_type: float, whole: bool):
    monkeypatch.setattr(iter_sums, "__defaults__", (8,))
    torch.manual_seed(0)
    positions = (
        torch.cat([torch.arange(6), torch.tensor([1, 3])]) if whole else torch.tensor([1, 3, 1])
    )
    values = torch.randn(len(positions), 4, dtype=torch.float64)
    weights = [nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for _ in range(2)]
    grad = CompactGrad.of([IndexedGrad(positions, values, 6, 4)], SHAPE, values)
    weights[0].grad, weights[1].grad = grad, plain(grad)
    totals = [sparsestep.clip_grad_norm_([weight], 0.5, norm_type) for weight in weights]
    assert torch.allclose(*totals)
    assert not grad.is_materialized
    assert torch.allclose(weights[0].grad.to_dense(), weights[1].grad.to_dense())
    for weight in weights:
        sparsestep.clip_grad_value_([weight], 0.1)
    assert torch.allclose(weights[0].grad.to_dense(), weights[1].grad.to_dense())
    assert weights[0].grad.is_coalesced()


# As a tensor


ASKED: dict[str, Callable[[Any], Any]] = {
    "_values": lambda g: g._values(),
    "_indices": lambda g: g._indices(),
    "_nnz": lambda g: g._nnz(),
    "sparse_dim": lambda g: g.sparse_dim(),
    "dense_dim": lambda g: g.dense_dim(),
    "is_coalesced": lambda g: g.is_coalesced(),
    "coalesce": lambda g: g.coalesce().to_dense(),
    "values": lambda g: g.coalesce().values(),
    "indices": lambda g: g.coalesce().indices(),
    "to_dense": lambda g: g.to_dense(),
    "norm": lambda g: g.norm(),
    "sum": lambda g: g.sum(),
    "torch.sparse.sum": lambda g: torch.sparse.sum(g, dim=1).to_dense(),
    "pow": lambda g: g.coalesce().pow(2).to_dense(),
    "elementwise": lambda g: (g * torch.ones(6, 4)).to_dense(),
    "of a dense one": lambda g: torch.zeros(6, 4).add_(g, alpha=-0.5),
    "difference": lambda g: (g - g).to_dense(),
    "alpha": lambda g: torch.add(g, g, alpha=-2).to_dense(),
    "double": lambda g: g.double().to_dense(),
    "index_select": lambda g: g.index_select(0, torch.tensor([1, 3])).to_dense(),
    "converted": lambda g: g.to(torch.bfloat16).to_dense(),
    "concatenated": lambda g: torch.cat([g, g]).to_dense(),
    "type": lambda g: g.type(),
}


@pytest.mark.parametrize("name", ASKED)
def test_code_that_reads_more_gets_an_ordinary_tensor(name: str):
    grad = example()
    wanted = ASKED[name](plain(grad))
    found = ASKED[name](grad)
    assert not isinstance(found, CompactGrad)
    assert same(found, wanted) if isinstance(found, Tensor) else found == wanted
    assert (
        same(ASKED[name](grad) if name != "of a dense one" else found, found)
        if isinstance(found, Tensor)
        else True
    )


def test_attributes_do_not_settle_it():
    grad = example()
    assert (grad.shape, grad.dtype, grad.device.type) == (SHAPE, torch.float32, "cpu")
    assert (grad.size(0), grad.dim(), grad.ndim, grad.numel(), len(grad)) == (6, 2, 2, 24, 6)
    assert (grad.is_sparse, grad.layout, grad.is_sparse_csr) == (True, torch.sparse_coo, False)
    assert (grad.requires_grad, grad.grad_fn, grad.is_leaf, grad.grad) == (False, None, True, None)
    assert grad.is_floating_point()
    assert torch.is_floating_point(grad)
    assert not grad.is_complex()
    assert grad.is_cpu
    assert not grad.is_inference()
    assert "nnz=3" in repr(grad)
    assert "nnz=3" in f"{grad}"
    assert not grad.is_materialized


def test_values_are_changed_in_place():
    """As GradScaler does it: what is changed is the gradient."""
    grad = example()
    grad._values().mul_(2)
    assert same(grad.to_dense(), example().to_dense() * 2)
    grad.mul_(2)
    assert same(grad.to_dense(), example().to_dense() * 4)
    grad.add_(example())
    assert same(grad.to_dense(), example().to_dense() * 5)
    assert same((grad + example()).to_dense(), example().to_dense() * 6)
    assert grad.zero_() is grad
    assert grad._nnz() == 0


def test_other_changes_in_place():
    grad = example()
    assert grad.mul_(torch.full((6, 4), 2.0)) is grad
    assert same(grad.to_dense(), example().to_dense() * 2)
    grad -= example()
    assert isinstance(grad, CompactGrad)
    assert same(grad.to_dense(), example().to_dense())
    grad = example()
    grad.copy_(example() * 2)
    assert same(plain(grad).to_dense(), example().to_dense() * 2)
    grad.copy_(example().coalesce())
    assert same(grad.to_dense(), example().to_dense())
    grad.copy_(torch.ones(6, 4))
    assert not grad.is_sparse
    assert same(grad.to_dense(), torch.ones(6, 4))
    assert grad.zero_() is grad
    assert not grad.is_sparse  # what was dense stays so
    assert same(grad.to_dense(), torch.zeros(6, 4))
    grad = example()
    grad.data = example().coalesce() * 3
    assert same(grad.to_dense(), example().to_dense() * 3)
    target = torch.zeros(6, 4)
    assert same(target.copy_(example()), example().to_dense())


def test_what_is_materialized_is_not_the_memory_of_autograd():
    grad = example()
    (part,) = grad.parts
    held = CompactGrad.of([part._replace(indices=part.indices[:2], value_index=None, scale=None)],
                   SHAPE, part.values)  # fmt: skip
    before = part.values.clone()
    for each in (grad, held, grad.detach(), held.clone()):
        each._values().zero_()
        each._indices().zero_()
    assert same(part.values, before)
    assert part.indices.tolist() == [3, 1, 3]


@loads_sparse_tensors
@pytest.mark.parametrize("materialized", [False, True])
def test_copies(materialized: bool):
    grad, wanted = example(), example().to_dense()
    if materialized:
        grad.to_dense()
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(grad),
        pickle.loads(pickle.dumps(grad)),
        torch.load(file, weights_only=True),
    ):
        assert type(copied) is Tensor
        assert copied.layout is torch.sparse_coo
        assert same(copied.to_dense(), wanted)


def looked_up(weight: nn.Parameter) -> Tensor:
    table = sparsestep.nn.EmbeddingBag(6, 4, mode="sum", _weight=weight)
    table.weight = weight
    return table(torch.tensor([[1, 3, 1]])).sin().sum()


def test_hooks_see_it_and_may_replace_it():
    weight = nn.Parameter(torch.randn(6, 4))
    looked_up(weight).backward()
    wanted, weight.grad = weight.grad.to_dense(), None
    seen: list[Any] = []
    after = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    held = weight.register_hook(lambda grad: seen.append(grad))
    looked_up(weight).backward()
    looked_up(weight).backward()
    assert all(isinstance(grad, CompactGrad) for grad in seen)
    assert same(seen[0].to_dense(), wanted)
    assert torch.allclose(weight.grad.to_dense(), 2 * wanted)
    held.remove()
    for change in (Tensor.coalesce, Tensor.to_dense, lambda grad: grad * 1):
        weight.grad = None
        handle = weight.register_hook(change)
        looked_up(weight).backward()
        assert torch.allclose(weight.grad.to_dense(), wanted)
        handle.remove()
    after.remove()


def test_a_gradient_that_is_held_is_not_changed_by_the_next():
    """Nor by what is done to it."""
    weight = nn.Parameter(torch.randn(6, 4))
    kept = []
    weight.register_hook(lambda grad: kept.append(grad))
    looked_up(weight).backward()
    wanted = plain(kept[0]).to_dense()
    looked_up(weight).backward()
    weight.grad.mul_(2)
    weight.grad._values().zero_()
    assert same(plain(kept[0]).to_dense(), wanted)


def test_autograd_grad_and_assignment():
    weight = nn.Parameter(torch.randn(6, 4))
    loss = looked_up(weight)
    (grad,) = torch.autograd.grad(loss, weight)
    assert isinstance(grad, CompactGrad)
    weight.grad = grad.clone()
    looked_up(weight).backward()
    assert torch.allclose(weight.grad.to_dense(), 2 * grad.coalesce().to_dense())
    weight.grad = torch.ones(6, 4)
    looked_up(weight).backward()
    assert type(weight.grad) is Tensor
    weight.grad = None


# A table that is looked up several times: the core reads the parts where they are


needs_core = pytest.mark.skipif(ext is None, reason="installed without the native core")
ROWS, DIM = 7, 5
RULES = {
    "SGD": lambda params: sparsestep.SGD(params, lr=0.1, weight_decay=0.1, maximize=True),
    "AdamW": lambda params: sparsestep.AdamW(params, lr=0.1),
    "RowwiseAdagrad": lambda params: sparsestep.RowwiseAdagrad(params, lr=0.1),
}


def lookup_part(seed: int, entries: int, form: str, dtype: torch.dtype) -> IndexedGrad:
    """What one lookup leaves: a row for each id, or one for each bag, with factors or without."""
    chance = torch.Generator().manual_seed(seed)
    positions = torch.randint(ROWS, (entries,), generator=chance)
    bags = entries if form == "rows" else 3
    values = torch.randn(bags, DIM, generator=chance).to(dtype)
    source = None if form == "rows" else torch.randint(bags, (entries,), generator=chance)
    scale = torch.rand(entries, generator=chance) if form == "weighted bags" else None
    return IndexedGrad(positions, values, ROWS, DIM, source, scale)


several_parts = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from([0, 1, 20, 300]),
        st.sampled_from(["rows", "bags", "weighted bags"]),
    ),
    min_size=2,
    max_size=4,
)


def never(forms: Any) -> IndexedGrad:
    raise AssertionError("values were copied")


def stepped(rule: str, dtype: torch.dtype, grads: list[Tensor]) -> list[Tensor]:
    """A parameter and its state after steps; the core knows it by the third."""
    param = torch.nn.Parameter(torch.ones(ROWS, DIM, dtype=dtype))
    optimizer = RULES[rule]([param])
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return [param.detach(), *optimizer.state[param].values()]


@needs_core
@needs_tensors_that_the_core_reads
@given(
    rule=st.sampled_from(sorted(RULES)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    forms=several_parts,
    threads=st.sampled_from([1, 2]),
)
def test_several_parts_give_the_bits_of_one_that_is_put_together(
    rule: str, dtype: torch.dtype, forms: list[tuple[int, int, str]], threads: int
):
    found = [lookup_part(*each, dtype) for each in forms]
    like, shape = torch.empty(0, dtype=dtype), torch.Size([ROWS, DIM])
    first = CompactGrad.of([found[0]], shape, like)
    together = CompactGrad.of([CompactGrad.of(found, shape, like).indexed()], shape, like)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        theirs = stepped(rule, dtype, [first, first, together])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IndexedGrad, "cat", never)
            ours = stepped(rule, dtype, [first, first, CompactGrad.of(found, shape, like)])
    finally:
        torch.set_num_threads(before)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)


@needs_core
@needs_tensors_that_the_core_reads
def test_a_loop_with_two_look_ups_copies_no_values(monkeypatch: pytest.MonkeyPatch):
    table = sparsestep.nn.Embedding(ROWS, DIM)
    optimizer = sparsestep.SparseAdam(table.parameters(), lr=0.1)
    for step in range(5):
        if step == 2:  # the core knows the parameter by now
            monkeypatch.setattr(IndexedGrad, "cat", never)
        optimizer.zero_grad()
        centre = table(torch.tensor([1, 2, 1]))
        context = table(torch.tensor([[3, 1], [0, 0], [2, 5]]))
        (centre.unsqueeze(1) * context).sum().backward()
        optimizer.step()


def test_values_that_the_step_writes_are_read_before():
    shape = torch.Size([ROWS, DIM])
    results = []
    for shares in (True, False):
        param = torch.nn.Parameter(torch.arange(float(ROWS * DIM)).view(ROWS, DIM))
        optimizer = sparsestep.SGD([param], lr=0.5)
        for _ in range(3):
            own = param.detach()[1:3] if shares else param.detach()[1:3].clone()
            others = torch.ones(3, DIM)
            param.grad = CompactGrad.of(
                [
                    IndexedGrad(torch.tensor([0, 2, 2]), others, ROWS, DIM),
                    IndexedGrad(torch.tensor([1, 2, 6]), own, ROWS, DIM, torch.tensor([1, 0, 1])),
                ],
                shape,
                others,
            )
            optimizer.step()
        results.append(param.detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("where", [0, 1])
def test_a_bad_id_in_any_part_changes_nothing(where: int):
    param = torch.nn.Parameter(torch.ones(ROWS, DIM))
    optimizer = sparsestep.Adagrad([param], lr=0.1)
    forms = [lookup_part(seed, 20, "rows", torch.float32) for seed in (1, 2)]
    param.grad = CompactGrad.of(forms, param.shape, param)
    optimizer.step()
    optimizer.step()
    before = param.detach().clone()
    positions = forms[where].indices
    assert positions is not None
    positions[7] = ROWS
    param.grad = CompactGrad.of(forms, param.shape, param)
    with pytest.raises(sparsestep.InputError, match=rf"in \[0, {ROWS}\)"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 2


@needs_core
@needs_tensors_that_the_core_reads
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    forms=several_parts,
    order=st.sampled_from([1.0, 2.0, torch.inf]),
)
def test_clipping_reads_several_parts_where_they_are(
    dtype: torch.dtype, forms: list[tuple[int, int, str]], order: float
):
    found = [lookup_part(*each, dtype) for each in forms]
    like, shape = torch.empty(0, dtype=dtype), torch.Size([ROWS, DIM])
    together = slot_norms((CompactGrad.of(found, shape, like).indexed(),), order)
    ours = slot_norms(tuple(found), order)
    assert ours is not None
    assert together is not None
    assert torch.equal(ours, together)
