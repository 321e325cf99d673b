"""One file per update rule: the formula, its state, its optimizer class, its functional twins.

Those are for gradients that are passed by hand: a function, and a functional optimizer.
``OPTIMIZERS`` is the registry: what is listed here is covered by the property tests.
"""

import sys

from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer, signature_of
from sparsestep.rules.adagrad import Adagrad
from sparsestep.rules.adam import Adam
from sparsestep.rules.adamw import AdamW
from sparsestep.rules.ftrl import Ftrl
from sparsestep.rules.lion import Lion
from sparsestep.rules.radam import RAdam
from sparsestep.rules.rmsprop import RMSprop
from sparsestep.rules.rowwise_adagrad import RowwiseAdagrad
from sparsestep.rules.rowwise_adam import RowwiseAdam
from sparsestep.rules.sgd import SGD
from sparsestep.rules.sparse_adam import SparseAdam

OPTIMIZERS: tuple[type[RuleOptimizer], ...] = (
    SparseAdam,
    Adam,
    AdamW,
    RAdam,
    Adagrad,
    RowwiseAdagrad,
    RowwiseAdam,
    SGD,
    RMSprop,
    Lion,
    Ftrl,
)

# For each optimizer, in their order.
FUNCTIONAL: tuple[type[FunctionalOptimizer], ...] = tuple(
    vars(sys.modules[each.__module__])[f"Functional{each.__name__}"] for each in OPTIMIZERS
)

for _each in FUNCTIONAL:  # for help() and Sphinx
    vars(_each)["__init__"].__signature__ = signature_of(_each)

__all__ = [
    "FUNCTIONAL",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "Lion",
    "RAdam",
    "RMSprop",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "SparseAdam",
]
