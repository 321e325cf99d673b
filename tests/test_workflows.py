"""The supply chain of releases: pinned actions, pinned tools, few permissions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
REQUIREMENTS = [ROOT / "packaging" / f"{name}-requirements.txt" for name in ("build", "release")]
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="not part of the source distribution")


def parse(path: Path) -> dict[Any, Any]:
    return pytest.importorskip("yaml").safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_use_pinned_actions_and_hashed_requirements_and_may_do_little(path: Path):
    """They may read, and a job may do one thing more."""
    workflow = parse(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in path.read_text()
    for name, job in workflow["jobs"].items():
        allowed = {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}
        assert job.get("permissions", {}) == allowed.get(name, {}), name
    for line in path.read_text().splitlines():
        used = re.search(r"\buses:\s*(.*)", line)
        if used and not used[1].startswith("./"):
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+(\.\d+)+", used[1]), line
        assert "pipx" not in line, line
        if re.search(r"\bpip install\b", line):
            assert "install --require-hashes -r packaging/" in line, line


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_release_tools_are_pinned_by_version_and_hash(path: Path):
    lines = re.sub(r"\\\n", "", re.sub(r"(?m)^\s*#.*\n?", "", path.read_text())).splitlines()
    assert lines[0] == "--only-binary :all:"  # a source distribution would bring its own tools
    requirements = [line for line in lines[1:] if line]
    assert requirements
    for line in requirements:
        assert re.match(r"[\w.-]+==[\w.]+ ", line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", line), line


def test_wheels_are_built_with_the_hashed_tools():
    text = (ROOT / "pyproject.toml").read_text()
    assert '"--no-isolation"' in text
    assert '"pip install --require-hashes -r {project}/packaging/build-requirements.txt"' in text
    requires = re.search(r"requires = \[(.*)\]", text)[1]
    pinned = REQUIREMENTS[0].read_text()
    for name in re.findall(r'"([\w-]+)', requires):
        assert re.search(rf"(?m)^{name}==", pinned), name
