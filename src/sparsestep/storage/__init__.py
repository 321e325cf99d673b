"""Tables larger than memory: in files, read ahead of time, with checkpoints that survive a kill.

``tables`` has tensors in files, ``ahead`` reads rows before they are needed; ``checkpoints`` saves
and loads, by way of ``journal`` (what lies in the folder) and ``copies``. That such a tensor is a
file, and that state lies beside it, is known below, in ``memory/files.py``.
"""

from sparsestep.storage.checkpoint import load, save, writing
from sparsestep.storage.mapped import Mapped, mapped
from sparsestep.storage.prefetch import Prefetching, prefetch, prefetching

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
