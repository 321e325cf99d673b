"""One file per optimizer: the formula, its state, the class, and its functional forms.

``OPTIMIZERS`` is the registry. Tests and the tables of the documentation read it.
"""

from sparsestep.optim.adagrad import Adagrad
from sparsestep.optim.adam import Adam
from sparsestep.optim.adamw import AdamW
from sparsestep.optim.ftrl import Ftrl
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.lion import Lion
from sparsestep.optim.nadam import NAdam
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
    NAdam,
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

__all__ = ["FUNCTIONAL", "OPTIMIZERS"]
