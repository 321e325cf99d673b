"""Whatever is passed for a gradient is used, or refused in one sentence; it never crashes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import sparsestep
from sparsestep import IndexedGrad, functional
from sparsestep.errors import InputError
from tests.table import same_bits

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what is experimental

SHAPE = (4, 6)
ONES = torch.ones(SHAPE)
ROW, ROWS = torch.ones(1, 6), torch.tensor([1])
DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


class Wrapper(Tensor):
    """One without memory, as libraries make them."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def fake() -> Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(ONES)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(2, 6)])


def quantized() -> Tensor:
    return torch.quantize_per_tensor(ONES, 0.1, 0, torch.qint8)


NO_TENSORS = [
    *({}, 3, 2.5, "x", b"x", [1.0], (1, 2), torch.Size(SHAPE), torch.float32, object(), True),
    *(np.ones(SHAPE), torch.nn.Identity(), range(3), Tensor, IndexedGrad, lambda: 1),
]
UNUSABLE = {
    "nested": nested,
    "quantized": quantized,
    "mkldnn": ONES.to_mkldnn,
    "meta": lambda: ONES.to("meta"),
    "fake": fake,
    "wrapper": lambda: Wrapper(ONES),
}
NO_PART = {
    "zeros without memory": lambda: torch._efficientzerotensor(SHAPE),
    "coo": ONES.to_sparse,
    "csr": ONES.to_sparse_csr,
    "bsr": lambda: ONES.to_sparse_bsr((2, 2)),
    "masked": lambda: masked_tensor(ONES, ONES > 0),
    "touched": lambda: IndexedGrad(None, ONES),
}


def ways(param: Tensor, grad: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every way by which a gradient comes in, with the name that messages begin with."""
    moments = [torch.zeros_like(param) for _ in range(2)]
    named = (
        sparsestep.FunctionalAdam([param]),
        sparsestep.FunctionalAdam([param], semantics="dense"),
    )
    for engine in ("auto", "reference"):
        yield "adam_", lambda e=engine: functional.adam_(param, grad, *moments, step=1, engine=e)
    mask = torch.tensor([True, False, True, True])
    yield "adam_", lambda: functional.adam_(param, grad, *moments, step=1, mask=mask)
    sums = torch.zeros(4)
    yield "rowwise_adagrad_", lambda: functional.rowwise_adagrad_(param, grad, sums)
    for opt in named:
        yield "Adam: param 0 of group 0", lambda o=opt: o.step([grad])
        yield "Adam: param 0 of group 0", lambda o=opt: o.step_param(param, grad)
    leaf = param.clone().requires_grad_()
    try:
        leaf.grad = grad
    except (TypeError, RuntimeError):
        return  # torch does not let it through
    yield "Adam: param 0 of group 0", sparsestep.Adam([leaf]).step


def assert_refused(
    grad: Any, dtype: torch.dtype = torch.float32, match: str = r"must|need"
) -> None:
    param = torch.zeros(SHAPE, dtype=dtype)
    for who, call in ways(param, grad):
        with pytest.raises(InputError, match=match) as raised:
            call()
        text = str(raised.value)
        assert text.startswith(f"{who}: "), text
        assert text.endswith("."), text
        assert "\n" not in text
    assert not param.any()


@pytest.mark.parametrize("grad", NO_TENSORS, ids=lambda g: type(g).__name__)
def test_no_tensor(grad: Any):
    assert_refused(grad, match="the gradient must be a tensor or an IndexedGrad. Got ")


@pytest.mark.parametrize("kind", UNUSABLE)
def test_tensors_that_cannot_be_read(kind: str):
    assert_refused(UNUSABLE[kind]())


@pytest.mark.parametrize("kind", [*UNUSABLE, *NO_PART])
def test_what_cannot_be_part_of_a_touched(kind: str):
    part = {**UNUSABLE, **NO_PART}[kind]()
    rows = torch.arange(4)
    for grad in (IndexedGrad(rows, part), IndexedGrad(None, part), IndexedGrad(part, ROW)):
        assert_refused(grad)
    for name in ("source", "scale", "held"):
        assert_refused(IndexedGrad(ROWS, ROW, **{name: part}))


@pytest.mark.parametrize("part", NO_TENSORS[:6], ids=lambda g: type(g).__name__)
def test_parts_of_a_touched_that_are_no_tensors(part: Any):
    assert_refused(IndexedGrad(ROWS, part))
    assert_refused(IndexedGrad(part, ROW))
    for name in ("source", "scale", "held"):
        assert_refused(IndexedGrad(ROWS, ROW, **{name: part}))
    if part != 3:
        assert_refused(IndexedGrad(ROWS, ROW, part, 6))


@pytest.mark.parametrize("param", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_used_or_refused(dtype: torch.dtype, param: torch.dtype):
    reals = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    fits = dtype in reals if param is torch.float32 else dtype is param
    starts = torch.tensor([0, 1, 1, 1, 1])
    for make in (
        lambda: torch.zeros(SHAPE, dtype=dtype),
        lambda: torch.sparse_coo_tensor(ROWS[None], torch.zeros(1, 6, dtype=dtype), SHAPE),
        lambda: torch.sparse_csr_tensor(starts, ROWS, torch.zeros(1, dtype=dtype), SHAPE),
        lambda: IndexedGrad(ROWS, torch.zeros(1, 6, dtype=dtype)),
        lambda: IndexedGrad(None, torch.zeros(SHAPE, dtype=dtype)),
    ):
        try:
            grad = make()
        except (RuntimeError, NotImplementedError):
            continue  # torch has no such tensor
        if not fits:
            assert_refused(grad, param)
            continue
        for _, call in ways(torch.zeros(SHAPE, dtype=param), grad):
            call()


def test_conjugated_gradients_are_used():
    values = torch.complex(ONES, 2 * ONES)
    for lazy in (
        values.conj(),
        values.conj().to_sparse(1),
        values.to_sparse(1).conj(),
        IndexedGrad(None, values.conj()),
        IndexedGrad(torch.arange(4), values.conj()),
    ):
        got, wanted = torch.zeros(2, *SHAPE, dtype=torch.complex64)
        plain = torch.conj_physical(values)
        for (_, one), (_, other) in zip(ways(got, lazy), ways(wanted, plain), strict=False):
            one()
            other()
            assert same_bits(got, wanted)


def test_a_parameter_that_cannot_be_written():
    for param in ("x", fake(), Wrapper(ONES), torch._efficientzerotensor(SHAPE)):
        with pytest.raises(InputError, match=r"^sgd_: (the|a) parameter must"):
            functional.sgd_(param, ONES)
    for state in (fake(), Wrapper(ONES)):
        with pytest.raises(InputError, match=r"^lion_: the state 'exp_avg' must own memory"):
            functional.lion_(torch.zeros(SHAPE), ONES, state)
