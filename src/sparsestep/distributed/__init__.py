"""Embedding tables sharded across ranks, and our optimizers in ``torch.distributed.optim``.

``shard`` divides the tables of a model; a ``plan`` has the ``placement`` of each. A ``lookup``
sends ids to the owners of rows, and rows back; ``grads`` follow when a step needs them. Each
exchange starts with a ``_handshake``. Ids of any value have owners, too (``vocabulary``). Any
number of ranks can load a ``checkpoint``.
"""

from sparsestep.distributed import _network
from sparsestep.distributed._functional_optim import register
from sparsestep.distributed.checkpoint import async_save, consolidate, load, save
from sparsestep.distributed.lockstep import lockstep
from sparsestep.distributed.placement import Placement
from sparsestep.distributed.plan import Plan
from sparsestep.distributed.shard import shard
from sparsestep.distributed.vocabulary import Vocabulary

__all__ = [
    "Placement",
    "Plan",
    "Vocabulary",
    "async_save",
    "consolidate",
    "load",
    "lockstep",
    "register",
    "save",
    "shard",
]

# At import: the first collective that could fail is torch's own ``init_process_group``.
_network.warn_about_loopback()


def __dir__() -> list[str]:
    return __all__
