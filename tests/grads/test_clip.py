"""Clipping: torch's own functions on the dense gradients are the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.masked import MaskedTensor, masked_tensor
from torch.nn import utils

import sparsestep
from sparsestep.errors import InputError
from sparsestep.grads import clip, dedup
from sparsestep.grads.clip import clip_grad_norm_, clip_grad_value_
from tests.generate.grads import Drawn, any_grad, as_dense, is_lazy, masked, plain_coo, strided
from tests.generate.grads import coo as any_coo
from tests.generate.params import DTYPES, REAL, any_param
from tests.generate.source import DrawnSource
from tests.properties.marks import QUIET
from tests.table import all_same_bits, same_bits

pytestmark = QUIET
NORM_TYPES = (2.0, 1.0, 0.5, 3.0, math.inf, -math.inf, 0.0, -1.0, -2.0)


def with_grad(grad: Tensor) -> Tensor:
    param = torch.zeros(1, dtype=grad.dtype).expand(grad.shape)
    param.grad = grad
    return param


def coo(indices: list, values: Tensor | list, shape: tuple, dtype=torch.float32) -> Tensor:
    values = torch.as_tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor(indices).reshape(-1, len(values)), values, shape)


def dense_of(grad: Tensor) -> Tensor:
    if not isinstance(grad, MaskedTensor):
        return as_dense(grad)
    return torch.where(grad.get_mask().to_dense(), grad.get_data().to_dense().double(), 0.0)


def assert_same_gradients(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for our, their in zip(ours, theirs, strict=True):
        if their.grad is None:
            assert our.grad is None
            continue
        assert our.grad.dtype == their.grad.dtype
        left, right = dense_of(our.grad), dense_of(their.grad)
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def form(param: Tensor) -> object:
    """What scaling leaves as it is."""
    grad = param.grad
    if grad is None or isinstance(grad, MaskedTensor) or not grad.is_sparse:
        return id(grad)
    return id(grad), grad._indices().tolist(), grad.is_coalesced()


FOREACH = (None, True, False)
Mixture = list[Drawn | None]
# Of one rounding of an element, of the norm, and of the factor.
TOLERANCE = {**dict.fromkeys(DTYPES, 1e-6), torch.float16: 4e-3, torch.bfloat16: 3e-2}


@st.composite
def mixtures(draw: st.DrawFn, dtypes: dict = REAL, kinds: tuple = (any_coo, strided)) -> Mixture:
    """Gradients of one to four parameters, some without."""
    chance = DrawnSource(draw)
    found: Mixture = []
    for _ in range(chance.integer(1, 4)):
        param, _ = any_param(chance, chance.weighted(dtypes))
        drawn = any_grad(chance, param, by_hand=False, kinds=kinds)
        usable = not is_lazy(drawn.grad) and not chance.one_in(5)
        found.append(drawn if usable else None)
    return found


of_masked = mixtures(kinds=(masked, plain_coo))


def ours_and_theirs(mixture: Mixture) -> tuple[list[Tensor], list[Tensor]]:
    """Params with these gradients, and params with their dense form."""
    ours, theirs = [], []
    for drawn in mixture:
        shape, dtype = (
            ((), torch.float32) if drawn is None else (drawn.held.shape, drawn.grad.dtype)
        )
        for params in (ours, theirs):
            params.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        if drawn is not None:
            ours[-1].grad = drawn.grad.clone()
            theirs[-1].grad = drawn.dense.to(dtype)
    return ours, theirs


@given(
    mixtures(DTYPES) | of_masked,
    st.sampled_from(NORM_TYPES),
    st.sampled_from((0.1, 1e3)),
    st.sampled_from(FOREACH),
)
def test_norm_like_torch_on_dense_gradients(mixture, norm_type, max_norm, foreach):
    ours, theirs = ours_and_theirs(mixture)
    forms = [form(param) for param in ours]
    try:
        expected = utils.clip_grad_norm_(theirs, max_norm, norm_type, foreach=foreach)
    except RuntimeError:  # no element, hence no largest and no smallest
        with pytest.raises(RuntimeError, match="norm on an empty tensor"):
            clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
        return
    assume(expected.isfinite())  # the norm of a dense float16 gradient may overflow
    total = clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
    assert (total.dtype, total.shape) == (expected.dtype, expected.shape)
    tolerance = max([TOLERANCE[each.grad.dtype] for each in mixture if each], default=0.0)
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=0)
    assert_same_gradients(ours, theirs, 2 * tolerance)
    assert [form(param) for param in ours] == forms


@given(mixtures() | of_masked, st.sampled_from((0.0, 0.3, 1.5, math.inf)), st.sampled_from(FOREACH))
def test_value_like_torch_on_dense_gradients(mixture, clip_value, foreach):
    ours, theirs = ours_and_theirs(mixture)
    grads = [param.grad for param in ours]
    if any(grad is not None for grad in grads):  # where torch fails
        utils.clip_grad_value_(theirs, clip_value, foreach)
    clip_grad_value_(ours, clip_value, foreach)
    assert_same_gradients(ours, theirs, 0.0)
    assert all(param.grad is grad for param, grad in zip(ours, grads, strict=True))


@pytest.mark.parametrize("foreach", FOREACH)
def test_a_lazily_conjugate_gradient(foreach: bool | None):
    lazy = with_grad(torch.tensor([3 + 4j, 0, 0]).conj())
    clip_grad_norm_(lazy, 1.0, foreach=foreach)
    assert lazy.grad[0].item() == pytest.approx(0.6 - 0.8j, abs=1e-4)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 0.0])
def test_a_gradient_of_any_size(norm_type: float):
    rows = [[0, 2**39, 0]]
    param = with_grad(coo(rows, [[3.0] * 4, [4.0] * 4, [1.0] * 4], (2**40, 4)))
    small = with_grad(torch.tensor([4.0] * 8 + [0.0]))
    assert clip_grad_norm_(param, 1.0, norm_type) == utils.clip_grad_norm_(small, 1.0, norm_type)
    assert param.grad._indices().tolist() == rows
    clip_grad_value_(param, 0.01)
    assert param.grad._indices().tolist() == [[0, 2**39]]
    assert float(param.grad._values().max()) <= 0.01


@pytest.mark.parametrize("values", [[60000.0, 60000.0, -60000.0], [40000.0, 40000.0]])
def test_half_sums_do_not_overflow(values: list[float]):
    """They are finite for the optimizer, so they are for the factor; the result may not be."""
    for clipped in (1.0, 2.0):
        param = with_grad(coo([[1] * len(values)], values, (3,), torch.float16))
        total = clip_grad_norm_(param, clipped)
        assert total.dtype == torch.float16
        assert float(total) == (60000.0 if len(values) == 3 else math.inf)
        assert float(param.grad._values().float().sum()) == pytest.approx(clipped, rel=1e-2)
    param = with_grad(coo([[1] * len(values)], values, (3,), torch.float16))
    clip_grad_value_(param, 50000.0)
    assert param.grad.to_dense().tolist() == [0.0, 49984.0, 0.0]  # the nearest that float16 has


@pytest.mark.parametrize("core", [True, False], ids=["core", "torch"])
def test_another_default_device(core: bool, monkeypatch):
    """As where the rest of a model is on a GPU."""
    if not core:
        monkeypatch.setattr(dedup, "ext", None)
    grads = [coo([[1, 1]], [3.0, 4.0], (3,)), coo([[0, 2, 0]], torch.ones(3, 2), (4, 2))]
    params = [with_grad(grad) for grad in grads]
    monkeypatch.setattr(clip, "_uses_if_unshared", clip._uses_if_unshared.__wrapped__)
    with torch.device("meta"):
        total = clip_grad_norm_(params, 1.0)
        clip_grad_value_(params, 0.01)
    assert float(total) == pytest.approx(math.sqrt(49 + 8 + 2))
    assert float(params[0].grad.to_dense()[1]) == pytest.approx(0.01)


def test_a_tensor_an_iterable_or_nothing():
    for function in (clip_grad_norm_, clip_grad_value_):
        for wrapped in (lambda p: p, lambda p: {p}, lambda p: (q for q in [p])):
            param = with_grad(coo([[1, 1]], [3.0, 4.0], (3,)))
            function(wrapped(param), 0.5)
            assert float(param.grad.to_dense()[1]) == pytest.approx(0.5)
        with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
            function((p for p in []), 1.0)
        assert caught[0].filename == __file__
    for some in ([], [torch.zeros(2), torch.zeros(3)]):
        assert same_bits(clip_grad_norm_(some, 1.0), torch.tensor(0.0))
        clip_grad_value_(some, 1.0)


@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_under_autocast(sparse: bool):
    """There torch has no rule for putting float16 tensors together on a CPU."""
    table = (sparsestep if sparse else torch).nn.Embedding(4, 2).half()
    for ids in ([0, 1], [1, 2]):
        table(torch.tensor(ids)).sum().backward()
    with torch.autocast("cpu"):
        norm = sparsestep.clip_grad_norm_(table.parameters(), 1.0)
        sparsestep.clip_grad_value_(table.parameters(), 0.5)
    assert float(norm) == pytest.approx(12**0.5, rel=1e-3)
    wanted = torch.tensor([12**-0.5, 0.5, 12**-0.5, 0.0], dtype=torch.float16)
    torch.testing.assert_close(table.weight.grad.to_dense(), wanted[:, None].expand(4, 2))


def test_a_dense_half_gradient_beside_a_sparse_one_does_not_overflow():
    """Its norm is beyond float16: taken in float16 the factor would be zero, every gradient too."""
    layer = with_grad(torch.full((3, 600), 0.01, dtype=torch.float16))
    table = with_grad(coo([[1]], [0.5], (3,), torch.float16))
    sparsestep.clip_grad_norm_([layer, table], 1e4, norm_type=0.5)
    factor = 1e4 / (1800 * 0.01**0.5 + 0.5**0.5) ** 2
    assert layer.grad[0, 0].item() == pytest.approx(0.01 * factor, rel=2e-3)
    assert table.grad.to_dense()[1].item() == pytest.approx(0.5 * factor, rel=2e-3)


KEPT = torch.ones(4, 3)


def of_autograd() -> Tensor:
    table = torch.nn.Embedding.from_pretrained(torch.ones(4, 3), freeze=False, sparse=True)
    table(torch.tensor([3, 0, 2, 1])).sum().backward()
    return table.weight


def of_values(values: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: with_grad(coo([[3, 0, 2, 1]], values(), (4, 3)))


@pytest.mark.parametrize(
    ("make", "in_place"),
    [
        (of_autograd, True),
        (lambda: with_grad(of_autograd().grad.coalesce().clone()), True),
        (of_values(lambda: torch.ones(1, 1).expand(4, 3)), False),
        (of_values(lambda: torch.ones(4, 6)[:, ::2]), False),
        (of_values(lambda: KEPT), False),
        (of_values(lambda: torch.ones(4, 3)), None),
    ],
    ids=["autograd's", "coalesced", "expanded", "sliced", "the caller's", "torch does not tell"],
)
def test_values_are_replaced_if_they_may_be_shared(make: Any, in_place: bool | None, monkeypatch):
    monkeypatch.setattr(clip, "_uses_if_unshared", clip._uses_if_unshared.__wrapped__)
    if in_place is None:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    for function, bound in ((clip_grad_norm_, math.sqrt(3)), (clip_grad_value_, 0.5)):
        param = make()
        before, where = form(param), param.grad._values().data_ptr()
        function(param, bound)
        torch.testing.assert_close(param.grad._values(), torch.full((4, 3), 0.5))
        assert form(param) == before
        assert not in_place or param.grad._values().data_ptr() == where
        assert torch.equal(KEPT, torch.ones(4, 3))


def test_gradients_that_share_memory_are_scaled_once():
    """Autograd gives the tables of a sum of rows the same values, each through its own gradient."""
    tables = [torch.nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    params = [table.weight for table in tables]
    ids = torch.tensor([1, 2, 1])
    (tables[0](ids) + tables[1](ids + 1)).pow(2).sum().mul(10).backward()
    assert len({param.grad._values().data_ptr() for param in params}) == 1
    theirs = [with_grad(param.grad.to_dense()) for param in params]
    clip_grad_norm_(params, 0.1)
    utils.clip_grad_norm_(theirs, 0.1)
    assert_same_gradients(params, theirs, 1e-6)


@pytest.mark.parametrize("own", [True, False])
def test_a_param_given_twice_is_scaled_twice_like_torch(own: bool):
    values = torch.full((2, 3), 2.0)
    ours = with_grad(coo([[1, 2]], values.clone() if own else values, (4, 3)))
    theirs = with_grad(ours.grad.to_dense())
    totals = clip_grad_norm_([ours, ours], 1.0), utils.clip_grad_norm_([theirs, theirs], 1.0)
    torch.testing.assert_close(*totals)
    assert_same_gradients([ours], [theirs], 1e-6)


def test_gradients_that_carry_a_graph():
    table = torch.nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=False, sparse=True)
    loss = table(torch.tensor([1, 1])).pow(3).sum()
    (table.weight.grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    assert clip_grad_norm_(table.parameters(), 0.5).requires_grad is False
    assert float(table.weight.grad.detach().to_dense().norm()) == pytest.approx(0.5, rel=1e-4)


def bits(params: list[Tensor]) -> list[Tensor]:
    grads = [param.grad for param in params]
    return [(grad._values() if grad.is_sparse else grad).clone() for grad in grads]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_non_finite_norm_is_an_error_if_asked_for(bad: float, norm_type: float):
    params = [with_grad(coo([[0, 0]], [1.0, bad], (3,))), with_grad(torch.ones(2))]
    before = bits(params)
    with pytest.raises(RuntimeError, match="is non-finite"):
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    assert all_same_bits(bits(params), before)
    total = clip_grad_norm_(params, 1.0, norm_type)
    assert math.isnan(total) if math.isnan(bad) else math.isinf(total)


BAD: dict[str, Callable[[], Tensor]] = {
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "masked integer": lambda: masked_tensor(torch.eye(3).long(), torch.eye(3) > 0),
    "integer": lambda: torch.eye(3).long().to_sparse(),
    "beyond": lambda: coo([[0, 1], [1, 3]], [1.0, 1.0], (3, 3)),
    "below": lambda: coo([[0, -1]], torch.ones(2, 3), (3, 3)),
}


@pytest.mark.parametrize("function", [clip_grad_norm_, clip_grad_value_])
@pytest.mark.parametrize("kind", BAD)
def test_bad_gradients_are_refused_before_anything_is_changed(function: Callable, kind: str):
    bad = BAD[kind]() if kind == "csr" else torch.zeros(3, 3).to(BAD[kind]().dtype)
    bad.grad = BAD[kind]()
    params = [with_grad(coo([[0, 0]], [2.0, 3.0], (3,))), with_grad(torch.ones(2))]
    before = bits(params)
    with pytest.raises(InputError, match="param 3: "):
        function([*params, torch.zeros(1), bad], 0.1)
    assert all_same_bits(bits(params), before)
