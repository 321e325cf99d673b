"""CompactGrad: its sums, products and parts; a sparse gradient like any other."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsestep
from sparsestep._native import ext
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.dedup import iter_sums
from sparsestep.grads.indexed import IndexedGrad
from tests.nn.cases import DTYPES, plain, same
from tests.subject import refused
from tests.table import through_a_file
from tests.torch_versions import loads_sparse_tensors, needs_tensors_that_the_core_reads

SHAPE = torch.Size([6, 4])
NORM_TYPES = (2.0, 1.0, 0.5, 3.0, math.inf, -math.inf, 0.0, -1.0)


@st.composite
def parts(draw: st.DrawFn, shapes: Any = ((6, 4), (24, 1)), most: int = 12) -> IndexedGrad:
    """Rows or elements; with and without ``source`` and ``scale``."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    slots, block = draw(st.sampled_from(shapes))
    entries, rows = draw(st.integers(0, most)), draw(st.integers(1, 4))
    source = draw(st.booleans())
    return IndexedGrad(
        torch.randint(slots, (entries,), generator=generator),
        torch.randn(rows if source else entries, block, generator=generator).double(),
        slots,
        block,
        torch.randint(rows, (entries,), generator=generator) if source else None,
        torch.randn(entries, generator=generator).double() if draw(st.booleans()) else None,
    )


several = st.lists(parts(), max_size=3)
LIKE = torch.zeros(0, dtype=torch.float64)


def dense(some: list[IndexedGrad]) -> Tensor:
    """In plain loops."""
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for part in some:
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


def in_list(function: Callable[..., Any], grad: Tensor, *args: Any) -> Tensor:
    """Changed together with a dense gradient."""
    function([grad, torch.ones(2)], *args)
    return grad


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul": lambda g: g * 3,
    "rmul": lambda g: 3 * g,
    "a tensor": lambda g: g * torch.tensor(3.0),
    "a tensor first": lambda g: torch.tensor(3.0) * g,
    "mul_": lambda g: g.mul_(3),
    "imul": lambda g: g.__imul__(3),
    "mul_ by a tensor": lambda g: g.mul_(torch.tensor(3.0)),
    "div": lambda g: g / 4,
    "div_": lambda g: g.div_(4),
    "torch.div": lambda g: torch.div(g, torch.tensor(4.0)),
    "neg": lambda g: -g,
    "neg_": lambda g: g.neg_(),
    "detach": lambda g: g.detach(),
    "detach_": lambda g: g.detach_(),
    "clone": lambda g: g.clone(),
    "requires_grad_": lambda g: g.requires_grad_(False),
    "clamp": lambda g: g.clamp(-0.2, 0.1),
    "clamp_": lambda g: g.clamp_(-0.2, 0.1),
    "foreach mul": lambda g: torch._foreach_mul([g, torch.ones(2)], 2.0)[0],
    "foreach clamp max": lambda g: torch._foreach_clamp_max([g, torch.ones(2)], 0.1)[0],
    "foreach_ mul by a number": lambda g: in_list(torch._foreach_mul_, g, 3.0),
    "foreach_ mul by a tensor": lambda g: in_list(torch._foreach_mul_, g, torch.tensor(3.0)),
    "foreach_ mul by numbers": lambda g: in_list(torch._foreach_mul_, g, [3.0, 2.0]),
    "foreach_ div": lambda g: in_list(torch._foreach_div_, g, 3.0),
    "foreach_ neg": lambda g: in_list(torch._foreach_neg_, g),
    "foreach_ zero": lambda g: in_list(torch._foreach_zero_, g),
    "foreach_ add": lambda g: in_list(torch._foreach_add_, g, [g.clone(), torch.ones(2)]),
    "foreach_ copy": lambda g: in_list(torch._foreach_copy_, g, [g * 2, torch.zeros(2)]),
    "foreach_ min": lambda g: in_list(torch._foreach_clamp_min_, g, -0.25),
    "foreach_ max": lambda g: in_list(torch._foreach_clamp_max_, g, 0.25),
}


@pytest.mark.parametrize("name", CHANGES)
@settings(max_examples=8)
@given(some=several, dtype=st.sampled_from(DTYPES))
def test_operations_that_leave_it_compact(name: str, some: list[IndexedGrad], dtype: torch.dtype):
    grad = CompactGrad.of([_as(part, dtype) for part in some], SHAPE, LIKE.to(dtype))
    parts = grad.parts
    values = [part.values.clone() for part in parts]
    result = CHANGES[name](grad)
    assert (result is grad) == ("_" in name or name == "imul")
    found = plain(result)
    assert found.dtype == dtype
    near = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    wanted = CHANGES[name](dense(some))
    assert torch.allclose(found.to_dense().double(), wanted, rtol=near, atol=near)
    for part, before in zip(parts, values, strict=True):
        assert same(part.values, before)  # autograd's memory is not written to


def _as(part: IndexedGrad, dtype: torch.dtype, of_scale: torch.dtype | None = None) -> IndexedGrad:
    scale = None if part.scale is None else part.scale.to(of_scale or dtype)
    return part._replace(values=part.values.to(dtype), scale=scale)


@given(
    some=several,
    norm_type=st.sampled_from(NORM_TYPES),
    clip_value=st.sampled_from((0.0, 0.3, math.inf)),
    foreach=st.sampled_from((None, True, False)),
    chunk=st.sampled_from((8, 1 << 20)),
)
def test_clipping_leaves_it_compact(
    some: list[IndexedGrad], norm_type: float, clip_value: float, foreach: bool | None, chunk: int
):
    """By torch, which trainers call, and by us; also of nothing, and in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iter_sums, "__defaults__", (chunk,))
        for library in (sparsestep, torch.nn.utils):
            for name, bound in (("clip_grad_norm_", 0.1), ("clip_grad_value_", clip_value)):
                options = [norm_type] if name == "clip_grad_norm_" else []
                ours, theirs = (
                    [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in (SHAPE, 2)]
                    for _ in range(2)
                )
                grad = ours[0].grad = CompactGrad.of(some, SHAPE, LIKE)
                theirs[0].grad = dense(some)
                ours[1].grad, theirs[1].grad = torch.ones(2, 2, dtype=torch.float64).unbind()
                found = getattr(library, name)(ours, bound, *options, foreach=foreach)
                wanted = getattr(nn.utils, name)(theirs, bound, *options, foreach=foreach)
                assert found is None or torch.allclose(found, wanted)
                assert ours[0].grad is grad
                assert torch.allclose(plain(grad).to_dense(), theirs[0].grad)
                assert torch.allclose(ours[1].grad, theirs[1].grad)


@pytest.mark.parametrize("materialized", [False, True])
def test_norms_have_the_dtype_that_is_asked_for(materialized: bool):
    grad = example()
    if materialized:
        grad._values()
    wanted = torch.linalg.vector_norm(example().to_dense())
    for norm in (torch.linalg.vector_norm(grad), torch._foreach_norm([grad])[0]):
        torch.testing.assert_close(norm, wanted)
    assert torch.linalg.vector_norm(grad, dtype=torch.float64).dtype == torch.float64
    assert torch._foreach_norm([grad], 2, torch.float64)[0].dtype == torch.float64


def test_unscaling_by_torchs_kernel():
    """GradScaler asks for the values; others hand over the gradient itself."""
    grad, found = example(), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor(0.5))
    assert not found
    assert same(grad.to_dense(), example().to_dense() * 0.5)
    grad = example() * math.inf
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor(0.5))
    assert found


ASKED: dict[str, Callable[[Any], Any]] = {
    "_values": lambda g: g._values(),
    "_indices": lambda g: g._indices(),
    "is_coalesced": lambda g: g.is_coalesced(),
    "coalesce": lambda g: g.coalesce().to_dense(),
    "to_dense": lambda g: g.to_dense(),
    "norm": lambda g: g.norm(),
    "elementwise": lambda g: (g * torch.ones(6, 4)).to_dense(),
    "of a dense one": lambda g: torch.zeros(6, 4).add_(g, alpha=-0.5),
    "alpha": lambda g: torch.add(g, g, alpha=-2).to_dense(),
    "index_select": lambda g: g.index_select(0, torch.tensor([1, 3])).to_dense(),
    "concatenated": lambda g: torch.cat([g, g]).to_dense(),
}


@pytest.mark.parametrize("name", ASKED)
def test_code_that_reads_more_gets_an_ordinary_tensor(name: str):
    grad = example()
    wanted = ASKED[name](plain(grad))
    found = ASKED[name](grad)
    assert not isinstance(found, CompactGrad)
    assert same(found, wanted) if isinstance(found, Tensor) else found == wanted


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


def test_changes_in_place():
    """Values are changed as GradScaler does it."""
    grad, wanted = example(), example().to_dense()
    grad._values().mul_(2)
    assert same(grad.to_dense(), wanted * 2)
    grad.mul_(2)
    grad.add_(example())
    assert same((grad + example()).to_dense(), wanted * 6)
    assert grad.mul_(torch.full((6, 4), 2.0)) is grad
    grad -= example()
    assert isinstance(grad, CompactGrad)
    assert same(grad.to_dense(), wanted * 9)
    assert grad.zero_() is grad
    assert grad._nnz() == 0
    grad.data = example().coalesce() * 3
    assert same(grad.to_dense(), wanted * 3)
    assert same(torch.zeros(6, 4).copy_(example()), wanted)
    grad = example()
    grad.copy_(example() * 2)
    assert same(plain(grad).to_dense(), wanted * 2)
    grad.copy_(example().coalesce())
    assert same(grad.to_dense(), wanted)
    for dense in (torch.ones(6, 4), torch.zeros(6, 4)):
        assert (grad.copy_(dense) if dense.any() else grad.zero_()) is grad
        assert not grad.is_sparse  # what was dense stays so
        assert same(grad.to_dense(), dense)


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
    for copied in (
        copy.deepcopy(grad),
        pickle.loads(pickle.dumps(grad)),
        through_a_file(grad),
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
    assert torch.allclose(weight.grad.to_dense(), 2 * wanted)
    weight.grad.mul_(2)
    weight.grad._values().zero_()
    assert same(plain(seen[0]).to_dense(), wanted)  # it is not changed by the next
    held.remove()
    after.remove()
    for change in (Tensor.coalesce, Tensor.to_dense, lambda grad: grad * 1):
        weight.grad = None
        handle = weight.register_hook(change)
        looked_up(weight).backward()
        assert torch.allclose(weight.grad.to_dense(), wanted)
        handle.remove()


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
    some=st.lists(parts(((ROWS, DIM),), 300), min_size=2, max_size=4),
    threads=st.sampled_from([1, 2]),
)
def test_several_parts_give_the_bits_of_one_that_is_put_together(
    rule: str, dtype: torch.dtype, some: list[IndexedGrad], threads: int
):
    found = [_as(part, dtype, torch.float32) for part in some]
    like, shape = torch.empty(0, dtype=dtype), torch.Size([ROWS, DIM])
    first = CompactGrad.of([found[0]], shape, like)
    together = CompactGrad.of([CompactGrad.of(found, shape, like).indexed()], shape, like)
    torch.set_num_threads(threads)
    theirs = stepped(rule, dtype, [first, first, together])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexedGrad, "cat", never)
        ours = stepped(rule, dtype, [first, first, CompactGrad.of(found, shape, like)])
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)


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
    forms = [IndexedGrad(torch.arange(20) % ROWS, torch.ones(20, DIM), ROWS, DIM) for _ in range(2)]
    param.grad = CompactGrad.of(forms, param.shape, param)
    optimizer.step()
    optimizer.step()
    forms[where].indices[7] = ROWS
    param.grad = CompactGrad.of(forms, param.shape, param)
    with refused(optimizer):
        optimizer.step()
