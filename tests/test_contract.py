"""Ranks that differ, and ranks whose peer fails, end with an error that names it: never a value, never an abort.

Groups have a timeout of 30 s; what the contract ends takes less than 15.
"""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
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
    Hook,
    axis_of_all,
    broken_program,
    jitted_step,
    outcome,
    outcome_of,
    outcomes_of_survivors,
    params_of,
    places_of,
    prepare,
)
from tests.ranks import my_rank, on_ranks, world_of
from tests.test_processes import ROOT
from tests.trees import assert_same_bits

# (a) A rank raises, at each place of each program, and then goes on to the next call or idles.

ERRORS = {"raise": "BadSampleError: bad sample 17", "memory": "MemoryError: no memory"}
FAULTS = [("raise", "next"), ("raise", "idle"), ("memory", "next")]
PLACES = places_of(PROGRAMS)


def check_a_rank_that_raises_is_named_on_all(program, place, fault, then, world):
    """Return the ranks whose call had ended, which hear of it in the next one."""
    *others, victim = spmd(partial(broken_program, program, place, fault, then), world, timeout=60.0)
    assert f"{victim.error}: {victim.text}" == ERRORS[fault]
    for found in others:
        assert found.seconds < 15.0, found
        if found.error:
            assert found.error == "CollectiveError", found
            assert re.match(rf"rank {len(others)} failed in \w+: {ERRORS[fault]}\n", found.text), found
    return [rank for rank, found in enumerate(others) if not found.error]


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (2, "2 processes", "4 processes"))
@pytest.mark.parametrize("fault, then", FAULTS)
@pytest.mark.parametrize("name, place", PLACES)
def test_a_rank_that_raises_is_named_on_all(name, place, fault, then, world_size, workers):
    world = world_of(world_size, workers)
    returned = check_a_rank_that_raises_is_named_on_all(PROGRAMS[name][0], place, fault, then, world)
    # Nothing but the gather has no later message.
    assert returned == ([*range(int(str(world_size)[0]) - 1)] if name == "gather" else []), returned


@on_ranks(2, "2 processes")
def test_ranks_that_all_fail():
    """At the same place nothing is cut; at different ones each raises its own error or is told of another's."""
    axis = axis_of_all()
    params, before = params_of(axis), fs.comm.rank_state().generation

    def loss(p, calls):
        for _ in range(calls):
            fs.psum(fs.gather(p)["w"], axis)
        raise BadSampleError(f"on rank {my_rank()}")

    for _ in range(3):
        with pytest.raises(BadSampleError):
            fs.value_and_grad(loss)(params, 1)
    assert fs.comm.rank_state().generation == before
    assert fs.psum(torch.ones(()), axis).item() == 2.0
    found = outcome(lambda: fs.value_and_grad(loss)(params, 1 + my_rank()))
    told = f"rank {1 - my_rank()} failed in value_and_grad: BadSampleError: on rank {1 - my_rank()}\n"
    assert found.text == f"on rank {my_rank()}" or (my_rank() and found.text.startswith(told)), found


@on_ranks(2, "2 processes")
def test_bad_input_of_one_rank_goes_with_the_message_that_begins_a_call():
    """The mesh stays good, and nothing else is sent."""
    axis = axis_of_all()
    params, before = params_of(axis), fs.comm.rank_state().generation
    grads = {"v": torch.ones(8, 4), "w": torch.ones(8 - my_rank(), 4)}
    calls = {
        "scatter_grads": lambda: fs.scatter_grads(grads, params),
        "gather": lambda: fs.gather(params if my_rank() == 0 else {**params, "x": object()}),
        "value_and_grad": lambda: fs.value_and_grad(lambda p: p, reduce=("mean", "none")[my_rank()])(params),
        "jit": lambda: fs.jit(lambda p, x: p["w"], static_argnums=1)(params, [] if my_rank() else 1),
        "jit, traced": lambda: fs.jit(lambda p: p["w" if my_rank() == 0 else "at 1"])(params),
    }
    errors = ValueError, TypeError, KeyError, fs.comm.CollectiveError
    for what, call in calls.items():
        name = what.partition(",")[0]
        with fs.comm.record() as record, pytest.raises(errors) as caught:
            call()
        if my_rank() == 0:
            assert str(caught.value).startswith(f"rank 1 failed in {name}: "), (name, str(caught.value))
            assert str(caught.value).endswith(f"\nTo fix: correct the error above. {name} has not sent any data.")
        assert all(entry.about.is_comparison for entry in record)
        assert fs.psum(torch.ones(()), axis).item() == 2.0
    assert fs.comm.rank_state().generation == before


class UnreadableError(Exception):
    """An error that cannot say what it is about."""

    def __str__(self):
        raise RuntimeError("no text")


class SilentError(Exception):
    """An error without a text."""


# Errors whose texts cannot be sent as they are, and what the other ranks are told.
UNUSUAL = [
    (lambda: ValueError("no file caf\u00e9 \udc80"), "ValueError: no file caf\u00e9 \\udc80"),
    (UnreadableError, "UnreadableError"),
    (SilentError, "SilentError"),
]


@on_ranks(2, "2 processes")
def test_errors_with_any_text_reach_the_other_ranks():
    """Before a call sends anything, and in the middle of one."""
    for make, told in UNUSUAL:
        axis = axis_of_all()
        params = params_of(axis)

        def traced(tree, make=make):
            if my_rank():
                raise make()
            return tree["w"]

        def gathers_twice(tree, make=make):
            full = fs.gather({"w": tree["w"]})["w"]
            if my_rank():
                raise make()
            return (full + fs.gather({"v": tree["v"]})["v"]).sum()

        for name, call in {"jit": fs.jit(traced), "value_and_grad": fs.value_and_grad(gathers_twice)}.items():
            found = outcome(partial(call, params))
            if my_rank():
                assert found.error == told.partition(":")[0]
            else:
                assert found.error == "CollectiveError", found
                assert found.text.startswith(f"rank 1 failed in {name}: {told}\n"), found


# (b) Ctrl-C on a rank that waits.


def press_ctrl_c_in_a_wait():
    """Send this process SIGINT once it waits for another rank."""

    def press():
        while fs.comm.rank_state().waiting.collective is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def interrupted_in_a_call(call):
    """Run a call in which the last rank waits for the others, which come when it has ended, and return how it ended."""
    axis = axis_of_all()
    params = params_of(axis)
    if call is gather_in_a_jitted_step:
        fs.jit(jitted_step)(params)
    fs.psum(torch.ones(()), axis)
    store = dist.distributed_c10d._get_default_store()
    if my_rank() == axis.size - 1:
        press_ctrl_c_in_a_wait()
        found = outcome(lambda: call(axis, params, lambda: None))
        store.set(f"{call.__name__} has ended", "")
        return found
    return outcome(lambda: call(axis, params, lambda: store.wait([f"{call.__name__} has ended"])))


def begin(axis, params, come):
    come()
    fs.gather(params)


def sum_over_ranks(axis, params, come):
    come()
    fs.psum(torch.ones(()), axis)


def gather_in_a_loss(axis, params, come):
    def loss(p):
        full = fs.gather({"w": p["w"]})["w"]
        come()
        return (full + fs.gather({"v": p["v"]})["v"]).sum()

    fs.value_and_grad(loss)(params)


def sum_in_a_backward(axis, params, come):
    class Comes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            come()
            return grad

    fs.value_and_grad(lambda p: Comes.apply(fs.gather(p)["w"]).sum())(params)


def gather_in_a_jitted_step(axis, params, come):
    Hook.at = lambda place: come() if place == "forward" else None
    try:
        fs.jit(jitted_step)(params)
    finally:
        Hook.at = lambda place: None


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_ctrl_c_is_heard_by_a_rank_that_waits_and_named_on_the_others(size, workers):
    pool = workers(size)
    names = {begin: "gather", sum_over_ranks: "psum", gather_in_a_jitted_step: "jit"}
    for call in (begin, sum_over_ranks, gather_in_a_loss, sum_in_a_backward, gather_in_a_jitted_step):
        *others, pressed = pool.run(partial(interrupted_in_a_call, call), timeout=60.0)
        assert pressed.error == "KeyboardInterrupt", pressed
        for found in others:
            assert found.error == "CollectiveError", found
            name = names.get(call, "value_and_grad")
            assert found.text.startswith(f"rank {size - 1} failed in {name}: KeyboardInterrupt\n"), found


def test_ctrl_c_is_heard_by_a_rank_that_waits_for_others_to_make_a_mesh():
    def program():
        axis = axis_of_all()
        store = dist.distributed_c10d._get_default_store()
        if my_rank() == 0:
            store.wait(["mesh has ended"])
            return None
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        found = outcome(lambda: fs.init_mesh({"shard": axis.size}, device="cpu"))
        store.set("mesh has ended", "")
        return found.error

    with Workers(2) as pool:
        assert pool.run(program, timeout=60.0) == [None, "KeyboardInterrupt"]


@on_ranks("2 processes")
def test_a_program_that_handles_ctrl_c_itself_goes_on():
    axis = axis_of_all()
    fs.psum(torch.ones(()), axis)
    store = dist.distributed_c10d._get_default_store()
    if my_rank() == 0:
        # Longer than the watcher needs to find out.
        with pytest.raises(RuntimeError):
            store.wait(["nothing"], timedelta(seconds=1))
        assert fs.psum(torch.ones(()), axis).item() == 2.0
        return
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    press_ctrl_c_in_a_wait()
    assert fs.psum(torch.ones(()), axis).item() == 2.0
    signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


# (c) A rank is killed or exits.


def check_a_rank_that_is_killed_is_named_on_all(program, place, size, fault, path, monkeypatch):
    broken = partial(broken_program, program, place, fault, "idle")
    for rank, text in enumerate(outcomes_of_survivors(size, broken, path, monkeypatch)):
        seconds, first, *waiting, own, remedy = text.splitlines()
        assert float(seconds) < 15.0, text
        assert first == f"rank {size - 1} was killed or has ended", text
        where = r"in \w+ number \d+ \(.*\) over '\w+' of .+"
        assert re.match(rf"  rank {rank}, this one, was {where}", own), text
        if size == 2:
            (line,) = waiting
            assert re.match(rf"  rank 0 waits {where}", line), text
        assert remedy.startswith("To fix: correct the first error. Then restart from the last checkpoint, or "), text


@pytest.mark.rows(2)
@pytest.mark.parametrize("fault", ("kill", "exit"))
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name, place", [row for row in PLACES if row[0] != "gather"])
def test_a_rank_that_is_killed_is_named_on_all(name, place, size, fault, tmp_path, monkeypatch):
    check_a_rank_that_is_killed_is_named_on_all(PROGRAMS[name][0], place, size, fault, tmp_path, monkeypatch)


SCRIPT = """
import os, sys, torch, fshard as fs
axis = fs.axis_of(fs.init_mesh({'shard': -1}, device='cpu', timeout=30.0))
fs.psum(torch.ones(()), axis)
if fs.axis_index(axis) == 1:
    raise ValueError('bad sample 17')
try:
    fs.psum(torch.ones(()), axis)
except fs.comm.CollectiveError as error:
    open(sys.argv[1], 'w').write(str(error))
"""


def test_a_rank_whose_program_ends_by_an_error_is_named(tmp_path):
    """Outside of any call; no launcher is there."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    common = {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    begin = time.monotonic()
    command = [sys.executable, "-c", SCRIPT, tmp_path / "found"]
    processes = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    assert [process.wait(timeout=60.0) for process in processes] == [0, 1]
    assert time.monotonic() - begin < 30.0
    assert (tmp_path / "found").read_text().startswith("rank 1 was killed or has ended\n")


# (d) A rank is stopped, or computes for ever.


def check_a_rank_that_does_not_come_is_named_at_the_timeout(broken, place, size, timeout=2.0):
    def program():
        axis = axis_of_all(timeout)
        prepare(broken, axis)
        store = dist.distributed_c10d._get_default_store()

        def stops(reached):
            if my_rank() == size - 1 and reached == place:
                # All others have told that they wait in vain.
                store.wait([f"{rank} has waited" for rank in range(size - 1)], timedelta(seconds=30 + timeout))

        fs.psum(torch.ones(()), axis)
        found = outcome_of(broken, axis, stops)
        store.set(f"{my_rank()} has waited", "")
        return found

    with Workers(size) as pool:
        found = pool.run(program, timeout=60.0 + 4 * timeout)
    for each in found:
        first, *rest = each.text.splitlines()
        assert first.startswith(f"rank {size - 1} did not join a collective within {timeout:.0f} s. "), each
        assert any(re.match(r"  rank 0 waits in \w+ number \d+ \(.*\)", line) for line in rest), each
        assert each.seconds < timeout + 13.0, each


@pytest.mark.rows(1)
@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name, place", [("collectives", "between"), ("checkpoints", "again")])
def test_a_rank_that_does_not_come_is_named_at_the_timeout(name, place, size):
    # Four processes share the cores of a small machine, where one that is merely slow must not miss the timeout.
    check_a_rank_that_does_not_come_is_named_at_the_timeout(PROGRAMS[name][0], place, size, timeout=1.5 * size)


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 4))
def test_a_rank_that_does_not_come_in_a_jitted_step_is_named_at_the_timeout(size):
    """One rank may take longer than another to trace it."""
    check_a_rank_that_does_not_come_is_named_at_the_timeout(PROGRAMS["jitted"][0], "forward", size, timeout=30.0)


# (e) Ranks do something else.

X = torch.ones(4, 4)


def gathers(*order):
    """Of leaves that nothing but their names can tell apart."""

    def loss(params):
        return sum(torch.tanh(fs.gather(params[i])).sum() for i in order)

    return lambda axis: fs.value_and_grad(loss)(fs.shard([X] * 3, fs.zero3(axis, min_shard_elements=0)))


def sums_of(batches):
    return lambda axis: fs.accumulate(lambda p, b: fs.gather(p)["w"].sum())(params_of(axis), batches)


def updated(axis):
    state = fs.TrainState.create(params_of(axis), fs.sgd(0.1))
    return fs.update(fs.sgd(0.1), state, state.params)


def rows_sent(more):
    """Send each rank as many rows of X, or rank 0 some more than it expects and oneself as many fewer."""

    def call(axis):
        expected = [4 // axis.size] * axis.size
        expected[-1] -= more
        return fs.ragged_all_to_all(X, axis, [expected[0] + more, *expected[1:]], expected)

    return call


def both(*calls):
    return lambda axis: [call(axis) for call in calls]


psum, pmax, all_gather = (partial(f, X) for f in (fs.psum, fs.pmax, fs.all_gather))
ORDER = r"all_reduce number \d+ \(psum\)", r"all_gather number \d+ \(all_gather\)"
# What most ranks do, what the last one does, and what both texts must hold.
Different = dict[str, tuple[Callable[[fs.Axis], Any], Callable[[fs.Axis], Any], str, str]]
DIFFERENT: Different = {
    "order": (both(psum, all_gather), both(all_gather, psum), *ORDER),
    "size": (psum, partial(fs.psum, torch.ones(6)), r"\(4, 4\)", r"\(6,\)"),
    "dtype": (psum, partial(fs.psum, X.int()), "float32", "int32"),
    "reduction": (psum, pmax, r"\(psum\)", r"\(pmax\)"),
    "skipped": (both(psum, all_gather), all_gather, r"\(psum\)", r"\(all_gather\)"),
    "ragged": (rows_sent(0), rows_sent(1), "ragged_all_to_all", "ranks differ in the rows that they send each other"),
    "another call": (lambda axis: fs.unshard(params_of(axis)), updated, r"\(start of unshard\)", "has ended"),
    "microbatches": (sums_of([1, 2]), sums_of([1, 2, 3]), "microbatches: expected 2", "got 3"),
    "gathers in another order": (gathers(0, 1, 2), gathers(0, 2, 1), "^ranks differ in a collective", r"\[1\].*\[2\]"),
    "a gather less": (gathers(0, 1, 2), gathers(1, 2), "^ranks differ in a collective", r"\[0\].*\[1\]"),
    "a gather more": (gathers(0, 1), gathers(0, 0, 1), "^ranks differ in a collective", r"\[1\].*\[0\]"),
}


def check_ranks_that_differ_are_told_how(rows, world):
    """Before anything wrong is computed: never a value of another collective, and never the end of a process."""

    def program(most, last):
        axis = axis_of_all()
        fs.psum(torch.ones(()), axis)
        return outcome(lambda: (last if my_rank() == axis.size - 1 else most)(axis))

    for name, (most, last, *patterns) in rows.items():
        if name == "another call" and not isinstance(world, int):
            # A process that is over is a row of (b).
            continue
        ranks = spmd(partial(program, most, last), world, timeout=60.0)
        for rank, found in enumerate(ranks):
            # Ranks between the first and the last exchange what fits.
            between = name == "ragged" and 0 < rank < len(ranks) - 1
            if not found.error and (between or name == "another call"):
                continue
            assert found.seconds < 15.0, (name, rank, found)
            for pattern in patterns:
                assert re.search(pattern, found.text, re.DOTALL), (name, rank, found)


@pytest.mark.parametrize("world_size", (2, *(pytest.param(f"{n} processes", marks=pytest.mark.slow) for n in (2, 4))))
def test_ranks_that_differ_are_told_how(world_size, workers):
    check_ranks_that_differ_are_told_how(DIFFERENT, world_of(world_size, workers))


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


# (f) No alarm.


def check_nothing_is_raised_where_a_rank_is_slow(programs):
    """Later than a watcher waits, in a step with one rank jitted and another eager, and over meshes of two axes."""
    size = dist.get_world_size()
    axis = axis_of_all(60.0)
    if my_rank() == size - 1:
        time.sleep(1.5)
    assert fs.psum(torch.ones(()), axis).item() == size
    params, step = params_of(axis), fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum())
    # A trace sends what an eager call does, but for the messages by which ranks compare calls.
    expected = step(params)
    assert_same_bits(fs.tree_leaves(fs.jit(step)(params)), fs.tree_leaves(expected))
    for program in programs:
        program(axis)
    grid = fs.init_mesh({"replicate": 1 if size == 2 else 2, "shard": -1}, device="cpu", timeout=60.0)
    assert step(fs.shard({"w": torch.ones(8, 4)}, fs.hsdp(grid)))[0].item() == 32.0
    return fs.comm.rank_state().generation


@on_ranks("2 processes", pytest.param("4 processes", marks=pytest.mark.slow), timeout=90.0)
def test_nothing_is_raised_where_a_rank_is_slow():
    names = ("accumulate", "apply", "checkpoints", "experts")
    return check_nothing_is_raised_where_a_rank_is_slow([PROGRAMS[name][0] for name in names])


# After a failure.


@on_ranks("2 processes", pytest.param("4 processes", marks=pytest.mark.slow), timeout=60.0)
def test_training_goes_on_from_the_state_in_hand_on_a_new_mesh():
    """Several times in the same processes; a group of the user's own, and the default group, are left alone."""
    size, tx = dist.get_world_size(), fs.adam(0.1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
    group = dist.new_group(timeout=timedelta(seconds=30))
    state = reference = fs.TrainState.create(params_of(fs.axis_of(mesh)), tx)

    def step(state, fails=False):
        def loss(p):
            w = fs.gather(p)["w"]
            if fails:
                raise BadSampleError("bad sample 17")
            return w.square().sum()

        value, grads = fs.value_and_grad(loss)(state.params)
        return fs.update(tx, state, grads), value

    expected, counts = [], []
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
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    threads, files = zip(*counts, strict=True)
    # Threads and sockets of the groups before may be just about to end.
    assert max(threads) <= threads[0] + 4, counts
    assert max(files) <= files[0] + 8, counts
    dist.destroy_process_group(group)
