"""The faults can be planted: each line is there once, and the file with the fault is still Python."""

import ast
from functools import cache
from pathlib import Path

from tests.budget import parsed
from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


@cache
def dump_of(text: str) -> str:
    return ast.dump(parsed(text))


def check_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    found = [line.strip() for line in text.split("\n")].count(fault.before)
    assert found == 1, f"{fault.name}: its line is there {found} times; plant the same fault in the line in its place"
    assert ast.dump(ast.parse(fault.planted(text))) != dump_of(text)
    assert all((ROOT / test.partition("::")[0]).exists() for test in fault.tests)


IN_EXTENSIONS = [fault for fault in FAULTS if fault.file.startswith("fshard/ext/")]


def test_planted() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        if fault not in IN_EXTENSIONS:
            check_planted(fault)
