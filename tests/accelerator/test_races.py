"""Streams do not race, and what looks for races finds them where a wait, an order or a lifetime is lost."""

import json
import os
import subprocess
import sys

import pytest

from tests.accelerator import races
from tests.accelerator.clocks import Race
from tests.test_processes import ROOT


@pytest.fixture(scope="module")
def reports(library):
    """What each program, and each with a fault, came to."""
    result = library.with_name("races.json")
    done = subprocess.run(
        [sys.executable, races.__file__, library, result],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", races.PROGRAMS)
def test_streams_of_a_program_do_not_race(reports, name):
    report = reports[name]
    assert report["races"] == []
    # There are streams that could.
    assert report["launches"] > 100
    assert report["launches of other streams"] > 50
    assert report["waits for events"] > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", races.FAULTS)
def test_a_fault_leads_to_a_race_that_is_found(reports, name):
    pairs = [Race(*race) for *race, _ in reports[name]["races"]]
    assert races.FAULTS[name].race in pairs
