"""A user's own formulas that go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsestep
from tests.optim.own_rules import randn

SPOILED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "one value too few": (lambda param, kept: param, r"must return 2 values: param, kept. Got 1"),
    "one too many": (lambda param, kept: (param, kept, kept), "must return 2 values.* Got 3"),
    "nothing": (
        lambda param, kept: None,
        "must return a tensor or a tuple of tensors. Got NoneType",
    ),
    "a number": (lambda param, kept: 1.0, "must return a tensor or a tuple of tensors. Got float"),
    "by name": (
        lambda param, kept: {"param": param, "kept": kept},
        "must return a tensor or a tuple of tensors. Got dict",
    ),
    "not a tensor": (
        lambda param, kept: (param, 0.0),
        r"must return kept in its shape.* Got float",
    ),
    "None instead of state": (
        lambda param, kept: (param, None),
        "kept in its shape.* Got NoneType",
    ),
    "a row too few": (
        lambda param, kept: (param[1:], kept),
        r"param in its shape, \(2, 5\).*\(1, 5\)",
    ),
    "a shape that could be broadcast": (
        lambda param, kept: (param, kept.sum()),
        r"kept in its shape, \(2, 5\). Got \(\)",
    ),
    "transposed": (lambda param, kept: (param, kept.t()), r"\(2, 5\). Got \(5, 2\)"),
    "complex": (lambda param, kept: (param, kept * 1j), "must return real strided tensors"),
    "sparse": (lambda param, kept: (param.to_sparse_coo(), kept), "real strided tensors on cpu"),
    "elsewhere": (lambda param, kept: (param, kept.to("meta")), "on cpu. Got .* on meta"),
}


def spoiled_for_the_last(result: Callable[[Tensor, Tensor], Any], **kwargs: Any) -> Any:
    """A rule that goes wrong where rows have five elements."""

    @sparsestep.rule(state={"kept": 0.0}, **kwargs)
    def wrong(param, grad, kept, *, lr, spoil=False):
        new, kept = param - lr * grad, kept + 1
        return result(new, kept) if spoil and param.shape[-1] == 5 else (new, kept)

    return wrong


def several() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(randn(*shape)) for shape in [(6, 4), (3,), (6, 3), (6, 5)]]


def give_gradients(params: list[torch.nn.Parameter]) -> None:
    """A dense one for the second, sparse ones for the others."""
    for param in params:
        values = randn(2, *param.shape[1:], seed=1)
        coo = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), values, param.shape)
        param.grad = coo.to_dense() if param.dim() == 1 else coo
