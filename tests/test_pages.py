"""The pages of the documentation: their programs run, and their links and names lead somewhere."""

import re
from pathlib import Path

import pytest

from fshard.testing import spmd

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETUP = (DOCS / "setup.py").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\nranks: (\d)\n---\n")


def programs_of(page: Path) -> list[str]:
    """The programs of a page, which continue each other."""
    return BLOCK.findall(page.read_text())


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if programs_of(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_programs_of_a_page_run(page, tmp_path, monkeypatch):
    """On two ranks, or as many as the page says at its beginning."""
    monkeypatch.chdir(tmp_path)
    front_matter = FRONT_MATTER.match(page.read_text())
    world_size = int(front_matter[1]) if front_matter else 2
    # Blocks begin with the setup that docs/how_to/index.md shows, but for a page that says otherwise.
    program = compile("\n".join([SETUP, *programs_of(page)]), str(page), "exec")
    spmd(lambda: exec(program, {"__name__": "page"}), world_size)
