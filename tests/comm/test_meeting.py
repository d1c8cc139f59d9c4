"""A rank that dies or fails inside init_mesh is named on the others within seconds, long before the timeout."""

import json
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard as fs
from fshard import _compat
from fshard._compat.collectives import StoreClient, _ports_of_socket
from fshard.comm import CollectiveError, Meeting
from fshard.comm.failure import NOTE
from fshard.comm.meeting import END, Arrival
from fshard.testing import spmd
from tests.comm.broken_meetings import break_in_last_mesh, interrupt
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank

REMEDY = "To fix: correct the first error, then call fs.init_mesh on every rank or restart all ranks."
KILLED = "init_mesh: rank {} was killed or has ended"
REASON = "rank 1 failed in init_mesh: MemoryError: no memory"
STORE = "The rendezvous store does not answer. The process that holds it "
FILES = r"rank {} failed in init_mesh: (OSError: \[Errno 24\] Too many open files|RuntimeError: Cannot resolve)"
SECONDS = 40.0
ROWS = [
    (2, 1, "create_default_device", "files", 1, SECONDS, FILES),
    (2, 1, "make_pair", "kill", 1, SECONDS, KILLED),
    (2, 0, "_read", "kill", 1, SECONDS, f"{KILLED}|{STORE}"),
    (2, 1, "agree", "interrupt", 2, SECONDS, "rank {} failed in init_mesh: KeyboardInterrupt$"),
    (2, 1, "_read", "kill", 1, SECONDS, KILLED),
    (2, 1, "init_process_group", "kill", 1, SECONDS, KILLED),
    (2, 1, "init_process_group", "files", 1, SECONDS, FILES),
    (4, 3, "make_group", "kill", 1, SECONDS, KILLED),
    (4, 2, "make_group", "files", 1, SECONDS, FILES),
    (2, 0, "create_default_device", "kill", 1, SECONDS, f"{KILLED}|{STORE}"),
    (4, 3, "make_pair", "kill", 1, SECONDS, KILLED),
    (4, 3, "create_default_device", "files", 1, SECONDS, FILES),
    (4, 3, "connect", "kill", 1, SECONDS, KILLED),
    # The last rank has no link with the first, which holds the store.
    (4, 0, "_wait_for_all", "kill", 1, SECONDS, f"{KILLED}|{STORE}"),
]


@pytest.mark.rows(3)
@pytest.mark.parametrize("size, victim, place, fault, meshes, timeout, text", ROWS)
def test_a_rank_that_breaks_in_init_mesh_is_named(size, victim, place, fault, meshes, timeout, text):
    programs = run_on_ranks(size, break_in_last_mesh, victim, place, fault, meshes, timeout)
    for rank, program in enumerate(programs):
        if rank == victim and fault == "kill":
            assert program.code == -signal.SIGKILL
            continue
        assert program.code == 0, program
        seconds, error, *lines = program.output.splitlines()
        if rank == victim and error in ("KeyboardInterrupt", "OSError", "RuntimeError"):
            # Its own error.
            continue
        assert error == "CollectiveError", program
        assert re.match(text.replace("{}", str(victim)), lines[0]), program
        assert lines[-1] == REMEDY
        assert float(seconds) < 20.0


# Where and how the victim hangs, the number of meshes, the timeout of the last one, and what the others say.
HANGS = [
    ("make_pair", "hang", 1, 10.0, "did not make process groups"),
    ("connect", "stop", 1, 10.0, "did not make process groups"),
    ("init_process_group", "stop", 1, 30.0, "did not make process groups"),
    ("agree", "hang", 2, 6.0, "did not call it"),
    ("collecting_sockets", "hang", 2, 6.0, "did not make process groups"),
    ("make_group", "stop", 2, 6.0, "did not make process groups"),
]


@pytest.mark.slow
@pytest.mark.parametrize("place, fault, meshes, timeout, text", HANGS)
def test_one_rank_of_four_that_hangs_in_init_mesh_is_named(place, fault, meshes, timeout, text):
    """Those that wait for it are not, wherever they wait; a thread of theirs looks at the others, and tells so."""
    victim = 2
    programs = run_on_ranks(4, break_in_last_mesh, victim, place, fault, meshes, timeout)
    del programs[victim]
    for program in programs:
        assert program.code == 0, program
        seconds, error, first, *_ = program.output.splitlines()
        assert error == "CollectiveError", program
        assert float(seconds) < timeout + 6.0, program
        assert first.removeprefix("init_mesh: ").startswith(f"rank {victim} {text} within {timeout:g} s"), program


def test_a_rank_that_comes_when_the_others_have_given_up_makes_no_mesh():
    """Simulated ranks have no connections, by whose ends it would find that out; then all call again."""
    has_given_up = threading.Event()

    def program():
        if my_rank() == 1:
            assert has_given_up.wait(30)
        with pytest.raises(CollectiveError) as caught:
            fs.init_mesh({"a": -1}, device="cpu", timeout=0.5)
        assert str(caught.value) == (
            "init_mesh: rank 1 did not call it within 0.5 s. "
            "Call init_mesh on every rank; if you make several meshes, make them in the same order."
        )
        has_given_up.set()
        return fs.psum(torch.ones(()), fs.axis_of(fs.init_mesh({"a": -1}, device="cpu"))).item()

    assert spmd(program, 2) == [2, 2]


def test_a_rank_that_waits_for_the_first_use_of_a_group_hears_that_others_have_failed(workers):
    """Nobody comes there any more, and the timeout of a group of torch's is half an hour."""

    def program():
        place = my_rank()
        shard = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=50.0))
        part = DeviceMesh("cpu", [0, 1], mesh_dim_names=("part",))
        axis = fs.axis_of(part) if place == 1 else shard
        with pytest.raises(CollectiveError) as caught:
            fs.psum(torch.ones(1 + place), axis)
        shard = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
        return str(caught.value).splitlines()[0], fs.psum(torch.ones(()), shard).item()

    assert workers(3).run(program) == [("ranks differ in a collective", 3.0)] * 3


def test_ports_of_sockets_that_have_no_other_end_or_are_closed():
    """A thread of the store may close one of those that were listed."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        assert _ports_of_socket(listening.fileno()) == (listening.getsockname()[1], None)
        with socket.socket() as unused:
            closed = unused.fileno()
        assert _ports_of_socket(closed) == (None, None)


@pytest.fixture
def first(monkeypatch):
    """One of two ranks, whose constructors wait on a client of their own."""
    monkeypatch.setattr("fshard.comm.meeting.LOOK_INTERVAL", 0.01)
    monkeypatch.setattr("fshard.comm.failure.LINGER_TIME", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    return Meeting(store, 0, range(2), "1", 20.0, client=StoreClient(store))


def test_a_constructor_needs_no_new_client_of_a_store_that_may_have_gone(monkeypatch):
    """A rank that holds the store may die as soon as all have come, and a new client would wait for it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    meeting = Meeting(store, 0, range(2), "1", 20.0)
    meeting.board.set(END, "the same")
    assert meeting.agree("the same", "".join, bool) == "the same"
    monkeypatch.delattr(_compat, "StoreClient")
    assert meeting.run(lambda client: client.check([f"{meeting.prefix}/{END}"]))
    meeting._over.set()
    meeting._watcher.join(20)


def test_a_rank_that_comes_to_a_store_that_has_gone_makes_no_client_of_it(monkeypatch):
    """A client would wait for the store, where the first question to it ends with an error at once."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    store = server.clone()
    meeting = Meeting(store, 0, range(2), "1", 20.0)
    del server
    monkeypatch.delattr(_compat, "StoreClient")
    with pytest.raises(dist.DistNetworkError):
        meeting.agree("the same", "".join, bool)


def let_the_other_fail(meeting):
    meeting.board.set(NOTE, REASON)
    deadline = time.monotonic() + 20.0
    while not meeting._reason and time.monotonic() < deadline:
        meeting._over.wait(0.01)


def test_a_rank_whose_thread_has_read_a_note_raises_it_though_the_store_has_gone(first):
    """Rank 0 holds the store, and may end before a constructor of another rank does."""

    def wait_inside_torch(client):
        let_the_other_fail(first)
        first.board = None
        raise RuntimeError("no connection")

    with pytest.raises(CollectiveError, match=f"^{REASON}$"), first:
        first.run(wait_inside_torch)


def test_a_rank_that_reads_a_note_as_it_waits_raises_it_though_the_store_has_gone(first, monkeypatch):
    def read_at_last():
        first.board = None
        return REASON

    monkeypatch.setattr(first, "find_reason", read_at_last)
    with pytest.raises(CollectiveError, match=f"^{REASON}$"), first:
        first.agree("the same", "".join, bool)


def test_a_mesh_that_a_rank_has_given_up_behind_its_last_wait_is_none(first):
    """Its links have ended, so that the first collective would fail, and the others blame this rank."""
    with pytest.raises(CollectiveError, match=f"^{REASON}$"), first:
        first.run(lambda client: None) or let_the_other_fail(first)


def test_a_second_ctrl_c_leaves_no_thread_that_looks_at_others(first, monkeypatch):
    """It would give up the next mesh too."""
    monkeypatch.setattr("fshard.comm.meeting.leave_note", lambda board, reason: interrupt(0.0))
    with pytest.raises(KeyboardInterrupt), first:
        first.run(interrupt)
    first._watcher.join(20)
    assert not first._watcher.is_alive()


def test_a_peer_that_is_gone_is_named_also_shortly_before_the_timeout(first):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        first.entries[1] = Arrival(json.dumps([*unused.getsockname(), "00" * 16]), "the same")
    # As if the wait had begun long ago.
    first._since = time.monotonic() - first.timeout
    with pytest.raises(CollectiveError, match=r"^init_mesh: rank 1 was killed or has ended, or there is "), first:
        first._reach(1, 1.0)
