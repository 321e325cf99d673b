"""Optimizers for PyTorch that cost what the batch uses, not what the table holds."""

from sparsestep import _process as interpreter  # noqa: F401  (first: it refuses subinterpreters)

# isort: split
from sparsestep import distributed, functional, nn, storage
from sparsestep.errors import InputError, SlowWarning, StaleWarning
from sparsestep.grads.clip import clip_grad_norm_, clip_grad_value_
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import indexed_grad
from sparsestep.optim.adagrad import Adagrad, FunctionalAdagrad
from sparsestep.optim.adam import Adam, FunctionalAdam
from sparsestep.optim.adamw import AdamW, FunctionalAdamW
from sparsestep.optim.custom import rule
from sparsestep.optim.from_torch import from_torch
from sparsestep.optim.ftrl import Ftrl, FunctionalFtrl
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.lion import FunctionalLion, Lion
from sparsestep.optim.nadam import FunctionalNAdam, NAdam
from sparsestep.optim.radam import FunctionalRAdam, RAdam
from sparsestep.optim.rmsprop import FunctionalRMSprop, RMSprop
from sparsestep.optim.rowwise_adagrad import FunctionalRowwiseAdagrad, RowwiseAdagrad
from sparsestep.optim.rowwise_adam import FunctionalRowwiseAdam, RowwiseAdam
from sparsestep.optim.sgd import SGD, FunctionalSGD
from sparsestep.optim.sparse_adam import FunctionalSparseAdam, SparseAdam
from sparsestep.version import __version__

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "FunctionalAdagrad",
    "FunctionalAdam",
    "FunctionalAdamW",
    "FunctionalFtrl",
    "FunctionalLion",
    "FunctionalNAdam",
    "FunctionalOptimizer",
    "FunctionalRAdam",
    "FunctionalRMSprop",
    "FunctionalRowwiseAdagrad",
    "FunctionalRowwiseAdam",
    "FunctionalSGD",
    "FunctionalSparseAdam",
    "IndexedGrad",
    "InputError",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SlowWarning",
    "SparseAdam",
    "StaleWarning",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "distributed",
    "from_torch",
    "functional",
    "indexed_grad",
    "nn",
    "rule",
    "storage",
]


def __dir__() -> list[str]:
    return __all__
