"""What dense semantics needs of an optimizer, which lies above it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sparsestep.deferred.rows import RowClock


class Owner(Protocol):
    """Whose rows are behind."""

    param_groups: list[dict[str, Any]]
    _clocks: dict[int, RowClock]
    semantics: str

    def catch_up(self, param: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Bring rows up to date; all by default."""
        ...

    def _catch_up_rows(self, param: Tensor, rows: Tensor | None) -> None:
        """The same of one parameter, for rows that are known to be right."""
        ...


_INTEGERS = (torch.int64, torch.int32)  # what embeddings take


def rows_in(ids: Any, weight: Tensor) -> Tensor | None:
    """The rows of a table that ids name, if they are ids of rows at all."""
    if (
        not isinstance(ids, Tensor)
        or ids.dtype not in _INTEGERS
        or ids.device != weight.device
        or not (ids.layout is torch.strided or ids.is_nested)
        or not weight.dim()
    ):
        return None
    inside = (ids.values() if ids.is_nested else ids).reshape(-1)
    if inside.numel():
        low, high = inside.aminmax()
        if int(low) < 0 or int(high) >= weight.shape[0]:
            return None
    return inside
