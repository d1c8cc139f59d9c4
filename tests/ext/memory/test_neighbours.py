"""Copies of generations on a neighbouring host: what a lost host had comes from there, and only if it is whole."""

import contextlib
import shutil
import signal
import socket

import pytest
import torch

from fshard.ext.memory import neighbours
from fshard.testing import spmd
from tests.checkpoint.states import split
from tests.ext.memory import neighbouring_process
from tests.ext.memory.jobs import be_job, manager, save_steps, slots_in
from tests.ext.memory.neighbouring_process import STEPS
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank

ALL_LOST = "no state in memory is whole, because hosts are lost together with those that had copies of theirs"
# How many ranks there are, on a host and at all; the hosts that are lost; the hosts of the restart; the step that it
# reads, and whether from the disk.
LOSSES = [
    ((1, 3), [1, 2], ["0", "1", "2"], STEPS - 1, ALL_LOST),
    ((2, 4), [1], ["0", "new"], STEPS, None),
    # The launcher may number hosts anew.
    ((1, 2), [0], ["1", "new"], STEPS, None),
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


def test_half_a_copy_is_removed(tmp_path, monkeypatch):
    """And a whole one has the name that it has at home."""
    be_job(monkeypatch)
    save_steps(tmp_path / "sender", lambda step: {"w": torch.arange(1000.0) + step}, 1)
    (slot,) = slots_in(tmp_path / "sender").values()
    data = slot.read_bytes()
    message = neighbours.HEADER.pack(b"rank-00007.1", len(data)) + data
    copies = tmp_path / "copies"
    copies.mkdir()
    for size in (len(message) - 1, len(message)):
        ours, theirs = socket.socketpair()
        with ours, contextlib.suppress(ConnectionResetError):
            with theirs:
                theirs.sendall(message[:size])
            neighbours.receive_slot(ours, copies)
        assert [path.name for path in copies.iterdir()] == ["rank-00007.1"] * (size == len(message))
    assert (copies / "rank-00007.1").read_bytes() == data


def test_the_newest_slot_takes_the_place_of_one_that_waits(tmp_path, monkeypatch):
    """Here ranks share one memory, so that nobody sends any."""
    be_job(monkeypatch, LOCAL_WORLD_SIZE="1")

    def program():
        kept = manager(tmp_path)
        for step in range(1, 4):
            kept.save(split(step), step)
        waiting = kept._memory._neighbours._waiting
        name, data = waiting.get_nowait()()
        kept.close()
        return name == f"rank-{my_rank():05d}.1" and data is not None

    assert spmd(program, 2) == [True, True]
