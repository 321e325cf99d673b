"""Gradients that nobody can work with, or that are odd: to be passed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
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


def no_tensor(chance: Source, param: Tensor) -> Bad:
    things: list[Any] = [
        *({}, [], (), 3, 0.5, "gradient", True, object(), int, len, torch.float32, torch.Size([2])),
        *(np.ones(tuple(param.shape)), [1.0], {"grad": 1}, b"bytes", range(3), 1j),
    ]
    thing = chance.pick(things)
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


def broken_touched(chance: Source, param: Tensor) -> Bad:
    shape = tuple(param.shape)
    rows, block = (shape[0] if shape else 1), math.prod(shape[1:])
    if not rows or not block:
        raise NotApplicableError
    n = chance.integer(1, 4)
    fields: dict[str, Any] = {
        "positions": torch.tensor(chance.integers(n, rows)),
        "values": chance.numbers((n, block), param.dtype),
        "slots": rows,
        "block": block,
        "source": None,
        "scale": None,
        "held": None,
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
    if name in ("slots", "block"):
        wrong = (rows if name == "slots" else block) + 1
        return [*things, (-1, True), (2**62, True), (wrong, True), (None, True), (True, False)]
    if name == "held":
        return [(torch.ones(n, block, dtype=torch.bool), True), ("x", True)]
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


def positions_in_the_param(chance: Source, param: Tensor) -> Bad:
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
    broken_touched: 8,
    positions_in_the_param: 1,
}


def any_garbage(chance: Source, param: Tensor) -> Bad:
    while True:
        try:
            return chance.weighted(GARBAGE)(chance, param)
        except NotApplicableError:
            continue
