"""Nothing is written twice."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_REPEATED_LINES = 10


def sources() -> list[Path]:
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return [*found, *(ROOT / "native").rglob("*.h"), *(ROOT / "native").rglob("*.cpp")]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def code_lines(path: Path) -> list[str]:
    """The lines that do something: no docstrings, comments, imports or lists of parameters.

    Public functions write out their parameters, so that ``help()`` and editors show them; where two
    take the same, these lines and those that document them are the same.
    """
    lines = path.read_text().splitlines()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                begin, end = node.lineno, node.body[0].lineno - 1
            elif isinstance(node, ast.Import | ast.ImportFrom) or is_text(node):
                begin, end = node.lineno, node.end_lineno or node.lineno
            else:
                continue
            lines[begin - 1 : end] = [""] * (end - begin + 1)
    kept = (line.strip() for line in lines)
    return [line for line in kept if line and not line.startswith(("#", "//"))]


def test_nothing_is_written_twice():
    seen: dict[tuple[str, ...], str] = {}
    found = set()
    for path in sources():
        name = str(path.relative_to(ROOT))
        lines = [] if "tests" in path.parts[len(ROOT.parts) :] else code_lines(path)
        for first in range(len(lines) - MOST_REPEATED_LINES):
            run = tuple(lines[first : first + MOST_REPEATED_LINES + 1])
            if run in seen:
                found.add((seen[run], name))
            seen[run] = name
    assert found == set()
