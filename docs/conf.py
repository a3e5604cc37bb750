"""Configuration of the documentation site; docs/build_site.py collects the pages and starts Sphinx.

Nothing is loaded from the network, neither when the site is built nor when it is read.
"""

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from docstrings import to_rst  # noqa: E402

from semidice import __version__  # noqa: E402

project = "semidice"
author = "the semidice developers"
release = version = __version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "sphinx-mathjax-offline",
]

# pages are written for the forge: dollar signs, ```math and links to headings work there too
myst_enable_extensions = ["dollarmath", "colon_fence", "html_image"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
# console output and file trees have no language
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
# without it, a signature with every option is one line of 600 characters
maximum_signature_line_length = 88
# defaults as in the source: "min", not a repr
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"

sphinx_gallery_conf = {
    "examples_dirs": [str(DOCS / "gallery")],
    "gallery_dirs": ["examples"],
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "min_reported_time": 1,
    "abort_on_example_error": True,
    "matplotlib_animations": False,
    "plot_gallery": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "capture_repr": (),
    "reset_modules": ("matplotlib",),
    "default_thumb_file": str(DOCS / "figures" / "landing.png"),
}

html_theme = "pydata_sphinx_theme"
html_title = "semidice"
html_static_path = [str(DOCS / "site" / "static")]
html_css_files = ["site.css"]
html_extra_path = [str(DOCS.parent / "build" / "site_source" / "extra")]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "semidice"},
    "navbar_align": "left",
    "header_links_before_dropdown": 8,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "back_to_top_button": False,
}
html_context = {"default_mode": "auto"}
# pages without others in their section have no list of them
html_sidebars: dict[str, list[str]] = {name: [] for name in ("index", "start", "choose", "search")}
copyright = "the semidice developers. Apache-2.0"


def _docstring(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Any) -> None:
    # before napoleon, which reads the section Args
    app.connect("autodoc-process-docstring", _docstring, priority=100)
