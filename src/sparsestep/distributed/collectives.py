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
    LocalReader,
    as_bytes,
    pack_bytes,
    read_all,
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
    """Catches the error of a block, so that other ranks can be told before it is raised."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error: BaseException | None = error  # the first one

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = self.error or error
        return True


def status_of(error: BaseException | None) -> int:
    """The status that a rank reports to the others; 0 if it has no error."""
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


def new_group(backend: str | None = None) -> ProcessGroup:
    """A group of all ranks whose collectives do not wait for those of the default group."""
    timeout = group_timeout(dist.group.WORLD)
    group: ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
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
        is_lost: whether an exchange has failed half-way, for example after a timeout: ranks are no
            longer in step, so there is no way to tell the others.
    """

    is_lost: bool = False

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group: ProcessGroup | None = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        size = max(_BUFFER_BYTES, _BUFFER_BYTES_PER_RANK * self.world_size)
        size = size if self.world_size > 1 else 0
        self._outgoing = torch.empty(size, dtype=torch.uint8)
        self._incoming = torch.empty(size, dtype=torch.uint8)

    def all_to_all_rows(self, outgoing: Tensor) -> Tensor:
        """Send row ``r`` of a matrix to rank ``r``; get a row from each."""
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

    def check(self, error: BaseException | None, number: int = 0) -> list[int]:
        """The numbers of all ranks; raises on every rank if one has an error."""
        row = [status_of(error), number]
        outgoing = certain(lambda: torch.tensor(row).repeat(self.world_size, 1))
        incoming = self.all_to_all_rows(outgoing)
        statuses, numbers = certain(lambda: incoming.t().tolist())
        raise_failure(statuses, error)
        found: list[int] = numbers
        return found

    def all_to_all(
        self,
        outgoing: Outgoing | Callable[[], Outgoing],
        incoming_sizes: Sequence[int],
        max_bytes: int,
        outgoing_sizes: Sequence[int] | None = None,
    ) -> list[BufferReader]:
        """Send tensors to each rank; return a reader per rank. A rank's own tensors are not sent.

        Atomic: if one rank raises before its messages are sent, all do. Messages have to be read
        before the next transfer.

        Args:
            outgoing: for each rank, contiguous tensors, or a function that returns them. What the
                function raises counts as this rank's error.
            incoming_sizes: bytes from each rank.
            max_bytes: the most bytes that any rank sends another; the same on all ranks.
            outgoing_sizes: bytes to each rank; required if ``outgoing`` is a function.
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
        spans = list(zip(starts, ends, strict=True))
        buffer = self._incoming
        readers = certain(lambda: [BufferReader(buffer[b:e], is_shared=True) for b, e in spans])
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
        """The texts of all ranks."""
        message = torch.tensor(list(text.encode()), dtype=torch.uint8)
        counts = self.check(None, len(message))
        readers = self.all_to_all([[message]] * self.world_size, counts, max(counts))
        pieces = read_all(readers, counts, torch.uint8)
        return [bytes(each.tolist()).decode() for each in pieces]

    def scatter_rows(self, rows: Tensor, ranks: Tensor) -> ScatteredRows:
        """Send each row of a contiguous tensor to a rank."""
        counts: list[int] = ranks.bincount(minlength=self.world_size).tolist()
        numbers = torch.tensor([[count, max(counts)] for count in counts])
        incoming = self.all_to_all_rows(numbers).tolist()
        max_count = max(largest for _, largest in incoming)
        order = ranks.argsort(stable=True)
        received = [count for count, _ in incoming]
        pieces = self.exchange_rows(
            lambda: rows[order].split(counts), counts, received, max_count, rows[:0]
        )
        return ScatteredRows(pieces, counts, order, max_count)

    def exchange_rows(
        self,
        outgoing: Callable[[], Sequence[Tensor]],
        outgoing_counts: Sequence[int],
        incoming_counts: Sequence[int],
        max_count: int,
        like: Tensor,
    ) -> list[Tensor]:
        """Send rows with the shape and dtype of ``like`` to each rank; return those of each."""
        width, shape, dtype = like.shape[1:].numel(), like.shape[1:], like.dtype
        row_bytes = width * dtype.itemsize
        readers = self.all_to_all(
            lambda: [[piece] for piece in outgoing()],
            incoming_sizes=[count * row_bytes for count in incoming_counts],
            max_bytes=max_count * row_bytes,
            outgoing_sizes=[count * row_bytes for count in outgoing_counts],
        )
        pieces = read_all(readers, [count * width for count in incoming_counts], dtype)
        return [
            piece.view(count, *shape) for piece, count in zip(pieces, incoming_counts, strict=True)
        ]


def _message_starts(sizes: Sequence[int]) -> list[int]:
    """Where messages begin that are followed by a byte each."""
    return list(itertools.accumulate([size + 1 for size in sizes[:-1]], initial=0))
