"""Lookups of every kind, for hypothesis; and what is done with two models side by side."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsestep.grads.compact import CompactGrad
from tests.table import DTYPES


def splitmix64(number: int) -> int:
    """The finalizer of splitmix64, which spreads ids over shared rows, and n-grams over all."""
    bits = number & (1 << 64) - 1
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
    return bits ^ (bits >> 31)


@dataclass
class Call:
    """A table and what is looked up in it."""

    rows: int
    dim: int
    dtype: torch.dtype
    seed: int
    ids: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    offsets: Tensor | None = None
    factors: Tensor | None = None

    def table(self, cls: Any, **more: Any) -> Any:
        torch.manual_seed(self.seed)
        return cls(self.rows, self.dim, dtype=self.dtype, **self.options, **more)

    def output(self, table: nn.Module) -> Tensor:
        if isinstance(table, nn.Embedding):
            return table(self.ids)
        return table(self.ids, self.offsets, self.factors)

    def backward(self, table: nn.Module) -> Tensor:
        """Where every element of the output has a gradient of its own."""
        output = self.output(table)
        output.backward(self.pushed(output))
        return output

    def pushed(self, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(output.shape, generator=generator).to(output.dtype)


@st.composite
def bag_calls(draw: st.DrawFn, modes: Any = ("sum", "mean", "max"), freq: bool = True) -> Call:
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    rows, dim = draw(st.sampled_from([(1, 1), (7, 3), (20, 5), (50, 16)]))
    dtype, mode = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(modes))
    options: dict[str, Any] = {"mode": mode}
    if draw(st.booleans()):
        options["padding_idx"] = draw(st.sampled_from([0, rows - 1, -1]))
    if freq and mode != "max":
        options["scale_grad_by_freq"] = draw(st.booleans())
    if draw(st.booleans()):
        options["max_norm"] = 0.5
    integers = draw(st.sampled_from([torch.int64, torch.int32]))
    offsets = None
    if draw(st.booleans()):
        shape: tuple[int, ...] = (draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 5])))
    else:
        sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=7))
        ends = torch.tensor([0, *sizes]).cumsum(0)
        last = draw(st.booleans())
        options["include_last_offset"] = last
        offsets = (ends if last else ends[:-1]).to(draw(st.sampled_from([integers, torch.int64])))
        shape = (sum(sizes),)
    ids = torch.randint(rows, shape, generator=generator).to(integers)
    factors = None
    if mode == "sum" and draw(st.booleans()):
        factors = torch.randn(shape, generator=generator).to(dtype)
    return Call(rows, dim, dtype, seed, ids, options, offsets, factors)


@st.composite
def row_calls(draw: st.DrawFn, freq: bool = True, single: bool = True) -> Call:
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    rows, dim = draw(st.sampled_from([(1, 1), (7, 3), (20, 5), (50, 16)]))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["padding_idx"] = draw(st.sampled_from([0, rows - 1, -1]))
    if draw(st.booleans()):
        options["max_norm"] = 0.5
    if freq:
        options["scale_grad_by_freq"] = draw(st.booleans())
    shapes: list[Any] = [(0,), (1,), (9,), (4, 3), (2, 0), (2, 3, 2)]
    shape = draw(st.sampled_from([*shapes, ()] if single else shapes))
    integers = draw(st.sampled_from([torch.int64, torch.int32]))
    ids = torch.randint(rows, shape, generator=generator).to(integers)
    return Call(rows, dim, draw(st.sampled_from(DTYPES)), seed, ids, options)


def copies(module: nn.Module) -> Iterator[nn.Module]:
    """A module, copied and saved in several ways."""
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    yield pickle.loads(pickle.dumps(module, protocol=0))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def plain(grad: Tensor) -> Tensor:
    """The ordinary gradient that a compact one stands for."""
    assert type(grad) is CompactGrad
    assert not grad.is_materialized
    return grad.clone().materialize_()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal to the bit, but for the sign of zero."""
    return torch.equal(ours.detach(), theirs.detach())


def same_run(ours: Any, theirs: Any) -> bool:
    """Two optimizers with equal parameters and state."""
    found = []
    for optimizer in (ours, theirs):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = [{"param": param, **optimizer.state[param]} for param in params]
        found.append(
            [(name, torch.as_tensor(value)) for each in state for name, value in each.items()]
        )
    return len(found[0]) == len(found[1]) and all(
        name == other and same(mine, value)
        for (name, mine), (other, value) in zip(*found, strict=True)
    )
