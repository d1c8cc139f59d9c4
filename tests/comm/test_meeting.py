"""A rank that dies or fails inside init_mesh is named on the others within seconds, long before the timeout."""

import re
import signal
import socket

import pytest

from fshard._compat.collectives import _ports_of_socket
from fshard.comm.processes import Process, has_ended, this_process
from tests.forked_programs import run_on_ranks

# The victim breaks as it is about to call a function of a name, in its first mesh or in its second one.
BREAKS = """
import os, resource, signal, subprocess, sys, time, torch.distributed as dist, fshard as fs
from fshard import _compat

victim, place, fault, meshes = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

def breaks():
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(float(sys.argv[5]) + 8)
        os._exit(0)
    if fault == "stop":
        goes_on = f"sleep {float(sys.argv[5]) + 8}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", goes_on])
        return os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raise":
        raise ValueError("bad sample 17")
    if fault == "interrupt":
        raise KeyboardInterrupt
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    try:
        while os.dup(0):
            pass
    except OSError:
        pass

def break_before(owner, name):
    function = getattr(owner, name)

    def run(*args, **kwargs):
        setattr(owner, name, function)
        breaks()
        return function(*args, **kwargs)

    setattr(owner, name, run)

make = lambda timeout: fs.init_mesh({"a": 2, "b": -1}, device="cpu", timeout=timeout)
for _ in range(meshes - 1):
    # Of another timeout, so that the last mesh has groups of its own.
    make(60.0)
if int(os.environ["RANK"]) == victim:
    owners = dict.fromkeys(("init_process_group", "new_subgroups_by_enumeration"), dist)
    owners["create_default_device"] = dist.ProcessGroupGloo
    break_before(owners.get(place, _compat), place)
begin = time.monotonic()
try:
    make(float(sys.argv[5]))
except BaseException as error:
    print(time.monotonic() - begin, type(error).__name__, str(error), sep="\\n")
"""

REMEDY = "To fix: correct the first error, then call fs.init_mesh on every rank or restart all ranks."
KILLED = "init_mesh: rank {} was killed or has ended"
STORE = "The rendezvous store does not answer. The process that holds it "
FILES = r"rank {} failed in init_mesh: (OSError: \[Errno 24\] Too many open files|RuntimeError: Cannot resolve)"
SECONDS = 40.0
ROWS = [
    (2, 1, "create_default_device", "files", 1, SECONDS, FILES),
    (2, 1, "make_pair", "kill", 1, SECONDS, KILLED),
    (2, 0, "texts_in_store", "kill", 1, SECONDS, f"{KILLED}|{STORE}"),
    (2, 1, "texts_in_store", "interrupt", 2, SECONDS, "rank {} failed in init_mesh: KeyboardInterrupt$"),
    (2, 1, "texts_in_store", "kill", 1, SECONDS, KILLED),
    (2, 1, "init_process_group", "kill", 1, SECONDS, KILLED),
    (2, 1, "init_process_group", "files", 1, SECONDS, FILES),
    (4, 3, "new_subgroups_by_enumeration", "kill", 1, SECONDS, KILLED),
    (4, 2, "new_subgroups_by_enumeration", "files", 1, SECONDS, FILES),
    (2, 0, "create_default_device", "kill", 1, SECONDS, f"{KILLED}|{STORE}"),
    (4, 3, "make_pair", "kill", 1, SECONDS, KILLED),
    (4, 3, "create_default_device", "files", 1, SECONDS, FILES),
]


@pytest.mark.rows(3)
@pytest.mark.parametrize("size, victim, place, fault, meshes, timeout, text", ROWS)
def test_a_rank_that_breaks_in_init_mesh_is_named(size, victim, place, fault, meshes, timeout, text):
    programs = run_on_ranks(size, BREAKS, victim, place, fault, meshes, timeout)
    for rank, program in enumerate(programs):
        if rank == victim and fault == "kill":
            assert program.code == -signal.SIGKILL
            continue
        assert program.code == 0, program
        seconds, error, *lines = program.output.splitlines()
        if rank == victim and error == "KeyboardInterrupt":
            continue
        assert error == "CollectiveError", program
        assert re.match(text.replace("{}", str(victim)), lines[0]), program
        assert lines[-1] == REMEDY
        assert float(seconds) < 20.0


# Where and how the victim hangs, the number of meshes, the timeout of the last one, and what the others say.
HANGS = [
    ("wait_in_store", "hang", 1, 30.0, "did not make process groups"),
    ("init_process_group", "stop", 1, 30.0, "did not make process groups"),
    ("texts_in_store", "hang", 2, 6.0, "did not call it"),
    ("set_group_count", "hang", 2, 6.0, "did not make process groups"),
    ("new_subgroups_by_enumeration", "stop", 2, 6.0, "did not make process groups"),
]


@pytest.mark.slow
@pytest.mark.parametrize("place, fault, meshes, timeout, text", HANGS)
def test_one_rank_of_four_that_hangs_in_init_mesh_is_named(place, fault, meshes, timeout, text):
    """Those that wait for it are not, wherever they wait."""
    victim = 2
    programs = run_on_ranks(4, BREAKS, victim, place, fault, meshes, timeout)
    del programs[victim]
    for program in programs:
        assert program.code == 0, program
        seconds, error, first, *_ = program.output.splitlines()
        assert error == "CollectiveError", program
        assert float(seconds) < timeout + 6.0, program
        assert first.removeprefix("init_mesh: ").startswith(f"rank {victim} {text} within {timeout:g} s"), program


def test_processes_that_have_ended():
    own = this_process()
    assert not has_ended(own)
    assert has_ended(own._replace(start="0"))
    # Of another machine nobody can tell.
    assert not has_ended(Process("another", own.pid, "0"))
    assert not has_ended(Process("", own.pid, "0"))


def test_ports_of_sockets_that_have_no_other_end_or_are_closed():
    """A thread of the store may close one of those that were listed."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        assert _ports_of_socket(listening.fileno()) == (listening.getsockname()[1], None)
        with socket.socket() as unused:
            closed = unused.fileno()
        assert _ports_of_socket(closed) == (None, None)
