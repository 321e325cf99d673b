"""One file per update rule: the formula, its state, its optimizer class.

``OPTIMIZERS`` is the registry: what is listed here is covered by the property tests.
"""

from sparsestep.optimizer.base import RuleOptimizer
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

__all__ = [
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
