"""What the documentation shows runs, its links lead on, and every public name is in it."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sparsestep
from docs import claims
from docs.notebooks import EXAMPLES, notebook
from sparsestep.optim import OPTIMIZERS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
README = DOCS.parent / "README.md"

# What may stand above a block: it is not run, or not here, since it is a part of an example.
MARK = r"<!-- (?:not run|in: (?P<example>\w+\.py)) -->\n"
BLOCK = re.compile(rf"^(?P<mark>{MARK})?```python\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#]*)(?:#(?P<heading>[^)]*))?\)")


WITH_CODE = [page for page in (README, *PAGES) if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(DOCS.parent)))
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
    # Compiled functions keep the namespace alive, and with it models that are tracked.
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    assert not printed, "".join(printed)


PRIVATE = re.compile(
    r"^(?:>>> )?(?:from|import) (sparsestep\.(?!nn|distributed|storage|functional)\S+)", re.M
)


def test_pages_import_public_packages_only():
    found = [(page.name, *PRIVATE.findall(page.read_text())) for page in (README, *PAGES)]
    assert [each for each in found if len(each) > 1] == []


PUBLIC = (
    sparsestep,
    sparsestep.functional,
    sparsestep.nn,
    sparsestep.distributed,
    sparsestep.storage,
)


@pytest.mark.parametrize(
    "module", [*PUBLIC, sparsestep.nn.functional], ids=lambda module: module.__name__
)
def test_dir_lists_the_public_names(module: ModuleType):
    assert dir(module) == sorted(module.__all__)


def test_what_a_page_shows_of_an_example_stands_there():
    """But for white space; what is left out is a line with ``...``."""
    shown = [(page, block) for page in PAGES for block in BLOCK.finditer(page.read_text())]
    for page, block in shown:
        if block["example"]:
            program = (DOCS.parent / "examples" / block["example"]).read_text()
            for part in re.split(r"^ *\.\.\.\n", block["code"], flags=re.MULTILINE):
                assert "".join(part.split()) in "".join(program.split()), f"{page}: {part}"


def assert_leads_somewhere(page: Path, target: Path, heading: str | None) -> None:
    assert target.exists(), f"{page}: {target}"
    assert not heading or heading in headings(target), f"{page}: {target}#{heading}"


def test_links_lead_somewhere():
    for page in PAGES:
        for link in LINK.finditer(page.read_text()):
            target = (page.parent / link["path"]).resolve() if link["path"] else page
            assert_leads_somewhere(page, target, link["heading"])


def test_front_matter_is_not_shown_as_text():
    for page in PAGES:
        text = page.read_text()
        assert not text.startswith("---") or re.match(r"---\nmyst:\n(?: .*\n)+---\n", text), page
    assert "description:" in (DOCS / "index.md").read_text()


NEEDED = {
    "knowledge_graph.py": ["pykeen"],
    "movielens.py": ["--no-deps recbole"],
    "new_tokens.py": ["transformers accelerate"],
    "umls.py": ["--no-deps pykeen"],
    "with_accelerate.py": ["accelerate"],
    "with_lightning.py": ["lightning"],
    "word_vectors.py": ["--no-deps gensim"],
}


def test_notebooks_of_the_gallery_have_the_programs_and_what_they_print():
    pages = "".join(page.read_text() for page in (DOCS / "gallery").glob("*.md"))
    commands = [each.split() for each in re.findall(r"^```{executed} (.+)$", pages, re.MULTILINE)]
    assert ["recommender.py", "--quick", "--steps", "40"] in commands
    for command in commands:
        about, install, program, run = notebook(command, "printed")["cells"]
        assert about["cell_type"] == "markdown"
        assert about["source"]
        assert install["source"].splitlines() == [
            "%pip install sparsestep",
            *(f"%pip install {each}" for each in NEEDED.get(command[0], [])),
        ]
        source = (EXAMPLES / command[0]).read_text()
        assert program["source"] == f"%%writefile {command[0]}\n{source}"
        assert run["source"] == "%run " + " ".join(command)
        assert run["outputs"][0]["text"] == "printed"


def test_examples_are_single_files_on_public_names():
    for path in sorted(EXAMPLES.glob("*.py")):
        text = path.read_text()
        imported = {
            each.partition(".")[0] for each in re.findall(r"^\s*(?:from|import) (\S+)", text, re.M)
        }
        assert not imported & {each.stem for each in EXAMPLES.glob("*.py")}, path
        assert not PRIVATE.findall(text), path


SITE = "https://sparsestep.readthedocs.io/en/latest/"


def test_links_of_the_readme_are_absolute_and_lead_somewhere():
    """PyPI shows the README, where a relative link leads nowhere."""
    text = README.read_text()
    assert not LINK.findall(text)
    for path, heading in re.findall(rf"\]\({SITE}([^)#]+)\.html(?:#([^)]+))?\)", text):
        assert_leads_somewhere(README, DOCS / f"{path}.md", heading)
    for path in re.findall(r"sparsestep/sparsestep/(?:blob/)?main/([^)]+)\)", text):
        assert (DOCS.parent / path).exists(), path


def test_claims_are_those_of_the_results():
    """``python -m docs.claims`` writes them."""
    known = claims.claims()
    texts = [page.read_text() for page in claims.pages()]
    for pattern in known:
        assert any(re.search(pattern, text) for text in texts), pattern
    for page, text in zip(claims.pages(), texts, strict=True):
        assert claims.fill(text, known) == text, page


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType):
    text = "\n".join(page.read_text() for page in PAGES)
    whole = re.findall(r"^\.\. automodule:: (.+)$", text, re.MULTILINE)
    named = {
        f"sparsestep.{name}" for name in re.findall(r"^```{optimizer} (\w+)$", text, re.MULTILINE)
    }
    if "{functional-optimizers}" in text:
        named |= {f"sparsestep.Functional{each.__name__}" for each in OPTIMIZERS}
    current = "sparsestep"
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)(?:\(.*\))?$", text, re.MULTILINE):
        if kind == "currentmodule":
            current = name
        named.add(name if name.startswith("sparsestep.") else f"{current}.{name}")
    for name in module.__all__:
        is_module = isinstance(getattr(module, name), ModuleType)
        if name == "__version__" or is_module or module.__name__ in whole:
            continue
        assert f"{module.__name__}.{name}" in named


def test_pictures_follow_the_theme_fit_a_phone_and_have_text():
    for picture in [*DOCS.glob("*.svg"), *DOCS.glob("gallery/*.svg")]:
        text = picture.read_text()
        assert "prefers-color-scheme: dark" in text, picture
        width = re.search(r'<svg [^>]*width="([\d.]+)pt"', text)
        assert width is not None
        assert float(width[1]) <= 420, picture  # so that text can be read at 390 pixels
        assert "<text" in text, picture
    figure = re.compile(r"^:::+\{(?:image|figure)\}.*\n((?:^:\w.*\n)*)", re.MULTILINE)
    for page in PAGES:
        text = page.read_text()
        for words, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text):
            assert len(words) > 10, f"{page}: {path}"
        for options in figure.findall(text):
            assert ":alt:" in options, page


def headings(page: Path) -> set[str]:
    """As GitHub makes them into links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in found}
