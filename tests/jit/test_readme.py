"""The README of jit: its example prints what stands there, and it names what is there."""

import inspect
import re
from importlib import import_module

from fshard.jit.jit import Jitted
from tests.test_guide import ROOT, dead_links, tables

README = ROOT / "fshard/jit/README.md"
TEXT = README.read_text()


def test_the_example_prints_what_stands_in_the_readme(capsys):
    ((program, printed),) = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", TEXT, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out == printed


def test_the_passes_are_those_of_a_program_in_their_order():
    (passes,) = [rows for rows in tables(TEXT) if rows[0][0] == "pass"]
    names = [row[0] for row in passes[1:]]
    calls = re.findall(r"\b(\w+)\(", inspect.getsource(Jitted._build_program))
    assert [name for name in calls if name in names] == names
    imported = vars(import_module("fshard.jit.jit"))
    functions = {name for name in calls if getattr(imported.get(name), "__module__", "").startswith("fshard.jit.")}
    assert functions - {*names} == {"trace", "find_inputs", "Program", "CapturedTensor", "_describe_capture"}


def test_every_file_and_every_name_is_there():
    (files,) = [rows for rows in tables(TEXT) if rows[0][0] == "file"]
    package = README.parent
    assert {row[0] for row in files[1:]} == {path.name for path in package.glob("*.py")} - {"__init__.py"}
    source = "".join(path.read_text() for path in package.glob("*.py"))
    names = re.findall(r"`(?:\w+\.)?(_\w+|[a-z]\w*_\w+)`", TEXT)
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []
    assert list(dead_links(README)) == []
