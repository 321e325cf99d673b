"""Attached: a table whose rows a vocabulary assigns, with its optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sparsestep.errors import InputError, message, usable
from sparsestep.memory import tensors as parameters
from sparsestep.memory.mapped_file import RowWrites, about_to_write, mapped_files, written
from sparsestep.nn.grow import Init, Table, do_nothing, drawn, ours, weight_of
from sparsestep.optim.optimizer import RuleOptimizer


class Attached:
    """A table whose rows a vocabulary assigns; ``is_part`` if it is a shard."""

    def __init__(
        self,
        table: Table,
        optimizers: tuple[Any, ...],
        init: Init | None,
        *,
        is_part: bool = False,
    ) -> None:
        who = "Vocabulary.attach"
        weight = weight_of(who, table, is_part=is_part)
        self.table = table
        self._is_part = is_part
        self.optimizers: list[RuleOptimizer] = ours(who, weight, optimizers)
        self.init: Init = nn.init.normal_ if init is None else init
        with usable(f"{who}: init must fill a tensor of rows in place"):
            self._new_values(weight, 1, 0)

    def check(self, rows: int, shared: int) -> None:
        """Raise unless the table fits a vocabulary of so many rows, some of them shared by ids."""
        have, padding = self.table.num_embeddings, self.table.padding_idx
        if have < rows:
            requirement = f"Vocabulary.attach: a table must have a row for each of {rows}"
            raise InputError(message(requirement, f"{have} rows"))
        if padding is not None and shared <= padding < rows:
            requirement = f"Vocabulary.attach: padding_idx must be one of the {shared} shared rows"
            remedy = "Use padding_idx=0, and ids without a row of their own count as padding"
            raise InputError(message(requirement, padding, remedy))

    def progress(self) -> list[tuple[int, int]]:
        """Changes with every step of every optimizer."""
        return [(each.iterations, each.updates) for each in self.optimizers]

    def prepare(self, rows: Tensor, seed: int, writes: RowWrites) -> Callable[[], None]:
        """Add the reset of rows and their state to ``writes``: everything that can raise.

        Without rows, table and optimizers are checked. Returns what to call after the commit.
        """
        weight = weight_of("Vocabulary", self.table, is_part=self._is_part)
        memory = parameters.memory_of(weight)
        parameters.check_writable("the weight of a table", memory)
        for optimizer in self.optimizers:
            optimizer.prepare_forget(weight, rows, writes, is_overwritten=True)
        if not rows.numel():
            return do_nothing
        if mapped_files:
            about_to_write(weight, (), rows)
        writes.add(memory.detach(), rows, self._new_values(weight, rows.numel(), seed))
        return partial(self._note_written, weight)

    def _new_values(self, weight: Tensor, count: int, seed: int) -> Tensor:
        values = torch.empty(count, *weight.shape[1:], dtype=weight.dtype, device="cpu")
        return drawn(values, self.init, seed)

    def _note_written(self, weight: Tensor) -> None:
        increment_version([weight])
        for optimizer in self.optimizers:
            deferred = optimizer.deferred.get(id(weight))
            if deferred is not None:
                deferred.note_write(parameters.memory_of(weight))
        if mapped_files:
            written([weight])
