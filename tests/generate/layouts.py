"""The same entries of a gradient, stored in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.masked import masked_tensor

from sparsestep import IndexedGrad
from sparsestep.grads.layouts import Gradient as AnyGradient
from tests.generate.grads import BLOCKED, Drawn, compress


@dataclass
class Entries:
    """What a gradient of a matrix holds: ``values`` where ``held`` is true."""

    values: Tensor  # whose sums are exact
    held: Tensor  # in whole blocks of ``unit``
    unit: tuple[int, int] = (1, 1)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @classmethod
    def random(
        cls, shape: tuple[int, int], unit: tuple[int, int], share: float, seed: int
    ) -> Entries:
        generator = torch.Generator().manual_seed(seed)
        grid = (shape[0] // unit[0], shape[1] // unit[1])
        blocks = torch.rand(grid, generator=generator) < share
        held = blocks.repeat_interleave(unit[0], 0).repeat_interleave(unit[1], 1)
        values = torch.randint(-16, 17, shape, generator=generator) / 8
        values[torch.rand(shape, generator=generator) < 0.1] = -0.0  # held, and keeps its sign
        return cls(values, held, unit, generator)

    @property
    def rows(self) -> Tensor | None:
        """The rows that are touched, where they are touched as a whole."""
        whole = self.unit[1] == self.held.shape[1]
        return self.held[:, 0].nonzero().squeeze(1) if whole else None

    def drawn(self, grad: AnyGradient) -> Drawn:
        """One way to store it, with what it means."""
        return Drawn(grad, torch.where(self.held, self.values, 0.0).double(), self.held)

    def scattered(self, places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """In any order, and some of it in parts that are to be summed."""
        for _ in range(2):
            # Not zeros: they have a sign, which a sum of parts would lose.
            chosen = torch.rand(len(values), generator=self.generator) < 0.3
            chosen &= (values != 0).unsqueeze(-1).flatten(1).all(1)
            parts = torch.randint(-8, 9, values[chosen].shape, generator=self.generator) / 8
            values = torch.cat([values, parts])
            values[: len(chosen)][chosen] -= parts
            places = torch.cat([places, places[chosen]])
        order = torch.randperm(len(values), generator=self.generator)
        return places[order], values[order]

    def stored(self, dtype: torch.dtype, *, by_row: bool = False) -> dict[str, Stored]:
        """Every way to store it that there is; ``by_row`` without masks of elements."""
        grads: dict[str, AnyGradient] = {
            "coo": self.coo(dtype),
            "coo unsorted": self.unsorted_coo(dtype),
            "csr": self.compressed(torch.sparse_csr, dtype),
            "csr int32": self.compressed(torch.sparse_csr, dtype, indices=torch.int32),
            "csr strides": self.compressed(torch.sparse_csr, dtype, strides=True),
            "csc": self.compressed(torch.sparse_csc, dtype),
            **dict(self._blocked(dtype)),
            **dict(self._by_hand(dtype)),
        }
        for rows in (None, torch.arange(len(self.held))):
            grad = IndexedGrad(rows, self._strided(dtype), element_mask=self.held)
            grads[f"indexed, elements masked, {rows is None}"] = grad
        if dtype in (torch.float16, torch.float32, torch.float64):  # what torch's class takes
            grads |= dict(self._masked(dtype))
        masks = {} if by_row else {"strided, elements masked": self.held}
        if self.rows is not None:
            masks["strided, rows masked"] = self.held[:, 0]
            values, shape = self.values[self.rows], self.held.shape
            grads["coo rows"] = coalesced(self.rows[None], values.to(dtype), shape)
            rows, values = self.scattered(self.rows, values)
            grads["coo rows unsorted"] = coalesced(rows[None], values.to(dtype), shape)
            grads["touched rows"] = IndexedGrad(rows.int(), values.to(dtype))
        found: dict[str, Stored] = {name: (grad, None) for name, grad in grads.items()}
        return found | {name: (self._strided(dtype), mask) for name, mask in masks.items()}

    def coo(self, dtype: torch.dtype) -> Tensor:
        return coalesced(self.held.nonzero().t(), self.values[self.held].to(dtype), self.held.shape)

    def unsorted_coo(self, dtype: torch.dtype) -> Tensor:
        places, values = self.scattered(self.held.nonzero(), self.values[self.held])
        return torch.sparse_coo_tensor(places.t(), values.to(dtype), self.held.shape)

    def compressed(
        self,
        layout: torch.layout,
        dtype: torch.dtype,
        block: tuple[int, int] = (1, 1),
        *,
        indices: torch.dtype = torch.int64,
        strides: bool = False,
    ) -> Tensor:
        grid = self.held[:: block[0], :: block[1]]
        starts, others, values = compress(self.values[None], grid, layout, block)
        values = values[0].to(dtype)
        if strides:
            values = values.repeat_interleave(2, 0)[::2]
        return torch.sparse_compressed_tensor(
            starts.to(indices), others.to(indices), values, self.held.shape, layout=layout
        )

    def _blocked(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        high, wide = self.unit
        for block in {(high, wide), (high, 1), (1, wide)}:
            for layout in BLOCKED:
                yield f"{layout} {block}", self.compressed(layout, dtype, block)

    def _strided(self, dtype: torch.dtype) -> Tensor:
        """With something outside that must not get anywhere."""
        return torch.where(self.held, self.values, torch.nan).to(dtype)

    def _masked(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        data, shape = self._strided(dtype), self.held.shape
        yield "masked", masked_tensor(data, self.held)
        transposed = masked_tensor(data.t().contiguous().t(), self.held.t().contiguous().t())
        yield "masked strides", transposed
        # The layouts inside hold more than the mask lets through.
        more = self.held | (torch.rand(shape, generator=self.generator) < 0.2)
        rows = more.any(1).nonzero().squeeze(1)
        for name, chosen, indices in (
            ("masked coo", more, more.nonzero().t()),
            ("masked coo rows", rows, rows[None]),
        ):
            parts = (coalesced(indices, each[chosen], shape) for each in (data, self.held))
            yield name, masked_tensor(*parts)
        starts, columns, _ = compress(data[None], more, torch.sparse_csr)
        parts = (
            torch.sparse_csr_tensor(starts, columns, each[more], shape)
            for each in (data, self.held)
        )
        yield "masked csr", masked_tensor(*parts)

    def _by_hand(self, dtype: torch.dtype) -> Iterator[tuple[str, IndexedGrad]]:
        flat, numel = self.held.reshape(-1), self.held.numel()
        places, values = flat.nonzero().squeeze(1), self.values.reshape(-1)[flat]
        yield "touched", IndexedGrad(places, values.to(dtype), numel, 1)
        several, parts = self.scattered(places, values)
        yield "touched unsorted", IndexedGrad(several, parts.to(dtype), numel, 1)
        # The values in another order, and some that are not used between them.
        among = torch.randperm(len(places) + 3, generator=self.generator)[: len(places)]
        pool = torch.full((len(places) + 3, 1), torch.nan, dtype=values.dtype)
        pool[among, 0] = values
        yield "touched source", IndexedGrad(places, pool.to(dtype), numel, 1, among)
        # Values that have still to be multiplied, by factors for which nothing is rounded.
        factors = torch.tensor([4.0, -0.5])[torch.arange(len(places)) % 2]
        later = pool.clone()
        later[among, 0] /= factors
        yield "touched scale", IndexedGrad(places, later.to(dtype), numel, 1, among, factors)
        # Runs as wide as the blocks, with strides.
        wide = self.unit[1]
        runs = self.held.reshape(-1, wide)[:, 0].nonzero().squeeze(1)
        blocks = self.values.reshape(-1, wide)[runs].to(dtype)
        blocks = blocks.repeat_interleave(2, 1)[:, ::2]
        yield "touched runs", IndexedGrad(runs.int(), blocks, numel // wide, wide)


Stored = tuple[AnyGradient, Tensor | None]  # with the mask that goes with it


def coalesced(indices: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
