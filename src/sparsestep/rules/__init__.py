"""One file per update rule: the formula, its state, its optimizer class.

``OPTIMIZERS`` is the registry: what is listed here is covered by the property tests.
"""

from sparsestep.optimizer import RuleOptimizer
from sparsestep.rules.sparse_adam import SparseAdam

OPTIMIZERS: tuple[type[RuleOptimizer], ...] = (SparseAdam,)
