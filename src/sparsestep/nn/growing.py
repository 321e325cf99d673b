"""grow: a table gets more rows, and stays what it is for everybody who has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsestep.errors import InputError, memory_errors, sentence, usable
from sparsestep.memory import parameters
from sparsestep.memory.files import file_of
from sparsestep.nn.attached import AnyOptimizer, Init, Table, ours, restoring_rng, weight_of
from sparsestep.optimizer.declaration import speaking
from sparsestep.optimizer.growing import prepare_to_grow
from sparsestep.signals import uninterrupted
from sparsestep.torch_internals import without_torch_function


def grow(module: Table, rows: int, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
    """Give a table more rows. The weight stays the same parameter, and keeps its state.

    So optimizers go on with it, those that are passed here and have its state; models that are
    tracked stay so; hooks and ``step_in_backward`` as well. New rows are initialised, their state
    is what it is before a first step. Other modules that share the weight have the new rows, too,
    but keep what they say about their size (``num_embeddings``).

    Call it between steps: what was looked up before must have had its backward. It takes as long as
    to copy the table and its state.

    Args:
        module: an ``nn.Embedding`` or ``nn.EmbeddingBag`` of torch or of this library, such as one
            of the ``tables`` of an ``EmbeddingBagCollection``.
        rows: how many there are to be.
        optimizers: all optimizers of this library that have the weight.
        init: fills the tensor of new rows in place; by default from a normal distribution, as the
            module's own constructor does.

    Raises:
        InputError: it cannot grow, because it is sharded, masked, in shared memory or has a
            gradient.
        MemoryError: there is not enough memory.

    Whatever it raises, also ``KeyboardInterrupt``: table and optimizers have grown or nothing has
    changed.

    Example:
        >>> import sparsestep
        >>> table = sparsestep.nn.Embedding(2, 4)
        >>> weight = table.weight
        >>> optimizer = sparsestep.Adam(table.parameters())
        >>> table(torch.tensor([0, 1])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> sparsestep.nn.grow(table, 5, optimizer)
        >>> table.weight is weight, table
        (True, Embedding(5, 4, sparse=True))
        >>> optimizer.state[weight]["exp_avg"].shape
        torch.Size([5, 4])
    """
    with restoring_rng() as keep_rng:
        commit = prepare_growth(module, rows, optimizers, init)
        uninterrupted(lambda: [work() for work in (commit, keep_rng)])


class Spare(NamedTuple):
    """How many rows at the end of a weight are none of the table's, as ranks have equally many.

    Attributes:
        before: of those that there are.
        after: of those that there are to be.
    """

    before: int
    after: int


def prepare_growth(
    module: Any,
    rows: int,
    optimizers: tuple[Any, ...],
    init: Init | None,
    spare: Spare | None = None,
) -> Callable[[], None]:
    """Do all that may raise; what is returned does the rest, and nothing can fail.

    Args:
        module: whose weight grows.
        rows: how many it is to have.
        optimizers: all that have it.
        init: fills new rows in place.
        spare: of the part of a sharded table that is here.
    """
    weight = weight_of("grow", module, is_part=spare is not None)
    known = ours("grow", weight, optimizers)
    have = len(weight)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < have:
        contract = f"grow: rows must be a whole number, at least the {have} that there are"
        raise InputError(sentence(contract, repr(rows)))
    given: Any = init
    if given is not None and not callable(given):
        contract = "grow: init must be a function that fills a tensor of rows in place"
        raise InputError(sentence(contract, f"a {type(given).__name__}"))
    if weight.grad is not None:
        contract = "grow: a table that grows must have no gradient, which is for fewer rows"
        raise InputError(sentence(contract, "one", "Call zero_grad() first"))
    if file_of(weight) is not None:
        contract = "grow: a table that grows must not lie in a file, which has the size it was made"
        remedy = "Make a file for all rows that there may be: those that nobody uses take no room"
        raise InputError(sentence(contract, "one that does", remedy))
    if weight.is_cpu and weight.is_shared():
        contract = "grow: a table that grows must not be in shared memory"
        raise InputError(sentence(contract, "one that other processes may have"))
    parameters.check_writable("grow: the weight of a table", parameters.memory_of(weight))
    first, end = (have, rows) if spare is None else (have - spare.before, rows - spare.after)
    if rows == have and first == end:
        return lambda: None
    with speaking("grow"), usable("rows must be as many as memory can hold"):
        others = [prepare_to_grow(optimizer, weight, rows, first) for optimizer in known]
        new = torch.empty(rows, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    with memory_errors(), torch.no_grad(), without_torch_function():
        (nn.init.normal_ if init is None else init)(new[first:end])
        new[:first] = weight[:first]
        new[end:] = 0
    return partial(_commit, module, weight, new, others)


def _commit(
    module: Table, weight: nn.Parameter, new: Tensor, others: list[Callable[[], None]]
) -> None:
    with without_torch_function():
        weight.data = new
    module.num_embeddings = len(new)
    for grow_state in others:
        grow_state()
