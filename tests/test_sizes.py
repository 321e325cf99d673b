"""Small files and small functions, so that each can be read in one go."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 350
MOST_LINES_OF_A_FUNCTION = 60


def sources() -> list[Path]:
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return [*found, *(ROOT / "native").rglob("*.h"), *(ROOT / "native").rglob("*.cpp")]


def test_no_file_is_long():
    counts = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    assert {name: n for name, n in counts.items() if n > MOST_LINES} == {}


def test_no_function_is_long():
    found = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            # What it says, not how it is documented.
            documented = ast.get_docstring(node) is not None
            first = node.body[min(int(documented), len(node.body) - 1)]
            lines = node.body[0].lineno - node.lineno + (node.end_lineno or 0) - first.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                found[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    assert found == {}
