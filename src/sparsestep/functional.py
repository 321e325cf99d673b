"""One function per rule: parameter, gradient, state tensors, options. Everything is in place.

The gradient may have any layout: strided, COO, CSR, CSC, BSR, BSC, a ``MaskedTensor`` or an
``IndexedGrad``. State tensors have torch's names and order, and are updated in place; ``step`` is
the number of the update, counted from 1. Every function checks its arguments before it writes
anything, and raises an ``InputError`` if one is invalid. Autograd is not involved: you may call the
functions with or without ``torch.no_grad()``.
"""

from sparsestep.optim.adagrad import adagrad_
from sparsestep.optim.adam import adam_
from sparsestep.optim.adamw import adamw_
from sparsestep.optim.ftrl import ftrl_
from sparsestep.optim.functional import apply_
from sparsestep.optim.lion import lion_
from sparsestep.optim.nadam import nadam_
from sparsestep.optim.radam import radam_
from sparsestep.optim.rmsprop import rmsprop_
from sparsestep.optim.rowwise_adagrad import rowwise_adagrad_
from sparsestep.optim.rowwise_adam import rowwise_adam_
from sparsestep.optim.sgd import sgd_
from sparsestep.optim.sparse_adam import sparse_adam_

__all__ = [
    "adagrad_",
    "adam_",
    "adamw_",
    "apply_",
    "ftrl_",
    "lion_",
    "nadam_",
    "radam_",
    "rmsprop_",
    "rowwise_adagrad_",
    "rowwise_adam_",
    "sgd_",
    "sparse_adam_",
]


def __dir__() -> list[str]:
    return __all__
