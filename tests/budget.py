"""The budget of code: tokens of core and extensions, and the density of each room, held by `tests/BUDGET.md`.

A line of code is one that is not blank, not a comment alone and not part of a docstring; tokens are counted on lines of
code. `python -m tests.budget` prints the table; `--write` writes it anew: tokens as they are, other columns where they
went down.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests/BUDGET.md"
TOKENS_PER_LINE = 10.0
FUNCTION_LINES = 40
STRING_LENGTH = 200
# The ring of a room; examples and benchmarks are in none.
RINGS = ("core", "extensions", None)
# How far the tokens of a room may be from its row before the table has to be written anew.
ROW_SLACK = 0.1
LAYOUT = {
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER),
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

# Several rules read each file, which is parsed and measured once for all of them.
parsed = cache(ast.parse)


class Size(NamedTuple):
    """The size of a room."""

    tokens: int = 0  # tokens of code
    lines: int = 0  # lines of code
    long_functions: int = 0  # functions of more than FUNCTION_LINES lines of code

    @property
    def density(self) -> float:
        return self.tokens / self.lines

    def plus(self, other: "Size") -> "Size":
        return Size(*map(sum, zip(self, other, strict=True)))


class Row(NamedTuple):
    """What the table says of a room."""

    tokens: int
    density: float
    long_functions: int

    def __str__(self) -> str:
        return f"{self.tokens:,} | {self.density:.1f} | {self.long_functions}"


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            yield node.body[0].value


def tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a file but for its layout; an f-string is one, as before Python 3.12, which tells its parts."""
    nested = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            nested += 1
        elif kind.endswith("STRING_END"):
            nested -= 1
        elif token.type in LAYOUT:
            continue
        if not nested:
            yield token


@cache
def measure(text: str) -> Size:
    """The size of one file."""
    tree = parsed(text)
    documentation = {n for doc in docstrings(tree) for n in range(doc.lineno, doc.end_lineno + 1)}
    tokens = [token for token in tokens_of(text) if token.start[0] not in documentation]
    code = {n for token in tokens for n in range(token.start[0], token.end[0] + 1)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [len(code.intersection(range(node.lineno, node.end_lineno + 1))) for node in functions]
    return Size(len(tokens), len(code), sum(lines > FUNCTION_LINES for lines in lengths))


def room_of(path: Path) -> str:
    """The room of a file: a folder or file of fshard or fshard/ext; examples and benchmarks are a room each."""
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    if folder != "fshard":
        return folder
    return "/".join(inner[:2]) if inner[0] == "ext" else inner[0]


def sizes(rings: Collection[str | None] = RINGS) -> dict[str, Size]:
    """The size of each room of some rings, as the files are now."""
    found: dict[str, Size] = {}
    for folder in ("fshard", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            room = room_of(path)
            if ring_of(room) not in rings:
                continue
            found[room] = found.get(room, Size()).plus(measure(path.read_text()))
    return {room: size for room, size in found.items() if size.lines}


def ring_of(room: str) -> str | None:
    """The ring of a room: "core" or "extensions"; None for examples and benchmarks."""
    if room in ("examples", "benchmarks"):
        return None
    return "extensions" if room.startswith("ext/") else "core"


def tokens_of_rings(table: Mapping[str, Size]) -> dict[str, int]:
    """The tokens of core and extensions together."""
    totals = {"core": 0, "extensions": 0}
    for room, size in table.items():
        ring = ring_of(room)
        if ring is not None:
            totals[ring] += size.tokens
    return totals


def rows(rings: Collection[str | None] = RINGS) -> dict[str, Row]:
    """The budget of each room of some rings, as the table says."""
    table = re.findall(r"^\| `([\w/]+)` \| ([\d,]+) \| ([\d.]+) \| (\d+) \|", TABLE.read_text(), re.MULTILINE)
    return {
        room: Row(_number(tokens), float(density), int(long))
        for room, tokens, density, long in table
        if ring_of(room) in rings
    }


def limits() -> dict[str, int]:
    """The most tokens that each ring may have, as the table's text says."""
    limits = re.findall(r"^- (core|extensions): at most ([\d,]+) tokens", TABLE.read_text(), re.MULTILINE)
    return {ring: _number(limit) for ring, limit in limits}


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def write_rows() -> None:
    """Write the table anew: tokens as they are; density and long functions where they went down."""
    text = TABLE.read_text()
    head, _, rest = text.partition("| room")
    files = rest[rest.index("\n## ") :]
    lines = ["| room | tokens | tokens a line | functions of over 40 lines |", "|---|---|---|---|"]
    before = rows()
    for room, size in sorted(sizes().items()):
        row = Row(size.tokens, size.density, size.long_functions)
        if room in before:
            density = min(row.density, before[room].density)
            row = Row(row.tokens, density, min(row.long_functions, before[room].long_functions))
        lines.append(f"| `{room}` | {row} |")
    TABLE.write_text(head + "\n".join(lines) + "\n" + files)


def breaches(now: Mapping[str, Size], budget: Mapping[str, Row], most: Mapping[str, int]) -> list[str]:
    """Rooms without a row, too dense or far from their rows, and rings over their limits."""
    errors = [f"{room}: expected a row in {TABLE.name} and files" for room in now.keys() ^ budget.keys()]
    for room in now.keys() & budget.keys():
        size = now[room]
        row = budget[room]
        # The table has one decimal.
        densest = max(TOKENS_PER_LINE, row.density) + 0.05
        if size.density > densest:
            errors.append(f"{room}: expected at most {densest:.4g} tokens a line, got {size.density:.4g}")
        if size.long_functions > row.long_functions:
            long = f"functions of over {FUNCTION_LINES} lines"
            errors.append(f"{room}: expected at most {row.long_functions} {long}, got {size.long_functions}")
        if abs(size.tokens - row.tokens) > ROW_SLACK * row.tokens:
            remedy = "write the table anew by `python -m tests.budget --write`"
            errors.append(f"{room}: has {size.tokens:,} tokens, and its row {row.tokens:,}; {remedy}")
    for ring, tokens in tokens_of_rings(now).items():
        if tokens > most.get(ring, tokens):
            errors.append(f"{ring}: expected at most {most[ring]:,} tokens, got {tokens:,}")
    return sorted(errors)


def hidden_code(text: str) -> list[str]:
    """Code that no count of lines and tokens sees: long strings, `exec` and `eval`."""
    tree, errors = parsed(text), []
    documentation = set(docstrings(tree))
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) and node not in documentation else None
        # A list of names is data.
        if isinstance(value, str) and len(value) > STRING_LENGTH and not re.fullmatch(r"[\w\s]+", value):
            errors.append(f"{node.lineno}: a string of {len(value)} characters")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"exec", "eval", "compile"}:
            errors.append(f"{node.lineno}: {ast.unparse(node.func)}")
    return errors


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_rows()
    measured = sizes()
    for room, size in sorted(measured.items()):
        print(f"{room:<24}{Row(size.tokens, size.density, size.long_functions)}")
    for ring, tokens in tokens_of_rings(measured).items():
        print(f"{ring}: {tokens:,} tokens, at most {limits()[ring]:,}")
