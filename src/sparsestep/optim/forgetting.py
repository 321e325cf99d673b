"""Resetting the state of rows, for example when a vocabulary gives a row to another id."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsestep._process import uninterrupted
from sparsestep.deferred.rows import rows_of
from sparsestep.errors import InputError, memory_errors, message
from sparsestep.memory import tensors as parameters
from sparsestep.memory.mapped_file import RowWrites, about_to_write, mapped_files
from sparsestep.optim import state as states
from sparsestep.optim.catching_up import CatchesUp, row_numbers
from sparsestep.optim.declaration import speaking


class Forgets(CatchesUp):
    """An optimizer as far as it can forget what it knows of a row."""

    _lock: Any

    def forget(self, param: Tensor, rows: Tensor) -> None:
        """Reset the state of rows to what it is before the first step.

        This resets moments and sums, and the row's own count (``bias_correction="per_row"``). With
        ``semantics="dense"``, the row is brought up to date first, and then counts as one that
        never had a gradient. The parameter itself and its number of steps do not change. Before the
        first step, this does nothing.

        Args:
            param: one of this optimizer's parameters.
            rows: an integer tensor of row numbers, of any shape; may have duplicates.

        Raises:
            InputError: a row is out of range, or the state does not match the parameter.

        Whatever it raises, also ``MemoryError`` and ``KeyboardInterrupt``: all rows have been reset
        or none.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 1))
            >>> optimizer = sparsestep.Adagrad([weight], lr=0.1)
            >>> weight.grad = torch.ones(3, 1)
            >>> optimizer.step()
            >>> optimizer.forget(weight, torch.tensor([0, 2]))
            >>> optimizer.state[weight]["sum"].flatten().tolist()
            [0.0, 1.0, 0.0]
        """
        writes = RowWrites()
        with speaking(type(self).__name__), memory_errors(), self._lock:
            self.prepare_forget(param, rows, writes)
            uninterrupted(writes.commit)

    def prepare_forget(
        self, param: Tensor, rows: Tensor, writes: RowWrites, *, is_overwritten: bool = False
    ) -> None:
        """Add the state of rows to what ``writes`` resets; everything that can raise.

        Args:
            param: one of this optimizer's parameters.
            rows: which ones.
            writes: commits the reset.
            is_overwritten: the rows of the parameter are overwritten as well, so that steps they
                have missed do not matter.
        """
        group = self._group_of(param)
        memory = parameters.memory_of(param)
        if parameters.is_distributed(param):
            requirement = "forget does not support parameters that are sharded across processes"
            raise InputError(message(requirement, "a DTensor"))
        rows = row_numbers("rows to forget", rows, memory.shape[0] if memory.dim() else 1)
        record, rule = self.state.get(param), self.stored_rule_for(group)
        tensors: list[Tensor] = []
        # A missing tensor means a first step.
        if record and all(record.get(spec.name) is not None for spec in rule.state):
            tensors = states.checked(rule, memory, record)
            self._look_at(param, memory, tensors)
        values = [states.initial(spec, group) for spec in rule.state[: len(tensors)]]
        if not is_overwritten:
            self.catch_up_rows(param, rows)
        if not rows.numel():
            return
        if mapped_files:
            about_to_write(param, tensors, rows)
        rows = rows.to("cpu").contiguous()
        for tensor, value in zip(rows_of(memory, tensors)[1], values, strict=True):
            fresh = torch.full((1, *tensor.shape[1:]), value, dtype=tensor.dtype, device="cpu")
            writes.add(tensor, rows, fresh)
        clock = self.deferred.get(id(param))
        if clock is not None and clock.owner is param:
            writes.add(*clock.reset_of(rows))

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        """The param group that a parameter is in."""
        for group in self.param_groups:
            if any(param is each for each in group["params"]):
                found: dict[str, Any] = group
                return found
        requirement = "the parameter must be one of this optimizer's"
        shape = getattr(param, "shape", None)
        got = type(param).__name__ if shape is None else f"another, of shape {tuple(shape)}"
        raise InputError(message(requirement, got))
