"""Row constraints: ``max_norm`` and ``normalize``, applied to the rows that a step has updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.rules.options import as_float, get_option


class RowConstraint(NamedTuple):
    """Rescales rows whose 2-norm is above a limit.

    Engines apply it to whole rows, after the formula and before rounding. The C++ counterpart is
    ``native/kernels/constraint.h``.

    Attributes:
        norm: the 2-norm that a row is rescaled to.
        above: the limit; 0 for ``normalize``, so that a row of zeros stays.
    """

    norm: float
    above: float

    @classmethod
    def of_group(cls, group: Mapping[str, Any]) -> RowConstraint | None:
        """Return what a param group asks for."""
        if get_option(group, "normalize"):
            return cls(1.0, 0.0)
        limit = get_option(group, "max_norm")
        return None if limit is None else cls(as_float(limit), as_float(limit))

    def apply(self, rows: Tensor) -> Tensor:
        """Return the constrained rows of a matrix.

        Example:
            >>> rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
            >>> RowConstraint(1.0, 1.0).apply(rows)
            tensor([[0.6000, 0.8000],
                    [0.3000, 0.4000],
                    [0.0000, 0.0000]])
            >>> RowConstraint(1.0, 0.0).apply(rows)
            tensor([[0.6000, 0.8000],
                    [0.6000, 0.8000],
                    [0.0000, 0.0000]])
        """
        wide = rows if rows.is_mps else rows.double()  # Apple's GPUs have no float64
        norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        factor = torch.where(norm > self.above, self.norm / norm, 1.0)
        return (wide * factor).to(rows.dtype)
