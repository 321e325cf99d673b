"""Invalid and odd gradients, state and options, for a parameter of any shape.

What is here is named, so that a test may go through all of it, and the fuzzer pick from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map

from sparsestep import IndexedGrad
from tests.generate.grads import BLOCKED, BY_ROW, COMPRESSED, can_be_compressed
from tests.generate.source import NotApplicableError, Source


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


class Unusable(Tensor):
    """A tensor without memory that knows no operation."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


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
# Values of options and arguments.
VALUES: list[Any] = [
    *(None, "x", -1.0, float("nan"), float("inf"), 2.0, 1.0, 0, True, False, [], {}, (), 1j),
    *((0.9,), (0.9, 1.0), (-1, 0.5), ("a", "b"), (0.9, 0.99, 0.999), [0.9, 0.99], object()),
    *(
        torch.ones(1).to_sparse_coo(),
        torch.ones(1, device="meta"),
        torch.ones(2),
        torch.tensor(0.5),
    ),
]


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def fake(like: Tensor) -> Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(like)


def released(tensor: Tensor) -> Tensor:
    """A tensor whose memory was released, as FSDP does with what it does not need."""
    tensor.untyped_storage().resize_(0)
    return tensor


def unreadable(param: Tensor) -> dict[str, Any]:
    """Tensors of the right shape that nobody can read."""
    whole = torch.ones(param.shape)
    found = {
        "quantized": torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8),
        "meta": whole.to("meta"),
        "fake": fake(whole),
        "wrapper": Unusable(whole),
        "released": released(whole.clone()),
    }
    if param.dim():
        found["nested"] = torch.nested.nested_tensor([whole, whole])
        found["mkldnn"] = whole.to_mkldnn()
    return found


def broken(param: Tensor) -> dict[str, Any]:
    """Gradients that must be refused for a parameter that is not empty."""
    return {name: grad for some in BROKEN for name, grad in some(param).items()}


def _of_any_layout(param: Tensor) -> dict[str, Any]:
    shape, dtype = param.shape, param.dtype
    whole = torch.ones(shape, dtype=dtype)
    longer = torch.ones(shape[0] + 1, *shape[1:]) if shape else torch.ones(2)
    other = torch.float32 if dtype.is_complex else torch.complex64
    found = {
        **{f"no tensor: {type(thing).__name__}": thing for thing in NO_TENSORS},
        "strided of another shape": longer.to(dtype),
        "strided with one more dim": whole.unsqueeze(-1),
        "COO of another shape": longer.to(dtype).to_sparse_coo(),
        "of other numbers": whole.to(other),
        "COO of other numbers": whole.to(other).to_sparse_coo(),
        "integers": whole.real.long() if dtype.is_complex else whole.long(),
        "bools": whole == 1,
        "COO on meta": whole.to_sparse().to("meta"),
        **unreadable(param),
    }
    if shape and dtype in (torch.float32, torch.float64):
        found["MaskedTensor of another shape"] = masked_tensor(longer.to(dtype), longer > 0)
        found["MaskedTensor of integers"] = masked_tensor(whole.long(), whole > 0)
    return found


def _coo(param: Tensor) -> dict[str, Any]:
    """An index outside, in any of its dims."""
    found: dict[str, Any] = {}
    shape = tuple(param.shape)
    for dims in range(1, len(shape) + 1):
        values = torch.ones(2, *shape[dims:], dtype=param.dtype)
        for dim in range(dims):
            for bad in (-1, shape[dim], 2**31, 2**62, -(2**63), 2**63 - 1):
                indices = torch.zeros(dims, 2, dtype=torch.int64)
                indices[dim, 1] = bad
                name = f"COO index {dim} of {dims} is {'its size' if bad == shape[dim] else bad}"
                found[name] = torch.sparse_coo_tensor(indices, values, shape)
        for part in ("indices", "values"):
            grad = torch.sparse_coo_tensor(torch.zeros(dims, 2).long(), values.clone(), shape)
            released(getattr(grad, f"_{part}")())
            found[f"COO of {dims} whose {part} were released"] = grad
    return found


def _compressed(param: Tensor) -> dict[str, Any]:
    """From one entry in the first column of every row; blocks have one element."""
    found: dict[str, Any] = {}
    if not can_be_compressed(param, param.dtype):
        return found
    *batch, rows, columns = param.shape
    for layout in COMPRESSED:
        groups, size = (rows, columns) if layout in BY_ROW else (columns, rows)
        kind = str(layout).removeprefix("torch.sparse_").upper()
        starts, others = torch.arange(groups + 1), torch.zeros(groups, dtype=torch.int64)
        one = torch.ones(*batch, groups + 1, 1, 1, dtype=param.dtype)
        one = one if layout in BLOCKED else one[..., 0, 0]
        whole = one.narrow(len(batch), 0, groups)

        def made(
            starts: Tensor = starts,
            others: Tensor = others,
            values: Tensor = whole,
            shape: Any = param.shape,
            layout: torch.layout = layout,
        ) -> Tensor:
            indices = (each.expand(*batch, -1) for each in (starts, others))
            return torch.sparse_compressed_tensor(
                *indices, values, shape, layout=layout, check_invariants=False
            )

        def put(tensor: Tensor, place: int, value: int) -> Tensor:
            return torch.where(torch.arange(len(tensor)) == place % len(tensor), value, tensor)

        swapped = [0, 2, 1, *range(3, groups + 1)]
        bad = {
            "starts that begin late": made(put(starts, 0, 1)),
            "starts that begin early": made(put(starts, 0, -1)),
            "starts that end early": made(put(starts, -1, groups - 1)),
            "starts that end late": made(put(starts, -1, groups + 7)),
            **({"starts that fall": made(starts[swapped])} if groups > 1 else {}),
            "index too large": made(others=put(others, -1, size)),
            "index negative": made(others=put(others, -1, -1)),
            "index 2**31 - 1": made(others=put(others, -1, 2**31 - 1)),
            "with too few starts": made(starts[:-1]),
            "with too many starts": made(torch.cat([starts, starts[-1:]])),
            "without starts": made(starts[:0]),
            "with starts of floats": made(starts.float()),
            "with fewer values": made(values=one.narrow(len(batch), 0, groups - 1)),
            "with more values": made(values=one),
            "of integers": made(values=whole.real.long()),
            "of another shape": made(shape=(*batch, rows + 1, columns + 1)),
        }
        if not batch:
            grad = bad["whose indices were released"] = made(others=others.clone())
            released(grad.col_indices() if layout in BY_ROW else grad.row_indices())
        if layout in BLOCKED:
            values = torch.ones(*batch, groups, rows + 1, columns + 1, dtype=param.dtype)
            bad["without blocks"] = made(values=values[..., 0, 0])
            bad["with blocks that do not fit"] = made(values=values)
            bad["with empty blocks"] = made(values=values[..., :0, :0])
        found |= {f"{kind} {name}": grad for name, grad in bad.items()}
    return found


def _indexed(param: Tensor) -> dict[str, Any]:
    rows = param.shape[0] if param.dim() else 1
    width, numel, dtype = math.prod(param.shape[1:]), param.numel(), param.dtype
    two, whole = torch.ones(2, width, dtype=dtype), torch.ones(param.shape, dtype=dtype)
    other = torch.float32 if dtype.is_complex else torch.complex64
    at, last = ids(0, 0), ids(0, rows)
    found = {
        **{f"index {bad}": IndexedGrad(ids(0, bad), two) for bad in (-1, 2**31, 2**62, -(2**63))},
        "index too large": IndexedGrad(last, two),
        "index 2**62 of slots that are cut": IndexedGrad(
            ids(0, 2**62), torch.ones(2, numel, dtype=dtype), 1, numel
        ),
        "index of an element": IndexedGrad(ids(0, numel), torch.ones(2, dtype=dtype), numel, 1),
        "value_index too large": IndexedGrad(at, two, rows, width, ids(0, 2)),
        "value_index negative": IndexedGrad(at, two, rows, width, ids(-1, 0)),
        "value_index too short": IndexedGrad(at, two, rows, width, ids(0)),
        "value_index without indices": IndexedGrad(None, whole, value_index=ids(0)),
        "float value_index": IndexedGrad(at, two, rows, width, torch.zeros(2)),
        "scale too short": IndexedGrad(at, two, scale=torch.ones(1)),
        "scale of integers": IndexedGrad(at, two, scale=ids(1, 1)),
        "scale without indices": IndexedGrad(None, whole, scale=torch.ones(rows)),
        "scale that is no tensor": IndexedGrad(at, two, scale=2.0),
        "more indices than values": IndexedGrad(ids(0, 0, 0), two),
        "fewer indices than values": IndexedGrad(ids(0), two),
        "values of more than a row": IndexedGrad(at, torch.ones(2, width + 1, dtype=dtype)),
        "dense values of another shape": IndexedGrad(None, torch.ones(rows + 1, width)),
        "num_slots x slot_size": IndexedGrad(at, two, rows + 1, width),
        "num_slots without slot_size": IndexedGrad(at, two, rows),
        "negative num_slots": IndexedGrad(at, two, -rows, -width),
        "num_slots that are no integer": IndexedGrad(ids(0), two, float(rows), width),
        "slot_size 2**62": IndexedGrad(at, two, rows, 2**62),
        "float indices": IndexedGrad(torch.zeros(2), two),
        "bool indices": IndexedGrad(torch.tensor([True, False]), two),
        "integer values": IndexedGrad(at, torch.ones(2, width, dtype=torch.int64)),
        "values of other numbers": IndexedGrad(at, two.to(other)),
        "values elsewhere": IndexedGrad(at, two.to("meta")),
        "element_mask of another shape": IndexedGrad(
            at, two, element_mask=torch.ones(3, width) > 0
        ),
    }
    if width > 1:
        half = torch.ones(width + 1, dtype=dtype)
        found["values of no row with a value_index"] = IndexedGrad(at, half, rows, width, ids(0, 0))
    return found


def _fields(param: Tensor) -> dict[str, Any]:
    """Every field of an IndexedGrad is replaced by every tensor or object that it cannot be."""
    whole = torch.ones(param.shape, dtype=param.dtype)
    row = torch.ones(1, math.prod(param.shape[1:]), dtype=param.dtype)
    found: dict[str, Any] = {}
    no_parts = {
        **unreadable(param),
        "zeros without memory": torch._efficientzerotensor(tuple(param.shape)),
        "coo": whole.to_sparse(),
        "indexed": IndexedGrad(None, whole),
        "number": 2.5,
        "string": "x",
        "list": [1.0],
    }
    for kind, thing in no_parts.items():
        found[f"values {kind}"] = IndexedGrad(
            torch.arange(param.shape[0] if param.dim() else 1), thing
        )
        found[f"whole values {kind}"] = IndexedGrad(None, thing)
        found[f"indices {kind}"] = IndexedGrad(thing, row)
        for field in ("value_index", "scale", "element_mask"):
            found[f"{field} {kind}"] = IndexedGrad(ids(0), row, **{field: thing})
    return found


BROKEN: dict[Callable[[Tensor], dict[str, Any]], int] = {
    _of_any_layout: 6,
    _coo: 4,
    _compressed: 4,
    _indexed: 8,
    _fields: 2,
}


def odd(param: Tensor) -> dict[str, Any]:
    """Rare gradients, which may be used or refused."""
    rows, dtype = param.shape[0] if param.dim() else 1, param.dtype
    values = torch.ones(param.shape, dtype=dtype)
    by_row = values.reshape(rows, -1) if param.numel() else values
    every = torch.arange(rows)
    found = {
        "zeros without memory": torch._efficientzerotensor(tuple(param.shape), dtype=dtype),
        "a wrapper": Wrapper(values),
        "the parameter itself": param.detach(),
        "one that requires a gradient": values.clone().requires_grad_(),
        "a column of factors": IndexedGrad(every, by_row, scale=torch.ones(rows, 1)),
        "a mask of all": IndexedGrad(every, by_row, element_mask=by_row == 1),
        "one slot": IndexedGrad(ids(0), by_row[:1], True, by_row.numel()),
        "one entry of another dtype": IndexedGrad(None, values.to(torch.float64)),
    }
    fits = dtype == torch.float64 and param.dim() and param.is_contiguous() and param.numel()
    if fits:  # the step itself would write over them while it reads them
        inside = param.detach().view(-1).view(torch.int64)[:rows]
        found["indices in the parameter's memory"] = IndexedGrad(inside, by_row)
    return found


def any_garbage(chance: Source, param: Tensor) -> tuple[Any, str, bool]:
    """A gradient, what it is, and whether it must be refused."""
    must = bool(param.numel()) and not chance.one_in(6)
    found: dict[str, Any] = {}
    while not found:  # a parameter may be of no use for some
        found = chance.weighted(BROKEN)(param) if must else odd(param)
    name, grad = chance.pick(list(found.items()))
    return grad, name, must


def index_outside(chance: Source, param: Tensor) -> tuple[Tensor, str]:
    """A COO gradient that torch allows as ``.grad``."""
    if not param.dim() or not param.numel():
        raise NotApplicableError
    name, grad = chance.pick(list(_coo(param).items()))
    return grad, name


def bad_state(good: Tensor) -> dict[str, Any]:
    return {
        "state of another shape": torch.zeros(*good.shape, 2),
        "state of integers": good.long(),
        "complex state": good.to(torch.complex64),
        "state on meta": good.to("meta"),
        "state with shared memory": torch.zeros(()).expand(good.shape),
        "sparse state": good.to_sparse_coo(),
        "state that is a number": 0.0,
        "state that is a string": "x",
        "fake state": fake(good),
        "state without memory": Unusable(good),
        "state in a wrapper": Wrapper(good),
    }


def bad_memory(param: Tensor) -> dict[str, Tensor]:
    """Other memory for a parameter; what is meta or lazily negated may be used or refused."""
    shape, dtype = tuple(param.shape), param.dtype
    whole = torch.zeros(shape, dtype=dtype)
    found = {
        "integer": whole.real.long(),
        "meta": whole.to("meta"),
        "lazily negated": whole.conj() if dtype.is_complex else torch._neg_view(whole),
    }
    if shape:
        found["larger"] = torch.zeros((shape[0] + 2, *shape[1:]), dtype=dtype)
    if shape and shape[0] > 1 and whole.numel():
        found["expanded"] = whole[:1].expand(shape)
    if len(shape) == 2 and min(shape) > 1:
        found["overlapping"] = torch.zeros(sum(shape), dtype=dtype).as_strided(shape, (1, 1))
    return found
