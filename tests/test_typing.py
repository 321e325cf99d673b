"""What type checkers see: examples have no errors, and no public symbol is without a type."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sparsestep

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "typing"
SOURCES = Path(sparsestep.__file__).parents[1]

pytestmark = [
    pytest.mark.slow,  # `make lint` runs mypy, and pyright over the examples
    pytest.mark.skipif(
        importlib.util.find_spec("pyright") is None, reason="pyright is not installed"
    ),
    pytest.mark.skipif(
        shutil.which("node") is None, reason="pyright needs node, which it would have to download"
    ),
]


def pyright(folder: Path, *arguments: str) -> dict[str, Any]:
    """What pyright reports on the package that is tested, with the torch that is installed."""
    environment = {
        **os.environ,
        # It asks the first Python on the path where packages are.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(SOURCES),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
    }
    command = [sys.executable, "-m", "pyright", "--outputjson", *arguments]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = (done.stdout + done.stderr).strip()[-500:]
        pytest.fail(f"pyright printed no report (exit code {done.returncode}): {said}")
    return report


def test_the_examples_and_a_users_script_have_no_errors():
    """In strict mode, as ``[tool.pyright]`` in pyproject.toml sets it."""
    report = pyright(ROOT)
    assert report["summary"]["filesAnalyzed"] == len(list((ROOT / "examples").glob("*.py"))) + 1
    assert [
        f"{found['file']}:{found['range']['start']['line'] + 1}: {found['message']}"
        for found in report["generalDiagnostics"]
    ] == []


def test_mistakes_are_found(tmp_path: Path):
    lines = (SCRIPTS / "wrong_script.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 5
    shutil.copy(SCRIPTS / "wrong_script.py", tmp_path)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    report = pyright(tmp_path)
    assert {found["range"]["start"]["line"] + 1 for found in report["generalDiagnostics"]} == wrong


def test_every_public_symbol_has_a_type(tmp_path: Path):
    report = pyright(tmp_path, "--verifytypes", "sparsestep", "--ignoreexternal")
    found = report["typeCompleteness"]
    assert Path(found["pyTypedPath"]).parent == SOURCES / "sparsestep"
    vague = [symbol["name"] for symbol in found["symbols"] if not symbol["isTypeKnown"]]
    assert not vague
    assert found["completenessScore"] == 1
