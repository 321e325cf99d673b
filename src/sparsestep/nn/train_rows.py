"""train_rows: param groups that train some rows of a model's embedding, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsestep._torch import own_parameters
from sparsestep.errors import InputError, error_prefix, message, usable
from sparsestep.memory.tensors import is_distributed
from sparsestep.nn.grow import weight_of
from sparsestep.optim.state import check_rows


def train_rows(model: nn.Module, rows: Tensor | Iterable[int]) -> list[dict[str, Any]]:
    """Return param groups that train some rows of an embedding, such as those of new tokens.

    All other rows keep their bits, whatever the weight decay and momentum of the optimizer. Pass
    the groups to an optimizer of this library: torch's would train all rows.

    For a model of Transformers, or any other with ``get_input_embeddings()``, that method selects
    the embedding. If ``get_output_embeddings()`` has a separate weight, a second group trains the
    same rows of it: otherwise the model would not learn to predict new tokens. A tied weight is one
    parameter, in one group. Other models must have a single embedding.

    Under FSDP2, call it after ``fully_shard``, which replaces the parameters. For a model of PEFT,
    name the embedding in ``modules_to_save``, and the head, if it is to be trained: a head that
    PEFT has frozen stays frozen, since adapters are saved without it.

    The weights in the groups get ``requires_grad=True``. Other parameters are left alone: they are
    in no group, so they are not trained, but their gradients are computed unless you call
    ``model.requires_grad_(False)`` before.

    Args:
        model: a model, or the embedding itself.
        rows: the rows to train: ids, or a bool tensor with one value for each row.

    Returns:
        A param group for each weight, with ``params`` and ``mask``; you may add options.

    Raises:
        InputError: the model has no embedding or several, its output head has another number of
            rows, or a row is out of range; nothing has changed.

    Example:
        >>> import sparsestep
        >>> tokens = torch.nn.Embedding(1010, 16)  # ten of them new
        >>> groups = sparsestep.nn.train_rows(tokens, range(1000, 1010))
        >>> optimizer = sparsestep.AdamW(groups, lr=1e-3)
        >>> before = tokens.weight.detach().clone()
        >>> tokens(torch.tensor([[3, 1004]])).square().sum().backward()
        >>> optimizer.step()
        >>> (tokens.weight != before).any(dim=1).nonzero().flatten()
        tensor([1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008, 1009])
    """
    weights = [_input_weight(model)]
    head = getattr(_call(model, "get_output_embeddings"), "weight", None)
    if hasattr(model, "peft_config") and not getattr(head, "requires_grad", False):
        head = None  # frozen by PEFT, which would not save it
    if isinstance(head, nn.Parameter) and head is not weights[0]:
        if len(head) != len(weights[0]):
            requirement = "train_rows: the output head must have a row for each of the embedding's"
            remedy = "Resize it first, or pass the embedding itself to train that alone"
            raise InputError(message(requirement, f"{len(head)} for {len(weights[0])}", remedy))
        weights.append(head)
    with error_prefix("train_rows"):
        mask = _mask(rows, weights[0])
    groups = [{"params": [weight], "mask": mask.to(weight.device)} for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    return groups


def _call(model: nn.Module, method: str) -> Any:
    """Call a method of a Transformers model; ``None`` if the model does not implement it."""
    found = getattr(model, method, None)
    try:
        return found() if callable(found) else None
    except NotImplementedError:
        return None


def _input_weight(model: Any) -> nn.Parameter:
    if not isinstance(model, nn.Module):
        requirement = "train_rows: the first argument must be a model or an embedding"
        raise InputError(message(requirement, f"a {type(model).__name__}"))
    if isinstance(model, nn.Embedding | nn.EmbeddingBag):
        return _weight_of(model)
    found = _call(model, "get_input_embeddings")
    weight = getattr(found, "weight", None)
    if isinstance(found, nn.Embedding | nn.EmbeddingBag):
        return _weight_of(found)
    if isinstance(weight, nn.Parameter):  # as PEFT wraps the modules that it saves
        return weight
    if isinstance(weight, Tensor):
        requirement = "train_rows: the weight of the model's embedding must be a parameter"
        remedy = "With trainable_token_indices, PEFT itself trains these rows and no others"
        raise InputError(message(requirement, "one that is computed from others", remedy))
    tables = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }
    if len({id(each.weight) for each in tables.values()}) != 1:
        requirement = "train_rows: the model must have get_input_embeddings() or one embedding"
        got = ", ".join(tables) if tables else "none"
        remedy = "Pass the embedding itself" if tables else ""
        raise InputError(message(requirement, got, remedy))
    return _weight_of(next(iter(tables.values())))


def _weight_of(table: nn.Module) -> nn.Parameter:
    weight = own_parameters(table).get("weight")
    if weight is not None and is_distributed(weight):
        return cast("nn.Parameter", weight)
    return weight_of("train_rows", table)


def _mask(rows: Any, weight: Tensor) -> Tensor:
    """A bool tensor with one value for each row of the weight."""
    if not isinstance(rows, Tensor):
        with usable("rows must be integers, or a bool tensor"):
            rows = list(rows)
            rows = torch.tensor(rows, dtype=None if rows else torch.int64)
    if rows.dtype is not torch.bool:
        mask = torch.zeros(len(weight), dtype=torch.bool)
        mask[check_rows("rows", rows.cpu(), weight)] = True
    elif rows.shape != weight.shape[:1]:
        requirement = f"rows as a bool tensor must have shape {tuple(weight.shape[:1])}"
        raise InputError(message(requirement, tuple(rows.shape)))
    else:
        mask = rows
    if not mask.any():
        raise InputError(message("rows must select a row", "none"))
    return mask
