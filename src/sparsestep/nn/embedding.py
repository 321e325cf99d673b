"""Embedding: torch's, with a compact gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.types import Device

from sparsestep.deferred.guard import readable
from sparsestep.grads.compact import CompactGrad
from sparsestep.nn.interop import is_for_torch, outside_graphs, scripted_as, write_out_for_ddp
from sparsestep.nn.lookup import (
    ROWS,
    Found,
    Request,
    check_ids,
    first_derivative,
    look_up,
    part,
    part_of,
    unshared,
)


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding`` whose gradient is never larger than that of its output.

    It has the arguments and results of torch's module. Ids are checked before anything is read or
    changed, and an error names the out-of-range id and its position. The gradient of the weight is
    always sparse. The optimizers of this library use the ids and the gradient of the output
    directly; other code that reads the gradient's values gets an ordinary COO tensor.

    Args:
        num_embeddings: number of rows.
        embedding_dim: length of a row.
        padding_idx: a row that gets no gradient and starts as zeros.
        max_norm: the largest norm of a row; longer rows are rescaled when they are looked up.
        norm_type: the order of that norm.
        scale_grad_by_freq: divide the gradient of an id by its number of occurrences in the call.
        sparse: has no effect; the gradient is always sparse.
        device: the device of the weight.
        dtype: the dtype of the weight.

    Attributes:
        name: the name of the table in error messages.

    Example:
        >>> import sparsestep
        >>> table = sparsestep.nn.Embedding(1000, 2, padding_idx=0)
        >>> table(torch.tensor([[3, 0], [3, 5]])).sum().backward()
        >>> table.weight.grad
        tensor(indices=tensor([[3, 3, 5]]),
               values=tensor([[1., 1.],
                              [1., 1.],
                              [1., 1.]]),
               size=(1000, 2), nnz=3, layout=torch.sparse_coo)
        >>> try:
        ...     table(torch.tensor([[3, 1000]]))
        ... except sparsestep.InputError as error:
        ...     print(str(error).split(" Map")[0])
        Embedding (1000 x 2): ids must be in [0, 1000). Got 1000 at position (0, 1).
    """

    name = ""  # without a type: torch.jit.script takes annotations for its own

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            *(num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq),
            *(True, _weight, _freeze, device, dtype),
        )

    @outside_graphs
    @scripted_as(torch.nn.Embedding.forward)
    def forward(self, input: Tensor) -> Tensor:
        """Look up rows.

        Args:
            input: ids of any shape, int64 or int32.

        Returns:
            A row for each id: the shape of the ids, then that of a row.

        Raises:
            InputError: an id is out of range; nothing has changed.
        """
        weight = self.weight
        if is_for_torch(weight):
            return self._by_torch(input)
        is_recorded = weight.requires_grad and torch.is_grad_enabled()
        padding = -1 if self.padding_idx is None else self.padding_idx
        found, table = None, readable(weight, input)
        if self.max_norm is None and takes_compact(weight):
            request = Request(table, input, None, False, None, ROWS, padding, is_recorded)
            found = look_up([request])
        rows = self._by_operations(table, input) if found is None else found[0]
        if not is_recorded or rows.output.requires_grad:
            return rows.output
        write_out_for_ddp(weight)
        result: Tensor = _Rows.apply(weight, input, rows, padding, self.scale_grad_by_freq)
        return result

    def _by_operations(self, weight: Tensor, ids: Tensor) -> Found:
        """With torch's operations, and every check."""
        check_ids(self, weight, ids)
        if not takes_compact(self.weight):
            return Found(self._by_torch(ids))
        with torch.no_grad():
            if self.max_norm is not None:
                ids = ids.contiguous()
                torch.embedding_renorm_(weight, ids, self.max_norm, self.norm_type)
            return Found(torch.embedding(weight, ids))

    def _by_torch(self, ids: Tensor) -> Tensor:
        """With torch's own gradient, a dense one."""
        return functional.embedding(
            ids,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
        )


def takes_compact(weight: Tensor) -> bool:
    """Whether a compact gradient goes straight to whoever updates the weight.

    A weight that is computed from others passes its gradient on to operations that know nothing of
    it.
    """
    return weight.is_leaf


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, ids: Tensor, found: Found, padding: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(ids, found.positions, found.source)  # ids: they must not change
        ctx.weight = (weight.shape, padding, by_frequency)
        return found.output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return first_derivative(_gradient, ctx, grad)


def _gradient(ctx: Any, grad: Tensor) -> Any:
    ids, positions, source = ctx.saved_tensors
    shape, padding, by_frequency = ctx.weight
    rows = unshared(grad).reshape(ids.numel(), shape[1])
    if positions is None:
        found = part(shape, ids, rows, padding=padding, by_frequency=by_frequency)
    else:
        found = part_of(shape, positions, rows, source, by_frequency=by_frequency)
    return CompactGrad.of([found], shape, grad), None, None, None, None
