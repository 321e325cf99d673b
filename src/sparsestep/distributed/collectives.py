"""The process group: fixed numbers of integers to all ranks, then bytes, as many as these say.

A transfer is atomic across ranks. A rank that cannot build its messages, or has no memory for
incoming ones, still takes part and reports its error, and every rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import group_timeout, stack
from sparsestep.engines.base import certain
from sparsestep.errors import InputError, is_out_of_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Topology: TypeAlias = Literal["flat", "hosts"]

# Bytes per message and rank; gloo does not take messages of any size.
MAX_MESSAGE_BYTES = 64 << 20
# Messages up to this size go through buffers that are allocated in advance: such a transfer cannot
# run out of memory, so ranks need not ask each other first whether they have any.
_BUFFER_BYTES = 1 << 20
_BUFFER_BYTES_PER_RANK = 64 << 10

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


def new_group(backend: str | None = None, ranks: list[int] | None = None) -> ProcessGroup:
    """A group whose collectives do not wait for those of others; of all ranks by default.

    All ranks of the default group call it.
    """
    timeout = group_timeout(dist.group.WORLD)
    group: ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group


# Messages


Sections = list[Tensor | None]  # contiguous; None: empty


def pack(sections: Sections, sizes: Tensor, own: int, begins: Tensor, buffer: Tensor) -> None:
    """Write a message for each rank but ``own``, -1 for none: its bytes of every section.

    ``sizes`` has a row for each rank, ``begins`` where its message begins. A section is split among
    ranks as its column says; one that is as long as each of its sizes goes to every rank.
    """
    assert ext is not None
    ext.pack_messages(sections, sizes, own, begins, buffer)


@dataclass
class Messages:
    """What all ranks have sent. It has to be read before the next transfer."""

    buffer: Tensor
    begins: Tensor  # of each rank's message
    sizes: Tensor  # bytes of each rank's sections
    rank: int
    own: Sections  # this rank's own sections, which are never sent
    own_sizes: Tensor

    def read(self, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Each section, of all ranks in their order."""
        if len(self.sizes) == 1:
            return [
                torch.empty(0, dtype=dtype) if section is None else section.reshape(-1)
                for section, dtype in zip(self.own, dtypes, strict=True)
            ]
        totals = self.sizes.sum(0).tolist()
        empty = {dtype: torch.empty(0, dtype=dtype) for dtype in set(dtypes)}
        found = [
            torch.empty(total // dtype.itemsize, dtype=dtype) if total else empty[dtype]
            for total, dtype in zip(totals, dtypes, strict=True)
        ]
        unpack(self, found)
        return found


def unpack(messages: Messages, sections: Sequence[Tensor]) -> None:
    """Copy the sections of all ranks out of their messages."""
    assert ext is not None
    some: Sections = [each if each.numel() else None for each in sections]
    ext.unpack_messages(
        messages.buffer,
        messages.sizes,
        messages.rank,
        messages.begins,
        some,
        messages.own,
        messages.own_sizes,
    )


class Payload(NamedTuple):
    """What a rank sends together with its status if there is room."""

    sections: Sections
    sizes: Tensor  # bytes of each rank's sections


class Room(NamedTuple):
    """Bytes beside a status, to and from each rank; both ends of a pair know them."""

    outgoing: Tensor
    incoming: Tensor

    def after(self, outgoing: Tensor, incoming: Tensor) -> Room:
        """Room for messages like those that were just sent: an eighth more, and less in time."""
        pairs = zip(self, (outgoing, incoming), strict=True)
        found = [torch.maximum(size + size // 8 + 64, old - old // 16) for old, size in pairs]
        return Room(*found)


class Envelope:
    """The messages of a handshake: a row of numbers for each rank, and room for a payload."""

    def __init__(self, collectives: Collectives, row_bytes: int, room: Room) -> None:
        self._collectives, self._row_bytes, self._room = collectives, row_bytes, room
        self._sizes = [each + row_bytes for each in room]
        for each in self._sizes:
            each[collectives.rank] = row_bytes  # what a rank has for itself is not sent
        ends = [each.cumsum(0) for each in self._sizes]
        self._begins = [end - size for end, size in zip(ends, self._sizes, strict=True)]
        totals = (int(end[-1]) for end in ends)
        self._sent, self._received = map(collectives.buffer, (0, 1), totals)

    def pack(self, payload: Payload) -> bool:
        """Write a payload; ``False`` if there is not enough room."""
        sizes, rank = payload.sizes, self._collectives.rank
        is_short = sizes.sum(1) > self._room.outgoing
        is_short[rank] = False
        if is_short.any():
            return False
        pack(payload.sections, sizes, rank, self._begins[0] + self._row_bytes, self._sent)
        return True

    def exchange(self, rows: Tensor) -> Tensor:
        """Send each rank its row, and the payload; return the rows of all ranks."""
        size = certain(lambda: torch.full((len(rows), 1), self._row_bytes))
        found = certain(lambda: torch.empty_like(rows))
        certain(lambda: pack([rows], size, -1, self._begins[0], self._sent))
        lengths = certain(lambda: [each.tolist() for each in self._sizes])
        self._collectives.exchange_bytes(self._sent, self._received, *lengths)
        received = Messages(self._received, self._begins[1], size, -1, [rows], size)
        certain(lambda: unpack(received, [found]))
        return found

    def messages(self, payload: Payload, sizes: Tensor) -> Messages:
        """The payloads of all ranks, whose sections have these sizes."""
        begins = self._begins[1] + self._row_bytes
        rank = self._collectives.rank
        return Messages(self._received, begins, sizes, rank, *payload)


class ScatteredRows(NamedTuple):
    """Rows that ranks have sent each other."""

    rows: Tensor  # from all ranks
    incoming_counts: Tensor  # rows from each rank
    outgoing_counts: Tensor  # rows that this rank has sent to each
    order: Tensor  # which row each of these was
    max_count: int  # most rows that any rank has sent another


class Collectives:
    """The ranks of a process group; without one, this process alone."""

    # An exchange has failed half-way, for example after a timeout: the others cannot be told.
    is_lost: bool = False

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group: ProcessGroup | None = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        size = max(_BUFFER_BYTES, _BUFFER_BYTES_PER_RANK * self.world_size)
        shape = 2, size if self.world_size > 1 else 0
        self._outgoing, self._incoming = torch.empty(shape, dtype=torch.uint8)

    def buffer(self, side: int, size: int) -> Tensor:
        """Memory for outgoing (0) or incoming (1) messages, until the next transfer."""
        given = (self._outgoing, self._incoming)[side]
        return given[:size] if size <= len(given) else torch.empty(size, dtype=torch.uint8)

    def room(self, row_bytes: int, max_bytes: int) -> Room | None:
        """Room beside a row; ``None`` if messages are too large. All ranks pass the same."""
        if self.world_size == 1 or not self._fits_buffers(row_bytes + 64 + 2 * max_bytes):
            return None
        return Room(*torch.zeros(2, self.world_size, dtype=torch.int64))

    def all_to_all_rows(self, outgoing: Tensor) -> Tensor:
        """Send row ``r`` of a matrix to rank ``r``; get a row from each."""
        if self.world_size == 1:
            return outgoing
        incoming = certain(lambda: torch.empty_like(outgoing))
        self.exchange_bytes(outgoing, incoming)
        return incoming

    def exchange_bytes(
        self,
        outgoing: Tensor,
        incoming: Tensor,
        outgoing_sizes: list[int] | None = None,
        incoming_sizes: list[int] | None = None,
    ) -> None:
        """Send bytes to all ranks; without sizes, equally many."""
        try:
            self._exchange_bytes(outgoing, incoming, outgoing_sizes, incoming_sizes)
        except BaseException:
            self.is_lost = True
            raise

    def _exchange_bytes(
        self, outgoing: Tensor, incoming: Tensor, sent: list[int] | None, received: list[int] | None
    ) -> None:
        dist.all_to_all_single(incoming, outgoing, received, sent, group=self.group)

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
        outgoing: Callable[[], Sections],
        outgoing_sizes: Tensor,
        incoming_sizes: Tensor,
        max_bytes: int,
    ) -> Messages:
        """Send sections to all ranks, as ``pack`` does. A rank's own are not sent.

        Sizes have a row for each rank and a column for each section, in bytes. If ``outgoing``
        raises on one rank, all ranks raise. All ranks pass the same ``max_bytes``, of a message.
        """
        if self.world_size == 1:
            own, begins, buffer = outgoing(), incoming_sizes.new_zeros(1), self._incoming
        elif self._fits_buffers(max_bytes):
            own, begins = self._send_small(outgoing, outgoing_sizes, incoming_sizes)
            buffer = self._incoming
        else:
            sizes = outgoing_sizes, incoming_sizes
            own, begins, buffer = self._send_large(outgoing, *sizes, max_bytes)
        rank = self.rank
        return certain(lambda: Messages(buffer, begins, incoming_sizes, rank, own, outgoing_sizes))

    def _fits_buffers(self, max_bytes: int) -> bool:
        fits = (max_bytes + 1) * self.world_size <= len(self._outgoing)
        return fits and max_bytes <= MAX_MESSAGE_BYTES

    def _message_sizes(self, sizes: Tensor) -> Tensor:
        """The bytes of each rank's message."""
        found = sizes.sum(1)
        found[self.rank] = 0
        return found

    def _send_small(
        self, outgoing: Callable[[], Sections], outgoing_sizes: Tensor, incoming_sizes: Tensor
    ) -> tuple[Sections, Tensor]:
        """Each message ends with the status of its sender; no memory is needed to get that far."""
        sent_sizes = certain(lambda: self._message_sizes(outgoing_sizes) + 1)
        received_sizes = certain(lambda: self._message_sizes(incoming_sizes) + 1)
        sent_ends = certain(lambda: sent_sizes.cumsum(0))
        received_ends = certain(lambda: received_sizes.cumsum(0))
        sent = certain(lambda: self._outgoing[: sent_ends[-1]])
        received = certain(lambda: self._incoming[: received_ends[-1]])
        own: Sections = []
        with Caught() as caught:
            own = outgoing()
            pack(own, outgoing_sizes, self.rank, sent_ends - sent_sizes, sent)
        status = status_of(caught.error)
        certain(lambda: sent.index_fill_(0, sent_ends - 1, status))
        sizes = certain(lambda: (sent_sizes.tolist(), received_sizes.tolist()))
        self.exchange_bytes(sent, received, *sizes)
        raise_failure(certain(lambda: received[received_ends - 1].tolist()), caught.error)
        return own, certain(lambda: received_ends - received_sizes)

    def _send_large(
        self,
        outgoing: Callable[[], Sections],
        outgoing_sizes: Tensor,
        incoming_sizes: Tensor,
        max_bytes: int,
    ) -> tuple[Sections, Tensor, Tensor]:
        """Allocate, then ask all ranks whether they could, then send; in chunks if it is much."""
        is_chunked = max_bytes > MAX_MESSAGE_BYTES
        with Caught() as caught:
            own = outgoing()
            given = [self._message_sizes(each) for each in (outgoing_sizes, incoming_sizes)]
            begins = [each.cumsum(0) - each for each in given]
            sizes = [each.tolist() for each in given]
            packed, incoming = (torch.empty(sum(each), dtype=torch.uint8) for each in sizes)
            pack(own, outgoing_sizes, self.rank, begins[0], packed)
            if is_chunked:
                staged = torch.empty(2, self.world_size * MAX_MESSAGE_BYTES, dtype=torch.uint8)
        self.check(caught.error)
        if is_chunked:
            sent, received = packed.split(sizes[0]), incoming.split(sizes[1])
            self._exchange_chunks(sent, received, staged, max_bytes)
        else:
            self.exchange_bytes(packed, incoming, *sizes)
        return own, begins[1], incoming

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
            self.exchange_bytes(*buffers, outgoing_sizes, incoming_sizes)
            for chunk, piece in zip(wanted, buffers[1].split(incoming_sizes), strict=True):
                chunk.copy_(piece)

    def all_gather(self, mine: Tensor, counts: Tensor) -> Tensor:
        """The elements of all ranks, which have as many as ``counts`` says."""
        incoming_sizes = certain(lambda: (counts * mine.dtype.itemsize).unsqueeze(1))
        outgoing_sizes = certain(lambda: torch.full_like(incoming_sizes, mine.nbytes))
        max_bytes = certain(lambda: int(incoming_sizes.max()))
        messages = self.all_to_all(lambda: [mine], outgoing_sizes, incoming_sizes, max_bytes)
        return messages.read([mine.dtype])[0]

    def all_gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks."""
        message = torch.tensor(list(text.encode()), dtype=torch.uint8)
        counts = self.check(None, len(message))
        whole = self.all_gather(message, torch.tensor(counts))
        return [bytes(each.tolist()).decode() for each in whole.split(counts)]

    def scatter_rows(self, rows: Tensor, ranks: Tensor) -> ScatteredRows:
        """Send each row of a contiguous tensor to a rank."""
        counts = ranks.bincount(minlength=self.world_size)
        numbers = stack([counts, counts.max().expand_as(counts)]).t().contiguous()
        received, largest = self.all_to_all_rows(numbers).unbind(1)
        max_count = int(largest.max())
        order = ranks.argsort(stable=True)
        found = self.exchange_rows(lambda: rows[order], counts, received, max_count, rows[:0])
        return ScatteredRows(found, received, counts, order, max_count)

    def exchange_rows(
        self,
        outgoing: Callable[[], Tensor],
        outgoing_counts: Tensor,
        incoming_counts: Tensor,
        max_count: int,
        like: Tensor,
    ) -> Tensor:
        """Send rows with the shape and dtype of ``like``, in the order of ranks; return theirs."""
        row_bytes = like.shape[1:].numel() * like.dtype.itemsize
        messages = self.all_to_all(
            lambda: [outgoing().contiguous()],
            outgoing_counts.unsqueeze(1) * row_bytes,
            incoming_counts.unsqueeze(1) * row_bytes,
            max_count * row_bytes,
        )
        count = int(incoming_counts.sum())
        return messages.read([like.dtype])[0].view(count, *like.shape[1:])
