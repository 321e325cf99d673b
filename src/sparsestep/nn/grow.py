"""grow: more rows for a table, whose weight stays the same parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep._torch import own_parameters, without_torch_function
from sparsestep.errors import InputError, error_prefix, memory_errors, message, usable
from sparsestep.grads.exchange import source_of
from sparsestep.memory.mapped_file import file_of
from sparsestep.memory.tensors import check_writable, is_distributed, memory_of
from sparsestep.nn.ngram import NgramEmbedding
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer

Table: TypeAlias = nn.Embedding | nn.EmbeddingBag
AnyOptimizer: TypeAlias = RuleOptimizer | FunctionalOptimizer
Init: TypeAlias = Callable[[Tensor], object]


def weight_of(who: str, table: Any, *, is_part: bool = False) -> nn.Parameter:
    """The weight of a table whose rows ``who`` may assign, or which may grow.

    ``is_part``: it is known to be this process's part of a sharded table.
    """
    if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
        requirement = f"{who}: the table must be an nn.Embedding or nn.EmbeddingBag"
        remedy = "Pass one of its tables" if isinstance(table, nn.Module) else ""
        raise InputError(message(requirement, f"a {type(table).__name__}", remedy))
    if isinstance(table, NgramEmbedding):
        requirement = f"{who}: the rows of a table must not depend on their number"
        raise InputError(message(requirement, "a NgramEmbedding, which hashes to all of them"))
    weight = own_parameters(table).get("weight")
    if weight is None:
        requirement = f"{who}: the weight of a table must be a parameter of its own"
        raise InputError(message(requirement, "one that is computed from others"))
    if is_distributed(weight) or (source_of(weight) is not None and not is_part):
        requirement = f"{who}: a table must not be sharded over processes"
        raise InputError(message(requirement, "a sharded one", "Do this before sharding it"))
    found: nn.Parameter = weight
    return found


def as_rule_optimizers(
    who: str, weight: Tensor, optimizers: tuple[Any, ...]
) -> list[RuleOptimizer]:
    """Return the optimizers themselves, or refuse one that is not ours or lacks the weight."""
    found = []
    for optimizer in optimizers:
        if isinstance(optimizer, FunctionalOptimizer):
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, RuleOptimizer):
            requirement = f"{who}: optimizers must be sparsestep's"
            got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise InputError(message(requirement, got))
        if not any(weight is each for each in optimizer.params()):
            requirement = "an optimizer must have the weight of the table among its parameters"
            got = f"{type(optimizer).__name__} without it"
            raise InputError(f"{who}: {message(requirement, got)}")
        found.append(optimizer)
    return found


def initialize_rows(values: Tensor, init: Init, seed: int) -> Tensor:
    """Initialize rows in place by a seed of their own; torch's generator keeps its state."""

    def draw() -> None:
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed(seed)
            with torch.no_grad():  # an exception inside torch's own code would leave it on
                init(values)
        finally:
            generator.set_state(before)

    uninterrupted(draw)
    return values


def do_nothing() -> None:
    """Commit of an operation that changes nothing."""


@contextmanager
def restoring_rng() -> Iterator[Callable[[], None]]:
    """Restore torch's CPU generator on error, unless the function that it yields was called."""
    generator = torch.default_generator
    states = [generator.get_state()]
    try:
        yield states.clear
    except BaseException:
        for state in states:
            generator.set_state(state)
        raise


def grow(module: Table, rows: int, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
    """Add rows to a table. The weight stays the same parameter, and keeps its state.

    So the optimizers that you pass continue with it, and hooks, ``step_in_backward`` and tracked
    models keep working. New rows are initialized, and their state is that before a first step.
    Modules that share the weight have the new rows, too, but their ``num_embeddings`` stays.

    Call it between steps, after the backward of all lookups. It takes as long as copying the table
    and its state.

    Args:
        module: an ``nn.Embedding`` or ``nn.EmbeddingBag`` of torch or of this library, such as one
            of the ``tables`` of an ``EmbeddingBagCollection``.
        rows: the new number of rows.
        optimizers: all optimizers of this library that have the weight.
        init: fills the tensor of new rows in place; by default from a normal distribution, as the
            module's own constructor does.

    Raises:
        InputError: the table cannot grow: it is sharded, masked, in shared memory, or has a
            gradient.
        MemoryError: there is not enough memory.

    Atomic: on error, also on ``KeyboardInterrupt``, table and optimizers have grown or nothing has
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
        (True, Embedding(5, 4, sparse=True, fused=True))
        >>> optimizer.state[weight]["exp_avg"].shape
        torch.Size([5, 4])
    """
    with restoring_rng() as keep_rng:
        commit = prepare_grow(module, rows, optimizers, init)
        uninterrupted(lambda: [work() for work in (commit, keep_rng)])


class Spare(NamedTuple):
    """Rows at the end of a shard that are not the table's: all shards have equally many rows."""

    before: int
    after: int


def prepare_grow(
    module: Any, rows: int, optimizers: tuple[Any, ...], init: Any, spare: Spare | None = None
) -> Callable[[], None]:
    """Do everything that can raise, and return the rest. ``spare`` is for a shard."""
    weight = weight_of("grow", module, is_part=spare is not None)
    known = as_rule_optimizers("grow", weight, optimizers)
    have = len(weight)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < have:
        requirement = f"grow: rows must be a whole number, at least the present {have}"
        raise InputError(message(requirement, repr(rows)))
    if init is not None and not callable(init):
        requirement = "grow: init must be a function that fills a tensor of rows in place"
        raise InputError(message(requirement, f"a {type(init).__name__}"))
    if weight.grad is not None:
        requirement = "grow: the table must have no gradient"
        raise InputError(message(requirement, "one", "Call zero_grad() first"))
    if file_of(weight) is not None:
        requirement = "grow: the table must not be in a file, whose size is fixed"
        remedy = "Create the file with all rows that you may need: unused ones take no space"
        raise InputError(message(requirement, "one that is", remedy))
    if weight.is_cpu and weight.is_shared():
        requirement = "grow: the table must not be in shared memory"
        raise InputError(message(requirement, "one that other processes may use"))
    check_writable("grow: the weight of a table", memory_of(weight))
    first, end = (have, rows) if spare is None else (have - spare.before, rows - spare.after)
    if rows == have and first == end:
        return do_nothing
    with error_prefix("grow"), usable("rows must be as many as memory can hold"):
        others = [optimizer.prepare_grow(weight, rows, first) for optimizer in known]
        new = torch.empty(rows, *weight.shape[1:], dtype=weight.dtype, device=weight.device)
    with memory_errors(), torch.no_grad(), without_torch_function():
        (nn.init.normal_ if init is None else init)(new[first:end])
        new[:first] = weight[:first]
        new[end:] = 0

    def commit() -> None:
        with without_torch_function():
            weight.data = new
        module.num_embeddings = len(new)
        if hasattr(module, "graph_anchor"):
            module.graph_anchor = None  # which knows the former shape
        for grow_state in others:
            grow_state()

    return commit
