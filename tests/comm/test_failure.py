"""Collectives that fail: ranks that are killed, late or do something else, and what the others say then."""

import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import _compat, comm
from fshard.comm import recorder
from fshard.testing import RankError, Workers
from fshard.testing import workers as workers_module
from tests.test_processes import ROOT, TORCHRUN
from tests.trace.steps import make_step

# After which a rank that waits for another gives up. Gloo needs it where a rank dies, too: an error of a connection
# does not end the wait for a message that is just being sent (signalException in gloo/transport/tcp/pair.cc).
TIMEOUT = timedelta(seconds=3)


@contextmanager
def impatient_axis():
    """All ranks, on a process group of its own that does not wait for long, once all have loaded what they need."""
    step, state, x = make_step()
    step(state, x)
    group = dist.new_group(timeout=TIMEOUT)
    dist.barrier()
    try:
        yield fs.Axis("shard", dist.get_world_size(), group.group_name)
    finally:
        dist.destroy_process_group(group)


def store():
    return dist.distributed_c10d._get_default_store()


def text_of(call):
    """What a call fails with, once its cause has been looked at; and a sign for the others that it has."""
    with pytest.raises(comm.CollectiveError) as caught:
        call()
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert f"  backend: {str(cause).splitlines()[0][:100]}" in str(caught.value)
    return str(caught.value)


def in_order(text, *patterns):
    assert re.search(".*".join(patterns), text, re.DOTALL), text


def test_a_late_rank(workers):
    """Between two units one rank takes longer than the others wait."""

    def program():
        rank = dist.get_rank()

        def between(place):
            if (rank, place) == (1, 1):
                store().wait(["a late rank"])

        with impatient_axis() as axis:
            step, state, x = make_step(axis, between)
            text = text_of(lambda: step(state, x))
            store().set("a late rank", "")
        return text

    first, second = workers(2).run(program)
    gather = r"all_gather number \d+ \(gather of layers.2\) over 'shard'"
    in_order(
        first,
        rf"^{gather} failed on rank 0\n",
        r"  leaves: \S*layers\S*2\S*weight\S*, \S*layers\S*2\S*bias\S*\n",
        rf"  rank 0, this one: failed in {gather}; finished last: all_gather number \d+ \(gather of layers.1\)",
        r"  rank 1: did not answer within 1 s: it was killed, has ended, hangs or computes\n",
        r"To fix: see why rank 1 did not come; .* raise the process group's timeout\.$",
    )
    # It comes too late, and hears where the other was.
    in_order(
        second,
        r"^all_gather number \d+ \(gather of layers.[12]\) over 'shard' failed on rank 1\n",
        rf"  rank 0: failed in {gather}; finished last: all_gather number \d+ \(gather of layers.1\)",
        r"  rank 1, this one: failed in all_gather number \d+ \(gather of layers.[12]\)",
    )


@pytest.mark.slow
@pytest.mark.parametrize("jitted", (False, True), ids=("eager", "jitted"))
def test_a_rank_that_leaves_a_step_out(workers, jitted):
    def program():
        with impatient_axis() as axis:
            step, state, x = make_step(axis)
            step = fs.jit(step) if jitted else step
            step(state, x)
            if dist.get_rank() == 0:
                text = text_of(lambda: step(state, x))
                store().set(f"left out {jitted}", "")
                return text
            store().wait([f"left out {jitted}"])

    text, _ = workers(2).run(program)
    failed = r"\(agree of jit begins\)" if jitted else r"\(agree of value_and_grad begins\)"
    in_order(
        text,
        rf"^all_gather number \d+ {failed} over 'shard' failed on rank 0\n",
        r"  rank 0, this one: failed in .*; finished last: all_reduce number \d+ \(objective\) over 'shard'\n",
        r"  rank 1: did not answer",
    )


def test_ranks_that_do_different_things(workers):
    """All of them fail, and each hears from all others where these were."""

    def program():
        with impatient_axis() as axis:
            comm.all_gather([torch.ones(2)], axis, "before")
            if dist.get_rank() == 2:
                return text_of(lambda: comm.reduce_scatter([torch.ones(3, 2)], axis, "sums"))
            with comm.concerning(["blocks.7"], [f"['w{n}']" for n in range(8)]):
                return text_of(lambda: comm.all_gather([torch.ones(2)], axis, "gather"))

    for rank, text in enumerate(workers(3).run(program)):
        gather = r"all_gather number \d+ \(gather of blocks.7\) over 'shard'; finished last: all_gather number \d+ "
        for other in range(3):
            this = ", this one" if other == rank else ""
            failed = (
                gather if other < 2 else r"reduce_scatter number \d+ \(sums\) over 'shard'; finished last: all_gather "
            )
            in_order(text, rf"\n  rank {other}{this}: failed in {failed}")
        assert text.endswith("the rank behind has left one out."), text
        if rank < 2:
            assert "  leaves: ['w0'], ['w1'], ['w2'], ['w3'], ['w4'], ['w5'], and 2 more\n" in text


def killed_in_a_step(path):
    """Write down what a rank fails with whose peer is killed in front of the second unit."""

    def between(place):
        if (dist.get_rank(), place) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    with impatient_axis() as axis:
        step, state, x = make_step(axis, between)
        path.write_text(text_of(lambda: step(state, x)))


def test_a_process_that_is_killed(tmp_path, monkeypatch):
    # The pool would end the other one before it has said all.
    monkeypatch.setattr(workers_module, "GRACE", 60.0)
    with Workers(2) as workers, pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        workers.run(lambda: killed_in_a_step(tmp_path / f"{dist.get_rank()}"))
    in_order((tmp_path / "0").read_text(), *KILLED)


# What the survivor of two says, where the other was killed in front of the second unit.
KILLED = (
    r"^all_gather number \d+ \(gather of layers.[12]\) over 'shard' failed on rank 0\n",
    r"  leaves: \S*layers\S*[12]\S*weight\S*, \S*layers\S*[12]\S*bias\S*\n",
    r"  rank 0, this one: failed in .*; finished last: all_gather number \d+ \(",
    r"  rank 1: did not answer within 1 s: it was killed",
)

UNDER_TORCHRUN = """
import pathlib, signal, sys
from tests.comm.test_failure import killed_in_a_step

# The launcher ends the other ranks as soon as one has gone.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
killed_in_a_step(pathlib.Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_rank_of_torchrun_that_is_killed(tmp_path):
    script, found = tmp_path / "script.py", tmp_path / "found"
    script.write_text(UNDER_TORCHRUN)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = list(map(str, (*TORCHRUN, 2, script, found)))
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert found.exists(), result.stdout + result.stderr
    in_order(found.read_text(), *KILLED)


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch):
    class Stuck:
        def set(self, key, value):
            threading.Event().wait()

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Stuck)
    assert _compat.exchange_notes("key", 0, "note", [0, 1], 0.05) == {}

    class Gone:
        def set(self, key, value):
            raise dist.DistNetworkError("gone")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Gone)
    assert _compat.exchange_notes("key", 0, "note", [0, 1], 0.05) == {}


def test_notes_of_an_earlier_failure_are_not_read(monkeypatch):
    kept = dist.HashStore()
    kept.set("key/1/1", "earlier")
    kept.set("key/2/2", "now")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: kept)
    assert _compat.exchange_notes("key/2", 0, "mine", [0, 1, 2], 0.05) == {2: "now"}
    assert kept.get("key/2/0") == b"mine"


def test_a_collective_that_cannot_start():
    """As with backends that fail at once."""
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))

    def kernel():
        raise dist.DistBackendError("no device\nand more")

    about = comm.encoded(comm.Label("gather", ("a",), ("['w']",)))
    with pytest.raises(comm.CollectiveError) as caught:
        recorder.started("all_gather", kernel, [torch.ones(1)], ("shard", 1, axis.group_name, about))
    assert "all_gather number 1 (gather of a) over 'shard' failed on rank 0" in re.sub(
        r"number \d+", "number 1", str(caught.value)
    )
    assert "  backend: no device\n  leaves: ['w']\n" in str(caught.value)
    assert isinstance(caught.value.__cause__, dist.DistBackendError)
