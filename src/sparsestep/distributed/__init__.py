"""The optimizers within ``torch.distributed``: in its functional ones, in DDP, and over RPC.

Importing it costs nothing; :func:`register` imports what it needs of torch.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch

from sparsestep.by_hand import FUNCTIONAL
from sparsestep.distributed import overlap, scripted
from sparsestep.errors import InputError, sentence

__all__ = ["register"]


def register() -> None:
    """Make the optimizers known to ``torch.distributed``.

    Then these take them like torch's own classes, which stay as they are:

    - ``torch.distributed.optim.utils.as_functional_optim`` makes the functional optimizer of the
      same name.
    - ``torch.distributed.optim.DistributedOptimizer`` trains parameters of other processes over
      RPC, with gradients of any layout. It has to be registered only where that is created, and
      before; the other processes need sparsestep installed.
    - ``DistributedDataParallel._register_fused_optim`` updates parameters while others are still
      being reduced. Unlike torch's optimizers these also update those with sparse gradients.

    May be called more than once.

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
        contract = "sparsestep.distributed needs a torch that was built with torch.distributed"
        remedy = "Where there is one process only, nothing has to be registered"
        raise InputError(sentence(contract, f"torch {torch.__version__} without it", remedy))
    with warnings.catch_warnings():
        # Torch compiles its own functional optimizers here, and warns of its own compiler.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim.utils import register_functional_optim
    for cls in FUNCTIONAL:
        register_functional_optim(cls.optimizer_class, partial(scripted.functional, cls))
    overlap.register()
