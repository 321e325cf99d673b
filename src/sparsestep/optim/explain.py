"""What an optimizer does with each parameter, and what it costs: for people who look closely."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from sparsestep.memory.tensors import memory_of
from sparsestep.optim.forgetting import Forgets
from sparsestep.optim.param_groups import name_of


@dataclass(frozen=True)
class ParamExplanation:
    """One parameter.

    Attributes:
        name: from ``named_parameters()`` where the optimizer was given names, else its place.
        shape: of the parameter.
        engine: what ran its latest update: ``"native"``, ``"torch"``, ``"reference"`` or
            ``"triton"``; ``None`` before the first.
        reason: why it was not the native engine, or why it is slow; empty if it is neither.
        state_bytes: the size of its state. Memory is used only for rows that were updated.
        rows_behind: with ``semantics="dense"``, how many rows wait for a catch-up.
    """

    name: str
    shape: tuple[int, ...]
    engine: str | None
    reason: str
    state_bytes: int
    rows_behind: int


@dataclass(frozen=True)
class Explanation:
    """What ``explain()`` returns: prints as a table, and iterates over its rows.

    Attributes:
        params: one entry for each parameter, in the order of the param groups.
    """

    params: tuple[ParamExplanation, ...]

    def __iter__(self) -> Iterator[ParamExplanation]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    def __str__(self) -> str:
        heads = ("parameter", "shape", "engine", "state", "rows behind")
        lines = [heads, *map(_cells, self.params)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        names: dict[str, list[str]] = {}
        for each in self.params:
            if each.reason:
                names.setdefault(each.reason, []).append(each.name)
        return "\n".join([*table, *(f"{_listed(who)}: {why}" for why, who in names.items())])

    __repr__ = __str__


def _listed(names: list[str]) -> str:
    """Return names as a list; the table above has all of them."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


_MOST_NAMES = 8


def _cells(param: ParamExplanation) -> tuple[str, ...]:
    shape = " x ".join(f"{size:,}" for size in param.shape) or "one number"
    engine = param.engine or "no step yet"
    return (param.name, shape, engine, _size(param.state_bytes), f"{param.rows_behind:,}")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


class Explains(Forgets):
    """An optimizer as far as it can tell what it did."""

    def explain(self) -> Explanation:
        """Show for each parameter which engine ran its latest update, and the size of its state.

        Returns:
            A table to print; iterate over it for the figures.

        Example:
            >>> import torch, sparsestep
            >>> table = torch.nn.Embedding(1000, 16, sparse=True)
            >>> optimizer = sparsestep.Adam(table.named_parameters(), engine="reference")
            >>> table(torch.tensor([1, 2])).sum().backward()
            >>> optimizer.step()
            >>> print(optimizer.explain())
            parameter  shape       engine     state      rows behind
            weight     1,000 x 16  reference  125.0 KiB  0
            weight: you set engine='reference'.
        """
        found = []
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                found.append(self._explained(_name(group, group_index, index), param))
        return Explanation(tuple(found))

    def _explained(self, name: str, param: Tensor) -> ParamExplanation:
        record: dict[str, Any] = self.state.get(param) or {}
        owner, engine, reason = self._ran.get(id(param), (None, None, ""))
        if owner is not param:
            engine, reason = None, ""
        tensors = (v for k, v in record.items() if k != "step" and isinstance(v, Tensor))
        clock = self.deferred.get(id(param))
        behind = clock.count_behind() if clock is not None and clock.owner is param else 0
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # A lazy parameter refuses to tell its shape; so far its memory has no elements.
        shape = memory_of(param).shape if is_lazy(param) else param.shape
        return ParamExplanation(name, tuple(shape), engine, reason, size, behind)


def _name(group: dict[str, Any], group_index: int, index: int) -> str:
    names = group.get("param_names")
    if names and index < len(names):
        return str(names[index])
    return name_of("", group, group_index, index).removeprefix(": ")
