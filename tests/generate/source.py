"""Sources of randomness: one generator of cases serves the fuzzer's seeds and hypothesis."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")


class NotApplicableError(Exception):
    """Torch itself does not make what a case asked for; nothing was tested."""


class Source(ABC):
    """Random choices. Subclasses draw an integer and seed a generator of tensors."""

    # Tensors hold multiples of 1/8, whose sums are exact in every dtype and every order; otherwise
    # full mantissas.
    exact = True

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """An integer; both bounds are included."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator:
        """The generator that fills tensors."""

    def one_in(self, n: int) -> bool:
        return self.integer(0, n - 1) == n - 1

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.integer(0, len(choices) - 1)]

    def weighted(self, choices: Mapping[T, int]) -> T:
        left = self.integer(0, sum(choices.values()) - 1)
        for choice, weight in choices.items():
            left -= weight
            if left < 0:
                return choice
        raise AssertionError("weights must be positive")

    def integers(self, count: int, below: int) -> list[int]:
        return [self.integer(0, below - 1) for _ in range(count)]

    def numbers(self, shape: Any, dtype: torch.dtype) -> Tensor:
        if dtype.is_complex:
            shape = (*shape, 2)
        if self.exact:
            found = torch.randint(-16, 17, tuple(shape), generator=self.generator).double() / 8
        else:
            found = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)
        if found.numel() and self.one_in(4):
            found.view(-1)[self.integer(0, found.numel() - 1)] = -0.0
        return torch.view_as_complex(found).to(dtype) if dtype.is_complex else found.to(dtype)

    def flags(self, shape: Any, share: float = 0.5) -> Tensor:
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64) < share


class SeededSource(Source):
    """Random choices that depend on one number alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    @property
    def generator(self) -> torch.Generator:
        return self._generator


class DrawnSource(Source):
    """Choices drawn by hypothesis, which shrinks the structure of a case and not its numbers."""

    def __init__(self, draw: st.DrawFn, *, exact: bool = True) -> None:
        self._draw, self.exact = draw, exact
        self._generator: torch.Generator | None = None

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    @property
    def generator(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._draw(st.integers(0, 2**16)))
        return self._generator
