"""Tables larger than memory: in files, prefetched, with checkpoints that survive a kill."""

from sparsestep.storage.checkpoint import load, save
from sparsestep.storage.mapped import Mapped, Prefetching, mapped, prefetch, prefetching, writing

__all__ = [
    "Mapped",
    "Prefetching",
    "load",
    "mapped",
    "prefetch",
    "prefetching",
    "save",
    "writing",
]


def __dir__() -> list[str]:
    return __all__
