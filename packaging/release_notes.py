"""Print the section of CHANGELOG.md that belongs to a version, and refuse one that is not there.

Example:
    python packaging/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(version: str, changelog: str) -> str:
    r"""The section of a version.

    Example:
        >>> notes("0.2.0", "# Log\n\n## 0.2.0 - 2026-12-01\n\n- New.\n\n## 0.1.0\n\n- Old.\n")
        '- New.'
    """
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        if head.strip("[] ").split(" ")[0].rstrip("]") == version:
            return body.strip()
    raise SystemExit(f"CHANGELOG.md has no section '## {version}'. Rename 'Unreleased' first.")


def main() -> None:
    """Check that the tag is the package's version, and print the notes."""
    version = sys.argv[1]
    known = re.search(r'"(.+)"', (ROOT / "src/sparsestep/version.py").read_text().split("=")[1])
    if known is None or known[1] != version:
        raise SystemExit(f"src/sparsestep/version.py does not say {version}.")
    print(notes(version, (ROOT / "CHANGELOG.md").read_text()))


if __name__ == "__main__":
    main()
