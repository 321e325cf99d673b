"""What is measured: tables, lookups, and how the lookups fall on the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

_ZIPF_EXPONENT = 1.05

# Popular rows stay popular from batch to batch, so where they lie does not depend on the seed.
_PLACES_SEED = 20_000


def _uniform(rows: int, lookups: int, generator: Generator) -> Tensor:
    return torch.randint(rows, (lookups,), generator=generator)


def _zipf(rows: int, lookups: int, generator: Generator) -> Tensor:
    ranks = torch.arange(1, rows + 1, dtype=torch.float64)
    cumulative = ranks.pow(-_ZIPF_EXPONENT).cumsum(0)
    drawn = torch.rand(lookups, dtype=torch.float64, generator=generator) * cumulative[-1]
    # Rounding can bring a draw up to the total itself, one past the last rank.
    chosen = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=rows - 1)
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(_PLACES_SEED))
    return places[chosen]


def _half(rows: int, lookups: int, generator: Generator) -> Tensor:
    hot = rows // 2
    others = torch.randint(rows - 1, (lookups - lookups // 2,), generator=generator)
    others += others >= hot  # every row but the hot one
    positions = torch.cat([torch.full((lookups // 2,), hot), others])
    return positions[torch.randperm(lookups, generator=generator)]


def _distinct(rows: int, lookups: int, generator: Generator) -> Tensor:
    return torch.randperm(rows, generator=generator)[:lookups]


DISTRIBUTIONS: dict[str, Callable[[int, int, Generator], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "half": _half,
    "distinct": _distinct,
}


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        name: for people.
        rows: of each table.
        dim: how many numbers a row has.
        lookups: into each table, per step.
        distribution: how they fall on the rows: uniform; zipf (exponent 1.05, popular ranks
            scattered over the table); half (one row has half of them, the others share the rest);
            distinct (no row twice).
        tables: how many tables one optimizer has.
        threads: how many threads take part; ``None`` for as many as the run has.
    """

    name: str
    rows: int
    dim: int
    lookups: int
    distribution: str
    tables: int = 1
    threads: int | None = None

    def positions(self, seed: int) -> Tensor:
        """The rows that one batch looks up, int64, the same for the same seed.

        Example:
            >>> case(10, 16, 4, "distinct").positions(seed=0).unique().shape
            torch.Size([4])
        """
        generator = torch.Generator().manual_seed(seed)
        return DISTRIBUTIONS[self.distribution](self.rows, self.lookups, generator)

    @property
    def table_bytes(self) -> int:
        """What one copy of all tables takes, in float32."""
        return 4 * self.rows * self.dim * self.tables

    def scaled(self, scale: float) -> Case:
        """The same with rows and lookups divided by ``scale``.

        Example:
            >>> case(1_000_000, 64, 65_536, "uniform").scaled(100).name
            '10,000 x 64, 655 uniform'
        """
        if scale == 1:
            return self
        rows, lookups = max(2, int(self.rows / scale)), max(1, int(self.lookups / scale))
        smaller = replace(self, rows=rows, lookups=lookups)
        return replace(smaller, name=_described(smaller))


@dataclass(frozen=True)
class Program(Case):
    """A whole iteration of a training: lookups, the model, backward, update.

    Attributes:
        kind: which model, see ``programs.py``.
        length: how many lookups an example has, in each table.
    """

    kind: str = ""
    length: int = 1


@dataclass(frozen=True)
class Formula(Case):
    """A step of one rule: a user's formula, the rule in C++, torch's class.

    Attributes:
        rule: which, see ``formulas.py``.
    """

    rule: str = ""


def _described(case: Case) -> str:
    several = f"{case.tables} tables of " if case.tables > 1 else ""
    text = f"{several}{case.rows:,} x {case.dim}, {case.lookups:,} {case.distribution}"
    if isinstance(case, Program):
        text = f"{case.kind}, {text}"
    if isinstance(case, Formula):
        text = f"{case.rule}, {text}"
    if case.threads is None:
        return text
    return f"{text}, {case.threads} thread{'s' if case.threads > 1 else ''}"


def case(
    rows: int,
    dim: int,
    lookups: int,
    distribution: str,
    tables: int = 1,
    threads: int | None = None,
) -> Case:
    """A case that is named after what it is.

    Example:
        >>> case(1_000, 16, 64, "uniform", tables=26).name
        '26 tables of 1,000 x 16, 64 uniform'
    """
    unnamed = Case("", rows, dim, lookups, distribution, tables, threads)
    return replace(unnamed, name=_described(unnamed))


def program(
    kind: str, rows: int, dim: int, lookups: int, distribution: str, tables: int = 1, *, length: int
) -> Program:
    """A program that is named after what it is.

    Example:
        >>> program("dlrm", 200_000, 64, 8_192, "uniform", 26, length=4).name
        'dlrm, 26 tables of 200,000 x 64, 8,192 uniform'
    """
    unnamed = Program("", rows, dim, lookups, distribution, tables, kind=kind, length=length)
    return replace(unnamed, name=_described(unnamed))


def formula(rule: str, rows: int, dim: int, lookups: int, distribution: str) -> Formula:
    """A case of one rule that is named after what it is.

    Example:
        >>> formula("Lion", 1_000, 64, 512, "zipf").name
        'Lion, 1,000 x 64, 512 zipf'
    """
    unnamed = Formula("", rows, dim, lookups, distribution, rule=rule)
    return replace(unnamed, name=_described(unnamed))


SUITES: dict[str, list[Case]] = {
    "peers": [
        case(1_000_000, 64, 65_536, "uniform"),
        case(1_000_000, 64, 65_536, "zipf"),
        case(1_000_000, 128, 16_384, "uniform"),
        case(100_000, 16, 8_192, "uniform"),
        case(1_000, 16, 64, "uniform"),
        case(5_000_000, 32, 262_144, "zipf"),
    ],
    "large": [case(50_000_000, 16, 65_536, "uniform")],
    "small": [
        case(1_000, 16, 64, "uniform", tables=26),
        case(1_000, 16, 64, "uniform"),
    ],
    "lookups": [case(1_000_000, 64, 2**power, "uniform") for power in range(8, 21, 2)],
    "rows": [
        case(rows, 16, 65_536, "uniform") for rows in (100_000, 1_000_000, 10_000_000, 50_000_000)
    ],
    # 1, 5, 10, 25 and 45 percent of the rows
    "density": [
        case(200_000, 64, touched, "distinct")
        for touched in (2_000, 10_000, 20_000, 50_000, 90_000)
    ],
    "skew": [
        case(1_000_000, 64, 262_144, "uniform"),
        case(1_000_000, 64, 262_144, "half"),
    ],
    "threads": [
        case(1_000_000, 64, 65_536, "uniform", threads=1),
        case(1_000_000, 64, 65_536, "uniform"),
    ],
    "rules": [
        formula(rule, 1_000_000, 64, 65_536, distribution)
        for rule in ("Adam", "Adagrad", "Lion", "RMSprop", "RowwiseAdagrad")
        for distribution in ("uniform", "zipf")
    ],
    # Meta's DLRM script, PyG's Node2Vec, knowledge-graph training as PyKEEN and DGL-KE have it
    "programs": [
        program("dlrm", 200_000, 64, 8_192, "uniform", 26, length=4),
        program("dlrm", 200_000, 64, 8_192, "zipf", 26, length=4),
        program("dlrm with SGD", 200_000, 64, 8_192, "uniform", 26, length=4),
        program("node2vec", 400_000, 128, 57_344, "zipf", length=7),
        program("transe", 200_000, 128, 36_864, "zipf", length=18),
    ],
}
