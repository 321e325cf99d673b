"""How each layout of a gradient becomes a Touched, without copying its values.

Everything that can be checked without reading the positions is checked here. Positions that are
used as they are, are checked by the engine, which reads them anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep.errors import InputError, sentence
from sparsestep.grads import FLOATS, Touched, bad_index, check_positions

Gradient = Tensor | Touched

_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def touched(param: Tensor, grad: Gradient, *, by_row: bool = False) -> Touched:
    """Bring the gradient of ``param`` into canonical form, without copying its values.

    Args:
        param: the parameter.
        grad: its gradient: strided, COO, CSR, CSC, BSR, BSC, a MaskedTensor or a Touched.
        by_row: slots have to be rows, for a rule that keeps numbers per row.

    Example:
        >>> param = torch.zeros(5, 2)
        >>> rows = torch.tensor([[3, 1, 3]])
        >>> t = touched(param, torch.sparse_coo_tensor(rows, torch.ones(3, 2), (5, 2)))
        >>> t.positions.tolist(), t.slots, t.block
        ([[3, 1, 3]], 5, 2)
    """
    if not param.is_contiguous() and has_internal_overlap(param):
        raise InputError(
            sentence(
                "every element of a parameter must have memory of its own",
                f"shape {tuple(param.shape)} with strides {param.stride()}",
                "Make the parameter contiguous",
            )
        )
    if isinstance(grad, Touched):
        found = _by_hand(param, grad)
    elif isinstance(grad, MaskedTensor):  # before all else: its is_sparse is a method, hence true
        found = _from_masked(param, grad)
    else:
        found = _from_tensor(param, grad)
    return _in_rows(param, found) if by_row and param.dim() else found


def _from_tensor(param: Tensor, grad: Tensor) -> Touched:
    if (
        grad.shape != param.shape
        or (grad.dtype != param.dtype and not _may_mix(param.dtype, grad.dtype))
        or (
            not (grad.is_cpu and param.is_cpu)  # the usual case, told without making two devices
            and grad.device != param.device
        )
    ):
        raise InputError(_mismatch(param, grad))
    if grad.is_sparse:
        return _from_coo(param, grad)
    if grad.layout is torch.strided:
        return Touched(None, grad.resolve_neg() if grad.is_neg() else grad, 1, grad.numel())
    if grad.layout in _BY_ROW or grad.layout in _BY_COLUMN:
        return _from_compressed(grad)
    raise InputError(
        sentence(
            "the gradient must be a strided, COO, CSR, CSC, BSR or BSC tensor, a MaskedTensor or a "
            "Touched",
            f"layout {grad.layout}",
            "Convert it with .to_dense() or .to_sparse_coo()",
        )
    )


def _may_mix(param: torch.dtype, grad: torch.dtype) -> bool:
    """Real with real, of any precision: the arithmetic is done in the widest anyway."""
    return param in FLOATS and grad in FLOATS


def _mismatch(param: Tensor, grad: Tensor) -> str:
    again = "after backward? Call zero_grad() and backward() again"
    if grad.shape != param.shape:
        contract = f"the gradient must have the parameter's shape, {tuple(param.shape)}"
        return sentence(contract, tuple(grad.shape), f"Was the parameter resized {again}")
    if grad.dtype != param.dtype and not _may_mix(param.dtype, grad.dtype):
        contract = f"the gradient of a {param.dtype} parameter must be of a like dtype"
        return sentence(contract, grad.dtype, f"Was the parameter converted {again}")
    contract = f"the gradient must be on the parameter's device, {param.device}"
    return sentence(contract, grad.device)


def has_internal_overlap(tensor: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _in_rows(param: Tensor, found: Touched) -> Touched:
    rows = param.shape[0]
    if found.slots == rows:
        return found
    if found.positions is None:
        return found._replace(slots=rows, block=param.numel() // rows if rows else 0)
    if not param.numel():
        return Touched(found.positions.reshape(-1)[:0], found.values.reshape(-1)[:0], rows, 0)
    if found.slots < rows:
        return found.finer(rows)
    if found.source is not None:
        values = found.values.reshape(-1, found.block)[found.source]
        found = found._replace(values=values, source=None)
    return found.coarser(rows)


# COO


def _from_coo(param: Tensor, grad: Tensor) -> Touched:
    shape = param.shape
    indices, values = grad._indices(), grad._values()
    sparse_dim, entries = indices.shape
    if sparse_dim == 1:
        positions = indices
        slots = shape[0]
    else:
        _check_indices(indices, shape)
        positions = _flatten(indices, shape[:sparse_dim])
        slots = math.prod(shape[:sparse_dim])
    block = param.numel() // slots if slots else math.prod(shape[sparse_dim:])
    if not positions.is_contiguous():
        positions = positions.contiguous()
    if values.numel() != entries * block:
        raise InputError(
            sentence(
                f"the gradient's {entries} indices over {sparse_dim} dims need values of shape "
                f"{(entries, *shape[sparse_dim:])}",
                tuple(values.shape),
            )
        )
    if values.is_neg():  # torch may keep a sign that is still to be flipped beside the values
        values = values.resolve_neg()
    return Touched(positions, values, slots, block)


def _check_indices(indices: Tensor, shape: torch.Size) -> None:
    """Refuse an index outside its own dimension, which flattening would hide."""
    if indices.numel() == 0:
        return
    for dim, row in enumerate(indices):
        _check_index(dim, row, shape[dim])


def _check_index(dim: int, indices: Tensor, size: int) -> None:
    if indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= size:
            raise InputError(bad_index(dim, size, low if low < 0 else high))


def _flatten(indices: Tensor, leading: torch.Size) -> Tensor:
    positions = indices.new_zeros(indices.shape[1])
    for row, size in zip(indices, leading, strict=True):
        positions.mul_(size).add_(row)
    return positions


# CSR, CSC, BSR, BSC


def _from_compressed(grad: Tensor) -> Touched:
    """A slot is an element; of a blocked layout, one row's run of a block's columns.

    The layouts may have batch dims in front and dense dims behind. All batches have equally many
    entries, so their entries are simply one after the other.
    """
    by_row = grad.layout in _BY_ROW
    starts = (grad.crow_indices() if by_row else grad.ccol_indices()).long()
    others = (grad.col_indices() if by_row else grad.row_indices()).long()
    values = grad.values()
    batch_dims = starts.dim() - 1
    batches = math.prod(grad.shape[:batch_dims])
    rows, columns = grad.shape[batch_dims : batch_dims + 2]
    high, wide = (1, 1)
    if grad.layout in _BLOCKED:
        high, wide = values.shape[batch_dims + 1 : batch_dims + 3]
    dense = math.prod(grad.shape[batch_dims + 2 :])

    entries = others.shape[-1]
    groups = starts.shape[-1] - 1
    _check_starts(starts, entries)
    sizes = (rows // high, columns // wide)
    _check_index(batch_dims + int(by_row), others, sizes[1] if by_row else sizes[0])
    numbers = torch.arange(groups, device=starts.device).repeat(batches)
    grouped = numbers.repeat_interleave(starts.diff(dim=-1).reshape(-1))
    others = others.reshape(-1)
    block_row, block_column = (grouped, others) if by_row else (others, grouped)
    batch = torch.arange(batches, device=starts.device).repeat_interleave(entries)
    first = (batch * rows + block_row * high) * sizes[1] + block_column
    inside = torch.arange(high, device=starts.device) * sizes[1]
    positions = (first[:, None] + inside).reshape(-1)
    return Touched(
        positions,
        values.resolve_neg().reshape(positions.numel(), wide * dense),
        batches * rows * sizes[1],
        wide * dense,
    )


def _check_starts(starts: Tensor, entries: int) -> None:
    fits = (
        bool((starts[..., 0] == 0).all())
        and bool((starts[..., -1] == entries).all())
        and bool((starts.diff(dim=-1) >= 0).all())
    )
    if not fits:
        contract = f"compressed indices must rise from 0 to the number of entries, {entries}"
        raise InputError(sentence(contract, starts.tolist() if starts.numel() < 20 else "others"))


# Masked tensors


def _from_masked(param: Tensor, grad: MaskedTensor) -> Touched:
    """What the mask excludes is not held."""
    data, mask = grad.get_data(), grad.get_mask()
    found = _from_tensor(param, data)
    if found.positions is None:
        selected = mask.reshape(-1).nonzero().squeeze(1)
        return Touched(selected, found.values, param.numel(), 1, source=selected)
    # The mask has the data's sparsity: a value for each element that is stored.
    kept = mask._values() if mask.layout is torch.sparse_coo else mask.values()
    if bool(kept.all()):
        return found
    elements = found.finer(param.numel())
    assert elements.positions is not None
    source = kept.reshape(-1).nonzero().squeeze(1)
    return elements._replace(positions=elements.positions[source], source=source)


# By hand


def _by_hand(param: Tensor, grad: Touched) -> Touched:
    """A Touched that a user has made: nothing about it is taken for granted."""
    positions, values, slots, block, source, held = grad
    if not slots and not block and param.dim():
        slots, block = param.shape[0], math.prod(param.shape[1:])
    elif not slots and not block:
        slots = block = 1
    if slots * block != param.numel():
        contract = f"slots x block must be the parameter's {param.numel()} elements"
        raise InputError(sentence(contract, f"{slots} x {block}"))
    if not isinstance(values, Tensor) or values.layout is not torch.strided:
        raise InputError(sentence("the values of a Touched must be a strided tensor", type(values)))
    if values.dtype != param.dtype and not _may_mix(param.dtype, values.dtype):
        contract = f"the values for a {param.dtype} parameter must be of a like dtype"
        raise InputError(sentence(contract, values.dtype))
    for name, tensor in (("values", values), ("positions", positions), ("source", source)):
        if tensor is not None and tensor.device != param.device:
            raise InputError(sentence(f"{name} must be on {param.device}", tensor.device))
    if positions is None:
        if values.shape != param.shape or source is not None:
            contract = "without positions the values must have the parameter's shape"
            raise InputError(sentence(contract, tuple(values.shape)))
        return Touched(None, values.resolve_neg(), 1, param.numel())
    positions = _integers("positions", positions)
    rows = values.numel() // block if block else len(values)
    source = None if source is None else _integers("source", source)
    entries = rows if source is None else source.numel()
    if values.numel() != rows * block or positions.numel() != entries:
        contract = f"{positions.numel()} positions need as many rows of {block} values"
        raise InputError(sentence(contract, f"values of shape {tuple(values.shape)}"))
    if source is not None:
        check_positions(source, rows)
    if held is not None:
        raise InputError(sentence("held is for the library's own use", "held"))
    return Touched(positions, values.resolve_neg(), slots, block, source)


def _integers(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.int64, torch.int32):
        raise InputError(sentence(f"the {name} of a Touched must be integers", tensor.dtype))
    return tensor.long().reshape(-1).contiguous()
