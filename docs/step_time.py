"""Draw docs/step-time.svg from the published result, which need not be measured again for that.

Example:
    python docs/step_time.py
"""

from __future__ import annotations

from pathlib import Path

from sparsestep.cli.bench.picture import draw
from sparsestep.cli.bench.results import Report

HERE = Path(__file__).parent
RESULT = HERE.parent / "benchmarks" / "results" / "lookups.json"


def main() -> None:
    """Write the picture."""
    draw(HERE / "step-time.svg", Report.from_json(RESULT.read_text()).cases)


if __name__ == "__main__":
    main()
