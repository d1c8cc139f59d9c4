"""Workers: processes that serve one program after another; a rank that fails, ends or hangs is named."""

import gc
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.testing import RankError, Workers, spmd
from tests.testing.test_spmd import failure as error_of
from tests.testing.test_spmd import sum_of_ranks

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pool(workers):
    """The session's two processes, which must work after every test."""
    yield workers(2)
    assert workers(2).run(sum_of_ranks) == [1.0, 1.0]


def failure(workers, f, **options):
    """The text of a run's error."""
    return str(error_of(f, workers, **options))


def messages_of_a_call():
    params = fs.shard({"w": torch.ones(4, 512)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
    return [entry.label for entry in record]


def test_workers_persist_and_use_one_thread(pool):
    """Programs send the same whatever ran before, and what cannot be sent does no harm."""
    pids, lock = pool.run(os.getpid), threading.Lock()
    assert len({os.getpid(), *pids}) == 3
    assert pool.run(lambda: (os.getpid(), torch.get_num_threads())) == [(pid, 1) for pid in pids]
    first, second = (spmd(messages_of_a_call, pool) for _ in range(2))
    assert first == second
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        pool.run(lambda: lock)
    assert pool.run(os.getpid) == pids
    assert failure(pool, threading.Lock).startswith(
        "rank 0 of 2 failed: TypeError: cannot pickle '_thread.lock' object\n"
    )


def test_modules_are_found_on_the_callers_path(pool, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    assert pool.run(only_here.answer) == [42, 42]
    # A cache of graphs stores nothing in a process that has modules which are newer than it is.
    del sys.modules["only_here"]


def test_ranks_that_handled_an_error_are_replaced(pool):
    def program():
        mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
        params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0))
        with pytest.raises((ZeroDivisionError, fs.comm.CollectiveError)):
            fs.value_and_grad(lambda p: fs.gather(p)["w"].sum() / (1 // (1 - dist.get_rank())))(params)
        return os.getpid()

    assert not {*pool.run(program)} & {*pool.run(program)}


def test_ended_rank_is_named(pool):
    def program(end):
        if dist.get_rank() == 1:
            end()
        sum_of_ranks()

    for end, ending in (
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(0), "exited with code 0"),
    ):
        assert failure(pool, partial(program, end)) == f"rank 1 of 2 {ending}"


def test_stuck_rank_shows_its_stack_at_the_timeout(pool):
    def endless():
        # Python writes nonsense of a frame that begins or ends in the moment of the signal, so nothing is called here.
        is_stuck = dist.get_rank() == 1
        while is_stuck:
            pass
        sum_of_ranks()

    text = failure(pool, endless, timeout=0.5)
    assert text.startswith("timed out after 0.5 s: ranks [] of 2 finished, ranks [0, 1] did not\nrank 0 runs:\n")
    first, second = text.split("\nrank 1 runs:\n")
    assert "in sum_of_ranks\n" in first
    assert "in endless\n" in second


def test_failure_to_start_is_reported():
    with pytest.raises(RankError, match=r"^rank 0 of 2 failed: \w+: .*carrier-pigeon"):
        Workers(2, backend="carrier-pigeon")


@pytest.mark.parametrize("closes", (True, False), ids=("closed", "garbage"))
def test_nothing_is_left_behind(closes, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    two = Workers(2)
    pids = two.run(os.getpid)
    assert len(list(tmp_path.iterdir())) == 1
    if closes:
        two.close()
        two.close()
        with pytest.raises(RuntimeError, match="run was called after close"):
            two.run(os.getpid)
    else:
        del two
        gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("code, text", [(3, r"^rank 1 of 2 exited with code 3$"), (None, r"^timed out after 1 s: ")])
def test_how_workers_end_counts_at_close(code, text):
    def program():
        if code is None:
            threading.Thread(target=threading.Event().wait).start()
        elif dist.get_rank() == 1:
            multiprocessing.util.Finalize(None, os._exit, args=(code,), exitpriority=1)

    two = Workers(2)
    two.run(program)
    two.timeout = 1
    with pytest.raises(RankError, match=text):
        two.close()


SCRIPT = """
import os, signal, threading
import torch.distributed as dist
from fshard.testing.workers import Workers

if __name__ == "__main__":
    parent = os.getpid()

    def program():
        print("printed by a worker", flush=True)
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(parent, signal.SIGKILL)
        threading.Event().wait()

    Workers(2).run(program)
"""


@pytest.mark.slow
def test_killed_parent_leaves_nothing_behind(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, tmp_path / "script.py"]
    # The output ends when the last process that could write to it has ended.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.count("printed by a worker") == 2
