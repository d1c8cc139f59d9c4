"""A rehearsal of accelerators, on a device that has their rules and the memory of the processor."""

import json
import os
import subprocess

import pytest

from tests.accelerator import emu
from tests.accelerator.programs import GATHERS, PROGRAMS
from tests.test_processes import ROOT, TORCHRUN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emu.build(tmp_path_factory.mktemp("emu"))


def run(library, *options, script="tests/accelerator/programs.py", devices=8):
    """Run programs on two ranks of a host with so many devices."""
    result = library.with_name("result.json")
    done = subprocess.run(
        [*map(str, (*TORCHRUN, 2, ROOT / script, library, result)), *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "EMU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


def faults(reports, alone=False, programs=PROGRAMS, may_wait=False):
    """List programs that failed, gave other numbers or let the host wait more often than they may."""
    for name, each in reports.items():
        if "error" in each:
            yield f"{name}: {each['error']}"
            continue
        program = programs[name]
        if not each["difference"] <= program.tolerance:
            yield f"{name}: differs by {each['difference']}, expected at most {program.tolerance}"
        if may_wait:
            continue
        waits = program.alone if alone and program.alone is not None else program.waits
        if each["waits"] != waits:
            yield f"{name}: the host waits {each['waits']}, expected {waits}"
        if waits == {} and "to host" in each["copies"]:
            yield f"{name}: copies {each['copies']}"


def test_programs_on_an_accelerator_give_the_processors_numbers_and_no_host_waits(library):
    reports = run(library)
    assert list(faults(reports)) == []
    assert list(reports) == list(PROGRAMS)
    # All gathers copy on one stream, which the computing one is ordered after. It keeps what it reads: the five results
    # of a gather, the rows of the four leaves that are split, and, until they have been sent, their shards.
    gathered = reports["gathered from the processor"]
    assert gathered["side_streams"] == 1
    assert gathered["streams"] == {"order stream": GATHERS, "record stream": GATHERS * (5 + 2 * 4)}


def test_an_accelerator_whose_ranks_send_nothing_between_processors(library):
    """Then the status of a call travels with its objective, and the host waits for it once."""
    reports = run(library, "--alone", *(name for name, each in PROGRAMS.items() if each.alone is not None))
    assert list(faults(reports, alone=True)) == []


def test_ranks_that_share_a_device_send_through_the_processor(library):
    """The host waits for each tensor that is sent."""
    reports = run(library, devices=1)
    assert list(faults(reports, may_wait=True)) == []
    assert list(reports) == list(PROGRAMS)
