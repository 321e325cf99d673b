"""A table whose rows a vocabulary gives away, with the optimizers that know something of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sparsestep.errors import InputError, sentence, usable
from sparsestep.gradients.arriving import source_of
from sparsestep.memory import parameters
from sparsestep.memory.files import about_to_write, mapped_files, written
from sparsestep.memory.row_writes import RowWrites
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer
from sparsestep.signals import uninterrupted
from sparsestep.torch_internals import own_parameters

Table: TypeAlias = nn.Embedding | nn.EmbeddingBag
AnyOptimizer: TypeAlias = RuleOptimizer | FunctionalOptimizer
Init: TypeAlias = Callable[[Tensor], object]


def weight_of(who: str, table: Any, *, is_part: bool = False) -> nn.Parameter:
    """The weight of a table whose rows may be given away, or which may grow.

    Args:
        who: asks.
        table: what was given.
        is_part: it is known to be the part of a sharded table that is here.
    """
    if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
        contract = f"{who}: it must be an nn.Embedding or nn.EmbeddingBag"
        remedy = "Pass one of its tables" if isinstance(table, nn.Module) else ""
        raise InputError(sentence(contract, f"a {type(table).__name__}", remedy))
    weight = own_parameters(table).get("weight")
    if weight is None:
        contract = f"{who}: the weight of a table must be a parameter of its own"
        raise InputError(sentence(contract, "one that is computed from others"))
    if parameters.is_distributed(weight) or (source_of(weight) is not None and not is_part):
        contract = f"{who}: a table must not be sharded over processes"
        raise InputError(sentence(contract, "a sharded one", "Do this before sharding it"))
    found: nn.Parameter = weight
    return found


def ours(who: str, weight: Tensor, optimizers: tuple[Any, ...]) -> list[RuleOptimizer]:
    """The optimizers that a weight has; raises where one is none of ours, or does not have it."""
    found = []
    for optimizer in optimizers:
        if isinstance(optimizer, FunctionalOptimizer):
            optimizer = optimizer._optimizer
        if not isinstance(optimizer, RuleOptimizer):
            contract = f"{who}: optimizers must be sparsestep's"
            got = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            raise InputError(sentence(contract, got))
        if not any(weight is each for each in optimizer._all_params()):
            contract = f"{who}: an optimizer must have the weight of the table among its parameters"
            raise InputError(sentence(contract, f"{type(optimizer).__name__} without it"))
        found.append(optimizer)
    return found


def drawn(values: Tensor, init: Init, seed: int) -> Tensor:
    """Fill rows with random numbers of their own; torch's generator is left as it was.

    Args:
        values: rows that start over.
        init: fills them in place.
        seed: of their random numbers.

    Example:
        >>> with torch.random.fork_rng():
        ...     ours, theirs = drawn(torch.empty(3), nn.init.normal_, 5), torch.manual_seed(5)
        ...     torch.equal(ours, torch.randn(3))
        True
    """

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
    """Commit of a lookup that changes nothing."""


@contextmanager
def restoring_rng() -> Iterator[Callable[[], None]]:
    """Restore the state of torch's CPU generator on error, unless what is yielded was called.

    Example:
        >>> before = torch.get_rng_state()
        >>> try:
        ...     with restoring_rng():
        ...         torch.rand(3) / int("none")
        ... except ValueError:
        ...     torch.equal(torch.get_rng_state(), before)
        True
    """
    generator = torch.default_generator
    states = [generator.get_state()]
    try:
        yield states.clear
    except BaseException:
        for state in states:
            generator.set_state(state)
        raise


class Attached:
    """A table that a vocabulary gives rows of.

    Args:
        table: whose rows.
        optimizers: those that train it.
        init: fills rows that begin anew, in place.
        is_part: whether the table is the part of a sharded one that is here.

    Attributes:
        table: whose rows.
        optimizers: those that train it.
        init: fills rows that begin anew, in place.
    """

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
        """Refuse a table that a vocabulary of so many rows cannot give rows of.

        Args:
            rows: of the vocabulary.
            shared: how many of them several ids share.
        """
        have, padding = self.table.num_embeddings, self.table.padding_idx
        if have < rows:
            contract = f"Vocabulary.attach: a table must have a row for each of {rows}"
            raise InputError(sentence(contract, f"{have} rows"))
        if padding is not None and shared <= padding < rows:
            contract = f"Vocabulary.attach: padding_idx must be one of the {shared} shared rows"
            remedy = "Use padding_idx=0, and ids without a row of their own count as padding"
            raise InputError(sentence(contract, padding, remedy))

    def progress(self) -> list[tuple[int, int]]:
        """Changes with every step of every optimizer."""
        return [(each._rounds, each._updates) for each in self.optimizers]

    def prepare(self, rows: Tensor, seed: int, writes: RowWrites) -> Callable[[], None]:
        """Add rows that start over, with their state, to ``writes``; everything that can raise.

        Args:
            rows: which ones, on the CPU. If there are none, table and optimizers are checked.
            seed: of the new values.
            writes: commits them.

        Returns:
            What has to be called once they are committed.
        """
        weight = weight_of("Vocabulary", self.table, is_part=self._is_part)
        memory = parameters.memory_of(weight)
        parameters.check_writable("the weight of a table", memory)
        for optimizer in self.optimizers:
            optimizer._prepare_to_forget(weight, rows, writes, is_overwritten=True)
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
            clock = optimizer._clocks.get(id(weight))
            if clock is not None:
                clock.written(parameters.memory_of(weight))
        if mapped_files:
            written([weight])
