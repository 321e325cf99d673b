"""Ranks that save or load together: an error on one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from sparsestep.errors import InputError, is_out_of_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Failure(NamedTuple):
    """An error as other ranks see it.

    Attributes:
        kind: the class to raise: ``MemoryError``, ``OSError`` or ``InputError``.
        message: the text of the error.
        errno: of an ``OSError``.
    """

    kind: type[Exception]
    message: str
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
        message = f"rank {rank}: {self.message}"
        return self.kind(message) if self.errno is None else self.kind(self.errno, message)


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
