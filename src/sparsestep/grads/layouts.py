"""How each layout of a gradient becomes an IndexedGrad, without copying its values.

Everything that can be checked without reading the positions is checked here. Positions that are
used as they are, are checked by the engine, which reads them anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep._native import ext
from sparsestep._torch import coo_indices, coo_values
from sparsestep.errors import InputError, message
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.dedup import coarser
from sparsestep.grads.indexed import FLOATS, IndexedGrad, check_index
from sparsestep.memory.tensors import address

BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_INTEGERS = {torch.int64, torch.int32}


def from_compressed(grad: Tensor) -> IndexedGrad:
    """A slot is an element; of a blocked layout, one row's run of a block's columns.

    The layouts may have batch dims in front and dense dims behind. All batches have equally many
    entries, so their entries are simply one after the other.
    """
    by_row = grad.layout in BY_ROW
    starts = grad.crow_indices() if by_row else grad.ccol_indices()
    others = grad.col_indices() if by_row else grad.row_indices()
    values = grad.values().detach()  # as a view of a sparse tensor it could not be seen as real
    block_rows, block_columns = _block_of(grad, starts, others, values)
    batch_dims = starts.dim() - 1
    rows, columns = grad.shape[batch_dims : batch_dims + 2]
    blocks_down, blocks_across = rows // block_rows, columns // block_columns
    dense = math.prod(grad.shape[batch_dims + 2 :])

    starts, others = starts.long(), others.long()
    values = values.resolve_neg().reshape(others.numel() * block_rows, block_columns * dense)
    slots = math.prod(grad.shape[: batch_dims + 1]) * blocks_across
    if by_row and not batch_dims and ext is not None and starts.is_cpu:
        found = _in_order(starts.contiguous(), others.contiguous(), block_rows, blocks_across)
        if found is not None:
            return IndexedGrad(found[0], values, slots, block_columns * dense, found[1])
    entries = others.shape[-1]
    _check_starts(starts, entries)
    check_index(batch_dims + int(by_row), others, blocks_across if by_row else blocks_down)
    # The number of the compressed row or column of each entry, counted through all batches.
    grouped = torch.repeat_interleave(starts.diff(dim=-1).reshape(-1))
    others = others.reshape(-1)
    down = block_rows * blocks_across  # from a slot to the same one in the next row of blocks
    if by_row:
        first = torch.add(others, grouped, alpha=down)
    else:
        first = grouped.add_(others, alpha=down)
        batches = math.prod(grad.shape[:batch_dims])
        if batches > 1:
            batch = torch.arange(batches, device=starts.device).repeat_interleave(entries)
            first.add_(batch, alpha=(rows - 1) * blocks_across)
    positions = first
    if block_rows > 1:
        inside = torch.arange(block_rows, device=starts.device) * blocks_across
        positions = (first[:, None] + inside).reshape(-1)
    return IndexedGrad(positions, values, slots, block_columns * dense)


def _in_order(
    starts: Tensor, others: Tensor, block_rows: int, row_slots: int
) -> tuple[Tensor, Tensor | None] | None:
    """Slots row by row, by the core: in one pass, and so that memory is visited in order.

    Returns ``None`` for indices that are not valid; what is wrong with them is said elsewhere.
    """
    assert ext is not None
    positions = others.new_empty(others.numel() * block_rows)
    source = torch.empty_like(positions) if block_rows > 1 else None
    threads = torch.get_num_threads()
    valid = ext.slots_of(starts, others, block_rows, row_slots, positions, source, threads)
    return (positions, source) if valid else None


def _block_of(grad: Tensor, starts: Tensor, others: Tensor, values: Tensor) -> tuple[int, int]:
    """Rows and columns of a block; refuses indices and values that do not fit together."""
    batch_dims, shape = starts.dim() - 1, grad.shape
    blocked = grad.layout in _BLOCKED
    block = values.shape[batch_dims + 1 : batch_dims + 3] if blocked else torch.Size([1, 1])
    matrix = shape[batch_dims : batch_dims + 2]
    fits = batch_dims >= 0 and len(matrix) == len(block) == 2
    if fits and 0 not in block:
        batch, dense = shape[:batch_dims], shape[batch_dims + 2 :]
        groups = matrix[0] // block[0] if grad.layout in BY_ROW else matrix[1] // block[1]
        inner = block if blocked else ()
        if (
            matrix[0] % block[0] == 0
            and matrix[1] % block[1] == 0
            and starts.shape == (*batch, groups + 1)
            and others.shape[:-1] == batch
            and values.shape == (*others.shape, *inner, *dense)
            and {starts.dtype, others.dtype} <= _INTEGERS
        ):
            return block[0], block[1]
    raise InputError(
        message(
            f"the indices and values of a {grad.layout} gradient must fit its shape, "
            f"{tuple(shape)}",
            f"{starts.dtype} indices of shapes {tuple(starts.shape)} and {tuple(others.shape)}, "
            f"values of shape {tuple(values.shape)}",
        )
    )


def _check_starts(starts: Tensor, entries: int) -> None:
    fits = (
        bool((starts[..., 0] == 0).all())
        and bool((starts[..., -1] == entries).all())
        and bool((starts.diff(dim=-1) >= 0).all())
    )
    if not fits:
        requirement = f"compressed indices must increase from 0 to the number of entries, {entries}"
        raise InputError(message(requirement, starts.tolist() if starts.numel() < 20 else "others"))


Gradient = Tensor | IndexedGrad


def touched(param: Tensor, grad: Gradient, *, by_row: bool = False) -> IndexedGrad:
    """Bring the gradient of ``param`` into canonical form, without copying its values.

    Args:
        param: the parameter.
        grad: its gradient: strided, COO, CSR, CSC, BSR, BSC, CompactGrad, MaskedTensor or
            IndexedGrad.
        by_row: slots have to be rows, for a rule that keeps state per row.

    Example:
        >>> param = torch.zeros(5, 2)
        >>> rows = torch.tensor([[3, 1, 3]])
        >>> t = touched(param, torch.sparse_coo_tensor(rows, torch.ones(3, 2), (5, 2)))
        >>> t.indices.tolist(), t.num_slots, t.slot_size
        ([[3, 1, 3]], 5, 2)
    """
    if isinstance(grad, IndexedGrad):
        found = _by_hand(param, grad)
    elif isinstance(grad, CompactGrad):
        found = _from_compact(param, grad)
    elif isinstance(grad, MaskedTensor):  # before all else: its is_sparse is a method, hence true
        found = _from_masked(param, grad)
    else:
        found = _from_tensor(param, grad)
    return in_rows(param, found) if by_row and param.dim() else found


def _from_compact(param: Tensor, grad: CompactGrad) -> IndexedGrad:
    if grad.is_materialized:
        return _from_tensor(param, grad.materialize_())
    _check_fits(param, grad)
    return grad.touched()


def _check_fits(param: Tensor, grad: Tensor) -> None:
    if (
        grad.shape != param.shape
        or (grad.dtype != param.dtype and not _may_mix(param.dtype, grad.dtype))
        or (
            not (grad.is_cpu and param.is_cpu)  # the usual case, told without making two devices
            and grad.device != param.device
        )
    ):
        raise InputError(_mismatch(param, grad))


def _from_tensor(param: Tensor, grad: object) -> IndexedGrad:
    if not isinstance(grad, Tensor):
        requirement = "the gradient must be a tensor or an IndexedGrad"
        raise InputError(message(requirement, type(grad).__name__))
    if grad.is_nested:  # before its shape, which it may not have
        raise InputError(_wrong_layout("a nested tensor"))
    _check_fits(param, grad)
    if grad.is_sparse:
        return _from_coo(param, grad)
    if grad.layout is torch.strided:
        grad = _with_memory(grad)
        return IndexedGrad(None, grad, 1, grad.numel())
    if grad.layout in BY_ROW or grad.layout in BY_COLUMN:
        return from_compressed(grad)
    raise InputError(_wrong_layout(f"layout {grad.layout}"))


def _wrong_layout(got: str) -> str:
    return message(
        "the gradient must be a strided, COO, CSR, CSC, BSR or BSC tensor, a MaskedTensor or a "
        "IndexedGrad",
        got,
        "Convert it with .to_dense() or .to_sparse_coo()",
    )


def _with_memory(grad: Tensor) -> Tensor:
    """The gradient, or what it stands for; refuses one that only pretends to have values."""
    # Torch may keep beside the values that they are still to be negated or conjugated.
    if grad.is_neg() or grad.is_conj():
        grad = grad.resolve_neg().resolve_conj()
    if grad._is_zerotensor():  # autograd has zeros that take no memory
        return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    check_memory("the gradient", grad)
    return grad


def check_memory(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that only pretends to have values: a fake one, or a wrapper."""
    if tensor.is_cpu and not address(tensor) and tensor.numel():
        requirement = f"{name} must be a tensor with values in memory"
        kind = type(tensor).__name__
        raise InputError(
            message(requirement, f"a {kind} without values", "Pass an ordinary tensor")
        )


def _may_mix(param: torch.dtype, grad: torch.dtype) -> bool:
    """Real with real, of any precision: the arithmetic is done in the widest anyway."""
    return param in FLOATS and grad in FLOATS


def _mismatch(param: Tensor, grad: Tensor) -> str:
    again = "after backward? Call zero_grad() and backward() again"
    if grad.shape != param.shape:
        requirement = f"the gradient must have the parameter's shape, {tuple(param.shape)}"
        return message(requirement, tuple(grad.shape), f"Was the parameter resized {again}")
    if grad.dtype != param.dtype and not _may_mix(param.dtype, grad.dtype):
        requirement = f"the gradient of a {param.dtype} parameter must have a compatible dtype"
        return message(requirement, grad.dtype, f"Was the parameter converted {again}")
    requirement = f"the gradient must be on the parameter's device, {param.device}"
    return message(requirement, grad.device)


def in_rows(param: Tensor, found: IndexedGrad) -> IndexedGrad:
    """The same gradient with rows as slots, held in part where it has single elements.

    Example:
        >>> t = in_rows(torch.zeros(3, 2), IndexedGrad(torch.tensor([3]), torch.ones(1, 1), 6, 1))
        >>> t.indices.tolist(), t.element_mask.tolist()
        ([1], [[False, True]])
    """
    rows = param.shape[0]
    if found.num_slots == rows:
        return found
    if found.indices is None:
        return found._replace(num_slots=rows, slot_size=param.numel() // rows if rows else 0)
    if not param.numel():
        return IndexedGrad(found.indices.reshape(-1)[:0], found.values.reshape(-1)[:0], rows, 0)
    if found.num_slots < rows:
        return found.finer(rows)
    return coarser(found, rows)


# COO


def _from_coo(param: Tensor, grad: Tensor) -> IndexedGrad:
    shape = param.shape
    indices, values = coo_indices(grad), coo_values(grad)
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
            message(
                f"the gradient's {entries} indices over {sparse_dim} dims need values of shape "
                f"{(entries, *shape[sparse_dim:])}",
                tuple(values.shape),
            )
        )
    check_memory("the gradient", values)
    if values.is_neg():
        values = values.resolve_neg()
    return IndexedGrad(positions, values, slots, block)


def _check_indices(indices: Tensor, shape: torch.Size) -> None:
    """Refuse an index outside its own dimension, which flattening would hide."""
    if indices.numel() == 0:
        return
    for dim, row in enumerate(indices):
        check_index(dim, row, shape[dim])


def _flatten(indices: Tensor, leading: torch.Size) -> Tensor:
    positions = indices.new_zeros(indices.shape[1])
    for row, size in zip(indices, leading, strict=True):
        positions.mul_(size).add_(row)
    return positions


# Masked tensors


def _from_masked(param: Tensor, grad: MaskedTensor) -> IndexedGrad:
    """What the mask excludes is not held."""
    data, mask = grad.get_data(), grad.get_mask()
    found = _from_tensor(param, data)
    if found.indices is None:
        selected = mask.reshape(-1).nonzero().squeeze(1)
        return IndexedGrad(selected, found.values, param.numel(), 1, value_index=selected)
    # The mask has the data's sparsity: a value for each element that is stored.
    present = coo_values(mask) if mask.layout is torch.sparse_coo else mask.values()
    if bool(present.all()):
        return found
    elements = found.finer(param.numel())
    assert elements.indices is not None
    source = present.reshape(-1).nonzero().squeeze(1)
    return elements._replace(indices=elements.indices[source], value_index=source)


# By hand


def _by_hand(param: Tensor, grad: IndexedGrad) -> IndexedGrad:
    """An IndexedGrad that a user has made: nothing about it is taken for granted."""
    positions, values, slots, block, source, scale, held = grad
    if held is not None:
        raise InputError(message("held is internal and must be None", "a tensor"))
    _check_tensor("values", values, param, optional=False)
    for name, tensor in (("positions", positions), ("source", source), ("scale", scale)):
        _check_tensor(name, tensor, param, optional=True)
    if values.dtype != param.dtype and not _may_mix(param.dtype, values.dtype):
        requirement = f"the values for a {param.dtype} parameter must have a compatible dtype"
        raise InputError(message(requirement, values.dtype))
    rows = param.shape[0] if param.dim() else 1
    if slots == block == 0:
        slots, block = rows, math.prod(param.shape[1:])
    whole = isinstance(slots, int) and isinstance(block, int) and slots >= 0 and block >= 0
    if not whole or slots * block != param.numel():
        requirement = f"slots x block must be the parameter's {param.numel()} elements"
        raise InputError(message(requirement, f"{slots} x {block}"))
    slots, block = int(slots), int(block)  # True is 1
    if positions is None:
        for name, tensor in (("source", source), ("scale", scale)):
            if tensor is not None:
                requirement = f"{name} must be None if positions is None"
                raise InputError(message(requirement, "a tensor"))
        if values.shape != param.shape:
            requirement = f"without positions the values must have shape {tuple(param.shape)}"
            raise InputError(message(requirement, tuple(values.shape)))
        return IndexedGrad(None, values.resolve_neg().resolve_conj(), 1, param.numel())
    positions = _integers("positions", positions)
    source = None if source is None else _integers("source", source)
    blocks = values.numel() // block if block else math.prod(values.shape[:1])
    entries = positions.numel()
    if values.numel() != blocks * block or (source is None and blocks != entries):
        requirement = f"{entries} positions need as many rows of {block} values"
        if source is not None:
            requirement = f"the values must be rows of {block}"
        raise InputError(message(requirement, f"values of shape {tuple(values.shape)}"))
    if source is not None:
        _check_source(source, blocks, entries)
    if scale is not None:
        scale = _factors(scale, values, entries)
    found = IndexedGrad(positions, values.resolve_neg(), slots, block, source, scale)
    if param.numel() and slots % rows and rows % slots:
        # Neither parts of rows nor made of rows, which is all that others have to reckon with.
        return found.finer(math.lcm(slots, rows))
    return found


def _check_tensor(name: str, tensor: object, param: Tensor, *, optional: bool) -> None:
    if tensor is None and optional:
        return
    if not isinstance(tensor, Tensor) or isinstance(tensor, MaskedTensor):
        requirement = f"the {name} of an IndexedGrad must be a strided tensor"
        raise InputError(message(requirement, type(tensor).__name__))
    if tensor.layout is not torch.strided or tensor.is_nested:
        requirement = f"the {name} of an IndexedGrad must be a strided tensor"
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise InputError(message(requirement, got))
    if tensor.device != param.device:
        raise InputError(message(f"the {name} must be on {param.device}", tensor.device))
    check_memory(f"the {name} of an IndexedGrad", tensor)


def _integers(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in _INTEGERS:
        raise InputError(
            message(f"the {name} of an IndexedGrad must be int64 or int32", tensor.dtype)
        )
    return tensor.long().reshape(-1).contiguous()


def _check_source(source: Tensor, blocks: int, entries: int) -> None:
    if source.numel() != entries:
        requirement = f"{entries} positions need as many entries in source"
        raise InputError(message(requirement, source.numel()))
    if entries:
        low, high = (int(bound) for bound in source.aminmax())
        if low < 0 or high >= blocks:
            requirement = f"source must hold row numbers of values, in [0, {blocks})"
            raise InputError(message(requirement, low if low < 0 else high))


def _factors(scale: Tensor, values: Tensor, entries: int) -> Tensor:
    if scale.numel() != entries:
        requirement = f"{entries} positions need as many entries in scale"
        raise InputError(message(requirement, scale.numel()))
    if scale.dtype not in FLOATS:
        raise InputError(
            message("the scale of an IndexedGrad must be of a float dtype", scale.dtype)
        )
    return scale.detach().resolve_neg().reshape(-1).to(values.dtype.to_real()).contiguous()
