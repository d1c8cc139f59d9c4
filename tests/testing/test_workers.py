"""Workers: processes that serve one program after another; a rank that fails, ends or hangs is named."""

import gc
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.testing import RankError, Workers, spmd
from tests.testing.test_spmd import failure as error_of
from tests.testing.test_spmd import ranks_summed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def pool():
    with Workers(2) as workers:
        yield workers


@pytest.fixture
def workers(pool):
    """The pool, which must work after every test."""
    yield pool
    assert pool.run(ranks_summed) == [1.0, 1.0]


def failure(workers, f, **options):
    """The text of a run's error."""
    return str(error_of(f, workers, **options))


def messages_of_a_call():
    params = fs.shard({"w": torch.ones(4, 512)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    with fs.comm.record() as record:
        fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(params)
    return [entry.label for entry in record]


def test_workers_persist_and_use_one_thread(workers):
    """And programs send the same whatever ran before."""
    pids = workers.run(os.getpid)
    assert len({os.getpid(), *pids}) == 3
    assert workers.run(lambda: (os.getpid(), torch.get_num_threads())) == [(pid, 1) for pid in pids]
    first, second = (spmd(messages_of_a_call, workers) for _ in range(2))
    assert first == second


def test_modules_are_found_on_the_callers_path(workers, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    assert workers.run(only_here.answer) == [42, 42]


@pytest.mark.parametrize(
    "end, ending",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(0), "exited with code 0"),
    ],
)
def test_ended_rank_is_named(workers, end, ending):
    def program():
        if dist.get_rank() == 1:
            end()
        ranks_summed()

    assert failure(workers, program) == f"rank 1 of 2 {ending}"


def test_stuck_rank_shows_its_stack_at_the_timeout(workers):
    def endless():
        while True:
            pass

    def program():
        ranks_summed() if dist.get_rank() == 0 else endless()

    text = failure(workers, program, timeout=1.0)
    assert text.startswith("timed out after 1.0 s: ranks [] of 2 finished, ranks [0, 1] did not\nrank 0 runs:\n")
    first, second = text.split("\nrank 1 runs:\n")
    assert "in ranks_summed\n" in first
    assert "in endless\n" in second


def test_a_pool_has_a_timeout_of_its_own():
    """spmd takes that of the pool, unless it is given one."""
    one = Workers(1, timeout=10)
    one.timeout = 0.5
    with pytest.raises(RankError, match=r"timed out after 0\.5 s"):
        spmd(lambda: time.sleep(30), one)


def test_what_cannot_be_sent_does_no_harm(workers):
    assert "rank 0 of 2 failed:\n" in failure(workers, threading.Lock)
    pids, lock = workers.run(os.getpid), threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        workers.run(lambda: lock)
    assert workers.run(os.getpid) == pids


def test_failure_to_start_is_reported():
    with pytest.raises(RankError, match="rank 0 of 2 failed:\n"):
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


def exits_with_three():
    if dist.get_rank() == 1:
        multiprocessing.util.Finalize(None, os._exit, args=(3,), exitpriority=1)


def stays():
    threading.Thread(target=threading.Event().wait).start()


@pytest.mark.parametrize(
    "program, text",
    [
        (exits_with_three, r"^rank 1 of 2 exited with code 3$"),
        (
            stays,
            r"^timed out after 4 s: ranks \[\] of 2 finished, ranks \[0, 1\] did not\nrank 0 runs:\n(.*\n)*.*_shutdown",
        ),
    ],
)
def test_how_workers_end_counts_at_close(program, text):
    two = Workers(2)
    two.run(program)
    two.timeout = 4
    with pytest.raises(RankError, match=text):
        two.close()


@pytest.mark.rows(1)
def test_killed_parent_leaves_nothing_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
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
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    # The output ends when the last process that could write to it has ended.
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=40)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.count("printed by a worker") == 2
