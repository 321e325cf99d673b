"""Optimizers for PyTorch whose work is proportional to what the batch touched."""

from sparsestep.errors import InputError, SlowWarning
from sparsestep.rules.sparse_adam import SparseAdam
from sparsestep.version import __version__

__all__ = ["InputError", "SlowWarning", "SparseAdam", "__version__"]
