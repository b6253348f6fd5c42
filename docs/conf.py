"""Sphinx builds the site from this folder: ``python -m tools.docs.site OUT``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "parallel2d"
author = "the parallel2d authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "tools.docs.generated_pages",
]
default_role = "code"  # single backticks in docstrings name code
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4  # links such as launching.md#several-nodes
html_theme = "furo"
html_title = "parallel2d"
html_static_path = ["static"]
html_css_files = ["wide_tables.css"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
exclude_patterns = ["images", "static"]
# Pages show plain blocks for commands and for what they print; neither has a language.
highlight_language = "none"
