"""The pages of the documentation: their programs run, and the API reference has every public name."""

import io
import linecache
import re
import runpy
import shutil
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

import fshard as fs
from fshard import checkpoint, comm, testing
from fshard.testing import spmd

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETUP = DOCS / "setup.py"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\nranks: (\d)\n---\n")
# `tests/ext/replay/test_page.py` runs this page, and compares what it prints.
COMPARED = DOCS / "how_to/find_the_nan.md"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text()) and page != COMPARED]
# Pages of which each trace takes seconds: `make slow` runs them. The tests of their folders make the same calls.
LONG = {
    *("errors.md", "how_to/check_a_step.md", "how_to/fine_tune.md", "how_to/fit_memory.md", "how_to/jit.md"),
    *("how_to/norms_and_logging.md", "how_to/plan_memory.md", "how_to/profile.md", "how_to/same_bits.md"),
    "how_to/save_graphs.md",
}
# These show times, masks of processes, and the last line of a loop that is cut short here.
OTHER_NUMBERS = ("how_to/norms_and_logging.md", "how_to/profile.md", "start.md")


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def blank(text: str) -> str:
    """Keep the ends of lines, so that the lines behind have their numbers."""
    return "\n" * text.count("\n")


class Program(NamedTuple):
    """A program of a page, on the lines of the page, and the text that the page shows behind it."""

    code: str
    shown: str


def programs_of(page: Path) -> list[Program]:
    """The programs of a page, which continue each other; two steps of a long loop."""
    text = page.read_text().replace("range(200)", "range(2)")
    programs = []
    for block in BLOCK.finditer(text):
        (following,) = re.findall(r"\A(.*?)(?=^```python|\Z)", text[block.end() :], re.DOTALL | re.MULTILINE)
        shown = re.search(r"^```text\n(.*?)^```$", following, re.DOTALL | re.MULTILINE)
        programs.append(Program(blank(text[: block.start(1)]) + block[1], shown[1] if shown else ""))
    return programs


def program_of(page: Path) -> str:
    """The programs of a page as one, on the lines of the page."""
    lines = [program.code.split("\n") for program in programs_of(page)]
    return "\n".join(["".join(parts) for parts in zip_longest(*lines, fillvalue="")])


def without_lines(text: str) -> str:
    """What a program prints, but for the files and lines of a page, which its text calls train.py."""
    return re.sub(r"\S+\.(md|py):\d+", "train.py", text).strip()


@pytest.mark.rows(100)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if name_of(page) in LONG else ()) for page in PAGES], ids=name_of
)
def test_the_programs_of_a_page_run(page, tmp_path, monkeypatch):
    """On two ranks, or as many as the page says at its beginning; the first prints what the page shows."""
    monkeypatch.chdir(tmp_path)
    # As launchers name a job.
    monkeypatch.setenv("FSHARD_JOB_ID", "a page")
    front_matter = FRONT_MATTER.match(page.read_text())
    world_size = int(front_matter[1]) if front_matter else 2
    setup = compile(SETUP.read_text(), str(SETUP), "exec")
    programs = [(compile(program.code, str(page), "exec"), program.shown) for program in programs_of(page)]
    # A page is no source that inspect would find.
    linecache.checkcache(str(page))

    def run():
        printed = io.StringIO()
        scope = {"__name__": "page", "print": partial(print, file=printed)}
        exec(setup, scope)
        for program, shown in programs:
            printed.truncate(0)
            printed.seek(0)
            exec(program, scope)
            if shown and printed.getvalue() and name_of(page) not in OTHER_NUMBERS:
                assert without_lines(printed.getvalue()) == without_lines(shown)

    spmd(run, world_size, timeout=200.0)


def test_the_reference_has_every_public_name():
    listed = []
    for page in (DOCS / "reference").glob("*.md"):
        listed += re.findall(r"^\.\. auto\w+:: fshard\.(\S+)$", page.read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    modules = {"checkpoint": checkpoint, "comm": comm, "testing": testing}
    public = {name for name in fs.__all__ if name not in modules and name not in ("__version__", "moe", "schedules")}
    for prefix, module in modules.items():
        public |= {f"{prefix}.{name}" for name in module.__all__}
    # Modules of extensions are listed name by name.
    assert {name for name in listed if not name.startswith(("moe.", "schedules."))} == public


def test_pictures_are_what_their_scripts_draw(tmp_path):
    """From the committed results, so that a picture has the figures of the tables."""
    pictures = DOCS / "pictures"
    copy = tmp_path / "docs/pictures"
    copy.mkdir(parents=True)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for script in pictures.glob("draw_*.py"):
        runpy.run_path(shutil.copy(script, copy), run_name="__main__")
    drawn = {path.name: path.read_text() for path in copy.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in pictures.glob("*.svg")}
