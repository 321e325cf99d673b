"""Tags that search engines and link previews read, for every page."""

from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

TAGLINE = "Optimizers for PyTorch that cost what the batch uses, not what the table holds."


def add_tags(
    app: Sphinx, name: str, template: str, context: dict[str, Any], tree: nodes.document | None
) -> None:
    """Title, first paragraph and address of a page; a page without text gets the tagline."""
    if tree is None:
        return
    paragraph = next(iter(tree.findall(nodes.paragraph)), None)
    text = " ".join(paragraph.astext().split()) if paragraph else TAGLINE
    text = text if len(text) <= 200 else text[:199].rsplit(" ", 1)[0] + " …"
    title = "sparsestep" if name == "index" else f"{context['title']} · sparsestep"
    tags = {
        "og:title": title,
        "og:description": text,
        "og:type": "website",
        "og:site_name": "sparsestep",
        "og:url": f"{app.config.html_baseurl}{name}.html",
        "og:image": f"{app.config.html_baseurl}_static/social.png",
    }
    lines = [
        f'<meta property="{key}" content="{html.escape(value)}">' for key, value in tags.items()
    ]
    lines.append('<meta name="twitter:card" content="summary_large_image">')
    metatags = context.get("metatags", "")
    if 'name="description"' not in metatags:
        lines.append(f'<meta name="description" content="{html.escape(text)}">')
    context["metatags"] = "\n".join([metatags, *lines])


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("html-page-context", add_tags)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
