"""Convert gradients of every layout to IndexedGrad, without copying their values.

``classify`` is the only function that tells layouts apart. Everything that can be checked without
reading the indices is checked here. Engines check the indices, unless they are transformed here.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep._native import ext
from sparsestep._torch import coo_indices, coo_values, is_zerotensor
from sparsestep.errors import InputError, RangeError, message
from sparsestep.grads.compact import CompactGrad, materialize
from sparsestep.grads.dedup import merge_slots
from sparsestep.grads.indexed import IndexedGrad, check_indices
from sparsestep.memory.tensors import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_has_values,
    has_memory,
    is_distributed,
    is_plain_meta,
    memory_of,
    out_of_range,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Gradient = Tensor | IndexedGrad

_ROW_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = (*_ROW_COMPRESSED, torch.sparse_csc, torch.sparse_bsc)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


class GradLayout(enum.Enum):
    """How a gradient is stored."""

    STRIDED = enum.auto()
    COO = enum.auto()
    COMPRESSED = enum.auto()  # CSR, CSC, BSR, BSC
    COMPACT = enum.auto()
    MASKED = enum.auto()
    INDEXED = enum.auto()
    UNSUPPORTED = enum.auto()  # nested, mkldnn, not a tensor


def classify(grad: object) -> GradLayout:
    """Return the layout of a gradient; that of its contents for a materialized CompactGrad."""
    if isinstance(grad, IndexedGrad):
        return GradLayout.INDEXED
    if isinstance(grad, MaskedTensor):  # first: its is_sparse is a method, hence true
        return GradLayout.MASKED
    if not isinstance(grad, Tensor):
        return GradLayout.UNSUPPORTED
    if isinstance(grad, CompactGrad) and not grad.is_materialized:
        return GradLayout.COMPACT
    if grad.is_nested:
        return GradLayout.UNSUPPORTED
    layout = grad.layout
    if layout is torch.strided:
        return GradLayout.STRIDED
    if layout is torch.sparse_coo:
        return GradLayout.COO
    return GradLayout.COMPRESSED if layout in _COMPRESSED else GradLayout.UNSUPPORTED


def indexed_grad(param: Tensor, grad: Gradient, *, row_slots: bool = False) -> IndexedGrad:
    """Convert the gradient of ``param`` to canonical form, without copying its values.

    Args:
        param: the parameter.
        grad: its gradient: strided, COO, CSR, CSC, BSR, BSC, CompactGrad, MaskedTensor or
            IndexedGrad.
        row_slots: slots have to be rows, for a rule that keeps state per row.

    Returns:
        The gradient that engines see; its values are those of ``grad``.

    Raises:
        InputError: the gradient does not fit the parameter, or has an unsupported layout.

    Example:
        >>> param = torch.zeros(5, 2)
        >>> rows = torch.tensor([[3, 1, 3]])
        >>> coo = torch.sparse_coo_tensor(rows, torch.ones(3, 2), (5, 2))
        >>> grad = indexed_grad(param, coo)
        >>> grad.indices.tolist(), grad.num_slots, grad.slot_size
        ([[3, 1, 3]], 5, 2)
    """
    found = _convert(param, grad)
    if found.indices is not None and is_plain_meta(found.indices):
        requirement = "the gradient of a parameter on the meta device must be dense"
        raise InputError(message(requirement, "one whose indices have no values"))
    return to_row_slots(param, found) if row_slots and param.dim() else found


def _convert(param: Tensor, grad: Any) -> IndexedGrad:
    layout = classify(grad)
    if layout is GradLayout.INDEXED:
        return _from_indexed(param, grad)
    if layout is GradLayout.MASKED:
        found, mask = _convert(param, grad.get_data()), stored_mask(grad)[1]
        if found.indices is not None and bool(mask.all()):
            return found
        return found.select_elements(mask, param.numel())
    if not isinstance(grad, Tensor):
        requirement = "the gradient must be a tensor or an IndexedGrad"
        raise InputError(message(requirement, type(grad).__name__))
    if layout is GradLayout.UNSUPPORTED:
        layouts = "strided, COO, CSR, CSC, BSR or BSC tensor, a MaskedTensor or an IndexedGrad"
        got = "a nested tensor" if grad.is_nested else f"layout {grad.layout}"
        remedy = "Convert it with .to_dense() or .to_sparse_coo()"
        raise InputError(message(f"the gradient must be a {layouts}", got, remedy))
    _check_matches(param, grad)
    if isinstance(grad, CompactGrad):
        if layout is GradLayout.COMPACT:
            return grad.indexed()
        grad = grad.materialize_()
    if layout is GradLayout.COO:
        return _from_coo(param, grad)
    if layout is GradLayout.COMPRESSED:
        return _from_compressed(grad)
    grad = grad.resolve_neg().resolve_conj()
    if is_zerotensor(grad):  # autograd has zeros that take no memory
        grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    check_has_values("the gradient", grad)
    return IndexedGrad(None, grad, 1, grad.numel())


def _check_matches(param: Tensor, grad: Tensor) -> None:
    """Raise InputError unless shape, dtype and device are compatible with the parameter's."""
    again = "after backward? Call zero_grad() and backward() again"
    if grad.shape != param.shape:
        requirement = f"the gradient must have the parameter's shape, {tuple(param.shape)}"
        remedy = f"Was the parameter resized {again}"
        raise InputError(message(requirement, tuple(grad.shape), remedy))
    if grad.dtype != param.dtype and not _dtypes_compatible(param.dtype, grad.dtype):
        requirement = f"the gradient of a {param.dtype} parameter must have a compatible dtype"
        raise InputError(message(requirement, grad.dtype, f"Was the parameter converted {again}"))
    # The CPU first, because making two device objects takes longer.
    if not (grad.is_cpu and param.is_cpu) and grad.device != param.device:
        requirement = f"the gradient must be on the parameter's device, {param.device}"
        raise InputError(message(requirement, grad.device))


def _dtypes_compatible(param: torch.dtype, grad: torch.dtype) -> bool:
    """Whether dtypes are equal or both real: arithmetic uses the wider of two real ones."""
    return param == grad or (param in FLOAT_DTYPES and grad in FLOAT_DTYPES)


def to_row_slots(param: Tensor, grad: IndexedGrad) -> IndexedGrad:
    """Regroup slots into rows. Elements without an entry are excluded by ``element_mask``."""
    rows = param.shape[0]
    if grad.num_slots == rows:
        return grad
    if grad.indices is None:
        return grad._replace(num_slots=rows, slot_size=param.numel() // rows if rows else 0)
    if not param.numel():
        return IndexedGrad(grad.flat_indices[:0], grad.values.reshape(-1)[:0], rows, 0)
    return grad.split_slots(rows) if grad.num_slots < rows else merge_slots(grad, rows)


def local_grad(param: DTensor, grad: Any, *, row_slots: bool) -> Any:
    """Return the local part of a DTensor parameter's gradient; of whole rows if ``row_slots``."""
    if any(placement.is_partial() for placement in param.placements):
        requirement = "a DTensor parameter must be sharded or replicated"
        raise InputError(message(requirement, f"placements {param.placements}"))
    cut = [p for p in param.placements if p.is_shard() and p.dim != 0]  # type: ignore[attr-defined]
    if row_slots and cut:
        requirement = "state per row, max_norm and normalize need whole rows: shard along dim 0"
        raise InputError(message(requirement, f"placements {param.placements}"))
    if not is_distributed(grad):
        # Torch has no sparse DTensors: a sparse gradient is that of the local part.
        if classify(grad) is not GradLayout.STRIDED:
            return grad
        requirement = "a dense gradient of a DTensor must be a DTensor"
        raise InputError(message(requirement, f"a {type(grad).__name__}"))
    if grad.placements != param.placements or grad.device_mesh != param.device_mesh:
        requirement = "the gradient of a DTensor must have the parameter's placements"
        remedy = "Call redistribute() on it"
        raise InputError(message(f"{requirement}, {param.placements}", grad.placements, remedy))
    return memory_of(grad)


def rows_of(param: Tensor, grad: Any) -> list[Tensor | None]:
    """Return the rows of a sparse gradient's entries, part by part; ``None`` for all rows."""
    layout = classify(grad)
    if layout is GradLayout.COMPACT:
        return [slots_to_rows(param, each.indices, each.num_slots) for each in grad.local_parts()]
    if layout is GradLayout.STRIDED:
        return [None]
    if layout is not GradLayout.COO or grad.shape != param.shape or grad.device != param.device:
        return []  # the core declines it
    indices = coo_indices(materialize(grad))
    if indices.numel() and not has_memory(indices):
        return []
    return [each.contiguous() for each in indices[:1]]


def slots_to_rows(param: Tensor, indices: Tensor | None, num_slots: int) -> Tensor | None:
    """Return the row of each slot in ``indices``, in one dim; ``None`` for all rows."""
    if indices is None or not param.dim():
        return None
    indices = indices.reshape(-1).long()
    if not len(param):
        return indices.new_empty(0)
    if num_slots != len(param):
        indices = indices.div(max(1, num_slots // len(param)), rounding_mode="floor")
    return indices.contiguous()


# COO


def _from_coo(param: Tensor, grad: Tensor) -> IndexedGrad:
    indices, values = coo_indices(grad), coo_values(grad)
    check_has_values("the gradient", indices)
    check_has_values("the gradient", values)
    found = IndexedGrad.from_coo(indices, values, param.shape)
    sparse_dim, entries = indices.shape
    if values.numel() != entries * found.slot_size:
        requirement = (
            f"the gradient's {entries} indices over {sparse_dim} dims need values of shape "
            f"{(entries, *param.shape[sparse_dim:])}"
        )
        raise InputError(message(requirement, tuple(values.shape)))
    return found._replace(values=values.resolve_neg()) if values.is_neg() else found


# CSR, CSC, BSR, BSC


def _from_compressed(grad: Tensor) -> IndexedGrad:
    """A slot is an element; of a blocked layout, one row of a block.

    There may be batch dims before and dense dims after the matrix. All batches have equally many
    entries, one batch after the other.
    """
    by_row = grad.layout in _ROW_COMPRESSED
    compressed = grad.crow_indices() if by_row else grad.ccol_indices()
    plain = grad.col_indices() if by_row else grad.row_indices()
    values = grad.values().detach()  # as a view of a sparse tensor it cannot be viewed as real
    block_rows, block_columns = _block_shape(grad, compressed, plain, values)
    batch_dims = compressed.dim() - 1
    rows, columns = grad.shape[batch_dims : batch_dims + 2]
    blocks_down, blocks_across = rows // block_rows, columns // block_columns
    slot_size = block_columns * math.prod(grad.shape[batch_dims + 2 :])

    for part in (compressed, plain, values):
        check_has_values("the gradient", part)
    compressed, plain = compressed.long(), plain.long()
    values = values.resolve_neg().reshape(plain.numel() * block_rows, slot_size)
    num_slots = math.prod(grad.shape[: batch_dims + 1]) * blocks_across
    if by_row and not batch_dims and ext is not None and compressed.is_cpu:
        compressed, plain = compressed.contiguous(), plain.contiguous()
        indices = plain.new_empty(plain.numel() * block_rows)
        order = torch.empty_like(indices) if block_rows > 1 else None
        threads = torch.get_num_threads()
        # One pass, slots in ascending order. It declines invalid indices.
        if ext.slots_of(compressed, plain, block_rows, blocks_across, indices, order, threads):
            return IndexedGrad(indices, values, num_slots, slot_size, order)
    entries = plain.shape[-1]
    if not (
        bool((compressed[..., 0] == 0).all())
        and bool((compressed[..., -1] == entries).all())
        and bool((compressed.diff(dim=-1) >= 0).all())
    ):
        requirement = f"compressed indices must increase from 0 to the number of entries, {entries}"
        got = compressed.tolist() if compressed.numel() < 20 else "others"
        raise InputError(message(requirement, got))
    check_indices(plain, blocks_across if by_row else blocks_down, dim=batch_dims + int(by_row))
    # The compressed row or column of each entry, counted through all batches.
    group_of_entry = torch.repeat_interleave(compressed.diff(dim=-1).reshape(-1))
    plain = plain.reshape(-1)
    row_step = block_rows * blocks_across  # from a slot to the same one in the next row of blocks
    if by_row:
        indices = torch.add(plain, group_of_entry, alpha=row_step)
    else:
        indices = group_of_entry.add_(plain, alpha=row_step)
        batches = math.prod(grad.shape[:batch_dims])
        if batches > 1:
            batch = torch.arange(batches, device=compressed.device).repeat_interleave(entries)
            indices.add_(batch, alpha=(rows - 1) * blocks_across)
    if block_rows > 1:
        offsets = torch.arange(block_rows, device=compressed.device) * blocks_across
        indices = (indices[:, None] + offsets).reshape(-1)
    return IndexedGrad(indices, values, num_slots, slot_size)


def _block_shape(
    grad: Tensor, compressed: Tensor, plain: Tensor, values: Tensor
) -> tuple[int, int]:
    """Return rows and columns of a block. Raises if indices and values do not fit together."""
    batch_dims, shape = compressed.dim() - 1, grad.shape
    blocked = grad.layout in _BLOCKED
    block = values.shape[batch_dims + 1 : batch_dims + 3] if blocked else torch.Size([1, 1])
    matrix = shape[batch_dims : batch_dims + 2]
    fits = batch_dims >= 0 and len(matrix) == len(block) == 2
    if fits and 0 not in block:
        batch, dense = shape[:batch_dims], shape[batch_dims + 2 :]
        by_row = grad.layout in _ROW_COMPRESSED
        groups = matrix[0] // block[0] if by_row else matrix[1] // block[1]
        inner = block if blocked else ()
        if (
            matrix[0] % block[0] == 0
            and matrix[1] % block[1] == 0
            and compressed.shape == (*batch, groups + 1)
            and plain.shape[:-1] == batch
            and values.shape == (*plain.shape, *inner, *dense)
            and {compressed.dtype, plain.dtype} <= set(INDEX_DTYPES)
        ):
            return block[0], block[1]
    requirement = f"the indices and values of a {grad.layout} gradient must fit its shape"
    indices = f"{compressed.dtype} indices of shapes {tuple(compressed.shape)}"
    got = f"{indices} and {tuple(plain.shape)}, values of shape {tuple(values.shape)}"
    raise InputError(message(f"{requirement}, {tuple(shape)}", got))


# MaskedTensor


def stored_mask(grad: Any) -> tuple[Tensor, Tensor]:
    """Return the stored values of a masked gradient, and its mask."""
    data, mask = grad.get_data(), grad.get_mask()
    layout = classify(data)
    if layout is GradLayout.STRIDED:
        return data, mask
    if layout is GradLayout.COO:
        return coo_values(data), coo_values(mask)
    return data.values(), mask.values()


# IndexedGrad


def _from_indexed(param: Tensor, grad: IndexedGrad) -> IndexedGrad:
    """Check every field of an IndexedGrad made by a user, and fill in the defaults."""
    indices, values, num_slots, slot_size, value_index, scale, mask = grad
    for name, tensor in zip(IndexedGrad._fields, grad, strict=True):
        if name == "values" or (tensor is not None and name not in ("num_slots", "slot_size")):
            _check_field(name, tensor, param)
    if values.dtype != param.dtype and not _dtypes_compatible(param.dtype, values.dtype):
        requirement = f"the values for a {param.dtype} parameter must have a compatible dtype"
        raise InputError(message(requirement, values.dtype))
    num_slots, slot_size = _slot_shape(param, num_slots, slot_size)
    if indices is None:
        if value_index is not None or scale is not None:
            name = "scale" if value_index is None else "value_index"
            raise InputError(message(f"{name} must be None if indices is None", "a tensor"))
        if values.shape != param.shape:
            requirement = f"without indices the values must have shape {tuple(param.shape)}"
            raise InputError(message(requirement, tuple(values.shape)))
        found = IndexedGrad(None, values.resolve_neg().resolve_conj(), 1, param.numel())
    else:
        indices = _index_field("indices", indices)
        value_index = None if value_index is None else _index_field("value_index", value_index)
        value_rows = _num_value_rows(values, slot_size, indices.numel(), value_index)
        if scale is not None:
            scale = _scale_field(scale, values, indices.numel())
        found = IndexedGrad(indices, values.resolve_neg(), num_slots, slot_size, value_index, scale)
    if mask is not None:
        shapes = [values.shape] if indices is None else [values.shape, (value_rows, slot_size)]
        if mask.dtype != torch.bool or mask.shape not in shapes:
            shape, got = tuple(values.shape), f"{mask.dtype} of shape {tuple(mask.shape)}"
            requirement = f"element_mask must be a bool tensor of the values' shape, {shape}"
            raise InputError(message(requirement, got))
        return found.select_elements(mask, param.numel()) if param.numel() else found
    rows = param.shape[0] if param.dim() else 1
    if indices is not None and param.numel() and num_slots % rows and rows % num_slots:
        # Slots must divide rows or be multiples of them: split to the least common multiple.
        return found.split_slots(math.lcm(num_slots, rows))
    return found


def _slot_shape(param: Tensor, num_slots: object, slot_size: object) -> tuple[int, int]:
    """Return num_slots and slot_size; rows by default."""
    if num_slots is None and slot_size is None:
        return param.shape[0] if param.dim() else 1, math.prod(param.shape[1:])
    if (
        not isinstance(num_slots, int)
        or not isinstance(slot_size, int)
        or min(num_slots, slot_size) < 0
        or num_slots * slot_size != param.numel()
    ):
        requirement = f"num_slots x slot_size must be the parameter's {param.numel()} elements"
        remedy = "Pass two integers, or neither"
        raise InputError(message(requirement, f"{num_slots!r} x {slot_size!r}", remedy))
    return int(num_slots), int(slot_size)  # True is 1


def _check_field(name: str, tensor: object, param: Tensor) -> None:
    requirement = f"the {name} of an IndexedGrad must be a strided tensor"
    if not isinstance(tensor, Tensor) or isinstance(tensor, MaskedTensor):
        raise InputError(message(requirement, type(tensor).__name__))
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise InputError(message(requirement, got))
    if tensor.device != param.device:
        raise InputError(message(f"the {name} must be on {param.device}", tensor.device))
    check_has_values(f"the {name} of an IndexedGrad", tensor)


def _index_field(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in INDEX_DTYPES:
        requirement = f"the {name} of an IndexedGrad must be int64 or int32"
        raise InputError(message(requirement, tensor.dtype))
    return tensor.long().reshape(-1).contiguous()


def _num_value_rows(
    values: Tensor, slot_size: int, entries: int, value_index: Tensor | None
) -> int:
    """Return the number of rows of values. Raises if entries do not fit them."""
    rows = values.numel() // slot_size if slot_size else math.prod(values.shape[:1])
    if values.numel() != rows * slot_size or (value_index is None and rows != entries):
        requirement = f"the values must be rows of {slot_size}"
        if value_index is None:
            requirement += f", one per index, {entries}"
        raise InputError(message(requirement, f"values of shape {tuple(values.shape)}"))
    if value_index is not None:
        if value_index.numel() != entries:
            requirement = f"value_index must have one entry per index, {entries}"
            raise InputError(message(requirement, value_index.numel()))
        bad = out_of_range(value_index, rows)
        if bad is not None:
            requirement = f"value_index must hold row numbers of values, in [0, {rows})"
            raise RangeError(message(requirement, bad))
    return rows


def _scale_field(scale: Tensor, values: Tensor, entries: int) -> Tensor:
    if scale.numel() != entries:
        requirement = f"scale must have one entry per index, {entries}"
        raise InputError(message(requirement, scale.numel()))
    if scale.dtype not in FLOAT_DTYPES:
        requirement = "the scale of an IndexedGrad must be of a float dtype"
        raise InputError(message(requirement, scale.dtype))
    return scale.detach().resolve_neg().reshape(-1).to(values.dtype.to_real()).contiguous()
