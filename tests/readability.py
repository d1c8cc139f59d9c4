"""How each file of the package reads: density, names, branches, types. `make house` prints the table.

`python -m tests.readability` prints it, with the totals that `tests/BUDGET.md` limits; `--write` writes both there:
the table as it is, the limits where they went down. These are signs, not aims: a function that is cut into four which
must be read together is worse than one.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
BRANCHES = ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case
MARK = "| file |"


class Reading(NamedTuple):
    """How one file reads."""

    tokens: int  # tokens of code
    lines: int  # lines of code
    comprehensions: int  # comprehensions and generator expressions
    name_letters: int  # letters of the names that the file binds, each name once
    names: int  # how many names it binds
    branches: int  # branches of the function that has most
    parameters: int  # parameters of the function that has most, but for `self` and `cls`
    attributes: int  # attributes of the class that has most
    any_parameters: int  # parameters that may be anything
    type_ignores: int  # lines that mypy is told to pass over
    weak_names: int  # how often a name of `WEAK_NAMES` is bound
    participles: int  # functions whose name is a participle, such as `owned`

    @property
    def density(self) -> float:
        """Tokens a line of code."""
        return self.tokens / max(self.lines, 1)

    def row(self) -> str:
        """The columns of the table."""
        comprehensions = 100 * self.comprehensions / max(self.lines, 1)
        length = self.name_letters / max(self.names, 1)
        columns = (
            f"{self.tokens:,}",
            f"{self.density:.1f}",
            f"{comprehensions:.0f}",
            f"{length:.1f}",
            *(self.branches, self.parameters, self.attributes, self.any_parameters, self.type_ignores),
            *(self.weak_names, self.participles),
        )
        return " | ".join(map(str, columns))


COLUMNS = (
    *("file", "tokens", "tokens a line", "comprehensions / 100 lines", "letters a name", "branches, worst function"),
    *("parameters, worst function", "attributes, largest class", "`Any` parameters", "type-ignores", "weak names"),
    "participles",
)


def read(text: str) -> Reading:
    """Measure one file."""
    tree = parsed(text)
    size = measure(text)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    parameters = [parameter for function in functions for parameter in parameters_of(function)]
    bound = Counter(bound_names(nodes))
    names = {name.strip("_") for name in bound} - {""}
    return Reading(
        tokens=size.tokens,
        lines=size.lines,
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        name_letters=sum(map(len, names)),
        names=len(names),
        branches=max(map(branches_of, functions), default=0),
        parameters=max((len(list(parameters_of(function))) for function in functions), default=0),
        attributes=max((len(attributes_of(node)) for node in nodes if isinstance(node, ast.ClassDef)), default=0),
        any_parameters=sum(mentions_any(parameter.annotation) for parameter in parameters),
        type_ignores=text.count("# type: ignore"),
        weak_names=sum(bound[name] for name in WEAK_NAMES),
        participles=sum(is_participle(function.name) for function in functions),
    )


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.arg]:
    """List the parameters of a function, but for `self` and `cls`."""
    arguments = function.args
    for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if parameter.arg not in ("self", "cls"):
            yield parameter
    yield from filter(None, (arguments.vararg, arguments.kwarg))


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """List the names of values that a file binds: variables, parameters and fields, as often as it does."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def branches_of(function: ast.AST) -> int:
    """Count the places where a function goes one way or another, loops included."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
    return count


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Collect the fields that a class declares and the attributes that its methods assign to `self`."""
    attributes = {
        statement.target.id
        for statement in cls.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    for node in ast.walk(cls):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            attributes.add(node.attr)
    return attributes


def mentions_any(annotation: ast.expr | None) -> bool:
    """Tell whether an annotation is `Any`, alone or as one of several types."""
    return annotation is not None and any(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation)
    )


def is_participle(name: str) -> bool:
    """Tell whether a function is called by what it returns, such as `owned`, and not by what it does."""
    last = name.rpartition("_")[2]
    is_question = name.startswith(("is_", "has_", "was_"))
    return bool(PARTICIPLE.fullmatch(last)) and last not in VERBS and not is_question


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
        f"files of over {DENSE} tokens a line": sum(reading.density > DENSE for reading in measured),
        "comprehensions per 100 lines": round(100 * sum(reading.comprehensions for reading in measured) / lines, 1),
        "weak names": sum(reading.weak_names for reading in measured),
        "participles": sum(reading.participles for reading in measured),
    }


def limits(text: str) -> dict[str, float]:
    """Read the limits of the whole package from the text of the table."""
    rows = re.findall(r"^- package: at most ([\d.]+) (.+?) \(", text, re.MULTILINE)
    return {name: float(limit) for limit, name in rows}


def excesses(sums: Mapping[str, float], most: Mapping[str, float]) -> list[str]:
    """Name the totals that are over their limits, or have none."""
    errors = [f"package: expected a limit of {name}" for name in sums.keys() - most.keys()]
    for name, total in sums.items():
        if total > most.get(name, total):
            errors.append(f"package: expected at most {most[name]:g} {name}, got {total:g}")
    return sorted(errors)


def risen_names(files: Mapping[str, Reading], text: str) -> list[str]:
    """Name the files that have more weak names or participles than their rows say, with the participles."""
    lines = []
    for name, reading in files.items():
        row = re.search(rf"^\| `{re.escape(name)}` \|.* (\d+) \| (\d+) \|$", text, re.MULTILINE)
        weak_names, participles = map(int, row.groups()) if row else (0, 0)
        if reading.weak_names > weak_names:
            lines.append(f"{name}: {reading.weak_names} weak names, its row says {weak_names}")
        if reading.participles > participles:
            nodes = ast.walk(ast.parse((ROOT / "fshard" / name).read_text()))
            functions = [node.name for node in nodes if isinstance(node, FUNCTIONS) and is_participle(node.name)]
            lines.append(f"{name}: {reading.participles} participles, its row says {participles}: {functions}")
    return lines


def table(files: Mapping[str, Reading]) -> str:
    """Make the table of all files."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| `{name}` | {reading.row()} |" for name, reading in files.items() if reading.lines]
    return "\n".join(lines)


def write(path: Path, files: Mapping[str, Reading]) -> None:
    """Write the table of files, and limits where totals went down."""
    text = path.read_text()
    before = limits(text)
    for name, total in totals(files).items():
        if total < before[name]:
            text = text.replace(f"- package: at most {before[name]:g} {name}", f"- package: at most {total:g} {name}")
    head = text[: text.index(MARK)]
    path.write_text(head + table(files) + "\n")


if __name__ == "__main__":
    measured = readings()
    if "--write" in sys.argv:
        write(TABLE, measured)
    print(table(measured))
    for total_name, package_total in totals(measured).items():
        print(f"package: {package_total:g} {total_name}, at most {limits(TABLE.read_text())[total_name]:g}")
