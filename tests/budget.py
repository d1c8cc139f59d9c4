"""The budget of code: lines and tokens of each room, held by `tests/BUDGET.md`.

A line of code is one that is not blank, not a comment alone and not part of a docstring. `python -m tests.budget`
prints the table; `--lower` sets the rows of rooms that shrank.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/BUDGET.md"
TOKENS_PER_LINE = 11.5
FUNCTION_LINES = 40
STRING_LENGTH = 200
LAYOUT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER),
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Size(NamedTuple):
    """Lines and tokens of code, and functions of more than FUNCTION_LINES lines."""

    lines: int = 0
    tokens: int = 0
    long_functions: int = 0

    def plus(self, other: "Size") -> "Size":
        return Size(*map(sum, zip(self, other, strict=True)))


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def measure(text: str) -> Size:
    """The size of one file."""
    tree = ast.parse(text)
    documentation = {n for doc in docstrings(tree) for n in range(doc.lineno, doc.end_lineno + 1)}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT and token.start[0] not in documentation
    ]
    code = {n for token in tokens for n in range(token.start[0], token.end[0] + 1)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = [len(code.intersection(range(node.lineno, node.end_lineno + 1))) for node in functions]
    return Size(len(code), len(tokens), sum(lines > FUNCTION_LINES for lines in own))


def room_of(path: Path) -> str:
    """The room of a file: a folder or file of fshard or fshard/ext; examples and benchmarks are a room each."""
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    if folder != "fshard":
        return folder
    return "/".join(inner[:2]) if inner[0] == "ext" else inner[0]


def sizes() -> dict[str, Size]:
    """The size of each room, as the files are now."""
    found: dict[str, Size] = {}
    for folder in ("fshard", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            room = room_of(path)
            found[room] = found.get(room, Size()).plus(measure(path.read_text()))
    return {room: size for room, size in found.items() if size.lines}


def rows() -> dict[str, Size]:
    """The budget of each room, as the table says."""
    found = re.findall(r"^\| `([\w/]+)` \| ([\d,]+) \| ([\d,]+) \| (\d+) \|", TABLE.read_text(), re.MULTILINE)
    return {room: Size(*(int(number.replace(",", "")) for number in numbers)) for room, *numbers in found}


def most_lines() -> int:
    """The most lines of code that the package may have, as the table says."""
    return int(re.search(r"at most ([\d,]+) lines", TABLE.read_text())[1].replace(",", ""))


def lower_rows() -> None:
    """Set each row to its room's size where the room is smaller."""
    text = TABLE.read_text()
    for room, size in sizes().items():
        row = rows()[room]
        lower = size if size.lines < row.lines else row
        lower = lower._replace(long_functions=min(size.long_functions, row.long_functions))
        text = text.replace(written(room, row), written(room, lower))
    TABLE.write_text(text)


def written(room: str, size: Size) -> str:
    return f"| `{room}` | {size.lines:,} | {size.tokens:,} | {size.long_functions} |"


def breaches(now: dict[str, Size], budget: dict[str, Size], most: int) -> list[str]:
    """Rooms without a row, rooms over their rows, rows that their rooms no longer need, and a sum over the most."""
    errors = [f"{room}: expected a row in {TABLE.name} and files" for room in now.keys() ^ budget.keys()]
    for room in now.keys() & budget.keys():
        size, row = now[room], budget[room]
        density = 1.01 * max(TOKENS_PER_LINE, row.tokens / row.lines)
        long = f"functions of over {FUNCTION_LINES} lines"
        for what, found, bound in (
            ("lines of code, a tenth over its row", size.lines, 1.1 * row.lines),
            ("tokens a line", size.tokens / size.lines, density),
            (long, size.long_functions, row.long_functions),
        ):
            if found > bound:
                errors.append(f"{room}: expected at most {bound:.4g} {what}, got {found:.4g}")
        if size.lines < row.lines or size.long_functions < row.long_functions:
            errors.append(f"{room}: is smaller than its row; lower it by `python -m tests.budget --lower`")
    total = sum(size.lines for room, size in now.items() if room not in ("examples", "benchmarks"))
    if total > most:
        errors.append(f"fshard: expected at most {most:,} lines of code, got {total:,}")
    return sorted(errors)


def hidden_code(text: str) -> list[str]:
    """Code that no count of lines and tokens sees: long strings, `exec` and `eval`."""
    tree, errors = ast.parse(text), []
    documentation = set(docstrings(tree))
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) and node not in documentation else None
        if isinstance(value, str) and len(value) > STRING_LENGTH:
            errors.append(f"{node.lineno}: a string of {len(value)} characters")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"exec", "eval", "compile"}:
            errors.append(f"{node.lineno}: {ast.unparse(node.func)}")
    return errors


if __name__ == "__main__":
    if "--lower" in sys.argv:
        lower_rows()
    for room, size in sorted(sizes().items()):
        print(written(room, size))
    package = sum(size.lines for room, size in sizes().items() if room not in ("examples", "benchmarks"))
    print(f"fshard: {package:,} lines of code, at most {most_lines():,}")
