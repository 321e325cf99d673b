"""Which step each row has reached, in memory that costs nothing until a row is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsestep.memory import lazy as pages

# Rows whose stamps share a page of memory. What a table's first step writes is a page for each row
# that it touches, as with all memory that the operating system provides on first touch.
_PER_PAGE = 1024
_FEW = 1 << 18  # below this, writing all of them at once is cheaper than looking which are needed


class Stamps:
    """A number for each row, all of them the same in the beginning.

    Attributes:
        last: the numbers, int32, in the CPU's memory; right for rows that have ``begun``.

    Example:
        >>> stamps = Stamps(2_000_000, -1)
        >>> stamps.begin(torch.tensor([1_999_999, 5]))
        >>> stamps.last[[5, 1_999_999]], stamps.pages_left
        (tensor([-1, -1], dtype=torch.int32), 1952)
    """

    def __init__(self, rows: int, initial: int) -> None:
        self._initial = initial
        self._begun: Tensor | None = None
        self.pages_left: int = 0
        self.last: Tensor
        if rows < _FEW:
            self.last = torch.full((rows,), initial, dtype=torch.int32, device="cpu")
            return
        count = -(-rows // _PER_PAGE)
        cpu = torch.device("cpu")
        self._pages = pages.zeros(torch.Size([count, _PER_PAGE]), torch.int32, cpu)
        self.last = self._pages.view(-1)[:rows]
        if initial:
            self._begun = torch.zeros(count, dtype=torch.bool, device=cpu)
            self.pages_left = count

    def begin(self, rows: Tensor | None) -> None:
        """Have the numbers of these rows in ``last``; ``None`` for all."""
        begun = self._begun
        if begun is None:
            return
        if rows is None:
            self._pages[~begun] = self._initial
            self.pages_left = 0
        else:
            pages = rows.to("cpu") // _PER_PAGE
            new = pages[~begun[pages]].unique()
            if new.numel():
                self._pages[new] = self._initial
                begun[new] = True
                self.pages_left -= new.numel()
        if not self.pages_left:
            self._begun = None
