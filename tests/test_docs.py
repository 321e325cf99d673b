"""The pages of the optimizers are current, what the documentation shows runs, its links lead on."""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))

NOT_RUN = "<!-- not run -->\n"
BLOCK = re.compile(rf"^(?P<mark>{NOT_RUN})?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#]*)(?:#(?P<heading>[^)]*))?\)")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", DOCS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_the_optimizers_are_current(build: ModuleType):
    assert build.main(["--check"]) == 0, "run: python docs/build.py"


def test_a_stale_a_missing_and_a_forgotten_page_are_found(
    build: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert build.main([], tmp_path) == 0
    assert build.main(["--check"], tmp_path) == 0
    (tmp_path / "adam.md").write_text("stale")
    (tmp_path / "sgd.md").unlink()
    (tmp_path / "forgotten.md").touch()
    capsys.readouterr()
    assert build.main(["--check"], tmp_path) == 1
    said = capsys.readouterr().err
    assert [name for name in ("adam.md", "sgd.md", "forgotten.md", "ftrl.md") if name in said] == [
        "adam.md",
        "sgd.md",
        "forgotten.md",
    ]
    assert (tmp_path / "adam.md").read_text() == "stale"
    assert build.main([], tmp_path) == 0
    assert build.main(["--check"], tmp_path) == 0


def test_there_is_something_to_run():
    assert sum(len(BLOCK.findall(page.read_text())) for page in PAGES) > 10


@each_page
def test_the_code_of_a_page_runs(page: Path):
    """In one namespace, from top to bottom; blocks with ``>>>`` must print what they show."""
    text = page.read_text()
    namespace: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    printed: list[str] = []
    with torch.random.fork_rng():
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start("code"))
            code = block["code"]
            if block["mark"]:
                continue
            if not code.startswith(">>>"):
                exec(compile("\n" * line + code, str(page), "exec"), namespace)
                continue
            examples = doctest.DocTestParser().get_doctest(
                code, namespace, page.name, str(page), line
            )
            runner.run(examples, out=printed.append, clear_globs=False)
            namespace.update(examples.globs)
    assert not printed, "".join(printed)


@each_page
def test_the_links_of_a_page_lead_somewhere(page: Path):
    for link in LINK.finditer(page.read_text()):
        target = (page.parent / link["path"]).resolve() if link["path"] else page
        assert target.exists(), f"{page}: {link[0]}"
        if link["heading"]:
            assert link["heading"] in headings(target), f"{page}: {link[0]}"


def headings(page: Path) -> set[str]:
    """As GitHub makes them into links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in found}
