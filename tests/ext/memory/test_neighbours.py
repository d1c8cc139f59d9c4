"""Copies of generations on a neighbouring host: what a lost host had comes from there, and only if it is whole."""

import shutil
import signal
import socket

import pytest
import torch

from fshard.ext.memory import neighbours
from fshard.ext.memory.slots import list_parts
from fshard.testing import spmd
from tests.checkpoint.states import split
from tests.ext.memory import neighbouring_process
from tests.ext.memory.jobs import be_job, manager, save_steps, slots_in
from tests.ext.memory.neighbouring_process import STEPS
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank

ALL_LOST = (
    "no state in memory is whole, because the parts of rank 1 are lost with their hosts and those of their neighbours"
)
# How many ranks there are, on a host and at all; the hosts that are lost; the hosts of the restart; the step that it
# reads, and whether from the disk.
LOSSES = [
    ((1, 2), [1], ["0", "new"], STEPS, None),
    ((1, 3), [1, 2], ["0", "1", "2"], STEPS - 1, ALL_LOST),
    ((1, 2), [0], ["new", "1"], STEPS, None),
    ((2, 4), [1], ["0", "new"], STEPS, None),
    # The launcher may number hosts anew.
    ((2, 4), [0], ["1", "new"], STEPS, None),
    ((1, 2), [], ["1", "0"], STEPS, None),
]


@pytest.mark.timeout(200)
@pytest.mark.rows(2)
@pytest.mark.parametrize("sizes, lost, hosts, step, warning", LOSSES)
def test_what_a_lost_host_had_comes_from_its_neighbour(sizes, lost, hosts, step, warning, tmp_path):
    on_host, ranks = sizes
    for program in run_on_ranks(ranks, neighbouring_process.save, tmp_path, on_host, timeout=60):
        assert program.code == -signal.SIGKILL, program
    for host in lost:
        shutil.rmtree(tmp_path / f"host-{host}")
    programs = run_on_ranks(ranks, neighbouring_process.restore, tmp_path, on_host, *hosts, timeout=60)
    for rank, program in enumerate(programs):
        assert program.code == 0, program
        first, *warned = program.output.splitlines()
        assert first == f"restored {step}"
        assert len(warned) == (warning is not None and rank == 0)
        assert all(f"checkpoint.restore: {warning}" in line for line in warned)


@pytest.mark.rows(1)
@pytest.mark.parametrize("way", ["neighbours are gone", "neighbours are slow"])
def test_a_neighbour_that_keeps_nothing_hinders_nobody(way, tmp_path):
    for program in run_on_ranks(2, neighbouring_process.save, tmp_path, 1, way, timeout=60):
        assert (program.code, program.errors) == (0, ""), program
    assert not any(path.name.startswith("copy-") for path in tmp_path.rglob("*"))


@pytest.fixture
def slot(tmp_path, monkeypatch):
    """A slot with checksums."""
    be_job(monkeypatch)
    save_steps(tmp_path / "sender", lambda step: {"w": torch.arange(1000.0) + step}, 1)
    (path,) = slots_in(tmp_path / "sender").values()
    return path


def receive(data, directory, *, is_sealed=True):
    """Receive bytes as a slot of rank 7."""
    directory.mkdir()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(data)
        return neighbours.receive_slot(ours, directory, is_sealed=is_sealed)


def message(slot):
    data = slot.read_bytes()
    return neighbours.HEADER.pack(7, 1, len(data)) + data


def test_a_copy_counts_only_if_it_matches_its_checksums(slot, tmp_path):
    """For its rank may write over a slot while it is sent."""
    data = message(slot)
    assert receive(data, tmp_path / "whole")
    assert (tmp_path / "whole/rank-00007.1").read_bytes() == slot.read_bytes()
    for place in range(neighbours.HEADER.size + 3, len(data) - 4000, 997):
        damaged = bytearray(data)
        damaged[place] ^= 1
        if any(data[place - 1 : place + 2]):
            assert not receive(damaged, tmp_path / f"damaged {place}"), place
            assert not list((tmp_path / f"damaged {place}").iterdir())
    assert not receive(neighbours.HEADER.pack(7, 0, 0), tmp_path / "empty")


def test_a_copy_needs_checksums_unless_its_rank_is_gone(slot, tmp_path):
    (part,) = list_parts(slot.parent)
    with slot.open("r+b") as file:
        file.seek(part._checksums.start)
        file.write(bytes(part._checksums.stop - part._checksums.start))
    assert not receive(message(slot), tmp_path / "copy")
    assert receive(message(slot), tmp_path / "fetched", is_sealed=False)


def test_half_a_copy_is_removed(slot, tmp_path):
    with pytest.raises(ConnectionResetError):
        receive(message(slot)[:-1], tmp_path / "half")
    assert not list((tmp_path / "half").iterdir())


def test_the_newest_slot_takes_the_place_of_one_that_waits(tmp_path, monkeypatch):
    """Here ranks share one memory, so that nobody sends any."""
    be_job(monkeypatch, LOCAL_WORLD_SIZE="1")

    def program():
        kept = manager(tmp_path)
        for step in range(1, 4):
            kept.save(split(step), step)
        kept._memory.settle()
        waiting = kept._memory._neighbours._waiting
        slots = [waiting.get_nowait().name, waiting.qsize()]
        kept.close()
        return slots == [f"rank-{my_rank():05d}.1", 0]

    assert spmd(program, 2) == [True, True]
