"""How the site is built: `make docs`. What is particular to this project lives in `_ext`."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE / "_ext"),
    *(str(HERE.parent / name) for name in ("", "kernel_ext", "panels")),
]

project = "gpu-console"
author = "the authors of gpu-console"
version = release = version_of("gpu-console")

extensions = ["myst_nb", "sphinx_design", "site_checks"]
exclude_patterns = ["_build", "_ext"]
nb_execution_mode = "off"  # the stored outputs are shown; `make test` compares them
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # no widgets, so nothing is fetched from elsewhere
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"
nb_render_error_lexer = "text"
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "pydata_sphinx_theme"
html_title = "gpu-console"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_ext/search_order.js")
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "navbar_end": ["theme-switcher"],
    "navigation_depth": 2,
    "show_nav_level": 2,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "logo": {"text": "gpu-console"},
    "pygments_light_style": "default",
    "pygments_dark_style": "github-dark",
}
html_sidebars = {
    name: []
    for name in ("index", "getting_started", "installation", "faq", "runbooks", "architecture")
}
copyright = "2026 the gpu-console authors. MIT licence"
