"""What was measured, where, and with what; kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cases import Case, Formula, Program
from sparsestep import _native
from sparsestep.cli import info
from sparsestep.version import __version__

_PEERS = ("fbgemm-gpu-cpu", "fbgemm-gpu", "dgl")


@dataclass(frozen=True)
class Timing:
    """The steps of one contestant on one case.

    Attributes:
        contestant: its name.
        median_ms: of all rounds.
        lower_ms: the lower quartile.
        upper_ms: the upper quartile.
        rounds: how many were counted.
        times_torch: how many times faster than ``torch.optim.SparseAdam``.
        of_limit: the limit's time divided by its own; 1 is as fast as can be.
    """

    contestant: str
    median_ms: float
    lower_ms: float
    upper_ms: float
    rounds: int
    times_torch: float | None
    of_limit: float | None

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles, as a part of the median."""
        return spread(self.lower_ms, self.median_ms, self.upper_ms)


# A machine that has nothing else to do spreads a step's times by a few percent.
WIDEST_SPREAD = 0.15


def spread(lower: float, median: float, upper: float) -> float:
    """Half of the distance between the quartiles, as a part of the median.

    Example:
        >>> spread(9.0, 10.0, 12.0)
        0.15
    """
    return (upper - lower) / 2 / median


@dataclass(frozen=True)
class Refusal:
    """A contestant that did not take part, and why."""

    contestant: str
    reason: str


@dataclass(frozen=True)
class CaseResult:
    """One case.

    Attributes:
        suite: which the case belongs to.
        case: what was measured.
        threads: how many took part.
        unique: how many rows the first batch touches.
        shared: whether all contestants worked on one table, because memory would not hold more; the
            limit and the reference engine then use sparsestep's state too.
        timings: the fastest first.
        unavailable: who did not take part.
    """

    suite: str
    case: Case
    threads: int
    unique: int
    shared: bool
    timings: list[Timing]
    unavailable: list[Refusal]

    def timing(self, contestant: str) -> Timing | None:
        """That of one contestant, if it took part."""
        return next((each for each in self.timings if each.contestant == contestant), None)

    @property
    def is_disturbed(self) -> bool:
        """Whether the times of a contestant vary too much for a ratio to mean anything."""
        return any(timing.spread > WIDEST_SPREAD for timing in self.timings)


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    threads: int
    platform: str
    huge_pages: str


@dataclass(frozen=True)
class Header:
    """What every file of results begins with.

    Attributes:
        machine: where it ran.
        versions: of what took part.
        instruction_set: that the native core used.
        commit: of the working tree that the sources are in, if they are in one.
        date: when it began, UTC, ISO 8601.
    """

    machine: Machine
    versions: dict[str, str]
    instruction_set: str | None
    commit: str | None
    date: str


@dataclass(frozen=True)
class Report(Header):
    """One run of the harness.

    Attributes:
        scale: what rows and lookups were divided by.
        seconds: the time budget of a case.
        cases: the results.
    """

    scale: float
    seconds: float
    cases: list[CaseResult] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that ``to_json`` wrote."""
        data = json.loads(text)
        data["machine"] = Machine(**data["machine"])
        data["cases"] = [_case_result(case) for case in data["cases"]]
        return cls(**data)


def _case_result(data: dict[str, Any]) -> CaseResult:
    of_case = data["case"]
    kind = Program if "kind" in of_case else Formula if "rule" in of_case else Case
    data["case"] = kind(**of_case)
    data["timings"] = [Timing(**timing) for timing in data["timings"]]
    data["unavailable"] = [Refusal(**refusal) for refusal in data["unavailable"]]
    return CaseResult(**data)


def header() -> Header:
    """About this machine, now."""
    machine = Machine(
        cpu=info.cpu_model(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        platform=platform.platform(),
        huge_pages=info.huge_pages(),
    )
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Header(machine, versions(), _native.instruction_set(), commit(), date)


def new_report(scale: float, seconds: float) -> Report:
    """A report without results yet."""
    return Report(**vars(header()), scale=scale, seconds=seconds)


def versions() -> dict[str, str]:
    """Of Python, torch, this library, and the peers that are installed."""
    result = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "sparsestep": __version__,
    }
    for name in _PEERS:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def commit(directory: Path = Path(__file__).parent) -> str | None:
    """The commit that the working tree around ``directory`` is at, or ``None``."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=directory,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or no working tree
        return None
    return found.stdout.strip()
