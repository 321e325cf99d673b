"""Where all randomness of a case comes from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Chance:
    """Random choices that depend on one number alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator: torch.Generator | None = None
        self._seed = seed

    def one_in(self, n: int) -> bool:
        return self._random.randrange(n) == 0

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self._random.randrange(len(choices))]

    def weighted(self, choices: dict[T, int]) -> T:
        return self._random.choices(list(choices), list(choices.values()))[0]

    def integer(self, low: int, high: int) -> int:
        """Both included."""
        return self._random.randint(low, high)

    def integers(self, count: int, below: int) -> list[int]:
        return [self._random.randrange(below) for _ in range(count)]

    @property
    def generator(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed)
        return self._generator

    def numbers(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Multiples of 1/8: sums of a few are exact in every dtype and in every order."""
        if dtype.is_complex:
            shape = (*shape, 2)
        found = torch.randint(-16, 17, tuple(shape), generator=self.generator).double() / 8
        if found.numel() and self.one_in(4):
            found.view(-1)[self.integer(0, found.numel() - 1)] = -0.0
        return torch.view_as_complex(found).to(dtype) if dtype.is_complex else found.to(dtype)

    def flags(self, shape: Any, share: float = 0.5) -> Tensor:
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float64) < share
