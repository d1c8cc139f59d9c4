"""How each file of the package reads: its density and its names. `make house` prints the table.

`python -m tests.readability` prints it, with the totals that `tests/BUDGET.md` limits; `--write` writes limits there
where the totals went down. These are signs, not aims: a function that is cut into four which must be read together is
worse than one.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.budget import ROOT, TABLE, measure, parsed

# A file with more tokens a line than this is dense.
DENSE = 11.5
# Names that say how one came by a value, not what it is.
WEAK_NAMES = {"found", "needed", "what", "own", "told", "said"}
# Endings of participles, and verbs that end alike.
PARTICIPLE = re.compile(r"\w+ed")
VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Reading(NamedTuple):
    """How one file reads."""

    tokens: int  # tokens of code
    lines: int  # lines of code
    comprehensions: int  # comprehensions and generator expressions
    weak_names: list[str]  # lines and names that bind one of `WEAK_NAMES`
    participles: list[str]  # lines and names of functions that a participle names, such as `owned`


def read(text: str) -> Reading:
    """Measure one file."""
    size = measure(text)
    nodes = list(ast.walk(parsed(text)))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    return Reading(
        tokens=size.tokens,
        lines=size.lines,
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        weak_names=[f"{line} {name}" for line, name in bound_names(nodes) if name in WEAK_NAMES],
        participles=[f"{each.lineno} {each.name}" for each in functions if is_participle(each.name)],
    )


def bound_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """List lines and names of the values that a file binds: variables, parameters and fields, as often as it does."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def is_participle(name: str) -> bool:
    """Tell whether a function is called by what it returns, such as `owned`, and not by what it does."""
    last = name.rpartition("_")[2]
    return bool(PARTICIPLE.fullmatch(last)) and last not in VERBS and not name.startswith(("is_", "has_", "was_"))


def readings() -> dict[str, Reading]:
    """Measure each file of the package."""
    files = sorted((ROOT / "fshard").rglob("*.py"))
    return {str(path.relative_to(ROOT / "fshard")): read(path.read_text()) for path in files}


def totals(files: Mapping[str, Reading]) -> dict[str, float]:
    """Add up what the table limits for the whole package."""
    measured = files.values()
    lines = sum(reading.lines for reading in measured)
    return {
        "tokens a line": round(sum(reading.tokens for reading in measured) / lines, 1),
        f"files of over {DENSE} tokens a line": sum(each.tokens > DENSE * each.lines for each in measured),
        "comprehensions per 100 lines": round(100 * sum(reading.comprehensions for reading in measured) / lines, 1),
        "weak names": sum(len(reading.weak_names) for reading in measured),
        "participles": sum(len(reading.participles) for reading in measured),
    }


def limits(text: str) -> dict[str, float]:
    """Read the limits of the whole package from the text of the table."""
    rows = re.findall(r"^- package: at most ([\d.]+) (.+?) \(", text, re.MULTILINE)
    return {name: float(limit) for limit, name in rows}


def excesses(files: Mapping[str, Reading], most: Mapping[str, float]) -> list[str]:
    """Name the totals that are over their limits, and the names that count."""
    errors = []
    for name, total in totals(files).items():
        if total > most[name]:
            errors.append(f"package: expected at most {most[name]:g} {name}, got {total:g}")
    for name, reading in files.items() if errors else ():
        errors += [f"{name}:{place}" for place in (*reading.weak_names, *reading.participles)]
    return errors


def write(path: Path, files: Mapping[str, Reading]) -> None:
    """Write limits where totals went down."""
    text = path.read_text()
    before = limits(text)
    for name, total in totals(files).items():
        limit = min(total, before[name])
        text = text.replace(f"- package: at most {before[name]:g} {name}", f"- package: at most {limit:g} {name}")
    path.write_text(text)


def print_table(files: Mapping[str, Reading]) -> None:
    print("file", "tokens", "tokens a line", "comprehensions / 100 lines", "weak names", "participles", sep=" | ")
    for name, reading in files.items():
        lines = max(reading.lines, 1)
        densities = (reading.tokens / lines, 100 * reading.comprehensions / lines)
        counts = len(reading.weak_names), len(reading.participles)
        print(name, reading.tokens, *(f"{density:.1f}" for density in densities), *counts, sep=" | ")


if __name__ == "__main__":
    measured = readings()
    if "--write" in sys.argv:
        write(TABLE, measured)
    print_table(measured)
    for total_name, package_total in totals(measured).items():
        print(f"package: {package_total:g} {total_name}, at most {limits(TABLE.read_text())[total_name]:g}")
