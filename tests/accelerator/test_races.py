"""Streams do not race, and what looks for races finds them where a wait, an order or a lifetime is lost."""

import json
import sys

import pytest

from tests.accelerator import races
from tests.accelerator.clocks import Race
from tests.test_processes import run_script


@pytest.fixture(scope="module")
def reports(library):
    """What each program, and each with a fault, came to."""
    result = library.with_name("races.json")
    run_script(sys.executable, races.__file__, library, result)
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
