"""Optimizers for PyTorch whose work is proportional to what the batch touched."""

from sparsestep import distributed, functional, nn, storage
from sparsestep.errors import InputError, SlowWarning, StaleWarning
from sparsestep.gradients.clip import clip_grad_norm_, clip_grad_value_
from sparsestep.gradients.touched import Touched
from sparsestep.rules import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    RAdam,
    RMSprop,
    RowwiseAdagrad,
    RowwiseAdam,
    SparseAdam,
)
from sparsestep.rules.functional import (
    FunctionalAdagrad,
    FunctionalAdam,
    FunctionalAdamW,
    FunctionalFtrl,
    FunctionalLion,
    FunctionalRAdam,
    FunctionalRMSprop,
    FunctionalRowwiseAdagrad,
    FunctionalRowwiseAdam,
    FunctionalSGD,
    FunctionalSparseAdam,
)
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
