"""Ranks that differ, and ranks whose peer fails, end with an error that names it: never a value, never an abort.

Groups have a timeout of 30 s; what the contract ends takes less than 15.
"""

import gc
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.testing import Workers, spmd
from tests.faults import (
    PROGRAMS,
    BadSampleError,
    axis_of_all,
    broken_program,
    outcome,
    outcome_of,
    outcomes_of_survivors,
    params_of,
    places_of,
)
from tests.ranks import my_rank, on_ranks, world_of
from tests.test_processes import ROOT
from tests.trees import assert_same_bits

# Of every group of the mesh. No error may be that of a timeout, which says nothing of what the contract promises.
SECONDS = 5.0

# A dim of rank 0 and of rank 1, and what each becomes where an operator halves it.
LENGTHS = (422, 446)
SHAPES = (r"\b(422|211)\b", r"\b(446|223)\b")


def check_shapes_that_differ_between_ranks_are_named_on_all(operator, called):
    """Of an operator inside a loss, on two processes that nothing runs on afterwards."""

    def program():
        axis, length = axis_of_all(SECONDS), LENGTHS[my_rank()]
        params = fs.shard({"w": torch.ones(4)}, fs.zero3(axis, min_shard_elements=0))
        # Both have connected.
        fs.psum(torch.ones(()), axis)
        loss = fs.value_and_grad(lambda p: operator(fs.gather(p)["w"].expand(length, 4), axis=axis).sum())
        return outcome(lambda: loss(params))

    with Workers(2) as pool:
        found = pool.run(program, timeout=8 * SECONDS)
    for each in found:
        assert "Timed out" not in each.text, each
        for pattern in (called, *SHAPES):
            assert re.search(pattern, each.text), (pattern, each)


def test_shapes_that_differ_between_ranks_are_named_on_all():
    ppermute = partial(fs.ppermute, perm=[(0, 1), (1, 0)])
    check_shapes_that_differ_between_ranks_are_named_on_all(ppermute, "ppermute")


# (a) A rank raises, at each place of each program, and then goes on to the next call or idles.


def assert_named(outcomes, fault, victim):
    """Every rank but the victim names it and its error; one that had nothing to wait for any more is told next."""
    error = {"raise": ("BadSampleError", "bad sample 17"), "memory": ("MemoryError", "no memory")}[fault]
    for rank, found in enumerate(outcomes):
        assert found.seconds < 15.0, (rank, found)
        if rank == victim:
            assert (found.error, found.text) == error, found
        elif found.error:
            assert found.error == "CollectiveError", (rank, found)
            assert re.match(rf"rank {victim} failed in \w+: {': '.join(error)}\n", found.text), (rank, found)


def check_a_rank_that_raises_is_named_on_all(program, place, fault, then, world):
    """Return the ranks whose call had ended, which hear of it in the next one."""
    found = spmd(partial(broken_program, program, place, fault, then), world, timeout=60.0)
    assert_named(found, fault, len(found) - 1)
    return [rank for rank, each in enumerate(found) if not each.error]


FAULTS = [("raise", "next"), ("raise", "idle"), ("memory", "next")]
PLACES = places_of(PROGRAMS)


@pytest.mark.rows(5)
@pytest.mark.parametrize("world_size", (2, "2 processes", "4 processes"))
@pytest.mark.parametrize("fault, then", FAULTS)
@pytest.mark.parametrize("name, place", PLACES)
def test_a_rank_that_raises_is_named_on_all(name, place, fault, then, world_size, workers):
    world = world_of(world_size, workers)
    returned = check_a_rank_that_raises_is_named_on_all(PROGRAMS[name][0], place, fault, then, world)
    # Nothing but the gather has no later message.
    assert returned == ([*range(int(str(world_size)[0]) - 1)] if name == "gather" else []), returned


def test_ranks_that_fail_alike_go_on_with_their_mesh(workers):
    """One rank's exception passes through, and nothing is cut where all ranks raise at the same place."""

    def program():
        axis = axis_of_all()
        params, before = params_of(axis), fs.comm.world().generation

        def loss(p):
            fs.psum(fs.gather(p)["w"], axis)
            raise BadSampleError("on all")

        for _ in range(3):
            with pytest.raises(BadSampleError):
                fs.value_and_grad(loss)(params)
        assert fs.comm.world().generation == before
        return fs.psum(torch.ones(()), axis).item()

    assert spmd(program, 2) == [2.0, 2.0]
    assert spmd(program, workers(2)) == [2.0, 2.0]


@on_ranks(2, "2 processes")
def test_bad_input_of_one_rank_goes_with_the_message_that_begins_a_call():
    """The mesh stays good, and nothing else is sent."""
    axis = axis_of_all()
    params, before = params_of(axis), fs.comm.world().generation
    grads = {"v": torch.ones(8, 4), "w": torch.ones(8 - my_rank(), 4)}
    calls = {
        "scatter_grads": lambda: fs.scatter_grads(grads, params),
        "gather": lambda: fs.gather(params if my_rank() == 0 else {**params, "x": object()}),
        "value_and_grad": lambda: fs.value_and_grad(lambda p: p, reduce=("mean", "none")[my_rank()])(params),
        "jit": lambda: fs.jit(lambda p, x: p["w"], static_argnums=1)(params, [] if my_rank() else 1),
    }
    for name, call in calls.items():
        with fs.comm.record() as record, pytest.raises((ValueError, TypeError, fs.comm.CollectiveError)) as caught:
            call()
        if my_rank() == 0:
            assert str(caught.value).startswith(f"rank 1 failed in {name}: "), (name, str(caught.value))
            assert str(caught.value).endswith(f"\nTo fix: mend it; {name} has sent nothing yet.")
        assert all(entry.about.is_comparison for entry in record)
        assert fs.psum(torch.ones(()), axis).item() == 2.0
    assert fs.comm.world().generation == before


# (b) A rank is killed or exits.


def check_a_rank_that_is_killed_is_named_on_all(program, place, size, fault, path, monkeypatch):
    broken = partial(broken_program, program, place, fault, "idle")
    for text in outcomes_of_survivors(size, broken, path, monkeypatch):
        seconds, first, *_ = text.splitlines()
        assert float(seconds) < 15.0, text
        assert first == f"rank {size - 1} was killed or has ended", text


@pytest.mark.rows(2)
@pytest.mark.parametrize("fault", ("kill", "exit"))
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name, place", [row for row in PLACES if row[0] != "gather"])
def test_a_rank_that_is_killed_is_named_on_all(name, place, size, fault, tmp_path, monkeypatch):
    check_a_rank_that_is_killed_is_named_on_all(PROGRAMS[name][0], place, size, fault, tmp_path, monkeypatch)


def launched(size, script, *arguments):
    """Start a script on processes that find each other without a launcher's agent."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=os.environ | common | {"RANK": str(rank), "WORLD_SIZE": str(size)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]


def test_a_rank_whose_program_ends_by_an_error_is_named(tmp_path):
    """Outside of any call."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time, torch, fshard as fs\n"
        "axis = fs.axis_of(fs.init_mesh({'shard': -1}, device='cpu', timeout=30.0))\n"
        "fs.psum(torch.ones(()), axis)\n"
        "if fs.axis_index(axis) == 1:\n"
        "    raise ValueError('bad sample 17')\n"
        "try:\n"
        "    fs.psum(torch.ones(()), axis)\n"
        "except fs.comm.CollectiveError as error:\n"
        "    open(sys.argv[1], 'w').write(str(error))\n"
    )
    begin = time.monotonic()
    processes = launched(2, script, tmp_path / "found")
    codes = [process.wait(timeout=60.0) for process in processes]
    assert codes == [0, 1]
    assert time.monotonic() - begin < 30.0
    assert (tmp_path / "found").read_text().startswith("rank 1 was killed or has ended\n")


# (c) A rank is stopped, or computes for ever.


def check_a_rank_that_does_not_come_is_named_at_the_timeout(broken, place, size):
    def program():
        axis = axis_of_all(2.0)
        store = dist.distributed_c10d._get_default_store()

        def stops(reached):
            if my_rank() == size - 1 and reached == place:
                # All others have told that they wait in vain.
                store.wait([f"{rank} has waited" for rank in range(size - 1)], timedelta(seconds=30))

        fs.psum(torch.ones(()), axis)
        found = outcome_of(broken, axis, stops)
        store.set(f"{my_rank()} has waited", "")
        return found

    with Workers(size) as pool:
        found = pool.run(program, timeout=60.0)
    for rank, each in enumerate(found):
        first, *rest = each.text.splitlines()
        assert first == f"rank {size - 1} did not come within 2 s: it is stopped, hangs or computes", each
        assert any(re.match(r"  rank 0 waits in \w+ number \d+ \(.*\)", line) for line in rest), each
        assert each.seconds < 15.0, (rank, each)


@pytest.mark.rows(1)
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name, place", [("collectives", "between"), ("checkpoints", "again")])
def test_a_rank_that_does_not_come_is_named_at_the_timeout(name, place, size):
    check_a_rank_that_does_not_come_is_named_at_the_timeout(PROGRAMS[name][0], place, size)


# (d) Ranks do something else.

X = torch.ones(4, 4)


def perm(axis):
    return [(rank, (rank + 1) % axis.size) for rank in range(axis.size)]


# What most ranks do, what the last one does, and what both texts must hold.
DIFFERENT: dict[str, tuple[Callable[[fs.Axis], Any], Callable[[fs.Axis], Any], str, str]] = {
    "order": (
        lambda axis: (fs.psum(X, axis), fs.all_gather(X, axis)),
        lambda axis: (fs.all_gather(X, axis), fs.psum(X, axis)),
        r"all_reduce number \d+ \(psum\)",
        r"all_gather number \d+ \(all_gather\)",
    ),
    "size": (lambda axis: fs.psum(X, axis), lambda axis: fs.psum(torch.ones(6), axis), r"\(4, 4\)", r"\(6,\)"),
    "dtype": (lambda axis: fs.psum(X, axis), lambda axis: fs.psum(X.int(), axis), "float32", "int32"),
    "reduction": (lambda axis: fs.psum(X, axis), lambda axis: fs.pmax(X, axis), r"\(psum\)", r"\(pmax\)"),
    "skipped": (
        lambda axis: (fs.psum(X, axis), fs.all_gather(X, axis)),
        lambda axis: fs.all_gather(X, axis),
        r"\(psum\)",
        r"\(all_gather\)",
    ),
    "ragged": (
        lambda axis: fs.ragged_all_to_all(X, axis, *[[4 - axis.size + 1, *[1] * (axis.size - 1)]] * 2),
        lambda axis: fs.ragged_all_to_all(X, axis, *[[*[1] * (axis.size - 1), 4 - axis.size + 1]] * 2),
        "ragged_all_to_all",
        "ranks differ in the rows that they send each other",
    ),
    "another call": (
        lambda axis: fs.unshard(params_of(axis)),
        lambda axis: fs.update(fs.sgd(0.1), (s := fs.TrainState.create(params_of(axis), fs.sgd(0.1))), s.params),
        r"\(start of unshard\)",
        "has ended",
    ),
    "microbatches": (
        lambda axis: fs.accumulate(lambda p, b: fs.gather(p)["w"].sum())(params_of(axis), [1, 2]),
        lambda axis: fs.accumulate(lambda p, b: fs.gather(p)["w"].sum())(params_of(axis), [1, 2, 3]),
        "microbatches: expected 2",
        "got 3",
    ),
}


@pytest.mark.parametrize("world_size", (2, "2 processes", pytest.param("4 processes", marks=pytest.mark.slow)))
def test_ranks_that_differ_are_told_how(world_size, workers):
    """Before anything wrong is computed: never a value of another collective, and never the end of a process."""

    def program(name):
        most, last, *_ = DIFFERENT[name]
        axis = axis_of_all()
        fs.psum(torch.ones(()), axis)
        return outcome(lambda: (last if my_rank() == axis.size - 1 else most)(axis))

    world = world_of(world_size, workers)
    for name, (_, _, *patterns) in DIFFERENT.items():
        if name == "another call" and not isinstance(world, int):
            # A process that is over is a row of (b).
            continue
        for rank, found in enumerate(spmd(partial(program, name), world, timeout=60.0)):
            if name in ("ragged", "operator", "another call") and not found.error:
                # Two of four ranks may have exchanged what fits, and have ended.
                continue
            assert found.seconds < 15.0, (name, rank, found)
            for pattern in patterns:
                assert re.search(pattern, found.text), (name, rank, found)


@on_ranks("4 processes", timeout=60.0)
def test_ranks_that_take_axes_in_another_order_are_told():
    mesh = fs.init_mesh({"a": 2, "b": 2}, device="cpu", timeout=30.0)
    a, b = fs.axis_of(mesh, "a"), fs.axis_of(mesh, "b")
    first, second = (b, a) if my_rank() in (1, 2) else (a, b)
    found = outcome(lambda: (fs.psum(X, first), fs.psum(X, second)))
    assert found.error == "CollectiveError", found
    assert found.text.startswith("ranks wait for each other in different collectives\n"), found
    for rank, name in enumerate("abba"):
        assert re.search(rf"  rank {rank} waits in all_reduce number 1 \(psum\) over '{name}'", found.text), found
    assert found.seconds < 15.0, found


# (e) No alarm.


def check_nothing_is_raised_where_a_rank_is_slow(programs):
    """Later than a watcher waits, in a step with one rank jitted and another eager, and over meshes of two axes."""
    size = dist.get_world_size()
    axis = axis_of_all(60.0)
    if my_rank() == size - 1:
        time.sleep(1.5)
    assert fs.psum(torch.ones(()), axis).item() == size
    params = params_of(axis)

    def step(p):
        return fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum())(p)

    # A trace sends what an eager call does, but for the messages by which ranks compare calls.
    expected = step(params)
    assert_same_bits(fs.tree_leaves(fs.jit(step)(params)), fs.tree_leaves(expected))
    for program in programs:
        program(axis)
    grid = fs.init_mesh({"replicate": 1 if size == 2 else 2, "shard": -1}, device="cpu", timeout=60.0)
    hybrid = fs.shard({"w": torch.ones(8, 4)}, fs.hsdp(grid))
    assert step(hybrid)[0].item() == 32.0
    return fs.comm.world().generation


@on_ranks("2 processes", pytest.param("4 processes", marks=pytest.mark.slow), timeout=90.0)
def test_nothing_is_raised_where_a_rank_is_slow():
    names = ("accumulate", "apply", "checkpoints", "experts")
    return check_nothing_is_raised_where_a_rank_is_slow([PROGRAMS[name][0] for name in names])


# After a failure.


def threads_and_files():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@on_ranks("2 processes", pytest.param("4 processes", marks=pytest.mark.slow), timeout=60.0)
def test_training_goes_on_from_the_state_in_hand_on_a_new_mesh():
    """Several times in the same processes; a group of the user's own, and the default group, are left alone."""
    size, tx = dist.get_world_size(), fs.adam(0.1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
    group = dist.new_group(timeout=timedelta(seconds=30))
    state = fs.TrainState.create(fs.shard({"w": torch.ones(8, 4)}, fs.zero3(mesh, min_shard_elements=0)), tx)

    def step(state, fails=False):
        def loss(p):
            w = fs.gather(p)["w"]
            if fails:
                raise BadSampleError("bad sample 17")
            return w.square().sum()

        value, grads = fs.value_and_grad(loss)(state.params)
        return fs.update(tx, state, grads), value

    expected, counts = [], []
    reference = state
    for _ in range(3):
        reference, value = step(reference)
        expected.append(value.item())
    for number in range(3):
        found = outcome(lambda: step(state, fails=my_rank() == 1))  # noqa: B023
        assert "bad sample 17" in found.text, found
        broken = outcome(lambda: step(state))  # noqa: B023
        assert broken.error == "CollectiveError", broken
        for theirs in (None, group):
            total = torch.ones(2)
            dist.all_reduce(total, group=theirs)
            assert total.tolist() == [size, size]
        assert fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0).get_group() == mesh.get_group()
        state, value = step(state)
        assert value.item() == expected[number]
        gc.collect()
        counts.append(threads_and_files())
    threads, files = zip(*counts, strict=True)
    # Threads and sockets of the groups before may be just about to end.
    assert max(threads) <= threads[0] + 4, counts
    assert max(files) <= files[0] + 8, counts
    dist.destroy_process_group(group)
