"""A rehearsal of accelerators, on a device that has their rules and the memory of the processor."""

import json

import pytest

from tests.accelerator.programs import GATHERS, PROGRAMS
from tests.test_processes import ROOT, TORCHRUN, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Orders in which late streams run, and processes that share the programs.
SEEDS, PARTS = 20, 5


def launch(library, *options, script="tests/accelerator/programs.py", devices=8):
    """Run programs on two ranks of a host with so many devices, and return the file of their results."""
    result = library.with_name("result.json")
    run_script(*TORCHRUN, 2, ROOT / script, library, result, *options, EMU_DEVICES=str(devices))
    return result


def run(library, *options, **circumstances):
    return json.loads(launch(library, *options, **circumstances).read_text())


def run_late(library, seeds, *options, **circumstances):
    """Run programs with streams that run late; returns for each what differs on each rank, by seed."""
    result = launch(library, "--late", seeds, *options, **circumstances)
    ranks = [json.loads(result.with_name(f"{result.name}.{rank}").read_text()) for rank in range(2)]
    return {name: [each[name] for each in ranks] for name in ranks[0]}


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


def test_ranks_have_few_connections_beside_a_backend_that_sends_itself(library):
    """The backend sends tensors of processors there, and rows of the sums that ranks add themselves."""
    result = launch(library, script="tests/accelerator/connections.py")
    for rank in range(2):
        results = json.loads(result.with_name(f"{result.name}.{rank}").read_text())
        assert results["objects"] == [0, 1]
        assert not results["has pair"]
        assert results["cpu"] == results["emu"] == results["again"]
        gathered, empty, *sums = results["cpu"]
        rows = [[[float(10 * other + 3 * i + j) for j in range(3)] for i in range(2)] for other in range(2)]
        total = [[a + b for a, b in zip(*pair)] for pair in zip(*rows)]
        assert (gathered, empty) == (rows, [[], []])
        all_rows = [] if rank == 0 else rows[0] + rows[1]
        assert sums == [total, total, total[rank], total[rank], [row[rank] for row in rows], all_rows]


def test_ranks_that_share_a_device_send_through_the_processor(library):
    """The host waits for each tensor that is sent."""
    reports = run(library, devices=1)
    assert list(faults(reports, may_wait=True)) == []
    assert list(reports) == list(PROGRAMS)


@pytest.mark.parametrize("part", range(PARTS))
def test_late_streams_give_the_same_bits_and_host_waits(library, part):
    """Operators run in an order that only streams and events constrain, and freed memory is filled with NaN."""
    names = list(PROGRAMS)[part::PARTS]
    assert run_late(library, SEEDS, *names) == {name: [{}, {}] for name in names}


def test_late_streams_without_collectives_of_processors(library):
    names = [name for name, each in PROGRAMS.items() if each.alone is not None]
    assert run_late(library, 3, "--alone", *names) == {name: [{}, {}] for name in names}


@pytest.mark.parametrize(("fault", "name"), [("waits", "zero3"), ("records", "offloaded")])
def test_late_streams_find_what_is_lost(library, fault, name):
    """A lost wait for a collective, and memory of another stream that is not recorded, give other numbers."""
    (reports,) = run_late(library, 4, "--fault", fault, name).values()
    assert any(reports)
    for report in reports:
        assert "error" not in report
