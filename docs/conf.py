"""Configuration of Sphinx: `make docs` builds the pages of this folder."""

import re
from typing import Any

from sdc.burnin import exports
from sdc.records import layout

project = "jax-sdc"
author = "the authors of jax-sdc"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_typehints = "none"  # the signatures say enough, in the text of the types
myst_heading_anchors = 3
exclude_patterns = ["_build", "results/*"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "Silent data corruption in JAX programs"}


def complete(app: Any, page: str, source: list[str]) -> None:
    """Writes the tables of fields into a page before Sphinx parses it, and turns links to files above into pages."""
    source[0] = layout.render_tables(source[0], (*layout.TABLES, *exports.TABLES))
    above = r"\]\(\.\./(BENCHMARKS|CHANGELOG|CONTRIBUTING)"
    source[0] = re.sub(above, lambda match: f"]({match[1].lower()}", source[0])


def setup(app: Any) -> None:
    """Sphinx calls this when it starts."""
    app.connect("source-read", complete)
