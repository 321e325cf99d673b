"""The process group: fixed numbers of integers to all ranks, then bytes, as many as these say.

A transfer is atomic across ranks. A rank that cannot build its messages, or has no memory for
incoming ones, still takes part and reports its error, and every rank raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep._torch import group_timeout
from sparsestep.distributed._packing import (
    BufferReader,
    FailedReader,
    LocalReader,
    as_bytes,
    pack_bytes,
)
from sparsestep.engines.finishing import certain
from sparsestep.errors import InputError, is_out_of_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Bytes per message and rank; gloo does not take messages of any size.
MAX_MESSAGE_BYTES = 64 << 20
# Messages up to this size go through buffers that are allocated in advance: such a transfer cannot
# run out of memory, so ranks need not ask each other first whether they have any.
_BUFFER_BYTES = 1 << 20
_BUFFER_BYTES_PER_RANK = 64 << 10

Outgoing = Sequence[Sequence[Tensor]]

# Status of a rank, and how the others describe it.
_OK, _REJECTED, _MEMORY, _INTERRUPTED, _OTHER = range(5)
_FAILURES = {
    _REJECTED: "rejected its input",
    _MEMORY: "ran out of memory",
    _INTERRUPTED: "was interrupted",
    _OTHER: "raised an error",
}


class Caught:
    """Catches the error of a block, so that other ranks can be told before it is raised.

    Example:
        >>> with Caught() as caught:
        ...     raise ValueError("bad ids")
        >>> caught.error
        ValueError('bad ids')
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.error: BaseException | None = error  # the first one

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = self.error or error
        return True


def status_of(error: BaseException | None) -> int:
    """The status that a rank reports to the others; 0 if it has no error.

    Example:
        >>> status_of(None), describe_failure(status_of(MemoryError()))
        (0, 'ran out of memory')
    """
    if error is None:
        return _OK
    if isinstance(error, InputError):
        return _REJECTED
    if is_out_of_memory(error):
        return _MEMORY
    return _OTHER if isinstance(error, Exception) else _INTERRUPTED


def describe_failure(status: int) -> str:
    """Describe a failed rank, for a message on another rank."""
    return _FAILURES.get(status, _FAILURES[_OTHER])


def raise_failure(statuses: Sequence[int], error: BaseException | None) -> None:
    """Raise if any rank has failed: this rank's own error, or one that names the rank."""
    if error is not None:
        raise error
    for rank, status in enumerate(statuses):
        if status != _OK:
            what = f"rank {rank} {describe_failure(status)}; see that rank's message"
            raise InputError(f"{what}. Nothing has changed on any rank.")


def new_group_like(parent: ProcessGroup | None, backend: str | None = None) -> ProcessGroup:
    """Create a process group with the ranks and the timeout of another one.

    Collectives in the new group do not wait for those in the parent. All ranks of the parent call
    this function; other ranks do not take part.

    Args:
        parent: the other group; ``None`` for the default group.
        backend: the backend of the new group; by default the one of the default group.
    """
    timeout = group_timeout(dist.group.WORLD if parent is None else parent)
    group: ProcessGroup
    if parent is None or parent is dist.group.WORLD:
        group = dist.new_group(timeout=timeout, backend=backend)
    else:
        group = dist.new_group(
            dist.get_process_group_ranks(parent),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
        )
    return group


class ScatteredRows(NamedTuple):
    """Rows that ranks have sent each other."""

    pieces: list[Tensor]  # from each rank
    counts: list[int]  # rows that this rank has sent to each
    order: Tensor  # which row each of these was
    max_count: int  # most rows that any rank has sent another


class Collectives:
    """The ranks of a process group; without one, this process alone.

    Attributes:
        rank: of this process.
        world_size: the number of ranks.
        group: the process group.
        is_lost: whether an exchange has failed half-way, for example after a timeout: ranks are no
            longer in step, so there is no way to tell the others.
    """

    rank: int
    world_size: int
    group: ProcessGroup | None
    is_lost: bool = False

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        size = max(_BUFFER_BYTES, _BUFFER_BYTES_PER_RANK * self.world_size)
        size = size if self.world_size > 1 else 0
        self._outgoing = torch.empty(size, dtype=torch.uint8)
        self._incoming = torch.empty(size, dtype=torch.uint8)

    def all_to_all_rows(self, outgoing: Tensor) -> Tensor:
        """Send row ``r`` of a matrix to rank ``r``; get a row from each.

        Example:
            >>> Collectives(None).all_to_all_rows(torch.tensor([[1, 2]]))
            tensor([[1, 2]])
        """
        if self.world_size == 1:
            return outgoing
        incoming = certain(lambda: torch.empty_like(outgoing))
        self._exchange_bytes(outgoing, incoming)
        return incoming

    def _exchange_bytes(
        self,
        outgoing: Tensor,
        incoming: Tensor,
        outgoing_sizes: list[int] | None = None,
        incoming_sizes: list[int] | None = None,
    ) -> None:
        sizes = (incoming_sizes, outgoing_sizes)
        try:
            dist.all_to_all_single(incoming, outgoing, *sizes, group=self.group)
        except BaseException:
            self.is_lost = True
            raise

    def check(self, error: BaseException | None) -> None:
        """Raise on every rank if one has an error."""
        status = status_of(error)
        statuses = self.all_to_all_rows(certain(lambda: torch.full((self.world_size, 1), status)))
        raise_failure(certain(lambda: statuses.flatten().tolist()), error)

    def all_to_all(
        self,
        outgoing: Outgoing | Callable[[], Outgoing],
        incoming_sizes: Sequence[int],
        max_bytes: int,
        outgoing_sizes: Sequence[int] | None = None,
    ) -> list[BufferReader]:
        """Send tensors to each rank; return a reader per rank. A rank's own tensors are not sent.

        Atomic: if one rank raises before its messages are sent, all do.

        Args:
            outgoing: for each rank, contiguous tensors, or a function that returns them. What the
                function raises counts as this rank's error.
            incoming_sizes: bytes from each rank.
            max_bytes: the most bytes that any rank sends another; the same on all ranks.
            outgoing_sizes: bytes to each rank; required if ``outgoing`` is a function.

        Example:
            >>> message = [torch.ones(2), torch.zeros(1)]
            >>> (reader,) = Collectives(None).all_to_all([message], [12], 12)
            >>> reader.read(2, torch.float32)
            tensor([1., 1.])
        """
        if not callable(outgoing):
            made = outgoing
            outgoing_sizes = [sum(each.nbytes for each in tensors) for tensors in made]
            return self.all_to_all(lambda: made, incoming_sizes, max_bytes, outgoing_sizes)
        if self.world_size == 1:
            return [LocalReader(outgoing()[0])]
        assert outgoing_sizes is not None
        outgoing_sizes, incoming_sizes = list(outgoing_sizes), list(incoming_sizes)
        outgoing_sizes[self.rank] = incoming_sizes[self.rank] = 0
        fits_buffers = (max_bytes + 1) * self.world_size <= len(self._outgoing)
        if fits_buffers and max_bytes <= MAX_MESSAGE_BYTES:
            return self._send_small(outgoing, outgoing_sizes, incoming_sizes)
        return self._send_large(outgoing, outgoing_sizes, incoming_sizes, max_bytes)

    def _send_small(
        self,
        outgoing: Callable[[], Outgoing],
        outgoing_sizes: list[int],
        incoming_sizes: list[int],
    ) -> list[BufferReader]:
        """Each message ends with the status of its sender; no memory is needed to get that far."""
        own: Sequence[Tensor] = ()
        with Caught() as caught:
            made = outgoing()
            own = made[self.rank]
            for rank, begin in enumerate(_message_starts(outgoing_sizes)):
                for each in made[rank] if rank != self.rank else ():
                    self._outgoing[begin : (begin := begin + each.nbytes)] = as_bytes(each)
        status = status_of(caught.error)
        for begin, size in zip(_message_starts(outgoing_sizes), outgoing_sizes, strict=True):
            certain(partial(self._outgoing.__setitem__, begin + size, status))
        self._exchange_bytes(
            self._outgoing[: sum(outgoing_sizes) + self.world_size],
            self._incoming[: sum(incoming_sizes) + self.world_size],
            [size + 1 for size in outgoing_sizes],
            [size + 1 for size in incoming_sizes],
        )
        starts = _message_starts(incoming_sizes)
        ends = [begin + size for begin, size in zip(starts, incoming_sizes, strict=True)]
        raise_failure(certain(lambda: [int(self._incoming[end]) for end in ends]), caught.error)
        readers: list[BufferReader] = []
        try:
            for begin, end in zip(starts, ends, strict=True):
                readers.append(BufferReader(self._incoming[begin:end].clone()))
        except BaseException as raised:  # a transfer may follow: the error is raised by read()
            return [FailedReader(raised)] * self.world_size
        readers[self.rank] = LocalReader(own)
        return readers

    def _send_large(
        self,
        outgoing: Callable[[], Outgoing],
        outgoing_sizes: list[int],
        incoming_sizes: list[int],
        max_bytes: int,
    ) -> list[BufferReader]:
        """Allocate, then ask all ranks whether they could, then send; in chunks if it is much."""
        is_chunked = max_bytes > MAX_MESSAGE_BYTES
        with Caught() as caught:
            made = outgoing()
            own = made[self.rank]
            messages = [[] if rank == self.rank else each for rank, each in enumerate(made)]
            incoming = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
            if is_chunked:
                pieces = [pack_bytes(tensors) for tensors in messages]
                staged = torch.empty(2, self.world_size * MAX_MESSAGE_BYTES, dtype=torch.uint8)
            else:
                packed = pack_bytes([each for tensors in messages for each in tensors])
        self.check(caught.error)
        if is_chunked:
            self._exchange_chunks(pieces, list(incoming.split(incoming_sizes)), staged, max_bytes)
        else:
            self._exchange_bytes(packed, incoming, outgoing_sizes, incoming_sizes)
        readers = [BufferReader(message) for message in incoming.split(incoming_sizes)]
        readers[self.rank] = LocalReader(own)
        return readers

    def _exchange_chunks(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], staged: Tensor, max_bytes: int
    ) -> None:
        """Send whole messages, a chunk of each at a time, through a buffer."""
        for begin in range(0, max_bytes, MAX_MESSAGE_BYTES):
            sent, wanted = (
                [each[begin : begin + MAX_MESSAGE_BYTES] for each in some]
                for some in (outgoing, incoming)
            )
            outgoing_sizes, incoming_sizes = [list(map(len, some)) for some in (sent, wanted)]
            buffers = staged[0, : sum(outgoing_sizes)], staged[1, : sum(incoming_sizes)]
            for piece, chunk in zip(buffers[0].split(outgoing_sizes), sent, strict=True):
                piece.copy_(chunk)
            self._exchange_bytes(*buffers, outgoing_sizes, incoming_sizes)
            for chunk, piece in zip(wanted, buffers[1].split(incoming_sizes), strict=True):
                chunk.copy_(piece)

    def all_gather_texts(self, text: str) -> list[str]:
        """Send a text to all ranks; get one from each.

        Example:
            >>> Collectives(None).all_gather_texts("lr=0.1")
            ['lr=0.1']
        """
        message = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self.all_to_all_rows(torch.full((self.world_size, 1), len(message)))
        counts: list[int] = sizes.flatten().tolist()
        readers = self.all_to_all([[message]] * self.world_size, counts, max(counts))
        return [
            bytes(reader.read(count, torch.uint8).tolist()).decode()
            for reader, count in zip(readers, counts, strict=True)
        ]

    def scatter_rows(self, rows: Tensor, ranks: Tensor) -> ScatteredRows:
        """Send each row of a contiguous tensor to a rank.

        Example:
            >>> rows, ranks = torch.tensor([[7], [8]]), torch.tensor([0, 0])
            >>> Collectives(None).scatter_rows(rows, ranks).pieces
            [tensor([[7],
                    [8]])]
        """
        counts: list[int] = ranks.bincount(minlength=self.world_size).tolist()
        numbers = torch.tensor([[count, max(counts)] for count in counts])
        incoming = self.all_to_all_rows(numbers).tolist()
        max_count = max(largest for _, largest in incoming)
        order, shape = ranks.argsort(stable=True), rows.shape[1:]
        row_bytes = shape.numel() * rows.dtype.itemsize
        pieces = [[piece] for piece in rows[order].split(counts)]
        sizes = [count * row_bytes for count, _ in incoming]
        readers = self.all_to_all(pieces, sizes, max_count * row_bytes)
        received = [
            reader.read(count * shape.numel(), rows.dtype).view(count, *shape)
            for reader, (count, _) in zip(readers, incoming, strict=True)
        ]
        return ScatteredRows(received, counts, order, max_count)


def _message_starts(sizes: Sequence[int]) -> list[int]:
    """Where messages begin that are followed by a byte each."""
    return list(itertools.accumulate([size + 1 for size in sizes[:-1]], initial=0))
