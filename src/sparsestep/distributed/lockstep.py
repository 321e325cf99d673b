"""lockstep: batches for ranks that run out of data at different times; ids sent in advance.

With ``prefetch=1``, a loop records which tensors of a batch are passed to lookups, and sends those
of the next batch, in a separate thread and process group. A lookup that then gets these tensors
finds its ids already sent. A lookup that gets others sends them, and so do all ranks with it.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep._torch import tree_map_only, version_of
from sparsestep.distributed._hosts import HostCollectives
from sparsestep.distributed._requests import (
    IncomingLookup,
    LookupRequest,
    LookupSizes,
    TableRequests,
    exchange_ids,
    id_counts,
)
from sparsestep.distributed._table import NUM_COUNTS
from sparsestep.distributed.collectives import Collectives, new_group
from sparsestep.errors import InputError, SlowWarning, message, warn_once
from sparsestep.nn.collection import is_keyed_jagged

Batch = TypeVar("Batch")


class LoaderState(IntEnum):
    """The state of a rank's loader at the start of a step."""

    NO_BATCH_YET = 0
    EXHAUSTED = 1
    BATCH = 2
    ERROR = 3


def lockstep(loader: Iterable[Batch], prefetch: int = 0) -> Iterator[Batch]:
    """Iterate over a loader, with empty batches until every rank has reached its end.

    All ranks look up sharded tables together. So a rank that runs out of data continues with empty
    batches: its last batch with every tensor cut to length 0 along the first dim, also in lists,
    tuples, dicts and dataclasses. Anything else stays as it is. If a batch has a method ``empty``,
    that is called instead, for example if offsets must keep their last value. A rank that never had
    a batch gets its empty ones from another rank.

    The loss of an empty batch may be NaN, like any mean over nothing, but its gradient is zero.
    With ``reduce="mean"``, such a rank counts like any other, as in ``DistributedDataParallel``.

    Each step costs one exchange of a number. Every rank has to run the loop to its end: if one
    leaves early, the others wait. If the loader of one rank raises, all ranks raise.

    With ``prefetch=1``, the loader is two batches ahead. The ids of the next batch are sent to
    their owners while you train, and who has the one after it. For that, pass the batch's own
    tensors to the tables: ``model.user(batch["user"])``, not ``model.user(batch["ids"][:, 0])``.
    Other ids are sent when they are looked up, as without prefetching. It starts with the third
    batch, because it learns from the first one which tensors are looked up.

    Args:
        loader: batches, or anything else to iterate over.
        prefetch: how many batches in advance ids are sent, 0 or 1.

    Returns:
        An iterator with the same number of batches on every rank.

    Raises:
        InputError: ``prefetch`` is neither 0 nor 1; no rank has a batch to make an empty one from;
            the loader of another rank raises; or, with ``prefetch=1``, the loader modifies a batch
            that it has already yielded.

    Example:
        >>> import torch
        >>> for batch in lockstep([torch.tensor([3, 1]), torch.tensor([4])]):  # one process
        ...     print(batch)
        tensor([3, 1])
        tensor([4])
    """
    if not isinstance(prefetch, int) or prefetch not in (0, 1):
        raise InputError(message("lockstep: prefetch must be 0 or 1", repr(prefetch)))
    given: Any = loader
    if not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
        requirement = "lockstep: the loader must be iterable"
        raise InputError(message(requirement, f"a {type(given).__name__}"))
    if not prefetch or not _is_multi_rank():
        return _synchronized(iter(loader))
    return _with_prefetch(iter(loader))


def _synchronized(loader: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches until all ranks are exhausted."""
    batches = _Batches(loader)
    while True:
        batch = batches.settle(_all_gather_states(batches.fetch()))
        if batch is _END:
            return
        yield batch


def _with_prefetch(loader: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches; meanwhile, ids of the next one are sent, and who has the one after it."""
    batches, prefetcher = _Batches(loader), IdPrefetcher()
    with prefetcher:
        batch = batches.settle(prefetcher.submit(None, batches.fetch()).states.result())
        following = _END
        if batch is not _END:
            first = prefetcher.submit(None, batches.fetch([batch]))
            following = batches.settle(first.states.result())
        task: PrefetchTask | None = None
        is_first = True
        while batch is not _END:
            prefetcher.record_calls()
            current, task = task, None
            if following is not _END:
                task = prefetcher.submit(following, batches.fetch([batch, following]))
                if is_first:  # a loader that modifies its batches has done so by now
                    task.states.exception()
                    batches.raise_errors(task.states.result())
            prefetcher.start_batch(batch, current)
            yield batch
            batch, following = following, _END
            if task is not None:
                following = batches.settle(task.states.result())
            is_first = False


class _Batches:
    """The batches of this rank, and empty ones when there are no more."""

    def __init__(self, loader: Iterator[Any]) -> None:
        self._loader = loader
        self._state = LoaderState.NO_BATCH_YET
        self._example: Any = None  # of an empty batch
        self._fetched: Any = None
        self._error: BaseException | None = None

    def fetch(self, before: Sequence[Any] = ()) -> LoaderState:
        """Get the next batch, which must not change those before; return this rank's state."""
        versions = [(each, _version(each)) for batch in before for each in iter_tensors(batch)]
        try:
            self._fetched = next(self._loader, _END)
            if any(_version(tensor) != version for tensor, version in versions):
                requirement = (
                    "lockstep: with prefetch=1 the loader must not modify a batch after yielding it"
                )
                remedy = "Allocate new tensors for every batch"
                raise InputError(message(requirement, "a modified batch", remedy))
            if self._fetched is not _END:
                self._state = LoaderState.BATCH
            elif self._state != LoaderState.NO_BATCH_YET:
                self._state, self._fetched = LoaderState.EXHAUSTED, empty_batch(self._example)
        except BaseException as raised:  # an interrupted rank, too, must not keep others waiting
            self._error = raised
            return LoaderState.ERROR
        return self._state

    def raise_errors(self, states: Sequence[int]) -> None:
        """Raise on every rank if the loader of one has raised."""
        if self._error is not None:
            raise self._error
        if LoaderState.ERROR in states:
            rank = states.index(LoaderState.ERROR)
            requirement = f"lockstep: rank {rank} has no next batch; see that rank's message"
            raise InputError(f"{requirement}. All ranks stop here.")

    def settle(self, states: Sequence[int]) -> Any:
        """The batch that was fetched; ``_END`` if all ranks are at the end."""
        self.raise_errors(states)
        batch = self._fetched
        if LoaderState.BATCH not in states:
            return _END
        if LoaderState.NO_BATCH_YET in states:
            received = _broadcast_empty_batch(states.index(LoaderState.BATCH), batch)
            if self._state == LoaderState.NO_BATCH_YET:
                self._state, batch = LoaderState.EXHAUSTED, received
        self._example = batch
        return batch


_END: Any = object()


def empty_batch(batch: Any) -> Any:
    """An empty batch with the structure of another."""
    if is_keyed_jagged(batch):  # its own method ``empty`` drops the keys
        weights = batch.weights_or_none()
        weights = None if weights is None else weights[:0]
        return type(batch)(batch.keys(), batch.values()[:0], weights, batch.lengths()[:0])
    empty = getattr(batch, "empty", None)
    if callable(empty) and not isinstance(batch, Tensor):
        return empty()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{n: empty_batch(getattr(batch, n)) for n in fields})
    return tree_map_only(_has_rows, _without_rows, batch, is_leaf=is_keyed_jagged)


def _has_rows(leaf: Any) -> bool:
    return is_keyed_jagged(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0)


def _without_rows(leaf: Any) -> Any:
    return leaf[:0] if isinstance(leaf, Tensor) else empty_batch(leaf)


def _is_multi_rank() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _all_gather_states(state: int) -> list[int]:
    """The states of all ranks, by a collective that takes as long for many ranks as for two."""
    if not _is_multi_rank():
        return [state]
    if _hosts:
        task = PrefetchTask([], [], 0, state)
        _background().submit(task)
        return task.states.result()
    mine = torch.full((dist.get_world_size(),), state)
    states = torch.empty_like(mine)
    dist.all_to_all_single(states, mine)
    found: list[int] = states.tolist()
    return found


def _broadcast_empty_batch(rank: int, batch: Any) -> Any:
    objects = [empty_batch(batch) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(objects, src=rank)
    return objects[0]


# Ids that are sent in advance

_MAX_CALLS = 1 << 20  # of a batch


def iter_tensors(batch: Any) -> Iterator[Any]:
    """Yield the tensors of a batch, keyed jagged ones, too, in lists, dicts and dataclasses."""
    if isinstance(batch, Tensor) or is_keyed_jagged(batch):
        yield batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for each in dataclasses.fields(batch):
            yield from iter_tensors(getattr(batch, each.name))
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from iter_tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from iter_tensors(value)


def _version(tensor: Any) -> int:
    """A number that changes when the tensor is modified."""
    if isinstance(tensor, Tensor):
        return version_of(tensor)
    return version_of(tensor.values()) + version_of(tensor.lengths())


def _map_tensors(arguments: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments of a lookup with every tensor, or number of one, replaced."""
    if isinstance(arguments, Mapping):
        return {key: _map_tensors(value, change) for key, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        return [_map_tensors(value, change) for value in arguments]
    return arguments if arguments is None else change(arguments)


class LookupCall(NamedTuple):
    """A call of a sharded module during a batch."""

    module: Any
    arguments: Any  # with numbers of the batch's tensors in place of these


class PrefetchTask:
    """Sends the ids of all lookups of one batch, and the state of the loader after it."""

    def __init__(
        self,
        calls: Sequence[LookupCall],
        tensors: Sequence[Tensor],
        first: int,
        state: int,
    ) -> None:
        self._calls = list(calls)
        self._first = first
        self._state = state
        self._arguments: list[Any] = [_map_tensors(c.arguments, tensors.__getitem__) for c in calls]
        self._versions = [[_version(t) for t in iter_tensors(a)] for a in self._arguments]
        self.states: Future[list[int]] = Future()
        self.sent: Future[list[TableRequests | None]] = Future()

    def run(self, collectives: Collectives) -> None:
        """Set the results, or the error that was raised."""
        try:
            self.sent.set_result(self._send(collectives))
        except BaseException as error:
            for each in (self.states, self.sent):
                if not each.done():
                    each.set_exception(error)

    def _signature(self) -> int:
        """A number that must be the same on all ranks to prefetch a batch; 0: no prefetching."""
        keys = [(each.module.call_key, repr(each.arguments)) for each in self._calls]
        return zlib.crc32(repr(keys).encode()) + 1 if keys else 0

    def _send(self, collectives: Collectives) -> list[TableRequests | None]:
        """Send the ids of all calls. If any rank's input is invalid, no rank sends."""
        requests: list[list[LookupRequest]] = []
        signature = max_bytes = 0
        with suppress(Exception):  # the lookup itself will raise it, on all ranks
            for call, arguments in zip(self._calls, self._arguments, strict=True):
                requests.append(call.module.lookup_requests(*arguments))
            tables = [request for of_call in requests for request in of_call]
            if tables:
                counts = id_counts(tables)
                outgoing = LookupSizes(tables, counts)
                max_bytes = int(outgoing.request.sum(1).max())
            signature = self._signature()
        numbers = torch.tensor([self._state, signature, max_bytes])
        numbers = collectives.all_to_all_rows(numbers.repeat(collectives.world_size, 1))
        states, signatures, sizes = numbers.t().tolist()
        self.states.set_result(states)
        if not signature or set(signatures) != {signature}:
            return [None] * len(self._calls)
        theirs = collectives.all_to_all_rows(counts.flatten(1)).unflatten(1, (-1, NUM_COUNTS))
        incoming = LookupSizes(tables, theirs)
        received = exchange_ids(collectives, tables, outgoing, incoming, max(sizes))()
        for request, each in zip(tables, received, strict=True):
            if each is not None:
                request.prefetch(each.ids)
        return self._by_call(requests, received, incoming.reply)

    def _by_call(
        self,
        requests: Sequence[list[LookupRequest]],
        incoming: Sequence[IncomingLookup | None],
        reply_bytes: Tensor,
    ) -> list[TableRequests | None]:
        """The requests of all ranks, call by call."""
        found: list[TableRequests | None] = []
        begin = 0
        for n, of_call in enumerate(requests):
            end = begin + len(of_call)
            reply = reply_bytes[:, begin:end].contiguous()
            found.append(TableRequests(of_call, self._first + n, incoming[begin:end], reply))
            begin = end
        return found

    def take(self, module: Any, arguments: Any) -> TableRequests | None:
        """The ids that have been sent for a call, once."""
        for n, call in enumerate(self._calls):
            if call.module is not module or not self._matches(n, arguments):
                continue
            results = self.sent.result()
            found, results[n] = results[n], None
            if found is not None:
                return found
        return None

    def _matches(self, n: int, arguments: Any) -> bool:
        mine, theirs = list(iter_tensors(self._arguments[n])), list(iter_tensors(arguments))
        return (
            len(mine) == len(theirs)
            and all(one is other for one, other in zip(mine, theirs, strict=True))
            and [_version(each) for each in theirs] == self._versions[n]
        )


class Background:
    """A thread with a process group of its own, in which tasks run in the order of all ranks."""

    def __init__(self, world: Any, hosts: Sequence[str]) -> None:
        self.world = world  # the default group
        self.hosts = hosts
        self.collectives: Collectives = (
            HostCollectives(world, hosts, "gloo") if hosts else Collectives(new_group("gloo"))
        )
        self._tasks: queue.SimpleQueue[PrefetchTask | None] = queue.SimpleQueue()
        # A daemon: if other ranks are gone, it may be waiting for them.
        thread = threading.Thread(target=self._run_tasks, name="sparsestep-ids", daemon=True)
        thread.start()

    def submit(self, task: PrefetchTask | None) -> None:
        """Run a task after the others; ``None`` ends the thread."""
        self._tasks.put(task)

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run(self.collectives)


_backgrounds: list[Background] = []  # at most one
_hosts: list[str] = []


def use_hosts(names: Sequence[str]) -> None:
    """Exchange as the tables that were sharded last: by the hosts of all ranks, or without any."""
    _hosts[:] = names


def _background() -> Background:
    """The thread of all loops: connections are made once."""
    world = dist.group.WORLD
    if _backgrounds:
        found = _backgrounds[0]
        is_same = found.world is world and found.hosts == _hosts
        if is_same and not found.collectives.is_lost:
            return found
        _backgrounds.pop().submit(None)
    _backgrounds.append(Background(world, list(_hosts)))
    return _backgrounds[0]


class IdPrefetcher:
    """Records the lookups of a batch, and sends the ids of the next one in a thread."""

    def __init__(self) -> None:
        self._background = _background()
        self._tensors: list[Tensor] = []  # of the current batch
        self._calls: list[LookupCall] = []  # of the current batch
        self._num_other_calls = 0  # lookups that got other tensors
        self._expected: list[LookupCall] = []  # calls of the next batches
        self._num_tensors = 0  # of a batch with these calls
        self._task: PrefetchTask | None = None  # of the current batch
        self._sequence = 1

    def __enter__(self) -> IdPrefetcher:
        _active_prefetchers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _active_prefetchers.remove(self)

    def submit(self, batch: Any, state: int) -> PrefetchTask:
        """Send the ids of the next batch, and the state of the loader after it; all ranks do."""
        tensors = list(iter_tensors(batch))
        calls = self._expected if len(tensors) == self._num_tensors else []
        task = PrefetchTask(calls, tensors, self._sequence, state)
        self._sequence += _MAX_CALLS
        self._background.submit(task)
        return task

    def record_calls(self) -> None:
        """Expect the lookups of the last batch from the next ones."""
        if self._calls:
            self._expected, self._num_tensors = self._calls, len(self._tensors)
        elif self._num_other_calls and not self._expected:
            warn_once(
                SlowWarning,
                "lockstep: prefetch=1 sends nothing ahead, because no lookup got a tensor of the "
                "batch itself. Pass the batch's own tensors to the tables, not slices of them",
            )

    def start_batch(self, batch: Any, task: PrefetchTask | None) -> None:
        """Serve the lookups of a batch from a task, and record them."""
        self._task = task
        self._tensors, self._calls, self._num_other_calls = list(iter_tensors(batch)), [], 0

    def take(self, module: Any, arguments: Any) -> TableRequests | None:
        """Record a lookup; return the ids that have been sent for it."""
        if module.sharding.collectives.world_size != dist.get_world_size():
            return None  # sharded among some of the ranks
        numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        tensors = list(iter_tensors(arguments))
        if not tensors or any(id(tensor) not in numbers for tensor in tensors):
            self._num_other_calls += 1
            return None
        numbered = _map_tensors(arguments, lambda tensor: numbers[id(tensor)])
        self._calls.append(LookupCall(module, numbered))
        return None if self._task is None else self._task.take(module, arguments)


_active_prefetchers: list[IdPrefetcher] = []


def take_prefetched(module: Any, arguments: Any) -> TableRequests | None:
    """The ids that have been sent in advance for a call of a module."""
    for prefetcher in _active_prefetchers:
        found = prefetcher.take(module, arguments)
        if found is not None:
            return found
    return None
