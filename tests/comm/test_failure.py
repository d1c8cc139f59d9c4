"""Messages of collectives that fail: one full text of each kind, and stores that do not answer."""

import json
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
from fshard import comm
from fshard.comm import failure, recorder
from fshard.comm.events import encoded
from fshard.comm.groups import Link
from fshard.testing import RankError, Workers
from fshard.testing import workers as workers_module
from tests.comm.steps import make_step
from tests.test_processes import ROOT, TORCHRUN

TIMEOUT = timedelta(seconds=3)

REMEDY = (
    "To fix: mend the first error; go on from the last checkpoint, or in the same processes: call fs.init_mesh on "
    "every rank, and the step again with the state before it."
)


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
    """What a call fails with; the backend's own words are its cause."""
    with pytest.raises(comm.CollectiveError) as caught:
        call()
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    return str(caught.value)


GATHER = "all_gather number 7 (gather of layers.2) over 'shard' of float32 (36,), 144 bytes in value_and_grad"


def test_a_late_rank(workers):
    """Between two units one rank takes longer than the others wait."""

    def program():
        rank = dist.get_rank()

        def between(place):
            if (rank, place) == (1, 1):
                store().wait(["a late rank"])

        with impatient_axis() as axis:
            # Ranks know the order of the step from another mesh, and send nothing more.
            step, state, x = make_step(axis, between)
            text = text_of(lambda: step(state, x))
            store().set("a late rank", "")
        return text

    first, second = workers(2).run(program)
    # The second one may have told of an earlier wait, where the machine is busy.
    first = re.sub(r"  rank 1 waits in .*\n", "", first)
    common = [
        "rank 1 did not come within 3 s: it is stopped, hangs or computes",
        f"  rank 0 waits in {GATHER}",
    ]
    assert first == "\n".join([*common, f"  rank 0, this one, was in {GATHER}", REMEDY])
    # It comes too late, and hears why the others have gone.
    assert re.sub(r"  rank 1 waits in .*\n", "", second).splitlines()[:2] == common


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
    verb = "jit" if jitted else "value_and_grad"
    assert text.startswith("rank 1 did not come within 3 s: it is stopped, hangs or computes\n")
    assert re.search(
        rf"  rank 0 waits in all_gather number \d+ \(start of {verb}\) over 'shard' of a digest in {verb}\n", text
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

    gather = "all_gather number 2 (gather of blocks.7) over 'shard' of float32 (2,), 8 bytes"
    steps = [gather, gather, "reduce_scatter number 2 (sums) over 'shard' of float32 (2,), 8 bytes"]
    for rank, text in enumerate(workers(3).run(program)):
        first, *others, own, remedy = text.splitlines()
        assert first == "ranks differ in a collective"
        # Those that were waiting when the difference was found.
        assert set(others) <= {f"  rank {n}: {step}" for n, step in enumerate(steps)}
        assert f"  rank 2: {steps[2]}" in others
        assert own == f"  rank {rank}, this one, was in {steps[rank]}"
        assert remedy == REMEDY


def killed_in_a_step(path):
    """Write down what a rank fails with whose peer is killed in front of the second unit."""

    def between(place):
        if (dist.get_rank(), place) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    with impatient_axis() as axis:
        step, state, x = make_step(axis, between)
        path.write_text(text_of(lambda: step(state, x)))


# What the survivor of two says, where the other was killed in front of the second unit.
KILLED = [
    "rank 1 was killed or has ended",
    f"  rank 0 waits in {GATHER}",
    f"  rank 0, this one, was in {GATHER}",
    REMEDY,
]


def test_a_process_that_is_killed(tmp_path, monkeypatch):
    # The pool would end the other one before it has said all.
    monkeypatch.setattr(workers_module, "GRACE", 60.0)
    with Workers(2) as workers, pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        workers.run(lambda: killed_in_a_step(tmp_path / f"{dist.get_rank()}"))
    assert without_layers((tmp_path / "0").read_text()) == without_layers("\n".join(KILLED))


def without_layers(text):
    """A text without the layer: a connection may end while this rank still reads what came for the one before."""
    return re.sub(r"number \d+ \(gather of layers\.\d\)", "number", text)


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
    assert without_layers(found.read_text()) == without_layers("\n".join(KILLED))


def test_a_store_that_does_not_answer_holds_nobody_up():
    def gone():
        raise dist.DistNetworkError("gone")

    assert failure.answer(threading.Event().wait) is None
    assert failure.answer(gone, 5.0) is None
    assert failure.answer(lambda: "note", 5.0) == "note"


def position(waits=None, **numbers):
    """A rank of two groups that has started some collectives in each, all alike, and may wait in the last of one."""
    trails = {name: [Link(n, n, f"psum {n} in {name}") for n in range(number + 1)] for name, number in numbers.items()}
    groups = {name: ([0, 1, 2], trail) for name, trail in trails.items()}
    return comm.Position(waits and (waits, trails[waits][-1]), groups)


CIRCLES = {
    "two groups": ({0: ("a", 1, 0), 1: ("b", 0, 1), 2: (None, 0, 0)}, [0, 1]),
    "over a third rank": ({0: ("a", 2, 1), 1: ("a", 1, 1), 2: ("b", 0, 2)}, [0, 1, 2]),
    "one computes": ({0: ("a", 1, 0), 1: (None, 0, 0), 2: ("a", 1, 0)}, None),
    "all have come": ({0: ("a", 1, 0), 1: ("a", 1, 0), 2: ("a", 1, 0)}, None),
    "one is behind": ({0: ("a", 2, 0), 1: ("a", 1, 0), 2: (None, 0, 0)}, None),
}


@pytest.mark.parametrize("name", CIRCLES)
def test_circles_are_found_and_nothing_else(name):
    table, expected = CIRCLES[name]
    positions = {rank: position(waits, a=a, b=b) for rank, (waits, a, b) in table.items()}
    told = {rank: comm.Position(*json.loads(json.dumps(each))) for rank, each in positions.items()}
    found = failure.circle(0, told)
    assert found == failure.circle(0, positions)
    if expected is None:
        assert found is None
    else:
        lines = found.splitlines()
        assert lines[0] == "ranks wait for each other in different collectives"
        assert [int(line.split()[1]) for line in lines[1:]] == expected


def test_a_collective_that_cannot_start():
    """As with backends that fail at once."""
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))

    def kernel(step, group):
        raise dist.DistBackendError("no device\nand more")

    about = encoded(comm.Label("gather", ("a",), ("['w']",)))
    with pytest.raises(comm.CollectiveError) as caught:
        recorder.started("all_gather", kernel, [torch.ones(1)], ("shard", 1, axis.group_name, about))
    text = "rank 0 failed in all_gather number 1 (gather of a) over 'shard' of float32 (1,), 4 bytes: no device\n"
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value.__cause__, dist.DistBackendError)
