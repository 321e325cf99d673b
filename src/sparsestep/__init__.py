"""Optimizers for PyTorch whose work is proportional to what the batch touched."""

from sparsestep.clip import clip_grad_norm_, clip_grad_value_
from sparsestep.errors import InputError, SlowWarning
from sparsestep.rules import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    RMSprop,
    RowwiseAdagrad,
    RowwiseAdam,
    SparseAdam,
)
from sparsestep.version import __version__

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "InputError",
    "Lion",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SlowWarning",
    "SparseAdam",
    "__version__",
    "clip_grad_norm_",
    "clip_grad_value_",
]
