"""optimizer_for: everything that makes the training of a dense model fast, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from sparsestep.errors import InputError, sentence
from sparsestep.nn.fuse import fuse
from sparsestep.optim.optimizer import RuleOptimizer

Options = ParamSpec("Options")
Made = TypeVar("Made", bound=RuleOptimizer)


def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[Concatenate[ParamsT, Options], Made],
    /,
    *args: Options.args,
    **options: Options.kwargs,
) -> Made:
    """Create an optimizer that trains a model's embeddings at a cost proportional to the batch.

    Results and checkpoints are those of dense training. It does three things: it converts the
    embeddings (:func:`fuse`), gives the optimizer ``semantics="dense"``, and tracks the model, so
    that rows catch up with the steps that they missed before they are read.

    If you want param groups, or only some of the tables, do these three things yourself.

    Args:
        model: the model. Its embeddings are converted in place.
        optimizer: an optimizer class of this library; it gets all parameters of the model.
        *args: positional arguments of the class after the parameters.
        **options: options of the class. With ``semantics="masked"``, nothing is tracked.

    Returns:
        The optimizer.

    Raises:
        InputError: the class is not one of this library, or an option is invalid; nothing has
            changed.

    Example:
        >>> import sparsestep
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(1000, 16), torch.nn.Linear(16, 1))
        >>> optimizer = sparsestep.nn.optimizer_for(model, sparsestep.AdamW, lr=1e-3)
        >>> model(torch.tensor([[3, 1, 3]])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.semantics
        'dense'
    """
    given: Any = model
    if not isinstance(given, torch.nn.Module):
        contract = "optimizer_for: the first argument must be a model, an nn.Module"
        raise InputError(sentence(contract, type(given).__name__))
    make: Any = optimizer
    if not _is_ours(make):
        contract = "optimizer_for: the second argument must be an optimizer class of sparsestep"
        raise InputError(sentence(contract, repr(make)))
    made: Made = make(model.parameters(), *args, **{"semantics": "dense", **options})
    fuse(model)
    if made.semantics == "dense":
        made.track(model)
    return made


def _is_ours(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, RuleOptimizer)
