"""Streams do not race, and what looks for races finds them where a wait, an order or a lifetime is lost."""

import json
import os
import subprocess
import sys

import pytest

from tests.accelerator import races
from tests.accelerator.clocks import Clocks, Race
from tests.test_processes import ROOT

# Stream 0 writes memory, and stream 1 reads it.
WRITTEN = ["take 64 8 on 0", "launch aten::fill on 0 reads writes 64"]
READ = "launch aten::copy_ on 1 reads 64 writes"
ORDERED = ["event 1 of 0", "stream 1 after event 1"]
# Then the memory is free, and stream 0 takes memory that may be the same.
TAKEN_AGAIN = ["free 64", "take 128 8 on 0", "launch aten::zero on 0 reads writes 128"]


@pytest.mark.parametrize(
    ("log", "race"),
    [
        ([*WRITTEN, *ORDERED, READ], None),
        ([*WRITTEN, READ], Race("fill", "fill", "copy_")),
        # An event holds what was launched before it.
        (["event 1 of 0", *WRITTEN, "stream 1 after event 1", READ], Race("fill", "fill", "copy_")),
        # Two that read do not race.
        ([*WRITTEN, *ORDERED, READ, "launch aten::add on 0 reads 64 writes"], None),
        ([*WRITTEN, *ORDERED, READ, "launch aten::add on 0 reads writes 64"], Race("fill", "copy_", "add")),
        # Of a collective the name is told.
        (
            [*WRITTEN, "collective all_gather of block", READ, "collective"],
            Race("fill", "fill", "copy_ in all_gather of block"),
        ),
        # The stream that memory was taken on takes it again while another stream reads it.
        ([*WRITTEN, *ORDERED, READ, *TAKEN_AGAIN], Race("freed: fill", "copy_", "zero")),
        ([*WRITTEN, *ORDERED, READ, "keep 64 for 1", *TAKEN_AGAIN], None),
        ([*WRITTEN, *ORDERED, READ, "event 2 of 1", "stream 0 after event 2", *TAKEN_AGAIN], None),
        ([*WRITTEN, *ORDERED, READ, "host after stream 1", *TAKEN_AGAIN], None),
        ([*WRITTEN, *ORDERED, READ, "host after stream 0", *TAKEN_AGAIN], Race("freed: fill", "copy_", "zero")),
        # Memory of another stream is not the same.
        ([*WRITTEN, *ORDERED, READ, "free 64", "take 128 8 on 2", "launch aten::zero on 2 reads writes 128"], None),
        # CUDA's 33rd stream is its first one.
        (["take 64 8 on 1", "launch aten::fill on 1 reads writes 64", "launch aten::add on 33 reads 64 writes"], None),
        # The host reads what is copied to it.
        (
            ["launch aten::copy_ on 0 reads writes host:64", "run mul on host reads host:64 writes"],
            Race("copy_", "copy_", "host mul"),
        ),
        (
            [
                "launch aten::copy_ on 0 reads writes host:64",
                "host after stream 0",
                "run mul on host reads host:64 writes",
            ],
            None,
        ),
        # What the host launches comes after what it did before.
        (["run fill on host reads writes host:64", "launch aten::copy_ on 1 reads host:64 writes"], None),
    ],
)
def test_clocks_tell_which_kernels_nothing_orders(log, race):
    clocks = Clocks()
    clocks.read(log)
    assert list(clocks.races) == ([] if race is None else [race])


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
