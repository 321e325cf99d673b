"""What processes send each other: equal numbers to all, then bytes, as many as the numbers say.

A transfer is atomic across ranks. If one rank cannot build its messages or has no memory to receive
those of others, it takes part all the same and says so, and every rank raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep._torch import cat, group_timeout
from sparsestep.engines.finishing import certain
from sparsestep.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def new_group_like(parent: ProcessGroup | None, backend: str | None = None) -> ProcessGroup:
    """Create a process group with the ranks and the timeout of another one.

    Collectives in the new group do not wait for those in the parent. All ranks of the parent call
    this function; other ranks do not take part.

    Args:
        parent: the other group; ``None`` for the default group.
        backend: the backend of the new group; by default the one of the default group.

    Returns:
        The new group.
    """
    timeout = group_timeout(dist.group.WORLD if parent is None else parent)
    made: ProcessGroup
    if parent is None or parent is dist.group.WORLD:
        made = dist.new_group(timeout=timeout, backend=backend)
    else:
        made = dist.new_group(
            dist.get_process_group_ranks(parent),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=True,
        )
    return made


# What one process sends another at once; gloo does not take messages of any size.
CHUNK = 64 << 20
# Messages to all other ranks together that go through buffers which are allocated in advance: such
# a transfer cannot run out of memory, so ranks need not ask each other first whether they have any.
_BUFFER = 1 << 20
_BUFFER_PER_RANK = 64 << 10

Outgoing = Sequence[Sequence[Tensor]]

# Status of a rank, and what the others say about it.
_OK, _REJECTED, _MEMORY, _INTERRUPTED, _OTHER = range(5)
_FAILURES = {
    _REJECTED: "rejected its input",
    _MEMORY: "ran out of memory",
    _INTERRUPTED: "was interrupted",
    _OTHER: "raised an error",
}


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
    # Torch raises a RuntimeError when its allocator for the CPU, or that of C++, fails.
    text = str(error) if isinstance(error, RuntimeError) else ""
    said = ("allocate memory", "not enough memory", "bad_alloc")
    if isinstance(error, MemoryError) or any(each in text for each in said):
        return _MEMORY
    return _OTHER if isinstance(error, Exception) else _INTERRUPTED


def describe_failure(status: int) -> str:
    """What a rank with this status did, for a message on another rank."""
    return _FAILURES.get(status, _FAILURES[_OTHER])


def raise_failure(statuses: Sequence[int], error: BaseException | None) -> None:
    """Raise if any rank has failed: its own error, or one that names the rank.

    Args:
        statuses: one for each rank.
        error: of this rank.
    """
    if error is not None:
        raise error
    for rank, status in enumerate(statuses):
        if status != _OK:
            what = f"rank {rank} {describe_failure(status)}; see that rank's message"
            raise InputError(f"{what}. Nothing has changed on any rank.")


class Dealt(NamedTuple):
    """Rows that ranks have dealt out to each other.

    Attributes:
        pieces: what has come from each rank.
        counts: how many rows this rank has sent to each.
        order: which row it was, for each of these.
        most: how many rows any rank has sent another.
    """

    pieces: list[Tensor]
    counts: list[int]
    order: Tensor
    most: int


class Wire:
    """The processes that share tables. Without a process group it is this one alone.

    Attributes:
        rank: the number of this process.
        world: how many there are.
        group: they themselves.
        is_lost: whether an exchange has failed half-way, for example after a timeout: ranks are no
            longer in step, so there is no way to tell the others.
    """

    rank: int
    world: int
    group: ProcessGroup | None
    is_lost: bool = False

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        size = max(_BUFFER, _BUFFER_PER_RANK * self.world) if self.world > 1 else 0
        self._outgoing = torch.empty(size, dtype=torch.uint8)
        self._incoming = torch.empty(size, dtype=torch.uint8)

    def numbers(self, outgoing: Tensor) -> Tensor:
        """Send row ``r`` of a matrix to rank ``r``; get a row from each.

        Example:
            >>> Wire(None).numbers(torch.tensor([[1, 2]]))
            tensor([[1, 2]])
        """
        if self.world == 1:
            return outgoing
        incoming = certain(lambda: torch.empty_like(outgoing))
        self._all_to_all(incoming, outgoing)
        return incoming

    def _all_to_all(
        self,
        incoming: Tensor,
        outgoing: Tensor,
        sizes: list[int] | None = None,
        lengths: list[int] | None = None,
    ) -> None:
        try:
            dist.all_to_all_single(incoming, outgoing, sizes, lengths, group=self.group)
        except BaseException:
            self.is_lost = True
            raise

    def check(self, error: BaseException | None) -> None:
        """Raise on every rank if one has an error.

        Args:
            error: of this rank.
        """
        status = status_of(error)
        statuses = self.numbers(certain(lambda: torch.full((self.world, 1), status)))
        raise_failure(certain(lambda: statuses.flatten().tolist()), error)

    def send(
        self,
        outgoing: Outgoing | Callable[[], Outgoing],
        sizes: Sequence[int],
        largest: int,
        lengths: Sequence[int] | None = None,
    ) -> list[Reader]:
        """Send tensors to each rank; get what each has sent. What a rank has for itself stays.

        Atomic: if one rank raises before its messages are sent, all do.

        Args:
            outgoing: for each rank, contiguous tensors, or a function that returns them. What the
                function raises counts as this rank's error.
            sizes: how many bytes come from each rank.
            largest: how many bytes any rank sends another; all ranks say the same.
            lengths: how many bytes go to each rank; required if ``outgoing`` is a function.

        Example:
            >>> (found,) = Wire(None).send([[torch.ones(2), torch.zeros(1)]], [12], 12)
            >>> found.take(2, torch.float32)
            tensor([1., 1.])
        """
        if not callable(outgoing):
            made = outgoing
            lengths = [sum(each.nbytes for each in tensors) for tensors in made]
            return self.send(lambda: made, sizes, largest, lengths)
        if self.world == 1:
            return [_Stayed(outgoing()[0])]
        assert lengths is not None
        lengths, sizes = list(lengths), list(sizes)
        lengths[self.rank] = sizes[self.rank] = 0
        is_small = (largest + 1) * self.world <= len(self._outgoing) and largest <= CHUNK
        transfer = self._send_small if is_small else self._send_large
        return transfer(outgoing, lengths, sizes, largest)

    def _send_small(
        self, outgoing: Callable[[], Outgoing], lengths: list[int], sizes: list[int], _: int
    ) -> list[Reader]:
        """Each message ends with the status of its sender; no memory is needed to get that far."""
        error: BaseException | None = None
        own: Sequence[Tensor] = ()
        try:
            made = outgoing()
            own = made[self.rank]
            begins = _begins(lengths)
            for rank, tensors in enumerate(made):
                begin = begins[rank]
                for piece in () if rank == self.rank else map(_bytes, tensors):
                    self._outgoing[begin : (begin := begin + len(piece))] = piece
        except BaseException as raised:
            error = raised
        status = status_of(error)
        for begin, length in zip(_begins(lengths), lengths, strict=True):
            certain(partial(self._outgoing.__setitem__, begin + length, status))
        self._swap(
            self._outgoing[: sum(lengths) + self.world],
            self._incoming[: sum(sizes) + self.world],
            [length + 1 for length in lengths],
            [size + 1 for size in sizes],
        )
        ends = [begin + size for begin, size in zip(_begins(sizes), sizes, strict=True)]
        raise_failure(certain(lambda: [int(self._incoming[end]) for end in ends]), error)
        found: list[Reader] = []
        try:
            for begin, end in zip(_begins(sizes), ends, strict=True):
                found.append(Reader(self._incoming[begin:end].clone()))
        except BaseException as raised:  # a transfer may follow: what reads these raises
            return [_Failed(raised)] * self.world
        found[self.rank] = _Stayed(own)
        return found

    def _send_large(
        self,
        outgoing: Callable[[], Outgoing],
        lengths: list[int],
        sizes: list[int],
        largest: int,
    ) -> list[Reader]:
        """Allocate, then ask all ranks whether they could, then send; in chunks if it is much."""
        error: BaseException | None = None
        try:
            made = outgoing()
            own = made[self.rank]
            messages = [[] if rank == self.rank else each for rank, each in enumerate(made)]
            incoming = torch.empty(sum(sizes), dtype=torch.uint8)
            if largest <= CHUNK:
                packed = _packed([each for tensors in messages for each in tensors])
            else:
                pieces = [_packed(tensors) for tensors in messages]
                staged = torch.empty(2, self.world * CHUNK, dtype=torch.uint8)
        except BaseException as raised:
            error = raised
        self.check(error)
        if largest <= CHUNK:
            self._swap(packed, incoming, lengths, sizes)
        else:
            self._swap_in_chunks(pieces, list(incoming.split(sizes)), staged, largest)
        found: list[Reader] = [Reader(payload) for payload in incoming.split(sizes)]
        found[self.rank] = _Stayed(own)
        return found

    def _swap_in_chunks(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], staged: Tensor, largest: int
    ) -> None:
        """Send whole messages, a chunk of each at a time.

        Args:
            outgoing: a message for each rank.
            incoming: where those of each rank go.
            staged: room for the chunks of all ranks, to send and to receive.
            largest: the length of the longest message of any rank.
        """
        for begin in range(0, largest, CHUNK):
            sent, wanted = (
                [each[begin : begin + CHUNK] for each in some] for some in (outgoing, incoming)
            )
            lengths, sizes = [list(map(len, some)) for some in (sent, wanted)]
            to_send, received = (
                staged[n, : sum(some)].split(some) for n, some in enumerate((lengths, sizes))
            )
            for piece, chunk in zip(to_send, sent, strict=True):
                piece.copy_(chunk)
            self._swap(staged[0, : sum(lengths)], staged[1, : sum(sizes)], lengths, sizes)
            for chunk, piece in zip(wanted, received, strict=True):
                chunk.copy_(piece)

    def _swap(
        self, outgoing: Tensor, incoming: Tensor, lengths: list[int], sizes: list[int]
    ) -> None:
        """Send bytes to each rank, and receive from each; ranks agree on how many."""
        self._all_to_all(incoming, outgoing, sizes, lengths)

    def texts(self, text: str) -> list[str]:
        """Send a text to all ranks; get one from each.

        Example:
            >>> Wire(None).texts("lr=0.1")
            ['lr=0.1']
        """
        payload = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.numbers(torch.full((self.world, 1), len(payload)))
        sizes: list[int] = lengths.flatten().tolist()
        readers = self.send([[payload]] * self.world, sizes, max(sizes))
        return [
            bytes(reader.take(size, torch.uint8).tolist()).decode()
            for reader, size in zip(readers, sizes, strict=True)
        ]

    def deal(self, rows: Tensor, ranks: Tensor) -> Dealt:
        """Send each row of a tensor to the rank that it is for.

        Args:
            rows: contiguous.
            ranks: one for each row.

        Example:
            >>> Wire(None).deal(torch.tensor([[7], [8]]), torch.tensor([0, 0])).pieces
            [tensor([[7],
                    [8]])]
        """
        counts = ranks.bincount(minlength=self.world)
        outgoing: list[int] = counts.tolist()
        lines = torch.tensor([[count, max(outgoing)] for count in outgoing])
        incoming = self.numbers(lines).tolist()
        most = max(largest for _, largest in incoming)
        order, rest = ranks.argsort(stable=True), rows.shape[1:]
        size, each_row = rest.numel() * rows.dtype.itemsize, rest.numel()
        pieces = [[piece] for piece in rows[order].split(outgoing)]
        readers = self.send(pieces, [count * size for count, _ in incoming], most * size)
        found = [
            reader.take(count * each_row, rows.dtype).view(count, *rest)
            for reader, (count, _) in zip(readers, incoming, strict=True)
        ]
        return Dealt(found, outgoing, order, most)


def _begins(lengths: Sequence[int]) -> list[int]:
    """Where messages begin that are followed by a byte each."""
    return list(itertools.accumulate([length + 1 for length in lengths[:-1]], initial=0))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other."""
    pieces = [_bytes(each) for each in tensors if each.numel()]
    if len(pieces) == 1:
        return pieces[0]
    return cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def shares(tensor: Tensor, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """What of a tensor goes to each rank, where that is anything.

    Example:
        >>> list(shares(torch.tensor([1, 2, 3]), [2, 0, 1]))
        [(0, tensor([1, 2])), (2, tensor([3]))]
    """
    begin, whole = 0, len(tensor)
    for rank, count in enumerate(counts):
        if count:
            yield rank, tensor if count == whole else tensor.narrow(0, begin, count)
            begin += count


def joined(pieces: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """One after the other; a piece beside which all are empty is not copied, whatever its dtype.

    Example:
        >>> whole = torch.ones(3)
        >>> joined([whole[:0], whole]) is whole, joined([whole, whole]).shape
        (True, torch.Size([6]))
    """
    some = [each for each in pieces if each.numel()] or pieces[:1]
    if len(some) == 1:
        return some[0]
    if dtype is None:
        return cat(some)
    whole, begin = torch.empty(sum(map(len, some)), dtype=dtype), 0
    for piece in some:
        whole[begin : (begin := begin + len(piece))] = piece
    return whole


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # a single element may have any
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8)


class Reader:
    """Takes tensors from bytes, in the order in which they were sent.

    Example:
        >>> reader = Reader(torch.tensor([1, 0, 0, 0, 7], dtype=torch.uint8))
        >>> reader.take(1, torch.int32), reader.take(1, torch.uint8)
        (tensor([1], dtype=torch.int32), tensor([7], dtype=torch.uint8))
    """

    def __init__(self, payload: Tensor) -> None:
        self._message = payload
        self._at = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next so many numbers."""
        size = count * dtype.itemsize
        if not count:
            return torch.empty(0, dtype=dtype)
        piece = self._message.narrow(0, self._at, size)
        self._at += size
        if piece.storage_offset() % dtype.itemsize:  # where such numbers cannot lie
            piece = piece.clone()
        return piece.view(dtype)


class _Stayed(Reader):
    """The same for tensors that went nowhere: these very ones, flat, of the dtype that they have.

    Example:
        >>> rows = torch.ones(2, 2)
        >>> _Stayed([rows]).take(4, torch.float32).data_ptr() == rows.data_ptr()
        True
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = iter([each for each in tensors if each.numel()])

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """The next tensor."""
        if not count:
            return torch.empty(0, dtype=dtype)
        found = next(self._tensors).reshape(-1)
        assert found.numel() == count
        return found


class _Failed(Reader):
    """The messages of a transfer that this rank had no memory to copy."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Raise."""
        raise self._error
