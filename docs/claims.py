"""Speed claims of README and site, each computed from a file in benchmarks/results.

A claim is a phrase with numbers in it, like "6 to 15 times as fast as torch.optim.SparseAdam".
Wherever a page has the phrase, this program writes the numbers; a test fails if they differ.

Example:
    python -m docs.claims
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Report

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def ratios(report: Report) -> list[float]:
    """How many times as fast as torch's SparseAdam a step is, from the smallest to the largest."""
    timings = (case.timing("sparsestep") for case in report.cases)
    return sorted(timing.times_torch for timing in timings if timing and timing.times_torch)


def speedup(report: Report) -> str:
    """The range over the cases of a report."""
    first, *_, last = ratios(report)
    return f"{first:.0f} to {last:.0f}"


def training(found: dict[str, Any]) -> str:
    """The ratio of the times of a whole training."""
    theirs, ours = (run["seconds"][-1] for run in found["runs"])
    return f"{theirs / ours:.1f}"


def own_rule(found: dict[str, Any]) -> str:
    """The range over the rules of custom_rules.py, with uniform lookups."""
    ahead = [each["ahead_of_torch"] for each in found["rules"] if each["lookups"] == "uniform"]
    return f"{min(ahead):.0f} to {max(ahead):.0f}"


def claims() -> dict[str, str]:
    """Patterns of the phrases, with a group for the numbers, and the numbers.

    A phrase may go on in the next line of a page.
    """
    peers = Report.from_json((RESULTS / "peers.json").read_text())
    first, *_, last = ratios(peers)
    phrases = {
        r"(\d+ to \d+) times as fast as `?torch\.optim\.SparseAdam": speedup(peers),
        r"bars for six tables, from ([\d.]+ to [\d.]+)": f"{first:.1f} to {last:.1f}",
        r"same training, ([\d.]+) times as fast": training(load("loss_against_time")),
        r"rule you write runs (\d+ to \d+) times as fast": own_rule(load("user_rules")),
    }
    return {phrase.replace(" ", r"\s+"): numbers for phrase, numbers in phrases.items()}


def pages() -> Iterator[Path]:
    """README and the sources of the site."""
    yield HERE.parent / "README.md"
    yield from (page for page in sorted(HERE.rglob("*.md")) if "_build" not in page.parts)


def fill(text: str, known: dict[str, str]) -> str:
    """The text with the numbers of every claim in it.

    Example:
        >>> fill("2 to 3 times as fast as x", {"(. to .) times": "4 to 5"})
        '4 to 5 times as fast as x'
    """
    for pattern, numbers in known.items():
        text = re.sub(
            pattern, lambda found, numbers=numbers: found[0].replace(found[1], numbers), text
        )
    return text


def main() -> None:
    """Write the numbers into the pages."""
    known = claims()
    for page in pages():
        before = page.read_text()
        if (after := fill(before, known)) != before:
            page.write_text(after)
            print(f"wrote {page}")


if __name__ == "__main__":
    main()
