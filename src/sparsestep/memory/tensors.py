"""Which tensors can be updated in place, and where their memory is.

A step works on plain memory. For a DTensor, that is its local part: each process updates its own,
with state that is sharded in the same way. A tensor without memory of its own is rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsestep._native import dtype_names
from sparsestep._torch import without_torch_function
from sparsestep.errors import InputError, message

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FLOAT_DTYPES = frozenset(getattr(torch, name) for name in dtype_names)
HALF_DTYPES = frozenset(dtype for dtype in FLOAT_DTYPES if dtype.itemsize == 2)
COMPLEX_DTYPES = frozenset({torch.complex64, torch.complex128})
INDEX_DTYPES = (torch.int64, torch.int32)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_distributed(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing torch.distributed.tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def memory_of(tensor: Tensor) -> Tensor:
    """Return a tensor itself, the local part of a DTensor, or a subclass as a plain tensor."""
    if type(tensor) is Parameter or type(tensor) is Tensor:
        return tensor
    if not is_distributed(tensor):
        try:
            with without_torch_function():
                return tensor.detach()
        except (NotImplementedError, RuntimeError):  # a class that cannot even do that
            return tensor
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # a collective may still be under way
    return wait() if wait is not None else local


def out_of_range(indices: Tensor, size: int) -> int | None:
    """Return an index that is not in [0, size), or None."""
    if not indices.numel():
        return None
    low, high = indices.aminmax()
    if int(low) < 0:
        return int(low)
    return int(high) if int(high) >= size else None


def laid_out_like(param: Tensor, local: Tensor) -> Tensor:
    """Wrap state of a parameter's memory in a DTensor if the parameter is one."""
    if not is_distributed(param):
        return local
    from torch.distributed.tensor import DTensor

    shape = param.shape[: local.dim()]
    stride = torch.empty(shape, device="meta").stride() if local.dim() < param.dim() else None
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=shape,
        stride=param.stride() if stride is None else stride,
    )


def check_writable(name: str, tensor: Tensor) -> None:
    """Refuse a tensor, from ``memory_of``, that cannot be written in place."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        requirement = f"outside torch.inference_mode(), {name} must not be an inference tensor"
        raise InputError(message(requirement, "an inference tensor", "Use a clone of it"))
    if tensor.layout is not torch.strided:
        raise InputError(message(f"{name} must be a strided tensor", f"layout {tensor.layout}"))
    if tensor.is_meta:
        return
    if tensor.is_conj() or tensor.is_neg():
        requirement = f"{name} must be a plain tensor, not a conjugate or negative view"
        raise InputError(message(requirement, "such a view", "Use a clone of it"))
    # An empty tensor needs no memory, but a wrapper may refuse any operation.
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if (tensor.numel() or is_wrapper) and not has_memory(tensor):
        requirement = f"{name} must own memory for all of its elements"
        got = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} without"
        raise InputError(message(requirement, got))
    if not tensor.is_contiguous() and has_internal_overlap(tensor):
        raise InputError(
            message(
                f"every element of {name} must have memory of its own",
                f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
                "Make it contiguous",
            )
        )


def check_has_values(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that cannot be read: a fake one, a wrapper, or one without its memory."""
    if tensor.is_cpu and tensor.numel() and not has_memory(tensor):
        requirement = f"{name} must be a tensor with values in memory"
        got = f"a {type(tensor).__name__} without values"
        raise InputError(message(requirement, got, "Pass an ordinary tensor"))


def is_plain_meta(tensor: Tensor) -> bool:
    """Whether a tensor has a shape alone. Subclasses on the meta device may have values."""
    return tensor.is_meta and type(tensor) is Tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage covers all elements."""
    if not address(tensor):
        return False
    end = tensor.storage_offset() + _span(tensor) + 1
    return end * tensor.itemsize <= tensor.untyped_storage().nbytes()


def address(tensor: Tensor) -> int:
    """Address of the first element; 0 for a tensor without memory of its own."""
    plain = type(tensor) is Parameter or type(tensor) is Tensor
    if not plain and getattr(tensor, "fake_mode", None) is not None:
        return 0  # asked for its address, it would warn
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper around others, or a sparse tensor
        return 0


def _span(tensor: Tensor) -> int:
    """Distance from the first element to the last, in elements."""
    return sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def lie_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are dense in memory, in the same order."""
    first = tensors[0]
    return _span(first) + 1 == first.numel() and all(
        tensor.stride() == first.stride() for tensor in tensors
    )


def has_even_rows(tensor: Tensor) -> bool:
    """Whether the rows of a tensor are vectors of one stride, at equal distances.

    Example:
        >>> image = torch.zeros(2, 3, 4, 5)
        >>> has_even_rows(image), has_even_rows(image.contiguous(memory_format=torch.channels_last))
        (True, False)
    """
    return tensor.dim() <= 2 or tensor.is_contiguous() or tensor[:1].is_contiguous()


def has_internal_overlap(tensor: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor."""
    if not tensor.numel():
        return False
    sizes = sorted(
        (stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1
    )
    reached = 0  # by the dims with smaller strides
    for stride, n in sizes:
        if stride == 0:
            return True
        if stride <= reached:
            return _has_duplicate_offsets(tensor)
        reached += (n - 1) * stride
    return False


def _has_duplicate_offsets(tensor: Tensor) -> bool:
    """Whether two elements share memory; looks at each, if strides alone do not decide."""
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + stride * torch.arange(n, device="cpu")
    return int(offsets.unique().numel()) < tensor.numel()


def overlapping(tensors: Iterable[Tensor]) -> set[int]:
    """The ``id`` of each tensor that may share memory with another."""
    extents = []
    for tensor in tensors:
        memory = memory_of(tensor)
        if memory.numel() and memory.layout is torch.strided and not memory.is_meta:
            begin = memory.data_ptr()
            end = begin + (_span(memory) + 1) * memory.itemsize
            extents.append((str(memory.device), begin, end, id(tensor)))
    extents.sort()
    found: set[int] = set()
    device, reached, last = "", 0, 0
    for where, begin, end, key in extents:
        if where == device and begin < reached and key != last:
            found |= {last, key}
        if where != device or end > reached:
            device, reached, last = where, end, key
    return found
