"""One-line faults of the kind that people make, each against a law of fshard's contract: those of `faults.txt`.

They were chosen by reading the package, not its tests. When a line is rebuilt, plant the same fault in the new one.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/mutants/RESULTS.md"


class Fault(NamedTuple):
    """The line `before`, which a file has once, less its indentation, becomes `after`; the law has its number."""

    name: str
    file: str
    before: str
    after: str
    law: str

    def planted(self, text: str) -> str:
        """Put the fault into the text of its file."""
        lines = text.split("\n")
        (place,) = [i for i, line in enumerate(lines) if line.strip() == self.before]
        lines[place] = lines[place].replace(self.before, self.after)
        return "\n".join(lines)

    @property
    def tests(self) -> tuple[str, ...]:
        """The file of the test that has found it, and the tests of its room."""
        return (*filter(None, (finders().get(self.name),)), *tests_of_room(Path(self.file)))


@cache
def finders() -> dict[str, str]:
    """Read which file's tests have found each fault."""
    rows = re.findall(r"^\| (\S+) \|.*\| found \| ([\w/]+\.py)::", RESULTS.read_text(), re.MULTILINE)
    return dict(rows)


def tests_of_room(file: Path) -> Iterator[str]:
    """List the tests with the name of a file, and those of the folders above it, up to its room."""
    for place in (file.with_suffix(""), *file.parents):
        folder = ROOT / "tests" / place.relative_to("fshard")
        for path in (*sorted(folder.parent.glob(f"test_{folder.name}*.py")), folder):
            if path.exists():
                yield str(path.relative_to(ROOT))
        if place.parent.name in ("fshard", "ext"):
            return


def read_faults(text: str) -> Iterator[Fault]:
    """Read the faults of `faults.txt`: below the name of a file, three lines for each."""
    file = ""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("== "):
            file = line.removeprefix("== ")
        elif line and not line.startswith("# "):
            name, law = line.split(" | ", 1)
            (before_mark, before), (after_mark, after) = (next(lines).split(" ", 1) for _ in range(2))
            if (before_mark, after_mark) != ("-", "+"):
                raise ValueError(f"{name}: expected a line after '- ' and one after '+ '")
            yield Fault(name, file, before, after, law)


FAULTS = tuple(read_faults(Path(__file__).with_name("faults.txt").read_text()))
