"""The faults can be planted: each line is there once, and the file with the fault is still Python."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.faults import FAULTS, TOPICS, Fault
from tests.mutants.report import judged

ROOT = Path(__file__).resolve().parents[2]


def test_counts() -> None:
    assert Counter(fault.topic for fault in FAULTS) == TOPICS
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def check_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    found = [line.strip() for line in text.split("\n")].count(fault.before)
    assert found == 1, f"{fault.file} has its line {found} times; plant the same fault in the line that took its place"
    assert ast.dump(ast.parse(fault.planted(text))) != ast.dump(ast.parse(text))
    assert all((ROOT / test).exists() for test in fault.tests)


IN_EXTENSIONS = [fault for fault in FAULTS if fault.file.startswith("fshard/ext/")]


@pytest.mark.rows(len(FAULTS))
@pytest.mark.parametrize("fault", [f for f in FAULTS if f not in IN_EXTENSIONS], ids=lambda fault: fault.name)
def test_planted(fault: Fault) -> None:
    check_planted(fault)


def test_judged() -> None:
    failed, broken = "FAILED tests/a.py::test_b - assert 1 == 2", "ERROR tests/a.py - SyntaxError"
    stopped = f"{failed}\n!!! xdist.dsession.Interrupted: stopping after 1 failures !!!"
    assert judged(1, failed) == judged(2, stopped) == ("found", "tests/a.py::test_b")
    assert judged(0, "3 passed")[0] == judged(None, "")[0] == "missed"
    assert judged(1, broken)[0] == judged(2, failed)[0] == "broken"
