"""lockstep: ranks that run out of data at different times."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep._torch import tree_map_only
from sparsestep.distributed.ahead import Loop, tensors_in, version_of
from sparsestep.errors import InputError, message

Batch = TypeVar("Batch")

# What a rank has at the begin of a step.
_NOTHING, _EXAMPLE, _BATCH, _ERROR = 0, 1, 2, 3


def lockstep(loader: Iterable[Batch], prefetch: int = 0) -> Iterator[Batch]:
    """Iterate over a loader, with empty batches until every rank has reached its end.

    All ranks look up sharded tables together. So a rank that runs out of data continues with empty
    batches: its last batch with every tensor cut to length 0 along the first dim, also in lists,
    tuples, dicts and dataclasses. Anything else stays as it is. If a batch has a method ``empty``,
    that is called instead, for example if offsets must keep their last value. A rank that never had
    a batch gets its empty ones from another rank.

    The loss of an empty batch may be NaN, like any mean over nothing, but its gradient is zero.
    With ``reduce="mean"``, such a rank counts like any other, as in ``DistributedDataParallel``.

    Each step costs one exchange of two numbers. Every rank has to run the loop to its end: if one
    leaves early, the others wait. If the loader of one rank raises, all ranks raise.

    With ``prefetch=1``, the loader is one batch ahead, and the ids of the next batch are sent to
    their owners while you train. For that, pass the batch's own tensors to the tables:
    ``model.user(batch["user"])``, not ``model.user(batch["ids"][:, 0])``. Other ids are sent when
    they are looked up, as without prefetching. It starts with the third batch, because it learns
    from the first one which tensors are looked up.

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
    if not prefetch or not _is_shared():
        return (batch for batch, _ in _in_step(iter(loader), lambda _: 0))
    return _ahead(iter(loader))


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches, of which the next one's ids are sent before each."""
    loop = Loop()
    given: list[tuple[Tensor, int]] = []

    def recipe(batch: Any) -> int:
        if any(version_of(tensor) != version for tensor, version in given):
            requirement = (
                "lockstep: with prefetch=1 the loader must not modify a batch after yielding it"
            )
            raise InputError(
                message(requirement, "a modified batch", "Allocate new tensors for every batch")
            )
        return 0 if batch is None else loop.recipe(batch)

    try:
        steps = _in_step(batches, recipe)
        following, sending = next(steps, None), None
        while following is not None:
            batch, sent = following[0], sending
            loop.learn()
            given[:] = [(each, version_of(each)) for each in tensors_in(batch)]
            following = next(steps, None)
            sending = loop.send(following[0]) if following is not None and following[1] else None
            given.clear()
            loop.begin(batch, sent)
            yield batch
    finally:
        loop.end()


def _in_step(
    batches: Iterator[Batch], recipe: Callable[[Any], int]
) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether all ranks say the same of theirs.

    Args:
        batches: of this rank.
        recipe: what it says of a batch; ``None`` where it is not known yet. 0: nothing.
    """
    example: Any = None
    has = _NOTHING
    while True:
        error: Exception | None = None
        batch, said = _END, 0
        try:
            batch = next(batches, _END)
            if batch is not _END:
                has = _BATCH
            elif has != _NOTHING:
                has, batch = _EXAMPLE, emptied(example)
            said = recipe(None if batch is _END else batch)
        except Exception as raised:
            error = raised
        everybody, agreed = _gathered(_ERROR if error else has, said)
        if error is not None:
            raise error
        if _ERROR in everybody:
            rank = everybody.index(_ERROR)
            requirement = f"lockstep: rank {rank} has no next batch; see that rank's message"
            raise InputError(f"{requirement}. All ranks stop here.")
        if _BATCH not in everybody:
            return
        if _NOTHING in everybody:
            found = _from_rank(everybody.index(_BATCH), batch)
            if has == _NOTHING:
                example, has, batch = found, _EXAMPLE, found
        if has == _BATCH:
            example = batch
        yield batch, agreed


_END: Any = object()


def emptied(batch: Any) -> Any:
    """A batch of nothing, made of one that has something.

    Example:
        >>> emptied({"ids": torch.tensor([[3, 1], [4, 1]]), "name": "train"})
        {'ids': tensor([], size=(0, 2), dtype=torch.int64), 'name': 'train'}
    """
    empty = getattr(batch, "empty", None)
    if callable(empty) and not isinstance(batch, Tensor):
        return empty()
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{n: emptied(getattr(batch, n)) for n in fields})
    return tree_map_only(Tensor, lambda t: t[:0] if t.dim() else t, batch)


def _is_shared() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gathered(has: int, said: int) -> tuple[list[int], bool]:
    """What every rank has, in their order; whether they say the same, and something."""
    if not _is_shared():
        return [has], said != 0
    found = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([has, said]))
    numbers = [each.tolist() for each in found]
    return [each[0] for each in numbers], {each[1] for each in numbers} == {said} != {0}


def _from_rank(rank: int, batch: Any) -> Any:
    """An empty batch like those of a rank."""
    mine = [emptied(batch) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(mine, src=rank)
    return mine[0]
