"""Bringing rows up to date that are behind under dense semantics."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from sparsestep._process import uninterrupted
from sparsestep.deferred.rows import rows_of
from sparsestep.deferred.tracking import Tracking
from sparsestep.errors import InputError, message
from sparsestep.memory import tensors as parameters
from sparsestep.optim.declaration import speaking
from sparsestep.optim.records import StateKeeper


class CatchesUp(StateKeeper):
    """An optimizer as far as rows go that are behind."""

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Bring rows up to date that are behind under ``semantics="dense"``.

        With ``semantics="masked"`` no row is ever behind, and this does nothing.

        Args:
            param: one parameter of this optimizer; all parameters by default.
            rows: an integer tensor of row numbers, of any shape; all rows by default.

        Raises:
            InputError: the parameter is not one of this optimizer's, or a row is out of range.

        Example:
            >>> import sparsestep
            >>> weight = torch.nn.Parameter(torch.zeros(3, 1))
            >>> optimizer = sparsestep.SGD([weight], lr=1.0, momentum=0.5, semantics="dense")
            >>> for row in (0, 1, 2):
            ...     weight.grad = torch.sparse_coo_tensor(
            ...         [[row]], [[1.0]], (3, 1), check_invariants=True
            ...     )
            ...     optimizer.step()
            >>> weight.flatten().tolist()
            [-1.0, -1.0, -1.0]
            >>> optimizer.catch_up()
            >>> weight.flatten().tolist()
            [-1.75, -1.5, -1.0]
        """
        known = list(self.params())
        if param is not None:
            if not any(param is each for each in known):
                requirement = "catch_up needs a parameter of this optimizer"
                shape = getattr(param, "shape", None)
                got = type(param).__name__ if shape is None else f"another, of shape {tuple(shape)}"
                raise InputError(f"{type(self).__name__}: {message(requirement, got)}")
            known = [param]
        for each in known:
            clock = self.deferred.get(id(each))
            if rows is not None and (clock is not None or param is not None):
                memory = parameters.memory_of(each)
                with speaking(type(self).__name__):
                    rows = row_numbers("rows to catch up", rows, len(memory) if memory.dim() else 1)
            if clock is None:
                continue
            self.catch_up_rows(each, rows)
            clock.announced = True

    def catch_up_rows(self, param: Tensor, rows: Tensor | None) -> None:
        """``catch_up`` of one parameter, for whoever knows that rows are integers and none outside.

        Args:
            param: whose rows.
            rows: int64 or int32, of one dim; ``None`` for all.
        """
        clock = self.deferred.get(id(param))
        if clock is None or clock.owner is not param or not clock.is_behind:
            return
        state = clock.state_in(self.state.get(param))
        if state is None:  # cleared: the parameter begins anew, so nothing was missed
            return
        memory = parameters.memory_of(param)
        real = rows_of(memory, state)
        clock.check(*real)
        clock.notice(memory)
        if rows is None:
            uninterrupted(partial(clock.catch_up_all, *real, engine=self.engine))
            return
        rows = clock.that_may_move(rows.to(param.device))
        clock.catch_up_rows(*real, rows, engine=self.engine)

    def track(self, model: torch.nn.Module, *, guard: bool = False) -> Tracking:
        """Bring rows up to date before a model reads them.

        Each ``nn.Embedding`` and ``nn.EmbeddingBag`` of the model then brings the rows of a lookup
        up to date first. So does a module with a method ``rows_read``, which yields what a call
        reads (``sparsestep.nn.EmbeddingBagCollection`` has one). For any other module that holds a
        table, all rows are brought up to date. Everything is current after ``eval()``, and in the
        model's ``state_dict()``, pickles and copies.

        Args:
            model: a model with parameters of this optimizer, which needs ``semantics="dense"``.
            guard: bring rows up to date for every torch operation that reads the tables, inside the
                model or not. Costs a Python call per operation.

        Returns:
            A handle; call its ``remove()`` to stop tracking.

        Raises:
            InputError: the semantics are ``"masked"``, or the model has none of the parameters.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(3, 1, sparse=True)
            >>> optimizer = sparsestep.SGD(table.parameters(), momentum=0.5, semantics="dense")
            >>> handle = optimizer.track(table)
        """
        return Tracking(self, model, guard=guard)

    def state_dict(self) -> StateDict:
        """Like torch's. All rows are brought up to date first, so it is an ordinary checkpoint.

        With a mask by rows, ``torch.save`` writes the state of the rows that have moved, as sparse
        tensors, if that takes less than half the space. In memory it has all rows.
        """
        self.catch_up()
        found = super().state_dict()
        by_row = {id(record): kept for record, kept in self._records_by_row()}
        if by_row:
            state = found["state"].items()
            found["state"] = {key: by_row.get(id(record), record) for key, record in state}
        return found


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def row_numbers(name: str, rows: Tensor, count: int) -> Tensor:
    """Rows of a parameter, as int64 of one dim; raises where they are none.

    Args:
        name: what they are called in messages.
        rows: as they were given.
        count: how many the parameter has.

    Example:
        >>> row_numbers("rows", torch.tensor([[2], [0]], dtype=torch.uint8), 3)
        tensor([2, 0])
    """
    if not isinstance(rows, Tensor) or rows.dtype not in _INTEGERS:
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(message("rows must be an integer tensor", got))
    rows = rows.reshape(-1).long()
    if rows.numel():
        low, high = rows.aminmax()
        if int(low) < 0 or int(high) >= count:
            outside = int(low) if int(low) < 0 else int(high)
            raise InputError(message(f"{name} must be in [0, {count})", outside))
    return rows
