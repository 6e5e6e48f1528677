"""Configuration of Sphinx: `make docs` builds the pages of this folder."""

import re
from pathlib import Path
from typing import Any

from sdc.burnin import exports
from sdc.records import layout

project = "jax-sdc"
author = "the authors of jax-sdc"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_typehints = "none"  # the signatures say enough, in the text of the types
myst_heading_anchors = 3
exclude_patterns = ["_build", "results/*", "jupyter_execute"]
nb_execution_cache_path = str(Path(__file__).parent / "_build" / ".jupyter_cache")
nb_execution_mode = "cache"  # the notebook runs again when its code changes
nb_execution_timeout = 600
nb_execution_raise_on_error = True
html_theme = "furo"
html_title = "jax-sdc"
html_theme_options = {
    "source_repository": "https://github.com/jax-sdc/jax-sdc/",
    "source_branch": "main",
    "source_directory": "docs/",
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def complete(app: Any, page: str, source: list[str]) -> None:
    """Writes the tables of fields into a page before Sphinx parses it, and turns links to files above into pages."""
    source[0] = layout.render_tables(source[0], (*layout.TABLES, *exports.TABLES))
    above = r"\]\(\.\./(BENCHMARKS|CHANGELOG|CONTRIBUTING)"
    source[0] = re.sub(above, lambda match: f"]({match[1].lower()}", source[0])


def setup(app: Any) -> None:
    """Sphinx calls this when it starts."""
    app.connect("source-read", complete)
