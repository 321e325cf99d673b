"""What processes send each other: equal numbers to all, then bytes, as many as the numbers say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep.surroundings import cat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What one process sends another at once; gloo does not take messages of any size.
CHUNK = 64 << 20


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
    """

    rank: int
    world: int
    group: ProcessGroup | None

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def numbers(self, outgoing: Tensor) -> Tensor:
        """Send row ``r`` of a matrix to rank ``r``; get a row from each.

        Example:
            >>> Wire(None).numbers(torch.tensor([[1, 2]]))
            tensor([[1, 2]])
        """
        if self.world == 1:
            return outgoing
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self.group)
        return incoming

    def send(
        self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[int], largest: int
    ) -> list[Reader]:
        """Send tensors to each rank; get what each has sent. What a rank has for itself stays.

        Args:
            outgoing: for each rank, contiguous tensors.
            sizes: how many bytes come from each rank.
            largest: how many bytes any rank sends another; all ranks say the same.

        Example:
            >>> (found,) = Wire(None).send([[torch.ones(2), torch.zeros(1)]], [12], 12)
            >>> found.take(2, torch.float32)
            tensor([1., 1.])
        """
        own = _Stayed(outgoing[self.rank])
        if self.world == 1:
            return [own]
        outgoing = [[] if rank == self.rank else each for rank, each in enumerate(outgoing)]
        sizes = [0 if rank == self.rank else size for rank, size in enumerate(sizes)]
        found = [Reader(message) for message in self._in_chunks(outgoing, sizes, largest)]
        found[self.rank] = own
        return found

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

    def _in_chunks(
        self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[int], largest: int
    ) -> list[Tensor]:
        if largest <= CHUNK:
            return list(self._at_once(outgoing, sizes).split(list(sizes)))
        packed = [_packed(tensors) for tensors in outgoing]
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for begin in range(0, largest, CHUNK):
            some = [[each[begin : begin + CHUNK]] for each in packed]
            wanted = [max(0, min(size - begin, CHUNK)) for size in sizes]
            pieces = self._at_once(some, wanted).split(wanted)
            for whole, piece in zip(found, pieces, strict=True):
                whole[begin : begin + len(piece)] = piece
        return found

    def _at_once(self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> Tensor:
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        lengths = [sum(each.nbytes for each in tensors) for tensors in outgoing]
        everything = _packed([each for tensors in outgoing for each in tensors])
        dist.all_to_all_single(incoming, everything, list(sizes), lengths, group=self.group)
        return incoming


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

    def __init__(self, message: Tensor) -> None:
        self._message = message
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
