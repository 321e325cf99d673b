"""Which row each id has: in the core, or in Python's dicts where it is not installed."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.nn.vocabulary.id_table import (
    Claim,
    Evict,
    Ids,
    Options,
    PlainIds,
    Saved,
    check_is_pending,
)

_EVICTIONS: tuple[Evict, ...] = (None, "lru", "lfu")


def new_ids(options: Options) -> Ids:
    """One that has seen nothing."""
    return PlainIds(options) if ext is None else NativeIds(options)


class NativeIds:
    """In the core: see ``native/core/vocabulary.h``."""

    def __init__(self, options: Options) -> None:
        assert ext is not None
        self._options = options
        # What row an id has does not depend on the keys, only how long it takes to find it.
        keys = (secrets.randbits(64), secrets.randbits(64))
        self._core = ext.vocabulary(
            options.rows,
            options.shared,
            options.admit,
            options.candidates,
            _EVICTIONS.index(options.evict),
            options.fades_after,
            keys,
        )

    @property
    def used(self) -> int:
        """See ``Ids``."""
        return self._core.sizes()[0]

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """See ``Ids``."""
        rows = torch.empty_like(ids)
        return rows, self._core.find(ids, rows, torch.get_num_threads())

    def claim(self, ids: Tensor, now: int) -> Claim:
        """See ``Ids``."""
        rows, taken = torch.empty_like(ids), torch.empty_like(ids)
        threads = torch.get_num_threads()
        without, count, number = self._core.claim(ids, rows, now, taken, threads)
        return Claim(rows, without, taken[:count], number)

    def commit(self, claim: Claim) -> None:
        """See ``Ids``."""
        check_is_pending(self._core.commit(claim.number))

    def save(self) -> Saved:
        """See ``Ids``."""
        saved = Saved.room(self._options, *self._core.sizes())
        self._core.save(*saved[:5])
        return saved

    def load(self, saved: Saved, now: int) -> bool:
        """See ``Ids``."""
        return self._core.load(*saved, now)
