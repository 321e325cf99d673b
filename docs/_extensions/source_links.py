"""Links that lead out of docs, as they are written for readers on GitHub, work on the site too.

``[the example](../examples/node2vec.py)`` becomes a link to the file in the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/sparsestep/sparsestep/"


class SourceLinks(SphinxPostTransform):
    """Turns downloads and unresolved links into files of the repository to links to it."""

    default_priority = 4  # before MyST resolves links

    def run(self, **options: Any) -> None:
        """Go through the links of a page."""
        for kind in (addnodes.download_reference, addnodes.pending_xref):
            for node in list(self.document.findall(kind)):
                target = self.target_of(node)
                if target is not None:
                    shown = node.children or [nodes.Text(node["reftarget"])]
                    node.replace_self(nodes.reference("", "", *shown, refuri=target))

    def target_of(self, node: nodes.Element) -> str | None:
        """The address of the file that a link leads to, if it lies outside of docs."""
        page = Path(self.env.doc2path(self.env.docname))
        name, _, heading = str(node.get("reftarget", "")).partition("#")
        if not name or "://" in name:
            return None
        heading = heading or node.get("reftargetid")
        # MyST writes downloads from the root of the sources, and pages without their ending. A page
        # may have a folder of the same name.
        tried = [page.parent / f"{name}.md", page.parent / name, Path(self.env.srcdir, name)]
        path = next((each.resolve() for each in tried if each.exists()), None)
        if path is None or not path.is_relative_to(ROOT):
            return None
        if path.is_relative_to(self.env.srcdir) and path.suffix == ".md":
            return None
        view = "tree" if path.is_dir() else "blob"
        tail = f"#{heading}" if heading else ""
        return f"{REPOSITORY}{view}/main/{path.relative_to(ROOT).as_posix()}{tail}"


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_post_transform(SourceLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
