"""Prefetching of ids: while a batch computes, those of the next one go to their owners.

A loop records which tensors of a batch are passed to lookups, and sends those of the next batch, in
a separate thread and process group. A lookup that then gets these tensors finds its ids already
sent. A lookup that gets others sends them as usual, and so do all ranks with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.distributed.collectives import Wire, new_group_like
from sparsestep.distributed.requests import Request
from sparsestep.distributed.sending import NUMBERS, Asked, numbers_of, send_ids, sent_bytes
from sparsestep.errors import SlowWarning, warn_once


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, in lists, tuples, dicts and dataclasses.

    Example:
        >>> [len(each) for each in tensors_in({"ids": [torch.ones(3), torch.ones(2)], "name": "a"})]
        [3, 2]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for each in dataclasses.fields(batch):
            yield from tensors_in(getattr(batch, each.name))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def _with(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of a lookup with every tensor, or number of one, replaced."""
    if isinstance(arguments, Mapping):
        return {key: _with(value, change) for key, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [_with(value, change) for value in arguments]
    return arguments if arguments is None else change(arguments)


def version_of(tensor: Tensor) -> int:
    """What changes when somebody writes to a tensor."""
    return -1 if tensor.is_inference() else tensor._version


class _Call(NamedTuple):
    """A lookup that a batch leads to.

    Attributes:
        module: what is called; it says what that asks for.
        arguments: numbers of the batch's tensors in the places of these.
    """

    module: Any
    arguments: Any

    def given(self, tensors: Sequence[Tensor]) -> Any:
        """The arguments for another batch."""
        return _with(self.arguments, lambda number: tensors[number])


class Sent(NamedTuple):
    """A lookup whose ids have been sent.

    Attributes:
        turn: the same on all ranks; more than 0.
        asked: what this rank asks for, in each table.
        incoming: what it is asked for.
    """

    turn: int
    asked: list[Request]
    incoming: list[Asked | None]


class Sending:
    """The lookups of one batch, which are being sent."""

    def __init__(self, calls: Sequence[_Call], tensors: Sequence[Tensor], first: int) -> None:
        self.calls: list[_Call] = list(calls)
        self.first = first
        self.given: list[Any] = [call.given(tensors) for call in calls]
        self.versions: list[list[int]] = [
            [version_of(each) for each in tensors_in(a)] for a in self.given
        ]
        self.done: threading.Event = threading.Event()
        self.sent: list[Sent | None] = [None] * len(calls)
        self.error: Exception | None = None

    def send(self, wire: Wire) -> None:
        """Send everything; what this rank cannot ask for, nobody sends."""
        try:
            self._send(wire)
        except Exception as error:  # of the processes: whoever looks up is told
            self.error = error
        finally:
            self.done.set()

    def _send(self, wire: Wire) -> None:
        asked: list[list[Request]] = []
        refuses = 0
        try:
            for call, given in zip(self.calls, self.given, strict=True):
                asked.append(call.module._requests(*given))
            tables = [request for each in asked for request in each]
            mine = numbers_of(tables)
            largest = max(sent_bytes(tables, row) for row in mine.tolist())
        except Exception:  # the lookup itself will say so, on all ranks
            refuses = 1
        # All ranks call the same modules, so all have as many tables.
        count = sum(call.module._width for call in self.calls)
        numbers = torch.zeros(wire.world, 2 + NUMBERS * count, dtype=torch.int64)
        numbers[:, 0] = refuses
        if not refuses:
            numbers[:, 2:], numbers[:, 1] = mine, largest
        theirs = wire.numbers(numbers).tolist()
        if any(row[0] for row in theirs):
            return
        largest = max(row[1] for row in theirs)
        incoming = iter(send_ids(wire, tables, [row[2:] for row in theirs], largest)())
        for place, requests in enumerate(asked):
            found = list(itertools.islice(incoming, len(requests)))
            self.sent[place] = Sent(self.first + place, requests, found)

    def take(self, module: Any, arguments: Any) -> Sent | None:
        """What has been sent for a call, once."""
        for place, call in enumerate(self.calls):
            if call.module is not module or not self._is_given(place, arguments):
                continue
            self.done.wait()
            if self.error is not None:
                raise self.error
            found, self.sent[place] = self.sent[place], None
            if found is not None:
                return found
        return None

    def _is_given(self, place: int, arguments: Any) -> bool:
        mine, theirs = list(tensors_in(self.given[place])), list(tensors_in(arguments))
        return (
            len(mine) == len(theirs)
            and all(one is other for one, other in zip(mine, theirs, strict=True))
            and [version_of(each) for each in theirs] == self.versions[place]
        )


class Loop:
    """A loop over batches whose ids are sent ahead."""

    def __init__(self) -> None:
        self._wire = Wire(new_group_like(None, backend="gloo"))
        self._tensors: list[Tensor] = []  # of the batch that computes
        self._calls: list[_Call] = []  # that it has led to
        self._others = 0  # lookups that were given something else
        self._known: tuple[list[_Call], int] = ([], 0)  # calls of a batch of so many tensors
        self._now: Sending | None = None
        self._index = 1
        self._work: queue.SimpleQueue[Sending | None] = queue.SimpleQueue()
        # Nobody waits for it: where other ranks are gone, it may be waiting for them.
        thread = threading.Thread(target=self._run, name="sparsestep-ids", daemon=True)
        thread.start()
        _loops.append(self)

    def _run(self) -> None:
        while (sending := self._work.get()) is not None:
            sending.send(self._wire)

    def end(self) -> None:
        """Send nothing any more."""
        _loops.remove(self)
        self._work.put(None)

    def recipe(self, batch: Any) -> int:
        """What all ranks have to say alike for the ids of a batch to be sent; 0: nothing."""
        calls, count = self._known
        if not calls or count != sum(1 for _ in tensors_in(batch)):
            return 0
        said = [(each.module._number, repr(each.arguments)) for each in calls]
        return zlib.crc32(repr(said).encode()) + 1

    def send(self, batch: Any) -> Sending:
        """Send the ids of the next batch; all ranks do."""
        calls, _ = self._known
        sending = Sending(calls, list(tensors_in(batch)), self._index)
        self._index += len(calls)
        self._work.put(sending)
        return sending

    def learn(self) -> None:
        """Take the lookups of the batch that has computed for those of the next ones."""
        if self._calls:
            self._known = (self._calls, len(self._tensors))
        elif self._others and not self._known[0]:
            warn_once(
                SlowWarning,
                "lockstep: prefetch=1 sends nothing ahead, because no lookup got a tensor of the "
                "batch itself. Pass the batch's own tensors to the tables, not slices of them",
            )

    def begin(self, batch: Any, sending: Sending | None) -> None:
        """Have the lookups of a batch find what was sent, and see what they are given."""
        self._now = sending
        self._tensors, self._calls, self._others = list(tensors_in(batch)), [], 0

    def look_up(self, module: Any, arguments: Any) -> Sent | None:
        """See a lookup; what has been sent for it."""
        if module._exchange.wire.world != self._wire.world:
            return None  # these are some of the processes
        places = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        given = list(tensors_in(arguments))
        if not given or any(id(tensor) not in places for tensor in given):
            self._others += 1
            return None
        self._calls.append(_Call(module, _with(arguments, lambda tensor: places[id(tensor)])))
        return None if self._now is None else self._now.take(module, arguments)


_loops: list[Loop] = []


def look_up(module: Any, arguments: Any) -> Sent | None:
    """What has been sent ahead for a call of a module."""
    for loop in _loops:
        found = loop.look_up(module, arguments)
        if found is not None:
            return found
    return None
