"""lockstep: ranks that run out of data at different times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.torch_internals import tree_map_only

Batch = TypeVar("Batch")

# What a rank has at the begin of a step.
_NOTHING, _EXAMPLE, _BATCH = 0, 1, 2


def lockstep(loader: Iterable[Batch], prefetch: int = 0) -> Iterator[Batch]:
    """The batches of a loader, and empty ones until every rank has come to the end.

    Lookups in sharded tables are things that all ranks do together. So a rank whose data ends goes
    on with empty batches: every tensor of its last batch cut to length 0 along the first dim, in
    lists, tuples, dicts and dataclasses; other things stay as they are. A batch that has a method
    ``empty`` is asked for one instead, for example where offsets must keep their last. A rank
    that never had a batch gets its empty ones from another.

    The loss of an empty batch may be NaN, as a mean of nothing is; its gradient is zero. Under
    ``reduce="mean"`` such a rank counts like any other, as in ``DistributedDataParallel``.

    Each step costs one exchange of a number. All ranks have to go on to the end: whoever leaves the
    loop early leaves the others waiting.

    Args:
        loader: batches, or anything else to iterate over.
        prefetch: how many batches' ids are sent ahead; 0 is all that there is so far.

    Returns:
        An iterator, with the same number of batches on every rank.

    Raises:
        InputError: ``prefetch`` is another number, or there is nothing to make an empty batch of.

    Example:
        >>> import torch
        >>> for batch in lockstep([torch.tensor([3, 1]), torch.tensor([4])]):  # one process
        ...     print(batch)
        tensor([3, 1])
        tensor([4])
    """
    if prefetch != 0:
        contract = "lockstep: prefetch must be 0, for ids cannot be sent ahead yet"
        raise InputError(sentence(contract, prefetch))
    return _in_step(iter(loader))


def _in_step(batches: Iterator[Batch]) -> Iterator[Batch]:
    example: Any = None
    has = _NOTHING
    while True:
        batch = next(batches, _END)
        if batch is not _END:
            has = _BATCH
        elif has == _BATCH:
            has = _EXAMPLE
        everybody = _gathered(has)
        if _BATCH not in everybody:
            return
        if _NOTHING in everybody:
            found = _from_rank(everybody.index(_BATCH), batch)
            if has == _NOTHING:
                example, has = found, _EXAMPLE
        if batch is not _END:
            example = batch
            yield batch
        else:
            yield emptied(example)


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


def _gathered(value: int) -> list[int]:
    """What every rank says, in their order."""
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value]))
    return [int(each) for each in found]


def _from_rank(rank: int, batch: Any) -> Any:
    """An empty batch like those of a rank."""
    mine = [emptied(batch) if dist.get_rank() == rank else None]
    dist.broadcast_object_list(mine, src=rank)
    return mine[0]
