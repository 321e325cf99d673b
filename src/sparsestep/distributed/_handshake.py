"""Handshake: every exchange starts with one fixed-size status row per peer.

Ranks that are at different places in the program find out, instead of misreading each other's
numbers or waiting forever. Checkpoints are rare: ``Peers`` gathers their errors as objects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep.distributed.collectives import (
    Caught,
    Collectives,
    Envelope,
    Messages,
    Payload,
    Room,
    describe_failure,
    status_of,
)
from sparsestep.distributed.placement import table_label
from sparsestep.engines.base import certain
from sparsestep.errors import InputError, is_out_of_memory, message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Facts = Mapping[str, str]

# If one of these differs, later facts differ as a consequence.
_STRUCTURE = ("caller", "tables", "frozen tables", "param groups")
_MAX_SHOWN = 3


class ExchangeKind(IntEnum):
    LOOKUP = 1
    EXCHANGE_GRADS = 2
    NORM = 3
    VOCABULARY_LOOKUP = 4
    GROW = 5
    MERGE = 6
    EXPORT = 7


_DESCRIPTIONS = {
    ExchangeKind.LOOKUP: "looks up {}",
    ExchangeKind.EXCHANGE_GRADS: "needs gradients, as step() and clipping do",
    ExchangeKind.NORM: "clips gradients",
    ExchangeKind.VOCABULARY_LOOKUP: "looks up ids of {}",
    ExchangeKind.GROW: "grows {}",
    ExchangeKind.MERGE: "merges ids of {} with others",
    ExchangeKind.EXPORT: "exports {}",
}


@dataclass
class Status:
    """A rank's message to all others at the start of an exchange."""

    operation: ExchangeKind
    table: int = -1  # index of the table, or of the first of several; -1: all
    sequence: int = 0  # number of lookups so far
    oldest_pending: int = 0  # oldest lookup whose gradient may still come from this rank
    num_tables: int = 0  # tables of a lookup
    max_bytes: int = 0  # most bytes that this rank will send another
    max_reply_bytes: int = 0  # most bytes that it expects another to return
    value: int = 0  # depends on the operation
    prefetched: int = 0  # number of the prefetched ids that are used; 0: none
    error: int = 0  # status of this rank's error
    digest: int = 0  # hash of facts that must be the same on all ranks; 0: none
    payload: int = 0  # kind of the payload packed with the status; 0: none


_FIELDS = [each.name for each in fields(Status)]
_MUST_AGREE = ("operation", "table", "sequence", "num_tables")


class PeerStatus:
    """The status of all ranks."""

    def __init__(self, incoming: Tensor) -> None:
        columns: list[list[int]] = incoming[:, : len(_FIELDS)].t().tolist()
        self._of = dict(zip(_FIELDS, columns, strict=True))
        # By rank, the counts that it sent to this rank.
        self.counts: Tensor = incoming[:, len(_FIELDS) :]
        self.messages: Callable[[Payload, Tensor], Messages] | None = None  # of payloads

    def __getitem__(self, name: str) -> list[int]:
        return self._of[name]

    def describe(self, rank: int, names: list[str]) -> str:
        table, operation = self["table"][rank], self["operation"][rank]
        name = table_label(names[table]) if table >= 0 else "tables"
        return _DESCRIPTIONS[ExchangeKind(operation)].format(name)


def digest(facts: Facts) -> int:
    """Hash facts; 0 only if there are none."""
    if not facts:
        return 0
    code = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).digest()
    return int.from_bytes(code, "little", signed=True) or 1


def row_bytes(num_counts: int) -> int:
    """Bytes of a status row with this many counts."""
    return (len(_FIELDS) + num_counts) * torch.int64.itemsize


def handshake(
    collectives: Collectives,
    status: Status,
    counts: Tensor,
    names: list[str],
    error: BaseException | None = None,
    facts: Facts | None = None,
    payload: Payload | None = None,
    room: Room | None = None,
) -> PeerStatus:
    """Exchange status rows; each has a fixed number of counts for its receiver.

    Raises on every rank if one has an error, another operation or other facts. The payload is
    packed with the status if it fits into the room, which is the same on all ranks; otherwise
    ``status.payload`` becomes 0.
    """
    envelope: Envelope | None = None
    if room is not None:
        size = row_bytes(counts.shape[1])
        envelope = certain(lambda: Envelope(collectives, size, room))
    is_packed = False
    if error is None and payload is not None and envelope is not None:
        with Caught() as caught:
            is_packed = envelope.pack(payload)
        error = caught.error
    status.payload *= is_packed
    status.error, status.digest = status_of(error), digest(facts or {})
    world_size, width = collectives.world_size, len(_FIELDS)

    def pack() -> Tensor:
        outgoing = counts.new_empty(world_size, width + counts.shape[1])
        outgoing[:, :width] = torch.tensor([int(value) for value in astuple(status)])
        outgoing[:, width:] = counts
        return outgoing

    rows = certain(pack)
    incoming = collectives.all_to_all_rows(rows) if envelope is None else envelope.exchange(rows)
    peers = certain(lambda: PeerStatus(incoming))
    peers.messages = None if envelope is None else envelope.messages
    if error is not None:
        raise error
    if any(peers["error"]):
        rank, failure = next((n, each) for n, each in enumerate(peers["error"]) if each)
        what = f"rank {rank}, which {peers.describe(rank, names)}, {describe_failure(failure)}"
        raise InputError(f"{what}; see that rank's message. Nothing has changed on any rank.")
    numbers = {name: int(getattr(status, name)) for name in _MUST_AGREE}
    if any(peers[name].count(mine) < world_size for name, mine in numbers.items()):
        ranks = range(world_size)
        for rank in (r for r in ranks if any(peers[name][r] != numbers[name] for name in numbers)):
            requirement = "all ranks must call sharded tables in the same order"
            here, there = (peers.describe(each, names) for each in (collectives.rank, rank))
            got = f"rank {collectives.rank}, which {here}, and rank {rank}, which {there}"
            remedy = "A rank without data must take part with empty batches: see lockstep"
            raise InputError(message(requirement, got, remedy))
    if len(set(peers["digest"])) > 1:
        requirement = "all ranks must train sharded tables with the same optimizer and options"
        raise _different_facts(collectives, facts or {}, requirement)
    return peers


def compare_facts(
    collectives: Collectives, facts: Facts, requirement: str, error: BaseException | None = None
) -> None:
    """Raise on every rank if one has an error, or facts differ."""
    digests = collectives.check(error, digest(facts))
    if len(set(digests)) > 1:
        raise _different_facts(collectives, facts, requirement)


def _different_facts(collectives: Collectives, facts: Facts, requirement: str) -> InputError:
    """Gather the facts of all ranks for an error with the same message on each."""
    texts = collectives.all_gather_texts(json.dumps(facts))
    of_ranks: list[dict[str, str]] = list(map(json.loads, texts))
    first = of_ranks[0]
    rank = next((n for n, each in enumerate(of_ranks) if each != first), 0)
    other = of_ranks[rank]
    differences = []
    for name in dict.fromkeys([*first, *other]):
        mine, theirs = first.get(name, "none"), other.get(name, "none")
        if mine != theirs:
            differences.append(f"{name}: {mine} on rank 0, {theirs} on rank {rank}")
            if name in _STRUCTURE:
                break
    shown = "; ".join(differences[:_MAX_SHOWN])
    more = len(differences) - _MAX_SHOWN
    got = f"{shown}; and {more} more" if more > 0 else shown
    return InputError(message(requirement, got, "Nothing has changed on any rank"))


# Checkpoints


def failure_of(rank: int, error: BaseException) -> Exception:
    """The error that other ranks raise for a rank's error."""
    text = f"rank {rank}: {error}"
    if isinstance(error, MemoryError):
        return MemoryError(text)
    if isinstance(error, OSError):
        where = "" if error.filename is None else f": {error.filename!r}"
        text = f"rank {rank}: {error.strerror or error}{where}"
        return OSError(text) if error.errno is None else OSError(error.errno, text)
    if not isinstance(error, InputError):
        text = f"rank {rank}: {type(error).__name__}: {error}".rstrip(": ")
    return InputError(text)


class Peers:
    """The ranks that save or load together: an error on one rank is raised on all of them."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group: ProcessGroup | None = group
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.world_size: int = 1 if group is None else dist.get_world_size(group)

    @property
    def dcp_options(self) -> dict[str, Any]:
        """Arguments of ``torch.distributed.checkpoint`` that select these ranks."""
        return {"no_dist": True} if self.group is None else {"process_group": self.group}

    def gather(self, mine: T) -> list[T]:
        """Gather an object from every rank; all ranks call it."""
        if self.world_size == 1:
            return [mine]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, mine, group=self.group)
        return gathered

    def agree(self, error: BaseException | None, undo: Callable[[], None] | None = None) -> None:
        """Raise if any rank has an error; all ranks call it.

        ``undo`` is called first, but not if ranks lose contact: others may have finished.
        """
        failures = self.gather(None if error is None else failure_of(self.rank, error))
        if undo is not None and any(failures):
            undo()
        if error is not None:
            raise error
        for failure in failures:
            if failure is not None:
                raise failure

    @contextmanager
    def agreeing(self, undo: Callable[[], None] | None = None) -> Iterator[None]:
        """Run a block without collectives on every rank; if it raises on one, all ranks raise."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = as_documented(raised)
        self.agree(error, undo)

    def error_of(self, failures: Mapping[int, tuple[BaseException, Any]]) -> BaseException:
        """The error to raise for the failures that ``torch.distributed.checkpoint`` reports."""
        if self.rank in failures:
            return as_documented(failures[self.rank][0])
        rank, (error, _) = next(iter(failures.items()))
        return failure_of(rank, as_documented(error))


def as_documented(error: BaseException) -> BaseException:
    """Convert torch's error for a failed allocation to ``MemoryError``; return others unchanged."""
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, InputError)
    return MemoryError(str(error)) if is_torchs and is_out_of_memory(error) else error
