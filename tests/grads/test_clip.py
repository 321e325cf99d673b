"""Clipping: torch's own functions on the densified gradients are the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import utils

import sparsestep
from sparsestep.errors import InputError
from sparsestep.grads import clip, dedup
from sparsestep.grads.clip import clip_grad_norm_, clip_grad_value_
from tests.generate.grads import Drawn, any_grad, is_lazy, strided
from tests.generate.grads import coo as any_coo
from tests.generate.params import REAL, any_param
from tests.generate.source import DrawnSource
from tests.grads.clipping import NORM_TYPES, assert_same_gradients, coo, form, with_grad
from tests.table import same_bits

FOREACH = (None, True, False)
Mixture = list[Drawn | None]
# Of one rounding of an element, of the norm, and of the factor.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-6}


@st.composite
def mixtures(draw: st.DrawFn, kinds: tuple = (any_coo, strided)) -> Mixture:
    """Gradients of one to four parameters, some without."""
    chance = DrawnSource(draw)
    found: Mixture = []
    for _ in range(chance.integer(1, 4)):
        param, _ = any_param(chance, chance.weighted(REAL))
        drawn = any_grad(chance, param, by_hand=False, kinds=kinds)
        usable = not is_lazy(drawn.grad) and not chance.one_in(5)
        found.append(drawn if usable else None)
    return found


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


# Against torch


@given(
    mixtures(), st.sampled_from(NORM_TYPES), st.sampled_from((0.1, 1e3)), st.sampled_from(FOREACH)
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


@given(mixtures(), st.sampled_from((0.0, 0.3, 1.5, math.inf)), st.sampled_from(FOREACH))
def test_value_like_torch_on_dense_gradients(mixture, clip_value, foreach):
    ours, theirs = ours_and_theirs(mixture)
    grads = [param.grad for param in ours]
    if any(grad is not None for grad in grads):  # where torch fails
        utils.clip_grad_value_(theirs, clip_value, foreach)
    clip_grad_value_(ours, clip_value, foreach)
    assert_same_gradients(ours, theirs, 0.0)
    assert all(param.grad is grad for param, grad in zip(ours, grads, strict=True))


@given(mixtures(kinds=(strided,)), st.sampled_from(FOREACH))
def test_dense_lists_have_the_bits_of_torch(mixture, foreach):
    assume(any(mixture))
    ours, theirs = ours_and_theirs(mixture)
    theirs_total = utils.clip_grad_norm_(theirs, 0.7, foreach=foreach)
    assert same_bits(clip_grad_norm_(ours, 0.7, foreach=foreach), theirs_total)
    clip_grad_value_(ours, 0.01, foreach)
    utils.clip_grad_value_(theirs, 0.01, foreach)
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is their.grad is None or same_bits(our.grad, their.grad)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("indices", [[[1, 1, 0]], [[0, 2, 1]]], ids=["duplicates", "unique"])
def test_complex_gradients(norm_type: float, indices: list):
    values = torch.tensor([3 + 4j, -2j, 1.0])
    ours = [with_grad(coo(indices, values, (3,), torch.complex64)), with_grad(torch.ones(2))]
    theirs = [with_grad(param.grad.to_dense().clone()) for param in ours]
    total = clip_grad_norm_(ours, 1.0, norm_type)
    torch.testing.assert_close(total, utils.clip_grad_norm_(theirs, 1.0, norm_type))
    assert_same_gradients(ours, theirs, 1e-6)
    with pytest.raises(InputError, match="param 0: the gradient must be real"):
        clip_grad_value_(ours, 1.0)


# Nothing but the stored values counts


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_gradient_of_any_size(norm_type: float):
    rows = [[0, 2**39, 0]]
    param = with_grad(coo(rows, [[3.0] * 4, [4.0] * 4, [1.0] * 4], (2**40, 4)))
    small = with_grad(torch.tensor([4.0] * 8 + [0.0]))
    assert clip_grad_norm_(param, 1.0, norm_type) == utils.clip_grad_norm_(small, 1.0, norm_type)
    assert param.grad._indices().tolist() == rows
    clip_grad_value_(param, 0.01)
    assert param.grad._indices().tolist() == [[0, 2**39]]
    assert float(param.grad._values().max()) <= 0.01


@pytest.mark.parametrize("sparse_dim", [0, 1, 2])
def test_duplicates_are_summed_before_their_values_are_clipped(sparse_dim: int):
    values = torch.tensor([5.0, -5.0, 0.5]).reshape(3, *[1] * (2 - sparse_dim))
    param = with_grad(coo([[0] * 3] * sparse_dim, values, (1, 1)))
    clip_grad_value_(param, 1.0)
    assert param.grad.to_dense().tolist() == [[0.5]]
    assert param.grad.is_coalesced()
    assert param.grad.sparse_dim() == sparse_dim


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


# Where tensors are made


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


# How it is called


def test_no_gradients():
    params = [torch.zeros(2), torch.zeros(3)]
    for some in ([], params):
        assert same_bits(clip_grad_norm_(some, 1.0), torch.tensor(0.0))
        clip_grad_value_(some, 1.0)
    for function in (clip_grad_norm_, clip_grad_value_):
        function((p for p in params), 1.0)
        with pytest.warns(UserWarning, match="`parameters` is an empty generator") as caught:
            function((p for p in []), 1.0)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("function", [clip_grad_norm_, clip_grad_value_])
def test_a_tensor_an_iterable_or_a_generator(function: Callable):
    for wrapped in (lambda p: p, lambda p: [p], lambda p: {p}, lambda p: (q for q in [p])):
        param = with_grad(coo([[1, 1]], [3.0, 4.0], (3,)))
        function(wrapped(param), 0.5)
        assert float(param.grad.to_dense()[1]) == pytest.approx(0.5)


def test_training_with_sparse_and_dense_layers():
    seen = {}
    for sparse, function in ((True, clip_grad_norm_), (False, utils.clip_grad_norm_)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=sparse), torch.nn.Linear(4, 1))
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        seen[sparse] = []
        for step in range(20):
            ids = (torch.arange(8) * (step + 1)) % 20
            opt.zero_grad()
            loss = (model(ids).squeeze(1) - ids / 10).square().mean()
            loss.backward()
            seen[sparse].append((loss.item(), function(model.parameters(), 0.5).item()))
            opt.step()
    torch.testing.assert_close(torch.tensor(seen[True]), torch.tensor(seen[False]))
    assert seen[True][-1][0] < seen[True][0][0] / 2


def test_gradients_that_are_lazily_conjugate():
    param = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    param.grad = torch.tensor([3 + 4j, 0, 0]).conj()
    assert float(sparsestep.clip_grad_norm_([param], 1.0)) == pytest.approx(5.0)
    assert param.grad[0].item() == pytest.approx(0.6 - 0.8j, abs=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_half_precision_under_autocast(sparse: bool):
    """There torch has no rule for putting float16 tensors together on a CPU."""
    table = (sparsestep if sparse else torch).nn.Embedding(4, 2).half()
    for ids in ([0, 1], [1, 2]):
        table(torch.tensor(ids)).sum().backward()
    with torch.autocast("cpu"):
        norm = sparsestep.clip_grad_norm_(table.parameters(), 1.0)
    assert float(norm) == pytest.approx(12**0.5, rel=1e-3)


def test_a_dense_half_gradient_beside_a_sparse_one_does_not_overflow():
    """Its norm is beyond float16: taken in float16 the factor would be zero, every gradient too."""
    layer = with_grad(torch.full((3, 600), 0.01, dtype=torch.float16))
    table = with_grad(coo([[1]], [0.5], (3,), torch.float16))
    sparsestep.clip_grad_norm_([layer, table], 1e4, norm_type=0.5)
    factor = 1e4 / (1800 * 0.01**0.5 + 0.5**0.5) ** 2
    assert layer.grad[0, 0].item() == pytest.approx(0.01 * factor, rel=2e-3)
    assert table.grad.to_dense()[1].item() == pytest.approx(0.5 * factor, rel=2e-3)
