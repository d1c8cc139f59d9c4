"""Children of a rank that were forked or started by it: they keep no connection of its, and change none."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import fshard as fs
from fshard.comm.agree import calling
from tests.forked_programs import run_on_ranks

# A child that lives until somebody makes a file, or for half a minute.
LIVES = "import os, sys, time\nfor _ in range(300): os.path.exists(sys.argv[-1]) or time.sleep(0.1)"


def die_beside_a_child(victim, kind, over):
    """Kill the victim while a child of it lives; the other rank prints its error, and how long that took."""
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0))
    fs.psum(torch.ones(()), axis)
    if fs.axis_index(axis) == victim:
        if kind == "program":
            subprocess.Popen([sys.executable, "-c", LIVES, over], close_fds=False)
        elif os.fork() == 0:
            sys.argv = [over]
            exec(LIVES)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        fs.psum(torch.ones(()), axis)
    except fs.comm.CollectiveError as error:
        print(str(error).splitlines()[0], time.monotonic() - begin, sep=", ")


@pytest.mark.rows(2)
@pytest.mark.parametrize("victim, kind", [(1, "fork"), (0, "fork"), (1, "program"), (0, "program")])
def test_a_rank_that_is_killed_is_named_while_a_child_of_it_lives(victim, kind, tmp_path):
    """Rank 0 holds the store."""
    over = tmp_path / "over"
    try:
        programs = run_on_ranks(2, die_beside_a_child, victim, kind, over, interpreter_ends=True)
    finally:
        over.touch()
    text, _, seconds = programs[1 - victim].output.partition(", ")
    assert text == f"rank {victim} was killed or has ended"
    assert float(seconds) < 10.0
    assert programs[victim].code == -signal.SIGKILL
    assert programs[1 - victim].code == 0


def assert_child_ends_well(act, lock=None):
    """Fork a child that acts, and then leaves, while another thread of this process may hold a lock."""
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            over.wait()

    if lock:
        threading.Thread(target=hold).start()
        held.wait()
    child = os.fork()
    if child == 0:
        act()
        os._exit(1)
    over.set()
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("a child did not end")


def drop_mesh():
    fs.comm.rank_state().groups.clear()
    torch.distributed.destroy_process_group()
    os._exit(0)


def call(rank, axis):
    try:
        fs.psum(torch.ones(()), axis)
    except fs.comm.CollectiveError as error:
        text = f"This process was forked from rank {rank} and cannot use its connections. "
        os._exit(0 if str(error).startswith(text) else 1)


def begin_call():
    """The signals of a child are its own."""
    with calling("gather", tuple):
        os._exit(signal.set_wakeup_fd(-1) != -1)


def load():
    assert len(list(torch.utils.data.DataLoader(range(10), num_workers=2))) == 10


def train_beside_children():
    """Let children of either rank end, by turns, and see after each that the ranks can send."""
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0))
    rank, watcher = fs.axis_index(axis), fs.comm.rank_state().watcher
    acts = (
        lambda: assert_child_ends_well(sys.exit),
        load,
        lambda: assert_child_ends_well(drop_mesh),
        lambda: assert_child_ends_well(lambda: call(rank, axis)),
        lambda: assert_child_ends_well(sys.exit, watcher._over._cond),
        lambda: assert_child_ends_well(begin_call),
    )
    for number, act in enumerate(acts):
        if rank == number % 2:
            act()
        # Large enough to be sent in several parts.
        assert fs.psum(torch.ones(2**20), axis).eq(2).all()
    print("ends")


def test_children_that_end_disturb_no_rank():
    """Workers of a loader, and forked children that end as programs do or take apart what they have.

    Also where a thread of the parent, which the child does not have, held a lock at the fork.
    """
    programs = run_on_ranks(2, train_beside_children, interpreter_ends=True)
    assert [(program.output, program.code) for program in programs] == [("ends\n", 0)] * 2, programs
    assert not any("Traceback" in program.errors for program in programs), programs
