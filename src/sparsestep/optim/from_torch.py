"""``from_torch``: an optimizer of torch becomes ours, in the middle of a training."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from sparsestep.errors import InputError, message
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.options import OPTIMIZER_OPTIONS

# By torch's class. A subclass may compute something else, so classes must be equal.
_OURS = {getattr(torch.optim, cls.__name__, None): cls for cls in OPTIMIZERS}


def from_torch(optimizer: Optimizer, **options: Any) -> RuleOptimizer:
    """Turn an optimizer of torch into ours: same class, parameters, param groups and state.

    Do not use the old one afterwards. The state is not copied unless its dtype changes (float32
    for half-precision parameters, or ``state_dtype``) or its parameter is in a file. Both share
    their param groups, so a learning rate scheduler of the old one keeps working. If the old one
    has not taken a step yet, such a scheduler warns about the order of calls: create it for the new
    one instead. Hooks move to the new one, and get it as their argument.

    Args:
        optimizer: a ``torch.optim`` optimizer whose class is also one of sparsestep, before its
            first step or at any time after it.
        **options: options that torch's class lacks, for all param groups: ``semantics``,
            ``engine``, ``mask``, ``state_dtype`` and the others.

    Returns:
        The optimizer of sparsestep.

    Raises:
        InputError: the class is not supported, or is a subclass; an option of torch's, such as
            ``lr``, or one that our class does not have; state that does not fit.

    Example:
        >>> import torch, sparsestep
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
        >>> table(torch.tensor([2, 7, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer = sparsestep.from_torch(optimizer, engine="reference")
        >>> type(optimizer), optimizer.state[table.weight]["step"]
        (<class 'sparsestep.optim.sparse_adam.SparseAdam'>, 1)
    """
    kind = type(optimizer)
    ours = _OURS.get(kind)
    if ours is None:
        names = ", ".join(cls.__name__ for theirs, cls in _OURS.items() if theirs is not None)
        requirement = f"from_torch: the optimizer must be one of torch.optim's {names}"
        remedy = "For a subclass, create an optimizer of sparsestep and load its state_dict()"
        raise InputError(message(requirement, f"{kind.__module__}.{kind.__qualname__}", remedy))
    known = {*OPTIMIZER_OPTIONS, *ours.group_options} - optimizer.defaults.keys()
    unknown = sorted(options.keys() - known)
    if unknown:
        requirement = f"from_torch: options of {ours.__name__} must be among "
        remedy = "Set other options in param_groups" if unknown[0] in optimizer.defaults else ""
        raise InputError(message(requirement + ", ".join(sorted(known)), unknown[0], remedy))
    groups = [dict(group) for group in optimizer.param_groups]
    # Loading a checkpoint, torch adds 'differentiable' to the defaults of classes without it.
    accepted = inspect.signature(ours).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    made = ours(groups, **defaults, **options)
    made.take_over(optimizer)
    return made
