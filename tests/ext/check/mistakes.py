"""The table of planted mistakes: steps of users that are wrong, and where a report on each must point.

A row is a loss or a step of the modules KNOWN and NEW, marked by `mistake`. The line that a user has to mend ends in
`# <- here`. What follows on `right:` is the code that mends a line, so that the same modules without mistakes are steps
in which nothing may be reported.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import fshard as fs
from tests.ext.check.programs import Make

KNOWN = ("mixed_values", "unlike_ddp")
NEW = ("wrong_losses", "wrong_updates", "wrong_results", "wrong_methods")
SHARD: Mapping[str, int] = {"shard": 8}
SHARD_TP: Mapping[str, int] = {"shard": 4, "tp": 2}
HERE, RIGHT = "# <- here", re.compile(r"^(\s*).*#.*?\bright: (.*)$")


class Mistake(NamedTuple):
    """A row of the table."""

    module: str  # the module that has the step
    name: str  # the function that makes it
    kinds: tuple[str, ...]  # the kinds of problem that a report may give
    mesh: Mapping[str, int]  # ranks on each axis
    only_a_run: str  # why no analysis without values can find it; empty where one can
    missed: str  # why a report says nothing of it all the same; empty where it must
    word: str  # of a row that only a run can find, a word of the sentence in which the report says so
    # Makes the step and its arguments, of a mesh of one rank with the same axes.
    make: Make
    lines: frozenset[int]  # the lines of the module that a report may point to

    @property
    def file(self) -> Path:
        """The module's file."""
        return Path(inspect.getfile(inspect.unwrap(self.make)))

    def judge(self, report: Any) -> "Outcome":
        """Compare a report with the row."""
        kinds = {problem.kind for problem in report.problems}
        places = {
            (Path(problem.frames[0].file), problem.frames[0].line) for problem in report.problems if problem.frames
        }
        return Outcome(
            problems=len(report.problems),
            kind=", ".join(sorted(kinds)),
            is_found=bool(kinds & set(self.kinds)),
            is_line_right=any((self.file, line) in places for line in self.lines),
        )


class Outcome(NamedTuple):
    """What a report says of a row."""

    problems: int  # the number of problems
    kind: str  # the kinds of all of them
    is_found: bool  # whether one is of a kind of the row
    is_line_right: bool  # whether one points to a line of the row


def mistake(
    *kinds: str,
    make: Callable[[Callable[..., Any]], Make],
    mesh: Mapping[str, int] = SHARD,
    only_a_run: str = "",
    missed: str = "",
    word: str = "",
) -> Callable[..., Any]:
    """Mark a loss or a step as a row of the table; `make` is from_loss or from_step, for the others see `Mistake`."""

    def decorate(function: Callable[..., Any]) -> Make:
        row = make(function)
        vars(row)["row"] = kinds, mesh, only_a_run, missed, word
        return row

    return decorate


def table(modules: tuple[str, ...] = KNOWN + NEW) -> list[Mistake]:
    """List the rows of modules in their order."""
    rows = []
    for name in modules:
        for make in vars(import_module(f"tests.ext.check.{name}")).values():
            if hasattr(make, "row"):
                rows.append(Mistake(name, make.__name__, *make.row, make, find_marked_lines(make)))
    return rows


def find_marked_lines(make: Callable[..., Any]) -> frozenset[int]:
    """Find the lines of a function that a report may point to."""
    lines, first = inspect.getsourcelines(make)
    return frozenset(number for number, line in enumerate(lines, first) if HERE in line)


def mended(module: str) -> list[Mistake]:
    """List the rows of a module in which every line with a `right:` has the code that follows on it."""
    path = Path(__file__).with_name(f"{module}.py")
    lines = []
    for line in path.read_text().splitlines():
        match = RIGHT.match(line)
        lines.append(line if match is None else "".join(match.groups()))
    namespace: dict[str, Any] = {"__name__": f"tests.ext.check.{module}", "__file__": str(path)}
    exec(compile("\n".join(lines), path, "exec"), namespace)
    rows = []
    for row in table((module,)):
        if "right: " in inspect.getsource(row.make):
            rows.append(row._replace(make=namespace[row.name]))
    return rows


def check(make: Make, mesh: Mapping[str, int]) -> Any:
    """Return the report on what a function makes of a mesh of one rank, for a mesh of many."""
    step, *args = make(fs.init_mesh(dict.fromkeys(mesh, 1), device="cpu"))
    return fs.check(step, *args, mesh=mesh)
