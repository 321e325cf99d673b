"""Examples on the site, with what they print: ``{executed} one_optimizer.py --steps 60``.

The example is run when its page is read, which is when the page or the example has changed. With
``:recorded:`` it is not: what it prints is in ``docs/gallery/recorded``, since it takes minutes or
needs packages that the site is built without; ``make integrations`` or ``make board`` wrote it. A
link downloads the program and its output as a notebook, which is part of the page. With
``:notebook: --quick``, the notebook of a recorded example is executed with these options.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from notebooks import notebook
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECORDED = ROOT / "docs" / "gallery" / "recorded"
DATA = os.path.join(sys.prefix, "board")  # packages that carry data, of `make board`
# As a terminal of this width shows it; one thread, so that others are not disturbed.
ENVIRONMENT = {"COLUMNS": "90", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


class Executed(SphinxDirective):
    """``{executed} name.py options``: the command, what it prints, and the program."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {  # noqa: RUF012
        "recorded": directives.flag,
        "notebook": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        """Three blocks: command and output, then the source."""
        name, *options = shlex.split(self.arguments[0])
        source = EXAMPLES / name
        self.env.note_dependency(str(source))
        command = shlex.join(["python", f"examples/{name}", *options])
        if "recorded" in self.options:
            path = RECORDED / f"{source.stem}.txt"
            self.env.note_dependency(str(path))
            printed = path.read_text()
        else:
            printed = self.printed(source, options)
        executed = printed
        if "notebook" in self.options:
            options = shlex.split(self.options["notebook"])
            executed = self.printed(source, options, PYTHONPATH=DATA)
        return [
            block(f"$ {command}\n{printed.rstrip()}", "console"),
            nodes.rubric("", "The program"),
            block(source.read_text(), "python"),
            download(f"{source.stem}.ipynb", notebook([name, *options], executed)),
        ]

    def printed(self, source: Path, options: list[str], **environment: str) -> str:
        """What the example prints; an error of the build if it fails."""
        done = subprocess.run(
            [sys.executable, str(source), *options],
            env={**os.environ, **ENVIRONMENT, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode:
            raise self.error(f"{source.name} failed:\n{done.stdout}{done.stderr}")
        return done.stdout


def download(name: str, content: dict[str, Any]) -> nodes.raw:
    """A link to a notebook that is in the link itself."""
    data = base64.b64encode(json.dumps(content).encode()).decode()
    link = f'<a download="{name}" href="data:application/x-ipynb+json;base64,{data}">{name}</a>'
    return nodes.raw("", f"<p>As a notebook: {link}</p>", format="html")


def block(text: str, language: str) -> nodes.literal_block:
    """Highlighted text."""
    return nodes.literal_block(text, text, language=language)


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_directive("executed", Executed)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
