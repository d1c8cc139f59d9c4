"""The README of jit: its example prints what stands there, and its passes are those of a program."""

import inspect
import re
from importlib import import_module

from fshard.jit.jit import Jitted
from tests.test_guide import ROOT, tables

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
    assert functions - {*names} == {"trace", "find_inputs", "Program"}
