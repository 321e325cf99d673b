"""optimizer_for: everything that makes the training of a dense model fast, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from sparsestep.errors import InputError, sentence
from sparsestep.nn.fusing import fuse
from sparsestep.optimizer.base import RuleOptimizer

Options = ParamSpec("Options")
Made = TypeVar("Made", bound=RuleOptimizer)


def optimizer_for(
    model: torch.nn.Module,
    optimizer: Callable[Concatenate[ParamsT, Options], Made],
    /,
    *args: Options.args,
    **options: Options.kwargs,
) -> Made:
    """Make an optimizer of a model whose embeddings are then trained at the cost of a batch.

    The numbers and the checkpoints are those of dense training: the embeddings are fused
    (:func:`fuse`), the optimizer has ``semantics="dense"``, and it tracks the model, so that rows
    catch up with the steps that they missed before they are read.

    For param groups, or for a part of the tables, do these three things by hand.

    Args:
        model: its embeddings may be torch's; they are changed in place, once the optimizer is made.
        optimizer: a class of this library; it gets the parameters of the model.
        *args: what the class takes after the parameters.
        **options: the options of the class. With ``semantics="masked"`` nothing is tracked.

    Returns:
        The optimizer.

    Raises:
        InputError: what was given is no class of this library, or an option is wrong; nothing was
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
