"""How Sphinx builds the documentation: `make docs`.

Docstrings are written as people read them in an editor, with names in single backticks. Sphinx reads reStructuredText,
where a star begins an emphasis and a trailing underscore a link, so `escape_docstring` translates them.
"""

import collections
import importlib.metadata
import re
from typing import Any

project = "fshard"
author = "the fshard authors"
html_show_copyright = False
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
napoleon_use_ivar = True

# Links into torch's own documentation need its inventory, which a build without a network does not have.
intersphinx_mapping: dict[str, tuple[str, None]] = {}
nitpicky = False

html_theme = "furo"
html_title = "fshard"
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a8", "color-brand-content": "#5fd3a8"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

LITERAL = re.compile(r"(`[^`]*`)")
ARGUMENT = re.compile(r"^ *\*{1,2}\w+:")


def escape_line(line: str) -> str:
    """Translate one line of prose: literals get double backticks, and other text has no markup."""
    start = ""
    argument = ARGUMENT.match(line)
    if argument:
        # napoleon reads the stars of *args itself.
        start = argument[0]
        line = line[len(start) :]
    parts = LITERAL.split(line)
    for number, part in enumerate(parts):
        is_literal = number % 2 == 1
        parts[number] = f"`{part}`" if is_literal else re.sub(r"\*|\||_(?=\W|$)|(?<!\w)_", r"\\\g<0>", part)
    return start + "".join(parts)


def escape_docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Translate a docstring, but for its examples, which end at an empty line."""
    is_example = False
    for number, line in enumerate(lines):
        is_example = line.strip().startswith(">>>") or (is_example and bool(line.strip()))
        if not is_example:
            lines[number] = escape_line(line)


def skip_fields(app: Any, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples: their classes' docstrings describe them."""
    return True if isinstance(value, type(collections.namedtuple("Pair", "first").first)) else None


def setup(app: Any) -> None:
    """Connect both functions, the first one before napoleon takes docstrings apart."""
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)
    app.connect("autodoc-skip-member", skip_fields)
