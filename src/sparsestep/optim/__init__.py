"""One file per update rule: the formula, its state, its optimizer class, its functional twins.

Those are for gradients that are passed by hand: a function, and a functional optimizer.
``OPTIMIZERS`` is the registry: what is listed here is covered by the property tests.
"""

from sparsestep.optim.adagrad import Adagrad
from sparsestep.optim.adam import Adam
from sparsestep.optim.adamw import AdamW
from sparsestep.optim.ftrl import Ftrl
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.lion import Lion
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.optim.radam import RAdam
from sparsestep.optim.rmsprop import RMSprop
from sparsestep.optim.rowwise_adagrad import RowwiseAdagrad
from sparsestep.optim.rowwise_adam import RowwiseAdam
from sparsestep.optim.sgd import SGD
from sparsestep.optim.sparse_adam import SparseAdam

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
    FunctionalOptimizer.registry[each] for each in OPTIMIZERS
)

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
