"""The site that `make docs` builds from these pages: Sphinx, with the API from docstrings. Read without a network."""

from importlib.metadata import version as installed

from sphinx.application import Sphinx

project = "gradwire"
version = release = installed(project)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["**/*.txt"]

html_theme = "furo"  # its fonts are those of the reader's system
html_title = f"gradwire {version}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # as in links between pages

default_role = "literal"  # docstrings write code in single backticks
highlight_language = "none"
smartquotes = False  # `--` is the beginning of an option
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88


def to_included_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to pages above this folder lead to the pages that include them."""
    for page in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        source[0] = source[0].replace(f"](../{page}", f"]({page}")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", to_included_pages)
