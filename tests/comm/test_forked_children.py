"""Children of a rank that were forked or started by it: they keep no connection of its, and change none."""

import signal

import pytest

from tests.forked_programs import run_on_ranks

# Rank and kind of child by the arguments; the child lives until somebody makes a file, or for half a minute.
KILLED_BESIDE_A_CHILD = """
import os, signal, subprocess, sys, time, torch, fshard as fs

victim, kind, over = int(sys.argv[1]), sys.argv[2], sys.argv[3]
LIVES = "import os, sys, time\\nfor _ in range(300): os.path.exists(sys.argv[-1]) or time.sleep(0.1)"
axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0))
fs.psum(torch.ones(()), axis)
if fs.axis_index(axis) == victim:
    if kind == "program":
        child = subprocess.Popen([sys.executable, "-c", LIVES, over], close_fds=False)
    elif os.fork() == 0:
        exec(LIVES)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    fs.psum(torch.ones(()), axis)
except fs.comm.CollectiveError as error:
    print(str(error).splitlines()[0], time.monotonic() - begin, sep=", ")
"""

CHILDREN_END = """
import os, signal, sys, threading, time, torch, fshard as fs

def ends_well(child):
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return False

def fork_while_held(lock):
    held, over = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            over.wait()

    threading.Thread(target=hold).start()
    held.wait()
    child = os.fork()
    if child:
        over.set()
    return child

def exits_while_the_watcher_looks():
    child = fork_while_held(fs.comm.rank_state().watcher._over._cond)
    if child == 0:
        sys.exit()
    assert ends_well(child)

def calls_while_the_watcher_reads_signals():
    child = fork_while_held(fs.comm.rank_state().watcher.interrupts._lock)
    if child == 0:
        try:
            fs.gather(params)
        except fs.comm.CollectiveError:
            os._exit(0)
    assert ends_well(child)

def loads():
    assert len(list(torch.utils.data.DataLoader(range(10), num_workers=2))) == 10

def exits():
    child = os.fork()
    if child == 0:
        sys.exit()
    assert ends_well(child)

def drops_its_mesh():
    global mesh
    child = os.fork()
    if child == 0:
        del mesh
        fs.comm.rank_state().groups.clear()
        torch.distributed.destroy_process_group()
        os._exit(0)
    assert ends_well(child)

def calls():
    child = os.fork()
    if child == 0:
        try:
            fs.psum(torch.ones(()), axis)
        except fs.comm.CollectiveError as error:
            text = f"This process was forked from rank {rank} and cannot use its connections. "
            os._exit(0 if str(error).startswith(text) else 1)
    assert ends_well(child)

mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0)
axis = fs.axis_of(mesh)
rank = fs.axis_index(axis)
params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(axis))
acts = exits, loads, drops_its_mesh, calls, exits_while_the_watcher_looks, calls_while_the_watcher_reads_signals
for number, act in enumerate(acts):
    if rank == number % 2:
        act()
    # Large enough to be sent in several parts.
    assert fs.psum(torch.ones(2**20), axis).eq(2).all()
print("ends")
"""


@pytest.mark.rows(2)
@pytest.mark.parametrize("victim, kind", [(1, "fork"), (0, "fork"), (1, "program"), (0, "program")])
def test_a_rank_that_is_killed_is_named_while_a_child_of_it_lives(victim, kind, tmp_path):
    """Rank 0 holds the store."""
    over = tmp_path / "over"
    try:
        programs = run_on_ranks(2, KILLED_BESIDE_A_CHILD, victim, kind, over)
    finally:
        over.touch()
    text, _, seconds = programs[1 - victim].output.partition(", ")
    assert text == f"rank {victim} was killed or has ended"
    assert float(seconds) < 10.0
    assert [program.code for program in programs] == [-signal.SIGKILL if n == victim else 0 for n in range(2)]


def test_children_that_end_disturb_no_rank():
    """Workers of a loader, and forked children that end as programs do or take apart what they have.

    Also where a thread of the parent, which the child does not have, held a lock at the fork.
    """
    programs = run_on_ranks(2, CHILDREN_END)
    assert [(program.output, program.code) for program in programs] == [("ends\n", 0)] * 2, programs
    assert not any("Traceback" in program.errors for program in programs), programs
