"""Ranks that differ, and ranks whose peer fails, end with an error that names it: never a value, never an abort.

Groups have a timeout of 30 s; what the contract ends takes less than 15.
"""

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import product
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
    outcome,
    outcome_of,
    outcomes_of_survivors,
    params_of,
    places_of,
    prepare,
)
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank, on_ranks, world_of
from tests.trees import assert_same_bits

# (a) A rank raises, at each place of each program, and then goes on to the next call or idles.

ERRORS = {"raise": "BadSampleError: bad sample 17", "memory": "MemoryError: no memory"}
FAULTS = [("raise", "next"), ("raise", "idle"), ("memory", "next")]
PLACES = places_of(PROGRAMS)


def check_a_rank_that_raises_is_named_on_all(program, place, fault, then, world):
    """Return the ranks whose call had ended, which hear of it in the next one."""
    *others, victim = spmd(partial(broken_program, program, place, fault, then), world, timeout=60.0)
    assert f"{victim.error}: {victim.text}" == ERRORS[fault]
    for ended in others:
        assert ended.seconds < 15.0, ended
        if ended.error:
            assert ended.error == "CollectiveError", ended
            assert re.match(rf"rank {len(others)} failed in \w+: {ERRORS[fault]}\n", ended.text), ended
    return [rank for rank, ended in enumerate(others) if not ended.error]


@pytest.mark.rows(2)
@pytest.mark.parametrize("world_size", (2, "2 processes", "4 processes"))
@pytest.mark.parametrize("fault, then", FAULTS)
@pytest.mark.parametrize("name, place", PLACES)
def test_a_rank_that_raises_is_named_on_all(name, place, fault, then, world_size, workers):
    world = world_of(world_size, workers)
    returned = check_a_rank_that_raises_is_named_on_all(PROGRAMS[name][0], place, fault, then, world)
    # Nothing but the gather has no later message.
    others = 3 if world_size == "4 processes" else 1
    assert returned == (list(range(others)) if name == "gather" else [])


def assert_mesh_is_good(axis, generation):
    assert fs.psum(torch.ones(()), axis).item() == 2.0
    assert fs.comm.rank_state().generation == generation


def sum_and_fail(params, axis, calls):
    for _ in range(calls):
        fs.psum(fs.gather(params)["w"], axis)
    raise BadSampleError(f"on rank {my_rank()}")


@on_ranks(2, "2 processes")
def test_ranks_that_all_fail():
    """At the same place nothing is cut; at different ones each raises its own error or is told of another's."""
    axis = axis_of_all()
    params = params_of(axis)
    generation = fs.comm.rank_state().generation
    step = fs.value_and_grad(sum_and_fail)
    with pytest.raises(BadSampleError):
        step(params, axis, calls=1)
    assert_mesh_is_good(axis, generation)
    text = outcome(lambda: step(params, axis, calls=1 + my_rank())).text
    other = 1 - my_rank()
    # Rank 0 raises first; rank 1 may have heard of it in its second sum.
    heard = my_rank() == 1 and text.startswith(f"rank {other} failed in value_and_grad: BadSampleError: on rank 0\n")
    assert heard or text == f"on rank {my_rank()}", text


@on_ranks(2, "2 processes")
def test_bad_input_of_one_rank_goes_with_the_message_that_begins_a_call():
    """The mesh stays good, and nothing else is sent."""
    axis = axis_of_all()
    params = params_of(axis)
    generation = fs.comm.rank_state().generation
    is_bad = my_rank() == 1
    grads = {"v": torch.ones(8, 4), "w": torch.ones(7 if is_bad else 8, 4)}
    reduce = "none" if is_bad else "mean"
    calls = [
        ("scatter_grads", lambda: fs.scatter_grads(grads, params)),
        ("gather", lambda: fs.gather({**params, "x": object()} if is_bad else params)),
        ("value_and_grad", lambda: fs.value_and_grad(lambda p: p, reduce=reduce)(params)),
        ("jit", lambda: fs.jit(lambda p, x: p["w"], static_argnums=1)(params, [] if is_bad else 1)),
        ("jit", lambda: fs.jit(lambda p: p["missing" if is_bad else "w"])(params)),
    ]
    for name, call in calls:
        with fs.comm.record() as record:
            text = outcome(call).text
        assert text, name
        if not is_bad:
            assert text.startswith(f"rank 1 failed in {name}: "), text
            assert text.endswith(f"\nTo fix: correct the error above. {name} has not sent any data."), text
        assert all(entry.about.is_comparison for entry in record)
        assert_mesh_is_good(axis, generation)


class UnreadableError(Exception):
    """An error that cannot say what it is about."""

    def __str__(self):
        raise RuntimeError("no text")


# Errors whose texts cannot be sent as they are, and what the other ranks are told.
UNUSUAL = [
    (lambda: ValueError("no file caf\u00e9 \udc80"), "ValueError: no file caf\u00e9 \\udc80"),
    (UnreadableError, "UnreadableError"),
    (KeyError, "KeyError"),
]


def fail_between_gathers(make_error, params):
    full = fs.gather({"w": params["w"]})["w"]
    if my_rank() == 1:
        raise make_error()
    return (full + fs.gather({"v": params["v"]})["v"]).sum()


@on_ranks("2 processes")
def test_errors_with_any_text_reach_the_other_ranks():
    """Before a call sends anything, as in a trace, and in the middle of one."""
    for transform, (make_error, text) in product((fs.jit, fs.value_and_grad), UNUSUAL):
        call = transform(partial(fail_between_gathers, make_error))
        params = params_of(axis_of_all())
        ended = outcome(lambda: call(params))  # noqa: B023
        if my_rank() == 1:
            assert ended.error == text.partition(":")[0]
        else:
            assert ended.error == "CollectiveError", ended
            assert ended.text.startswith(f"rank 1 failed in {transform.__name__}: {text}\n"), ended


# (b) Ctrl-C on a rank that waits.


def press_ctrl_c_in_a_wait():
    """Send this process SIGINT once it waits for another rank."""

    def press():
        while fs.comm.rank_state().awaited is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def default_store():
    return dist.distributed_c10d._get_default_store()


def begin_gather(axis):
    params = params_of(axis)
    Hook.at("begin")
    fs.gather(params)


def begin_psum(axis):
    Hook.at("begin")
    fs.psum(torch.ones(()), axis)


# Programs, the place of each where the last rank goes on while the others do not, and how errors name the call.
COLLECTIVES, JITTED = PROGRAMS["collectives"][0], PROGRAMS["jitted"][0]
INTERRUPTED = [
    (begin_gather, "begin", "gather"),
    pytest.param(begin_psum, "begin", "psum", marks=pytest.mark.slow),
    (COLLECTIVES, "between", "value_and_grad"),
    pytest.param(COLLECTIVES, "backward", "value_and_grad", marks=pytest.mark.slow),
    pytest.param(JITTED, "forward", "jit", marks=pytest.mark.slow),
]


def interrupt(program, place, name):
    """Press Ctrl-C on the last rank while it waits for the others, and return how the program ended."""
    axis = axis_of_all()
    prepare(program, axis)
    ended = f"{name} has ended, interrupted at {place}"
    is_last = my_rank() == axis.size - 1

    def come(reached):
        if reached == place and is_last:
            press_ctrl_c_in_a_wait()
        elif reached == place:
            default_store().wait([ended])

    pressed = outcome_of(program, axis, come)
    if is_last:
        default_store().set(ended, "")
    return pressed


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.slow)))
@pytest.mark.parametrize("program, place, name", INTERRUPTED)
def test_ctrl_c_is_heard_by_a_rank_that_waits_and_named_on_the_others(program, place, name, size, workers):
    *others, pressed = workers(size).run(partial(interrupt, program, place, name), timeout=60.0)
    assert pressed.error == "KeyboardInterrupt", pressed
    for ended in others:
        assert ended.error == "CollectiveError", ended
        assert ended.text.startswith(f"rank {size - 1} failed in {name}: KeyboardInterrupt\n"), ended


@on_ranks("2 processes")
def test_ctrl_c_is_heard_by_a_rank_that_waits_for_others_to_make_a_mesh():
    axis_of_all()
    if my_rank() == 0:
        default_store().wait(["mesh has ended"])
        assert outcome(axis_of_all).text.startswith("rank 1 failed in init_mesh: KeyboardInterrupt\n")
    else:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert outcome(axis_of_all).error == "KeyboardInterrupt"
        default_store().set("mesh has ended", "")
    assert fs.psum(torch.ones(()), axis_of_all()).item() == 2.0


# (c) A rank is killed or exits.


def check_a_rank_that_is_killed_is_named_on_all(program, place, size, fault, path, monkeypatch):
    broken = partial(broken_program, program, place, fault, "idle")
    where = r"in \w+ number \d+ \(.*\) over '\w+' of .+"
    for rank, text in enumerate(outcomes_of_survivors(size, broken, path, monkeypatch)):
        seconds, first, *waiting, this_rank, remedy = text.splitlines()
        assert float(seconds) < 15.0, text
        assert first == f"rank {size - 1} was killed or has ended", text
        assert re.match(rf"  rank {rank}, this one, was {where}", this_rank), text
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


def fail_on_one_rank():
    """Fail outside of any call, where nothing hears of it but the others' next collective."""
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=60.0))
    fs.psum(torch.ones(()), axis)
    if fs.axis_index(axis) == 1:
        raise ValueError("bad sample 17")
    try:
        fs.psum(torch.ones(()), axis)
    except fs.comm.CollectiveError as error:
        print(error)


def test_a_rank_whose_program_ends_by_an_error_is_named():
    """Outside of any call; no launcher is there."""
    survivor, failed = run_on_ranks(2, fail_on_one_rank, interpreter_ends=True)
    assert (survivor.code, failed.code) == (0, 1)
    assert survivor.output.startswith("rank 1 was killed or has ended\n")


# (d) A rank is stopped, or computes for ever.


def check_a_rank_that_does_not_come_is_named_at_the_timeout(broken, place, size, timeout=2.0):
    def program():
        axis = axis_of_all(timeout)
        prepare(broken, axis)

        def stop(reached):
            if my_rank() == size - 1 and reached == place:
                # All others have told that they wait in vain.
                keys = [f"{rank} has waited" for rank in range(size - 1)]
                default_store().wait(keys, timedelta(seconds=30 + timeout))

        fs.psum(torch.ones(()), axis)
        waited = outcome_of(broken, axis, stop)
        default_store().set(f"{my_rank()} has waited", "")
        return waited

    with Workers(size) as pool:
        outcomes = pool.run(program, timeout=60.0 + 4 * timeout)
    for waited in outcomes:
        first, *rest = waited.text.splitlines()
        assert first.startswith(f"rank {size - 1} did not join a collective within {timeout:.0f} s. "), waited
        assert any(re.match(r"  rank 0 waits in \w+ number \d+ \(.*\)", line) for line in rest), waited
        assert waited.seconds < timeout + 13.0, waited


# Seconds for each rank: four processes share the cores of a small machine, where one that is merely slow must not miss
# the timeout, and one rank may take longer than another to trace a step.
ABSENT = [
    ("collectives", "between", 1.0),
    pytest.param("checkpoints", "again", 1.5, marks=pytest.mark.slow),
    pytest.param("jitted", "forward", 10.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("size", (2, pytest.param(4, marks=pytest.mark.slow)))
@pytest.mark.parametrize("name, place, seconds", ABSENT)
def test_a_rank_that_does_not_come_is_named_at_the_timeout(name, place, seconds, size):
    check_a_rank_that_does_not_come_is_named_at_the_timeout(PROGRAMS[name][0], place, size, timeout=seconds * size)


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


def updates(*steps):
    """Make some updates of one state, each from the step of a number, and then a call that is alike on every rank."""

    def call(axis):
        states = [fs.TrainState.create(params_of(axis), fs.sgd(0.1))]
        for step in steps:
            states.append(fs.update(fs.sgd(0.1), states[step], states[step].params))
        fs.psum(X, axis)

    return call


def stepped_by(tx, *, is_jitted=False):
    """Make two updates, and then a call that is alike on every rank."""

    def call(axis):
        state = fs.TrainState.create(params_of(axis), tx)
        update = fs.jit(partial(fs.update, tx)) if is_jitted else partial(fs.update, tx)
        for _ in range(2):
            state = update(state, state.params)
        fs.psum(X, axis)

    return call


def steps_of_many(rate):
    """Make more updates than a text holds, the first by a rate, and then a call that is alike on every rank."""

    def call(axis):
        state = fs.TrainState.create(params_of(axis), fs.sgd(0.1))
        for lr in (rate, *[0.1] * 40):
            state = fs.update(fs.sgd(lr), state, state.params)
        fs.psum(X, axis)

    return call


def of_torch(cls, lr, **hyper):
    return fs.ema(fs.chain(fs.clip_by_value(1.0), fs.from_torch(cls, lr=lr, **hyper)), 0.9)


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
    "an update less": (updates(0), updates(), r"in psum, after an update of \d+ leaves at step 0", r"bytes in psum\n"),
    "an update more": (updates(0), updates(0, 1), r"in psum, after an update of \d+ ", "at step 1, after .* at step 0"),
    "an update of another step": (updates(0, 1), updates(0, 0), "at step 1, after", "at step 0, after .* at step 0"),
    "another rate": (stepped_by(fs.sgd(0.1)), stepped_by(fs.sgd(0.2)), "a step with lr=0.1,", "a step with lr=0.2,"),
    "another rate long ago": (
        steps_of_many(0.1),
        steps_of_many(0.2),
        "^ranks differ",
        "after an update of .* at step 40",
    ),
    "another bound": (
        stepped_by(fs.chain(fs.clip_by_global_norm(1.0), fs.sgd(0.1))),
        stepped_by(fs.chain(fs.clip_by_global_norm(2.0), fs.sgd(0.1))),
        "after clip_by_global_norm with max_norm=1\n",
        "after clip_by_global_norm with max_norm=2\n",
    ),
    "another average": (
        stepped_by(fs.ema(fs.sgd(0.1), 0.9)),
        stepped_by(fs.ema(fs.sgd(0.1), 0.5)),
        "after ema with decay=0.9,",
        "after ema with decay=0.5,",
    ),
    "another scale": (
        stepped_by(fs.dynamic_loss_scale(fs.sgd(0.1), 4.0)),
        stepped_by(fs.dynamic_loss_scale(fs.sgd(0.1), 8.0)),
        "after dynamic_loss_scale with scale=4\n",
        "after dynamic_loss_scale with scale=8\n",
    ),
    "another class": (
        stepped_by(of_torch(torch.optim.Adam, 0.1)),
        stepped_by(of_torch(torch.optim.AdamW, 0.1)),
        "after Adam with lr=0.1",
        "after AdamW with lr=0.1",
    ),
    "another schedule": (
        stepped_by(of_torch(torch.optim.SGD, lambda count: 1.0 - 0.1 * count)),
        stepped_by(of_torch(torch.optim.SGD, lambda count: 1.0 - 0.125 * count)),
        "after SGD with lr=0.9",
        "after SGD with lr=0.875",
    ),
    "another momentum in a graph": (
        stepped_by(of_torch(torch.optim.SGD, 0.1, momentum=0.5), is_jitted=True),
        stepped_by(of_torch(torch.optim.SGD, 0.1, momentum=0.75), is_jitted=True),
        "^jit: ranks make different calls\n  update: expected SGD with lr=0.1, momentum=0.5 as on the rank",
        "got SGD with lr=0.1, momentum=0.75 on the rank",
    ),
    "a gather more": (gathers(0, 1), gathers(0, 0, 1), "^ranks differ in a collective", r"\[1\].*\[0\]"),
}


def check_ranks_that_differ_are_told_how(rows, world):
    """Before anything wrong is computed: never a value of another collective, and never the end of a process."""

    def program(most, last):
        axis = axis_of_all()
        fs.psum(torch.ones(()), axis)
        is_last = my_rank() == axis.size - 1
        return outcome(lambda: last(axis) if is_last else most(axis))

    for name, (most, last, *patterns) in rows.items():
        if name == "another call" and not isinstance(world, int):
            # A process that is over is a row of (b).
            continue
        ranks = spmd(partial(program, most, last), world, timeout=60.0)
        for rank, ended in enumerate(ranks):
            # Ranks between the first and the last exchange what fits.
            is_between = name == "ragged" and 0 < rank < len(ranks) - 1
            if not ended.error and (is_between or name == "another call"):
                continue
            assert ended.seconds < 15.0, (name, rank, ended)
            for pattern in patterns:
                assert re.search(pattern, ended.text, re.DOTALL), (name, rank, ended)


@pytest.mark.parametrize("world_size", (2, *(pytest.param(f"{n} processes", marks=pytest.mark.slow) for n in (2, 4))))
def test_ranks_that_differ_are_told_how(world_size, workers):
    check_ranks_that_differ_are_told_how(DIFFERENT, world_of(world_size, workers))


@on_ranks("4 processes", timeout=60.0)
def test_ranks_that_take_axes_in_another_order_are_told():
    mesh = fs.init_mesh({"a": 2, "b": 2}, device="cpu", timeout=30.0)
    axes = [fs.axis_of(mesh, name) for name in ("ba" if my_rank() in (1, 2) else "ab")]
    ended = outcome(lambda: [fs.psum(X, axis) for axis in axes])
    assert ended.error == "CollectiveError", ended
    assert ended.text.startswith("ranks wait for each other in different collectives\n"), ended
    for rank, name in enumerate("abba"):
        assert re.search(rf"  rank {rank} waits in all_reduce number 1 \(psum\) over '{name}'", ended.text), ended
    assert ended.seconds < 15.0, ended


# (f) No alarm.


def check_nothing_is_raised_where_a_rank_is_slow(programs):
    """Later than a watcher waits, in a step with one rank jitted and another eager, and over meshes of two axes."""
    size = dist.get_world_size()
    axis = axis_of_all(60.0)
    if my_rank() == size - 1:
        time.sleep(1.0)
    assert fs.psum(torch.ones(()), axis).item() == size
    params = params_of(axis)
    step = fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum())
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


def train_step(tx, state):
    value, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].square().sum())(state.params)
    return fs.update(tx, state, grads), value.item()


@on_ranks("2 processes", pytest.param("4 processes", marks=pytest.mark.slow), timeout=60.0)
def test_training_goes_on_from_the_state_in_hand_on_a_new_mesh():
    """Several times in the same processes; a group of the user's own, and the default group, are left alone."""
    tx = fs.adam(0.1)
    mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
    users_group = dist.new_group(timeout=timedelta(seconds=30))
    state = reference = fs.TrainState.create(params_of(fs.axis_of(mesh)), tx)
    expected = []
    for _ in range(3):
        reference, value = train_step(tx, reference)
        expected.append(value)
    threads, files = [], []
    for number in range(3):
        assert "bad sample 17" in broken_program(COLLECTIVES, "between", "raise").text
        for group in (None, users_group):
            total = torch.ones(2)
            dist.all_reduce(total, group=group)
            assert total.tolist() == [dist.get_world_size()] * 2
        assert fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0).get_group() == mesh.get_group()
        state, value = train_step(tx, state)
        assert value == expected[number]
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
        files.append(len(os.listdir("/proc/self/fd")))
    # Threads and sockets of the groups before may be just about to end.
    assert max(threads) <= threads[0] + 4, threads
    assert max(files) <= files[0] + 8, files
    dist.destroy_process_group(users_group)
