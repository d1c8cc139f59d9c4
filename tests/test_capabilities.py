"""CAPABILITIES.md maps each public name, keyword and promise to tests that exist."""

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

import fshard as fs
from tests import house

ROOT = Path(__file__).resolve().parents[1]


def with_keywords(name: str, value: object) -> Iterator[str]:
    yield name
    # Errors, enumerations and records are made by fshard alone.
    if callable(value) and not (isinstance(value, type) and issubclass(value, BaseException | Enum | list)):
        yield from (f"{name}({parameter})" for parameter in inspect.signature(value).parameters if parameter != "self")


def public_names(objects: list[tuple[str, object]]) -> Iterator[str]:
    """Every function, class and method of some public objects, and each with each of its parameters."""
    modules = {value.__name__: f"fs.{name.rpartition('.')[2]}" for name, value in objects if type(value) is ModuleType}
    for full, value in objects:
        module, _, short = full.rpartition(".")
        name = f"{modules.get(module, 'fs')}.{short}"
        if type(value) is not ModuleType:
            yield from with_keywords(name, value)
        for member, kept in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and isinstance(kept, FunctionType | classmethod | property):
                yield from with_keywords(f"{name}.{member}", getattr(value, member))


@cache
def existing_tests() -> set[str]:
    tests: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        tests |= {f"`{path.relative_to(ROOT)}::{name}`" for name in names}
    return tests


def breaches(text: str, public: set[str], core: bool = False) -> Iterator[str]:
    """List the errors of a map of these public names, or with `core` those that do not need extensions to be found."""
    unmapped = set(public)
    for line in text.splitlines():
        if not line.startswith("| ") or line.startswith("| capability |"):
            continue
        capability, evidence, ring, state = (cell.strip() for cell in line.strip("|").split(" | "))
        spelled = re.findall(r"`(fs\.[\w.]+)(?:\(([^)]*)\))?`", capability)
        names = {f"{name}({keyword})" for name, keywords in spelled for keyword in re.findall(r"\w+", keywords)}
        names |= {name for name, keywords in spelled if state == "kept" or not keywords}
        if ring not in ("core", "ext") or state not in ("kept", "given up"):
            yield f"{capability}: expected core or ext, kept or given up, got {ring}, {state}"
        elif state == "kept":
            tests = (test for test in evidence.split(", ") if not (core and test.startswith("`tests/ext/")))
            yield from (f"{capability}: no test {test}" for test in tests if test not in existing_tests())
            if not (core and ring == "ext"):
                yield from (f"{capability}: no public {name}" for name in sorted(names - public))
            unmapped -= names
        else:
            yield from (f"{capability}: {name} still exists" for name in sorted(names & public))
            if "::" in evidence or " " not in evidence:
                yield f"{capability}: expected a reason, got {evidence!r}"
    yield from (f"{name} has no row" for name in sorted(unmapped))


def test_every_capability_has_a_row_and_every_row_a_test():
    """Of the core; tests/ext/test_house.py reads the whole map."""
    text = (ROOT / "tests/CAPABILITIES.md").read_text()
    public = set(public_names([*house.public_objects(fs)]))
    assert list(breaches(text, public, core=True)) == []
