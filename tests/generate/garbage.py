"""Invalid and odd gradients, to be passed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map

from sparsestep import IndexedGrad
from tests.generate.grads import BY_ROW, can_be_compressed, compressed
from tests.generate.source import NotApplicableError, Source

# A gradient, what it is, and whether it has to be refused.
Bad = tuple[Any, str, bool]


class Wrapper(Tensor):
    """A tensor that wraps another and has no memory of its own, as DTensor has none."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=requires_grad
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda t: t.inner if isinstance(t, Wrapper) else t, (args, kwargs))
        found = func(*args, **(kwargs or {}))
        return tree_map(lambda t: Wrapper(t) if isinstance(t, Tensor) else t, found)


class Handed(torch.nn.Parameter):
    """A parameter whose gradient is whatever it was handed: torch itself refuses some bad ones."""

    handed: Any = None

    @property
    def grad(self) -> Any:  # type: ignore[override]
        return self.handed

    @grad.setter
    def grad(self, value: Any) -> None:
        self.handed = value


NO_TENSORS: list[Any] = [
    *({}, [], (), 3, 0.5, "gradient", True, object(), int, len, torch.float32, torch.Size([2])),
    *(np.ones((4, 6)), [1.0], {"grad": 1}, b"bytes", range(3), 1j, torch.nn.Identity(), Tensor),
]


def no_tensor(chance: Source, param: Tensor) -> Bad:
    thing = chance.pick(NO_TENSORS)
    return thing, f"a gradient that is {type(thing).__name__}", True


def wrong_shape(chance: Source, param: Tensor) -> Bad:
    shape = list(param.shape)
    if shape and chance.one_in(2):
        shape[chance.integer(0, len(shape) - 1)] += chance.pick([1, 2])
    else:
        shape.append(chance.pick([1, 2]))
    values = chance.numbers(shape, param.dtype)
    form = chance.integer(0, 2)
    if form == 1:
        return values.to_sparse_coo(), f"a COO gradient of shape {tuple(shape)}", True
    if form == 2 and not param.is_complex() and param.dtype != torch.bfloat16:
        mask = torch.ones(shape, dtype=torch.bool)
        return masked_tensor(values, mask), f"a MaskedTensor of shape {tuple(shape)}", True
    return values, f"a strided gradient of shape {tuple(shape)}", True


def wrong_dtype(chance: Source, param: Tensor) -> Bad:
    dtypes = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn]
    dtypes.append(torch.float32 if param.is_complex() else torch.complex64)
    dtype = chance.pick(dtypes)
    values = torch.ones(param.shape).to(dtype)
    form = chance.integer(0, 2)
    if form == 1 and dtype != torch.float8_e4m3fn:
        return values.to_sparse_coo(), f"a COO gradient of {dtype}", True
    if form == 2:
        rows = param.shape[0] if param.dim() else 1
        grad = IndexedGrad(
            torch.arange(rows), values.reshape(rows, -1) if param.numel() else values
        )
        return grad, f"an IndexedGrad of {dtype}", True
    return values, f"a strided gradient of {dtype}", True


def elsewhere(chance: Source, param: Tensor) -> Bad:
    values = torch.ones(param.shape, dtype=param.dtype)
    form = chance.integer(0, 2)
    if form == 1:
        return values.to_sparse_coo().to("meta"), "a COO gradient on meta", True
    if form == 2:
        rows = param.shape[0] if param.dim() else 1
        grad = IndexedGrad(torch.arange(rows, device="meta"), values)
        return grad, "an IndexedGrad with positions on meta", True
    return values.to("meta"), "a strided gradient on meta", True


def odd(chance: Source, param: Tensor) -> Bad:
    """Tensors of rare kinds, some of which might be worked with."""
    values = chance.numbers(param.shape, param.dtype)
    kind = chance.pick(["zero", "wrapper", "mkldnn", "nested", "quantized", "param", "requires"])
    if kind == "zero":
        zero = torch._efficientzerotensor(tuple(param.shape), dtype=param.dtype)
        return zero, "a zero tensor without memory", False
    if kind == "wrapper":
        return Wrapper(values), "a wrapper without memory", False
    if kind == "mkldnn" and param.dtype == torch.float32 and param.dim() and param.numel():
        return values.to_mkldnn(), "an mkldnn gradient", True
    if kind == "nested" and param.dim() and param.numel():
        with_rows = torch.nested.nested_tensor([values.flatten(), values.flatten()])
        return with_rows, "a nested gradient", True
    if kind == "quantized" and param.dtype == torch.float32:
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "a quantized one", True
    if kind == "param":
        return param.detach(), "the parameter itself as gradient", False
    return values.requires_grad_(), "a gradient that requires one", False


def indices_outside(chance: Source, param: Tensor) -> Bad:
    if not param.dim() or not param.numel():
        raise NotApplicableError
    sparse_dim = chance.integer(1, param.dim())
    shape = param.shape
    count = chance.integer(1, 4)
    indices = torch.tensor([chance.integers(count, size) for size in shape[:sparse_dim]])
    dim, place = chance.integer(0, sparse_dim - 1), chance.integer(0, count - 1)
    bad = chance.pick([-1, shape[dim], 2**31, 2**62, -(2**63), 2**63 - 1])
    indices[dim, place] = bad
    values = chance.numbers((count, *shape[sparse_dim:]), param.dtype)
    grad = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    return grad, f"COO indices {indices.tolist()}", True


def broken_compressed(chance: Source, param: Tensor) -> Bad:
    if not can_be_compressed(param, param.dtype):
        raise NotApplicableError
    good = compressed(chance, param, param.dtype).grad
    by_row = good.layout in BY_ROW
    starts = (good.crow_indices() if by_row else good.ccol_indices()).clone()
    others = (good.col_indices() if by_row else good.row_indices()).clone()
    values = good.values().clone()
    what = chance.pick(["start", "end", "middle", "other", "values"])
    if what == "start":
        starts[..., 0] = chance.pick([-1, 1, 2**31 - 1])
    elif what == "end":
        starts[..., -1] += chance.pick([-1, 1, 7])
    elif what == "middle" and starts.shape[-1] > 2:
        starts[..., 1] = chance.pick([-5, others.shape[-1] + 1])
    elif what == "other" and others.numel():
        others[..., chance.integer(0, others.shape[-1] - 1)] = chance.pick([-1, 700, 2**31 - 1])
    else:
        raise NotApplicableError
    grad = torch.sparse_compressed_tensor(
        starts, others, values, param.shape, layout=good.layout, check_invariants=False
    )
    return grad, f"{good.layout} with a broken {what}", True


def broken_indexed(chance: Source, param: Tensor) -> Bad:
    shape = tuple(param.shape)
    rows, block = (shape[0] if shape else 1), math.prod(shape[1:])
    if not rows or not block:
        raise NotApplicableError
    n = chance.integer(1, 4)
    fields: dict[str, Any] = {
        "indices": torch.tensor(chance.integers(n, rows)),
        "values": chance.numbers((n, block), param.dtype),
        "num_slots": rows,
        "slot_size": block,
        "value_index": None,
        "scale": None,
        "element_mask": None,
    }
    name = chance.pick(list(fields))
    bad, must = chance.pick(_broken(chance, name, n, rows, block, param))
    fields[name] = bad
    shown = tuple(bad.shape) if isinstance(bad, Tensor) else bad
    return (
        IndexedGrad(**fields),
        f"an IndexedGrad whose {name} is {type(bad).__name__} {shown}",
        must,
    )


def _broken(
    chance: Source, name: str, n: int, rows: int, block: int, param: Tensor
) -> list[tuple[Any, bool]]:
    """Values for one field, and whether each has to be refused."""
    things: list[tuple[Any, bool]] = [("x", True), ([0], True), (1.5, True), ({}, True)]
    if name in ("num_slots", "slot_size"):
        wrong = (rows if name == "num_slots" else block) + 1
        return [*things, (-1, True), (2**62, True), (wrong, True), (None, True), (True, False)]
    if name == "element_mask":
        mask = torch.ones(n, block, dtype=torch.bool)
        return [(mask, False), (mask.int(), True), (mask[None], True), ("x", True)]
    sparse = torch.eye(n).to_sparse_coo()
    meta = torch.zeros(n, dtype=torch.int64, device="meta")
    things += [(sparse, True), (meta, True)]
    if name == "values":
        return [*things, (None, True), (chance.numbers((n, block + 1), param.dtype), True)]
    if name == "scale":
        integers = torch.ones(n, dtype=torch.int64)
        return [*things, (torch.ones(n + 1), True), (integers, True), (torch.ones(n, 1), False)]
    outside = chance.pick([-1, max(rows, n), 2**31, 2**62, -(2**63)])
    at = torch.zeros(n, dtype=torch.int64)
    at[chance.integer(0, n - 1)] = outside
    floats, longer = torch.zeros(n), torch.zeros(n + 1, dtype=torch.int64)
    return [*things, (at, True), (at, True), (floats, True), (longer, True)]


def indices_in_the_param(chance: Source, param: Tensor) -> Bad:
    """Positions that the step itself would write over while it reads them."""
    fits = param.dtype == torch.float64 and param.dim() and param.is_contiguous() and param.numel()
    if not fits:
        raise NotApplicableError
    rows = param.shape[0]
    positions = param.detach().view(-1).view(torch.int64)[:rows]
    values = chance.numbers((rows, math.prod(param.shape[1:])), param.dtype)
    return IndexedGrad(positions, values), "positions in the parameter's memory", False


GARBAGE: dict[Callable[[Source, Tensor], Bad], int] = {
    no_tensor: 3,
    wrong_shape: 3,
    wrong_dtype: 3,
    elsewhere: 2,
    odd: 3,
    indices_outside: 4,
    broken_compressed: 4,
    broken_indexed: 8,
    indices_in_the_param: 1,
}


def any_garbage(chance: Source, param: Tensor) -> Bad:
    while True:
        try:
            return chance.weighted(GARBAGE)(chance, param)
        except NotApplicableError:
            continue


# By name, for a parameter of 4 x 6 in float32


def compressed_of(
    starts: list[Any],
    others: list[Any],
    values: Tensor,
    layout: torch.layout = torch.sparse_csr,
    shape: tuple[int, ...] = (4, 6),
) -> Callable[[], Tensor]:
    return lambda: torch.sparse_compressed_tensor(
        torch.tensor(starts), torch.tensor(others), values, shape, layout=layout
    )


def indexed(*args: Any, **kwargs: Any) -> Callable[[], IndexedGrad]:
    return lambda: IndexedGrad(*args, **kwargs)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def fake() -> Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(WHOLE)


class Unusable(Tensor):
    """A tensor without memory that knows no operation."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


ONES, WHOLE = torch.ones(2, 6), torch.ones(4, 6)
CSR, CSC, BSR, BSC = torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc
UNREADABLE: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(2, 6)]),
    "quantized": lambda: torch.quantize_per_tensor(WHOLE, 0.1, 0, torch.qint8),
    "mkldnn": WHOLE.to_mkldnn,
    "meta": lambda: WHOLE.to("meta"),
    "fake": fake,
    "wrapper": lambda: Unusable(WHOLE),
}
# What may be a gradient, but not a part of an IndexedGrad.
NO_PARTS: dict[str, Callable[[], Any]] = {
    "zeros without memory": lambda: torch._efficientzerotensor((4, 6)),
    "coo": WHOLE.to_sparse,
    "csr": WHOLE.to_sparse_csr,
    "bsr": lambda: WHOLE.to_sparse_bsr((2, 2)),
    "masked": lambda: masked_tensor(WHOLE, WHOLE > 0),
    "indexed": lambda: IndexedGrad(None, WHOLE),
    "number": lambda: 2.5,
    "string": lambda: "x",
    "list": lambda: [1.0],
}
BROKEN: dict[str, Callable[[], Any]] = {
    "index too large": indexed(ids(0, 4), ONES),
    "index negative": indexed(ids(0, -1), ONES),
    "index 2**62": indexed(ids(0, 2**62), ONES),
    "index 2**62 of slots that are cut": indexed(ids(0, 2**62), torch.ones(2, 8), 3, 8),
    "index of an element": indexed(ids(0, 24), torch.ones(2), 24, 1),
    "value_index too large": indexed(ids(0, 1), ONES, 4, 6, ids(0, 2)),
    "value_index negative": indexed(ids(0, 1), ONES, 4, 6, ids(-1, 0)),
    "value_index too short": indexed(ids(0, 1), ONES, 4, 6, ids(0)),
    "value_index without indices": indexed(None, torch.ones(4, 6), value_index=ids(0)),
    "scale too short": indexed(ids(0, 1), ONES, scale=torch.ones(1)),
    "scale of integers": indexed(ids(0, 1), ONES, scale=ids(1, 1)),
    "scale without indices": indexed(None, torch.ones(4, 6), scale=torch.ones(4)),
    "scale that is no tensor": indexed(ids(0, 1), ONES, scale=2.0),
    "more indices than values": indexed(ids(0, 1, 2), ONES),
    "fewer indices than values": indexed(ids(0), ONES),
    "values of half a row": indexed(ids(0, 1), torch.ones(2, 3)),
    "values of half a row with a value_index": indexed(ids(0, 1), torch.ones(5), 4, 6, ids(0, 0)),
    "dense values of another shape": indexed(None, torch.ones(6, 4)),
    "num_slots x slot_size": indexed(ids(0, 1), ONES, 5, 6),
    "num_slots without slot_size": indexed(ids(0, 1), ONES, 4),
    "negative num_slots": indexed(ids(0, 1), ONES, -4, -6),
    "num_slots that are no integer": indexed(ids(0), ONES, 4.0, 6),
    "float indices": indexed(torch.tensor([0.0, 1.0]), ONES),
    "bool indices": indexed(torch.tensor([True, False]), ONES),
    "float value_index": indexed(ids(0, 1), ONES, 4, 6, torch.tensor([0.0, 1.0])),
    "list of indices": indexed([0, 1], ONES),
    "sparse values": indexed(ids(0, 1), ONES.to_sparse_coo()),
    "no values": indexed(ids(0, 1), None),
    "integer values": indexed(ids(0, 1), ONES.long()),
    "complex values": indexed(ids(0, 1), ONES * 1j),
    "values elsewhere": indexed(ids(0, 1), ONES.to("meta")),
    "crow that falls": compressed_of([0, 2, 1, 3, 3], [0, 1, 2], torch.ones(3)),
    "crow that begins late": compressed_of([1, 1, 2, 2, 2], [0, 1], torch.ones(2)),
    "crow that ends early": compressed_of([0, 0, 1, 1, 1], [0, 1], torch.ones(2)),
    "ccol that falls": compressed_of([0, 2, 1, 3, 3, 3, 3], [0, 1, 2], torch.ones(3), CSC),
    "crow too short": compressed_of([0, 1, 2], [0, 1], torch.ones(2)),
    "crow too long": compressed_of([0] * 5 + [1, 2], [0, 1], torch.ones(2)),
    "no crow": compressed_of([], [0], torch.ones(1)),
    "crow of floats": compressed_of([0.0, 1, 1, 1, 1], [0], torch.ones(1)),
    "crow of a batch": compressed_of([[0, 1, 1, 1, 1]], [[0]], torch.ones(1, 1)),
    "fewer values than columns": compressed_of([0, 1, 2, 2, 2], [0, 1], torch.ones(1)),
    "more values than columns": compressed_of([0, 1, 2, 2, 2], [0, 1], torch.ones(3)),
    "column too large": compressed_of([0, 1, 2, 2, 2], [0, 6], torch.ones(2)),
    "column negative": compressed_of([0, 1, 2, 2, 2], [0, -1], torch.ones(2)),
    "row too large": compressed_of([0, 1, 2, 2, 2, 2, 2], [0, 4], torch.ones(2), CSC),
    "column of blocks too large": compressed_of([0, 1, 2], [0, 2], torch.ones(2, 2, 3), BSR),
    "row of blocks too large": compressed_of([0, 1, 2], [0, 2], torch.ones(2, 2, 3), BSC),
    "blocks that do not divide the shape": compressed_of([0, 1], [0], torch.ones(1, 3, 4), BSR),
    "blocks without elements": compressed_of([0, 0], [], torch.ones(0, 0, 0), BSR),
    "values that are no blocks": compressed_of([0, 1, 1], [0], torch.ones(1), BSR),
    "COO index out of its dim": lambda: torch.sparse_coo_tensor(
        [[1, 0], [-1, 3]], torch.ones(2), (4, 6)
    ),
    "COO row out of its dim": lambda: torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 6), (4, 6)),
    "CSR of another shape": compressed_of([0, 1, 2], [0, 1], torch.ones(2), shape=(2, 6)),
    "strided of another shape": lambda: torch.ones(6, 4),
    "CSR of integers": compressed_of([0, 1, 1, 1, 1], [0], torch.ones(1, dtype=torch.int64)),
    "MaskedTensor of another shape": lambda: masked_tensor(torch.ones(6, 4), torch.ones(6, 4) > 0),
    "MaskedTensor of integers": lambda: masked_tensor(
        torch.ones(4, 6).long(), torch.ones(4, 6) > 0
    ),
    "unknown layout": lambda: torch.ones(4, 6).to_mkldnn(),
    "element_mask of another shape": indexed(ids(0, 1), ONES, element_mask=torch.ones(3, 6) > 0),
    "COO index 2**62": lambda: torch.sparse_coo_tensor([[1, 2**62]], ONES, (4, 6)),
    "COO second index 2**62": lambda: torch.sparse_coo_tensor(
        [[1, 0], [0, 2**62]], torch.ones(2), (4, 6)
    ),
    "complex": lambda: torch.ones(4, 6, dtype=torch.complex64),
    "COO on meta": lambda: WHOLE.to_sparse().to("meta"),
    **{f"no tensor: {type(thing).__name__}": lambda t=thing: t for thing in NO_TENSORS},
    **UNREADABLE,
}


def broken_parts() -> Iterator[tuple[str, IndexedGrad]]:
    """Every field of an IndexedGrad replaced by every tensor or object that it cannot be."""
    for kind, make in {**UNREADABLE, **NO_PARTS}.items():
        yield f"values {kind}", IndexedGrad(torch.arange(4), make())
        yield f"whole values {kind}", IndexedGrad(None, make())
        yield f"indices {kind}", IndexedGrad(make(), torch.ones(1, 6))
        for field in ("value_index", "scale", "element_mask"):
            yield f"{field} {kind}", IndexedGrad(ids(1), torch.ones(1, 6), **{field: make()})
