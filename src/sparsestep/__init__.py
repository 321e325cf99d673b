"""Optimizers for PyTorch whose work is proportional to what the batch touched."""

from sparsestep import interpreter  # noqa: F401  (first: it refuses subinterpreters)

# isort: split
from sparsestep import distributed, functional, nn, storage
from sparsestep.errors import InputError, SlowWarning, StaleWarning
from sparsestep.gradients.clip import clip_grad_norm_, clip_grad_value_
from sparsestep.gradients.touched import Touched
from sparsestep.rules.adagrad import Adagrad, FunctionalAdagrad
from sparsestep.rules.adam import Adam, FunctionalAdam
from sparsestep.rules.adamw import AdamW, FunctionalAdamW
from sparsestep.rules.ftrl import Ftrl, FunctionalFtrl
from sparsestep.rules.lion import FunctionalLion, Lion
from sparsestep.rules.radam import FunctionalRAdam, RAdam
from sparsestep.rules.rmsprop import FunctionalRMSprop, RMSprop
from sparsestep.rules.rowwise_adagrad import FunctionalRowwiseAdagrad, RowwiseAdagrad
from sparsestep.rules.rowwise_adam import FunctionalRowwiseAdam, RowwiseAdam
from sparsestep.rules.sgd import SGD, FunctionalSGD
from sparsestep.rules.sparse_adam import FunctionalSparseAdam, SparseAdam
from sparsestep.rules.user import rule
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
    "FunctionalRAdam",
    "FunctionalRMSprop",
    "FunctionalRowwiseAdagrad",
    "FunctionalRowwiseAdam",
    "FunctionalSGD",
    "FunctionalSparseAdam",
    "InputError",
    "Lion",
    "RAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SlowWarning",
    "SparseAdam",
    "StaleWarning",
    "Touched",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
    "distributed",
    "functional",
    "nn",
    "rule",
    "storage",
]
