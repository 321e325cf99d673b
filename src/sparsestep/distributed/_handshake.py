"""Every exchange starts with a line of numbers for each rank: what is coming, and do all agree?

The line always has the same length. So ranks that are at different places in the program find out,
instead of misreading each other's numbers or waiting forever.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep.distributed.collectives import Wire, describe_failure, raise_failure, status_of
from sparsestep.engines.finishing import certain
from sparsestep.errors import InputError, is_out_of_memory, message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Doing(IntEnum):
    """What an exchange is for."""

    LOOK_UP = 1
    ARRIVAL = 2
    NORM = 3
    BATCH = 4
    IDS = 5
    LOAD = 6
    GROW = 7
    MERGE = 8
    EXPORT = 9


_DOES = {
    Doing.LOOK_UP: "looks up {}",
    Doing.ARRIVAL: "needs gradients, as step() and clipping do",
    Doing.NORM: "clips gradients",
    Doing.BATCH: "asks for a batch",
    Doing.IDS: "looks up ids of {}",
    Doing.LOAD: "loads a checkpoint of {}",
    Doing.GROW: "grows {}",
    Doing.MERGE: "merges ids of {} with others",
    Doing.EXPORT: "exports {}",
}


class Line:
    """The numbers that go to all ranks and those that go to each.

    Attributes:
        doing: what the exchange is for.
        table: which table, or the first of several; -1 for all.
        turn: how many lookups there were before.
        count: how many tables are looked up.
        oldest: the oldest lookup whose gradient may still come from this rank.
        largest: the most bytes that this rank will send another.
        back: the most bytes that it expects from another in return.
        payload: whatever else the exchange needs.
        ahead: which ids have been sent already; 0 for none.
        digest: of facts that must be the same on all ranks; 0 if there are none.
    """

    FIELDS = (
        *("status", "doing", "table", "turn", "count", "oldest"),
        *("largest", "back", "payload", "ahead", "digest"),
    )
    # What all ranks must say alike.
    AGREED = ("doing", "table", "turn", "count")

    status: int
    doing: Doing
    table: int
    turn: int
    count: int
    oldest: int
    largest: int
    back: int
    payload: int
    ahead: int
    digest: int

    def __init__(self, doing: Doing, table: int = -1, turn: int = 0, oldest: int = 0) -> None:
        self.status, self.doing, self.table, self.turn, self.oldest = 0, doing, table, turn, oldest
        self.count = self.largest = self.back = self.payload = self.ahead = self.digest = 0

    def numbers(self) -> list[int]:
        """What all ranks get."""
        return [int(getattr(self, name)) for name in self.FIELDS]


class Lines:
    """What all ranks have said.

    Attributes:
        room: for each rank, the numbers that it has for this one alone.
    """

    def __init__(self, incoming: Tensor) -> None:
        fields = len(Line.FIELDS)
        rows: list[list[int]] = incoming.tolist()
        self._of = {name: [row[n] for row in rows] for n, name in enumerate(Line.FIELDS)}
        self.room: list[list[int]] = [row[fields:] for row in rows]

    def __getitem__(self, name: str) -> list[int]:
        return self._of[name]


Facts = Mapping[str, str]


def digest(facts: Facts) -> int:
    """A number that differs if facts do, and is not 0 unless there are none.

    Example:
        >>> digest({}), digest({"lr": "0.1"}) == digest({"lr": "0.2"})
        (0, False)
    """
    if not facts:
        return 0
    code = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True) or 1


def agree(
    wire: Wire,
    line: Line,
    room: Tensor,
    names: list[str],
    error: BaseException | None = None,
    facts: Facts | None = None,
) -> Lines:
    """Exchange lines; raise on every rank where one refuses, or does something else.

    Args:
        wire: the ranks.
        line: for all ranks.
        room: for each rank a row of numbers, always equally many.
        names: of the tables.
        error: why this rank refuses.
        facts: what must be the same on all ranks.
    """
    line.status, line.digest = status_of(error), digest(facts or {})
    fields = len(Line.FIELDS)

    def packed() -> Tensor:
        outgoing = room.new_empty(wire.world, fields + room.shape[1])
        outgoing[:, :fields] = torch.tensor(line.numbers())
        outgoing[:, fields:] = room
        return outgoing

    incoming = wire.numbers(certain(packed))
    lines = certain(lambda: Lines(incoming))
    if error is not None:
        raise error
    for rank, status in enumerate(lines["status"]):
        if status:
            what = f"rank {rank}, which {_says(lines, rank, names)}, {describe_failure(status)}"
            raise InputError(f"{what}; see that rank's message. Nothing has changed on any rank.")
    for rank in range(wire.world):
        if any(lines[name][rank] != int(getattr(line, name)) for name in Line.AGREED):
            requirement = "all ranks must call sharded tables in the same order"
            here, there = (_says(lines, each, names) for each in (wire.rank, rank))
            got = f"rank {wire.rank}, which {here}, and rank {rank}, which {there}"
            remedy = "A rank without data must take part with empty batches: see lockstep"
            raise InputError(message(requirement, got, remedy))
    if len(set(lines["digest"])) > 1:
        requirement = "all ranks must train sharded tables with the same optimizer and options"
        raise different_facts(wire, facts or {}, requirement)
    return lines


def compare_facts(
    wire: Wire, facts: Facts, requirement: str, error: BaseException | None = None
) -> None:
    """Raise on every rank if one has an error, or facts differ.

    Args:
        wire: the ranks.
        facts: what must be the same on all ranks.
        requirement: what the message says is required.
        error: of this rank.
    """
    numbers = [status_of(error), digest(facts)]
    theirs = wire.numbers(certain(lambda: torch.tensor(numbers).repeat(wire.world, 1)))
    statuses, digests = certain(lambda: theirs.t().tolist())
    raise_failure(statuses, error)
    if len(set(digests)) > 1:
        raise different_facts(wire, facts, requirement)


def different_facts(wire: Wire, facts: Facts, requirement: str) -> InputError:
    """Exchange facts that ranks do not agree on; the same message for all ranks.

    Args:
        wire: the ranks.
        facts: of this rank.
        requirement: what is required.
    """
    everybody: list[dict[str, str]] = list(map(json.loads, wire.texts(json.dumps(facts))))
    first = everybody[0]
    rank = next((n for n, each in enumerate(everybody) if each != first), 0)
    other = everybody[rank]
    found = []
    for name in dict.fromkeys([*first, *other]):
        mine, theirs = first.get(name, "none"), other.get(name, "none")
        if mine != theirs:
            found.append(f"{name}: {mine} on rank 0, {theirs} on rank {rank}")
            if name in STRUCTURE:  # the rest follows from it
                break
    shown = "; ".join(found[:_MOST_SHOWN])
    more = len(found) - _MOST_SHOWN
    got = f"{shown}; and {more} more" if more > 0 else shown
    return InputError(message(requirement, got, "Nothing has changed on any rank"))


STRUCTURE = ("caller", "tables", "frozen tables", "param groups")
_MOST_SHOWN = 3


def _says(lines: Lines, rank: int, names: list[str]) -> str:
    """What a rank does, in words."""
    table, doing = lines["table"][rank], lines["doing"][rank]
    name = (repr(names[table]) if names[table] else "the table") if table >= 0 else "tables"
    return _DOES[Doing(doing)].format(name)


T = TypeVar("T")


class Failure(NamedTuple):
    """An error as other ranks see it.

    Attributes:
        kind: the class to raise: ``MemoryError``, ``OSError`` or ``InputError``.
        message: the text of the error.
        errno: of an ``OSError``.
    """

    kind: type[Exception]
    text: str
    errno: int | None = None

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe an error.

        Example:
            >>> Failure.of(OSError(28, "No space left on device")).raised_by(1)
            OSError(28, 'rank 1: No space left on device')
        """
        if isinstance(error, MemoryError):
            return Failure(MemoryError, str(error))
        if isinstance(error, OSError):
            where = "" if error.filename is None else f": {error.filename!r}"
            return Failure(OSError, f"{error.strerror or error}{where}", error.errno)
        if isinstance(error, InputError):
            return Failure(InputError, str(error))
        return Failure(InputError, f"{type(error).__name__}: {error}".rstrip(": "))

    def raised_by(self, rank: int) -> Exception:
        """Create the error that the other ranks raise."""
        text = f"rank {rank}: {self.text}"
        return self.kind(text) if self.errno is None else self.kind(self.errno, text)


class Peers:
    """The ranks that save or load together.

    Attributes:
        group: their process group; ``None`` for a single process.
        rank: the rank of this process in the group.
        world: the number of ranks.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group: ProcessGroup | None = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world: int = 1 if group is None else dist.get_world_size(group)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``torch.distributed.checkpoint`` that select these ranks."""
        return {"no_dist": True} if self.group is None else {"process_group": self.group}

    def gather(self, mine: T) -> list[T]:
        """Gather an object from every rank; all ranks call it.

        Example:
            >>> Peers(None).gather("alone")
            ['alone']
        """
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def agree(self, error: BaseException | None, undo: Callable[[], None] | None = None) -> None:
        """Raise if any rank has an error; all ranks call it.

        Args:
            error: the error of this rank, which it raises itself.
            undo: called before raising. It is not called if the ranks lose contact: the others may
                have gone on.
        """
        failures = self.gather(None if error is None else Failure.of(error))
        if undo is not None and any(failures):
            undo()
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise failure.raised_by(rank)

    @contextmanager
    def agreeing(self, undo: Callable[[], None] | None = None) -> Iterator[None]:
        """Run a block without collectives on every rank; if it raises on one, all ranks raise.

        Args:
            undo: as for :meth:`agree`.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = as_documented(raised)
        self.agree(error, undo)

    def error_of(self, failures: Mapping[int, tuple[BaseException, Any]]) -> BaseException:
        """The error to raise for the failures that ``torch.distributed.checkpoint`` reports.

        Args:
            failures: by rank, the exception and its traceback.
        """
        if self.rank in failures:
            return as_documented(failures[self.rank][0])
        rank, (error, _) = next(iter(failures.items()))
        return Failure.of(as_documented(error)).raised_by(rank)


def as_documented(error: BaseException) -> BaseException:
    """Torch's error for a failed allocation as a ``MemoryError``; any other as it is.

    Example:
        >>> as_documented(RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"))
        MemoryError("DefaultCPUAllocator: can't allocate memory: 8 bytes")
    """
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, InputError)
    return MemoryError(str(error)) if is_torchs and is_out_of_memory(error) else error
