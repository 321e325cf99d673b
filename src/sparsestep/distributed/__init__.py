"""Several processes: tables that they share, and the optimizers within ``torch.distributed``.

``sharding`` divides the tables of a model. A lookup then is an exchange (``exchange``): what a
rank asks for (``requests``) goes over the ``wire`` to those who have the rows and comes back
(``lookups``); gradients follow when they are needed (``arrivals``). Each exchange begins with an
``agreement``. Ids of any value have owners, too (``vocabulary``). ``checkpoints`` are read by any
number of ranks; ids that get new owners take their rows along (``moving``).
"""

from __future__ import annotations

import warnings
from functools import partial

import torch

from sparsestep.distributed import _functional_optim as overlap
from sparsestep.distributed import _functional_optim as scripted
from sparsestep.distributed.checkpoint import async_save, consolidate, load, save
from sparsestep.distributed.lockstep import lockstep
from sparsestep.distributed.plan import Placement, Plan
from sparsestep.distributed.shard import shard
from sparsestep.distributed.vocabulary import Vocabulary
from sparsestep.errors import InputError, message
from sparsestep.optim import FUNCTIONAL

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


def register() -> None:
    """Register the optimizers with ``torch.distributed``, which can then use them like its own.

    - ``torch.distributed.optim.utils.as_functional_optim`` creates the functional optimizer of the
      same name.
    - ``torch.distributed.optim.DistributedOptimizer`` trains parameters in other processes over
      RPC, with gradients of any layout. Call this first, in the process that creates it.
    - ``DistributedDataParallel._register_fused_optim`` updates parameters while the gradients of
      others are being reduced. With torch's optimizers, it skips sparse gradients.

    Torch's own optimizers are not affected. You do not need this for ``DistributedDataParallel`` or
    ``ZeroRedundancyOptimizer``. You may call it more than once.

    Raises:
        InputError: torch was built without ``torch.distributed``.

    Example:
        >>> import torch, sparsestep.distributed
        >>> sparsestep.distributed.register()
        >>> from torch.distributed.optim.utils import as_functional_optim
        >>> optimizer = as_functional_optim(sparsestep.SGD, lr=0.5)
        >>> type(optimizer).__name__
        'FunctionalSGD'
        >>> weight = torch.zeros(3, 2)
        >>> optimizer.step_param(weight, torch.eye(3, 2).to_sparse_coo())
        >>> weight.tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.0, 0.0]]
    """
    if not torch.distributed.is_available():
        requirement = "sparsestep.distributed needs a torch that was built with torch.distributed"
        remedy = "With a single process there is nothing to register"
        raise InputError(message(requirement, f"torch {torch.__version__} without it", remedy))
    with warnings.catch_warnings():
        # Older releases compile their own functional optimizers here, and warn of the compiler.
        warnings.filterwarnings("ignore", r"`torch\.jit\.", module=r"torch\.jit")
        from torch.distributed.optim.utils import register_functional_optim
    for cls in FUNCTIONAL:
        register_functional_optim(cls.optimizer_class, partial(scripted.functional, cls))
    overlap.register()
