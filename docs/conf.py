"""How Sphinx builds the documentation: `make docs`."""

import importlib.metadata

project = "fshard"
author = "the fshard authors"
version = release = importlib.metadata.version("fshard")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["README.md"]

# Markdown
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings: types stand in the signatures, and examples are doctests of `make test`.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Links into torch's own documentation need its inventory, which a build without a network does not have.
intersphinx_mapping: dict[str, tuple[str, None]] = {}
nitpicky = False

html_theme = "furo"
html_title = "fshard"
html_static_path = ["pictures"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a8", "color-brand-content": "#5fd3a8"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
