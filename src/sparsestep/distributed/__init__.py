"""Embedding tables sharded across ranks, and our optimizers in ``torch.distributed.optim``.

``shard`` divides the tables of a model; a ``plan`` has the ``placement`` of each. In a lookup, ids
go to the owners of rows (``_requests``), and rows come back (``lookup``); ``grads`` follow when a
step needs them. Every exchange starts with a ``_handshake``, over the ``collectives`` of a process
group. Ids of any value have owners, too (``vocabulary``). ``lockstep`` keeps loops together. Any
number of ranks can load a ``checkpoint``.
"""

from sparsestep.distributed._functional_optim import register
from sparsestep.distributed._hosts import warn_about_loopback
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
warn_about_loopback()


def __dir__() -> list[str]:
    return __all__
