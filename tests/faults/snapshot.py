"""Snapshots: a digest of every tensor and value, by path, so that torn state has a name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsestep.optim.optimizer import RuleOptimizer

Snapshot = dict[str, Any]


class Close:
    """A tensor that equals others up to rounding."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Close)
            and self.tensor.shape == other.tensor.shape
            and torch.allclose(self.tensor, other.tensor, rtol=1e-9, atol=1e-12, equal_nan=True)
        )

    __hash__ = None  # type: ignore[assignment]


def snapshot(values: Mapping[str, Any]) -> Snapshot:
    """Digest nested dicts, lists, tensors and plain values.

    Example:
        >>> sorted(snapshot({"a": [1, {"b": 2.5}]}).items())
        [('a.0', '1'), ('a.1.b', '2.5')]
    """
    return dict(_leaves("", values))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(f"{path}.{index}", each)
    elif isinstance(value, Tensor):
        yield path, _digest(value)
    elif isinstance(value, Close):
        yield path, value
    else:
        yield path, repr(value)


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().clone()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha1(data).hexdigest()}"


def of_optimizer(optimizer: RuleOptimizer) -> dict[str, Any]:
    """Parameters, state and options.

    Deferred updates are applied first. Rows that are up to date and rows whose update is deferred
    stand for the same values, up to rounding, so these parameters should be float64.
    """
    is_deferred = optimizer.semantics == "dense"
    if is_deferred:
        optimizer.catch_up()
    found: dict[str, Any] = {}
    for index, param in enumerate(optimizer.params()):
        tensors = {"param": param, **(optimizer.state.get(param) or {})}
        if is_deferred:
            tensors = {k: Close(v) if v.dim() else v for k, v in tensors.items()}
        found[str(index)] = tensors
    found["options"] = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return found


def difference(found: Snapshot, expected: Snapshot) -> list[str]:
    """The paths at which two snapshots differ."""
    return sorted(k for k in found.keys() | expected.keys() if found.get(k) != expected.get(k))
