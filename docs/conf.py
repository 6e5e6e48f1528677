"""Configuration of Sphinx: `make docs` builds the pages of this folder."""

project = "jax-sdc"
author = "the authors of jax-sdc"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_typehints = "none"  # the signatures say enough, in the text of the types
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "Silent data corruption in JAX programs"}
