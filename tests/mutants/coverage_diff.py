"""Which lines and branches did tests reach before, and no longer do? ``make coverage-diff``.

Compares two reports of ``coverage json`` on the same sources and prints, by function, what only the
first one has. Exits with status 1 if there is anything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lost(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Describe what ``after`` has not executed, function by function."""
    for name, function in before.get("functions", {}).items():
        now = after.get("functions", {}).get(name)
        if now is None:
            continue  # the sources have changed
        lines = sorted({*function["executed_lines"]} - {*now["executed_lines"]})
        branches = {*map(tuple, function["executed_branches"])}
        branches -= {*map(tuple, now["executed_branches"])}
        arcs = sorted(each for each in branches if abs(each[0]) not in lines)
        found = [*map(str, lines), *(f"{begin}->{end}" for begin, end in arcs)]
        if found:
            yield f"  {name or '(module)'}: {', '.join(found)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = (json.loads(each.read_text()) for each in (options.before, options.after))
    count = 0
    for file, about in sorted(before["files"].items()):
        found = list(lost(about, after["files"].get(file, {})))
        count += len(found)
        if found:
            print(file, *found, sep="\n")
    percents = [each["totals"]["percent_covered"] for each in (before, after)]
    print(f"{percents[0]:.1f}% before, {percents[1]:.1f}% after; less covered: {count} functions")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
