"""How the site is built: `make docs`. Nothing is fetched from the network, before or after."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE)]

from inventories import write_inventories  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import sparsestep  # noqa: E402

project = "sparsestep"
author = "the sparsestep developers"
project_copyright = f"{author}, BSD-3-Clause"
version = release = sparsestep.__version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # MathJax as files of the site
    "sphinx_copybutton",
    "sphinx_design",
    "executed",
    "optimizers",
    "social",
    "source_links",
]
exclude_patterns = ["_build", "README.md"]
nitpicky = True

# Markdown
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # the included changelog begins with a third level

# Reference
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Its overloads are for type checkers.
_fuse = ModuleAnalyzer.for_module("sparsestep.nn.fuse")
_fuse.analyze()
del _fuse.overloads["optimizer_for"]

# Torch's and Python's names lead to their documentation; the inventories are written here.
intersphinx_mapping = write_inventories(HERE / "_build" / "inventories")
intersphinx_timeout = 1
# Types that are written in signatures and have no page of their own.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(sparsestep\.)?(deferred|distributed|engines|grads|memory|nn|optim|rules|storage)\..*",
    ),
    (
        "py:.*",
        r"(ParamsT|Tensor|Mask|Engine|Semantics|BiasCorrection|Formula|Only|Model|PlacementKind|Reduction|SumOrder|Topology|WireFormat"
        r"|Evict|Init|Table|ShardedTable|AnyOptimizer|(typing\.)?Concatenate|Options(\.k?w?args)?|Made"
        r"|functools\.partial)",
    ),
]

# Look
html_theme = "furo"
html_title = "sparsestep"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_baseurl = "https://sparsestep.readthedocs.io/en/latest/"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
_BRANDED = ("color-brand-primary", "color-brand-content", "color-api-name", "color-api-pre-name")
html_theme_options = {
    "source_repository": "https://github.com/sparsestep/sparsestep/",
    "source_branch": "main",
    "source_directory": "docs/",
    "navigation_with_keys": True,
    "light_css_variables": dict.fromkeys(_BRANDED, "#1f6fb4"),
    "dark_css_variables": dict.fromkeys(_BRANDED, "#7db8ea"),
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
