"""spmd: simulated ranks run as processes do, and a rank that fails, waits in vain or hangs is named."""

import gc
import logging
import math
import os
import re
import sys
import threading
import time
import weakref
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard.testing import RankError, Workers, spmd
from fshard.testing.workers import describe_failure
from tests.forked_programs import run_on_ranks
from tests.ranks import my_rank, on_ranks, world_of

pytestmark = pytest.mark.timeout(60)


def process_state():
    with forward_ad.dual_level() as level:
        return sys.excepthook, dist.is_initialized(), torch.get_default_dtype(), torch.get_num_threads(), level


@pytest.fixture(autouse=True)
def process_stays_usable():
    before = process_state()
    yield
    assert process_state() == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []
    assert spmd(sum_of_ranks, 3) == [3.0, 3.0, 3.0]


def sum_of_ranks(group=None):
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return total.item()


def failure(f, world, timeout=60.0):
    """The error of a run, which must come long before the timeout."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        spmd(f, world, timeout)
    assert time.monotonic() - start < 20
    return caught.value


def wait_for_ranks():
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(timeout=20)


@pytest.mark.parametrize("world", [5, "2 processes"])
def test_results_come_in_rank_order(world, workers):
    size, offset = int(str(world)[0]), torch.arange(3)
    ranks = spmd(lambda: (dist.get_world_size(), (offset + dist.get_rank()).tolist()), world_of(world, workers))
    assert ranks == [(size, [rank, rank + 1, rank + 2]) for rank in range(size)]
    with pytest.raises(ValueError, match="spmd: expected world to be Workers, or a whole number from 1 to 4096, got 0"):
        spmd(dist.get_rank, 0)


SECONDS = "timeout to be a number of seconds above 0 and below 1e9, got"
WRONG_CALLS = (
    *(
        (partial(Workers, n), f"Workers: expected world_size to be a whole number from 1, got {n!r}")
        for n in (0, "2", 1.5)
    ),
    *((partial(Workers, 1, timeout=t), f"Workers: expected {SECONDS} {t!r}") for t in (0, "60", math.inf)),
    *((partial(spmd, dist.get_rank, 2, t), f"spmd: expected {SECONDS} {t!r}") for t in (0, "60", math.inf)),
)


@pytest.mark.parametrize(("call", "text"), WRONG_CALLS)
def test_arguments_that_make_no_sense_are_refused_by_name_before_ranks_start(call, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call()


def test_a_limit_that_makes_no_sense_is_refused_by_workers(workers):
    """They go on with the next program."""
    pool = workers(2)
    with pytest.raises(ValueError, match=f"^spmd: expected {SECONDS} -1$"):
        spmd(dist.get_rank, pool, timeout=-1)
    assert pool.run(dist.get_rank) == [0, 1]


@on_ranks(1, 3)
def test_collectives(world_size):
    rank, ranks, total = my_rank(), torch.arange(float(world_size)), world_size * (world_size - 1) / 2
    group, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional

    def result_of(call, out, *args, **kwargs):
        call(out, *args, **kwargs)
        return out.tolist()

    mine, many = torch.tensor([float(rank)]), torch.empty(world_size)
    assert result_of(dist.all_reduce, mine.clone()) == [total]
    assert result_of(dist.all_reduce, mine.clone(), dist.ReduceOp.MAX) == [world_size - 1.0]
    assert result_of(lambda out, x: dist.all_gather([*out.split(1)], x), many, mine) == ranks.tolist()
    pieces = list((ranks + rank).split(1))
    assert result_of(dist.reduce_scatter, mine.clone(), pieces) == [world_size * rank + total]
    assert result_of(dist.all_to_all_single, many, ranks + 10 * rank) == (10 * ranks + rank).tolist()
    assert result_of(dist.broadcast, mine.clone(), src=world_size - 1) == [world_size - 1.0]
    assert ops.wait_tensor(ops.all_gather_into_tensor_coalesced([mine], world_size, group)[0]).equal(ranks)


@pytest.mark.parametrize("world", [4, "2 processes"])
def test_lowest_failing_rank_is_reported(world, workers):
    """And ends the others, which wait for it."""
    first, error = int(str(world)[0]) - 2, ValueError("bad batch\nof step 3")
    went_on = []

    def program():
        if dist.get_rank() < first:
            sum_of_ranks()
            went_on.append(dist.get_rank())
        raise error if dist.get_rank() == first else ValueError("a later one")

    caught = failure(program, world_of(world, workers))
    line = program.__code__.co_firstlineno + 4
    summary = f"rank {first} of {first + 2} failed: ValueError: bad batch (tests/testing/test_spmd.py:{line})\n"
    assert str(caught).startswith(f"{summary}Traceback (most recent call last):\n")
    assert "in program" in str(caught)
    assert str(caught).endswith(f"ValueError: bad batch\nof step 3\n{summary.rstrip()}")
    assert caught.__cause__ is error or world != 4
    assert went_on == []


@pytest.mark.parametrize("world", [4, "2 processes"])
def test_the_rank_that_failed_is_reported_and_not_those_that_heard_of_it(world, workers):
    """In the middle of a call, where rank 0 waits for it."""

    def program():
        params = fs.shard({"w": torch.ones(8)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))

        def loss_fn(params):
            if my_rank() == 1:
                raise ValueError("bad batch")
            return fs.gather(params)["w"].sum()

        fs.value_and_grad(loss_fn)(params)

    first, *_, last = str(failure(program, world_of(world, workers))).splitlines()
    line = program.__code__.co_firstlineno + 5
    place = f"tests/testing/test_spmd.py:{line}"
    assert first == last == f"rank 1 of {int(str(world)[0])} failed: ValueError: bad batch ({place})"


FAILING_TESTS = """
import warnings

import pytest
import fshard as fs
from fshard.testing import Workers, spmd

def program():
    warnings.warn("seen once")
    exec("raise ValueError('bad batch')")

def test_on_workers():
    with Workers(2) as workers:
        spmd(program, workers)

def test_on_simulated_ranks():
    spmd(program, 2)
"""


def run_tests_of_a_user(folder):
    os.chdir(folder)
    os.environ["COLUMNS"] = "150"
    os.environ.pop("CI", None)
    pytest.main(["-p", "no:cacheprovider", "test_of_a_user.py"])


def test_reports_of_pytest_show_the_cause_the_users_line_and_each_warning_once(tmp_path):
    (tmp_path / "test_of_a_user.py").write_text(FAILING_TESTS)
    (run,) = run_on_ranks(1, run_tests_of_a_user, tmp_path)
    line = 1 + FAILING_TESTS[: FAILING_TESTS.index("exec")].count("\n")
    error = f"fshard.testing.RankError: rank 0 of 2 failed: ValueError: bad batch (test_of_a_user.py:{line})"
    for name in ("test_on_workers", "test_on_simulated_ranks"):
        assert f"\nFAILED test_of_a_user.py::{name} - {error}\n" in run.output, run.output
        report = run.output.partition(f"_ {name} _")[2].partition("\n____")[0].partition("\n====")[0]
        # fshard's own functions are left out.
        assert report.count("def run(") == report.count("def _collect(") == 0
        assert report.rstrip().endswith("RankError") or "RankError\n----" in report
        assert "DEBUG" not in report
    assert run.output.count("UserWarning: seen once") == 2, run.output


class SilentError(Exception):
    def __str__(self):
        return ""


class UnprintableError(Exception):
    def __str__(self):
        raise TypeError


def test_failures_begin_with_their_class_and_the_first_line_of_their_text():
    for error, summary in (
        (ValueError("\n  bad batch \nof step 3"), "ValueError: bad batch"),
        (SilentError(), "SilentError"),
        (UnprintableError(), "UnprintableError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ):
        text = describe_failure(error)
        assert text.splitlines()[0].rstrip() == f"failed: {summary}"
        assert type(error).__name__ in text.split("\n", 1)[1]


def test_traces_of_torch_stay_out_of_the_report_of_a_failing_test(caplog):
    """pytest 9.2 adds its handler to all loggers that do not propagate; before, this test does."""
    logger, users = logging.getLogger("torch.__trace"), BufferingHandler(capacity=1000)
    logger.addHandler(caplog.handler)
    logger.addHandler(users)
    try:
        before = set(logger.handlers)
        spmd(lambda: fs.jit(lambda x: x + 1)(torch.ones(3)), 2)
        assert before >= set(logger.handlers) >= {caplog.handler, users}
    finally:
        logger.removeHandler(caplog.handler)
        logger.removeHandler(users)
    assert users.buffer
    assert [record for record in caplog.records if record.name == logger.name] == []


def test_a_handler_that_a_program_adds_to_the_logger_of_traces_stays(caplog):
    logger, added = logging.getLogger("torch.__trace"), logging.NullHandler()
    logger.addHandler(caplog.handler)
    try:
        spmd(lambda: logger.addHandler(added), 1)
        assert {caplog.handler, added} <= set(logger.handlers)
        spmd(lambda: logger.removeHandler(added), 1)
        assert added not in logger.handlers
    finally:
        logger.removeHandler(caplog.handler)
        logger.removeHandler(added)


class Noisy(torch.nn.Module):
    """Drops out before and after ranks meet."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self):
        first = torch.nn.functional.dropout(self.weight)
        sum_of_ranks()
        return torch.nn.functional.dropout(first)


def draw_as_ranks(world):
    """Draw by a key and from a generator that is seeded, on each rank, with others in between."""
    params = fs.shard({"weight": torch.ones(64)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    torch.manual_seed(my_rank())
    numbers = [torch.rand(3).tolist()]
    for key in range(3):
        numbers.append(fs.Model(Noisy()).apply(params, key=world * key + my_rank()).tolist())
        numbers.append(torch.rand(3).tolist())
    return numbers


def draw_alone(rank, world):
    """What a rank draws that has a process of its own."""
    drawn = torch.Generator().manual_seed(rank)
    numbers = [torch.rand(3, generator=drawn).tolist()]
    for key in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(world * key + rank)
            dropped = torch.nn.functional.dropout(torch.nn.functional.dropout(torch.ones(64)))
        numbers += [dropped.tolist(), torch.rand(3, generator=drawn).tolist()]
    return numbers


@pytest.fixture
def hasty_threads():
    """Python changes its thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize(("world", "times"), [(4, 20), ("2 processes", 1)])
def test_each_rank_draws_its_own_random_numbers(world, times, workers):
    size, before = int(str(world)[0]), torch.get_rng_state()
    expected = [draw_alone(rank, size) for rank in range(size)]
    for _ in range(times):
        assert spmd(partial(draw_as_ranks, size), world_of(world, workers)) == expected
    assert torch.get_rng_state().equal(before)


def test_ranks_that_wait_for_each_other_by_locks_of_their_own_go_on():
    """Also in a program whose name the kernel has cut inside of a letter; its threads inherit that."""
    barrier, events = threading.Barrier(3), [threading.Event() for _ in range(3)]

    def program():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_bytes("обучение".encode()[:15])
        barrier.wait()
        events[my_rank()].set()
        events[my_rank() - 1].wait()
        return sum_of_ranks()

    assert spmd(program, 3) == [3.0] * 3


@pytest.fixture
def patience(monkeypatch):
    """Long enough for a busy machine to let a rank that computes come to some milliseconds of it."""
    monkeypatch.setattr(sys.modules["fshard.testing.spmd"], "PATIENCE", 0.3)
    return 0.3


@pytest.mark.parametrize(("world", "timeout"), [(3, 60.0), (32, 16.0)])
def test_a_rank_that_computes_keeps_its_turn(world, timeout, patience):
    """Also for longer than a rank that waits may, and than its share of the timeout: it may draw initial values."""
    assert_that_a_rank_that_computes_keeps_its_turn(world, timeout, patience)


def let_the_kernel_say(monkeypatch, computed, waited, state):
    """Which part of the time each rank has computed, which part it has waited for a processor, and what it does now."""

    def read_bytes(path):
        counted = f"0 {int(waited * time.monotonic_ns())} 1"
        return counted.encode() if path.name == "schedstat" else f"Name:\tR\nState:\t{state}".encode()

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: computed * time.monotonic())


def test_a_rank_that_waits_for_a_processor_keeps_its_turn(monkeypatch):
    """Also where the kernel counts nothing but the time that it computed; a wait is counted when it is over."""
    for computed, waited, state in ((0, 1, "S"), (1, 0, "S"), (0, 0, "R")):
        let_the_kernel_say(monkeypatch, computed, waited, state)
        assert_that_a_rank_that_computes_keeps_its_turn(3, 60.0, 0.1)


def test_ranks_that_poll_on_a_busy_machine_go_on(monkeypatch):
    """Each time that they wake up they wait for a processor."""
    let_the_kernel_say(monkeypatch, 0, 0.25, "S")
    barrier = threading.Barrier(4)
    assert sorted(spmd(barrier.wait, 4, timeout=8.0)) == [0, 1, 2, 3]


def assert_that_a_rank_that_computes_keeps_its_turn(world, timeout, patience):
    order = []

    def program():
        order.append(my_rank())
        while my_rank() == 0 and time.thread_time() < 2 * patience:
            pass
        order.append(my_rank())

    spmd(program, world, timeout=timeout)
    assert order == [rank for rank in range(world) for _ in range(2)]


def test_ranks_that_had_no_turn_are_said_to_wait_for_it():
    def program():
        while True:
            pass

    text = str(failure(program, 4, timeout=1.0))
    assert "rank 0 runs:" in text
    assert "rank 3 waits for its turn:" in text


def test_a_rank_that_computes_for_ever_lets_others_fail():
    def program():
        while my_rank() == 0:
            pass
        raise ValueError("bad batch")

    assert "rank 1 of 2 failed: ValueError: bad batch" in str(failure(program, 2, timeout=4.0))


def test_ranks_that_fail_alike_one_after_another_go_on(monkeypatch):
    """However long their turns are; a rank that fails alone is found out when the others wait for it."""
    monkeypatch.setattr(sys.modules["fshard.comm.failure"], "SAME_FAILURE_WINDOW", 0.0)

    def program():
        params = fs.shard({"w": torch.ones(8)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))

        def loss_fn(params, fails):
            if fails:
                raise ValueError("bad batch")
            return fs.gather(params)["w"].sum()

        run = fs.value_and_grad(loss_fn)
        for _ in range(2):
            with pytest.raises(ValueError, match="bad batch"):
                run(params, True)
        loss, _ = run(params, False)
        with pytest.raises((ValueError, fs.comm.CollectiveError), match="bad batch"):
            run(params, my_rank() == 1)
        return loss.item()

    assert spmd(program, 3) == [8.0] * 3


def test_ranks_that_fail_alike_after_a_lock_of_their_own_go_on():
    """Ranks that run beside the one whose turn it is have not failed yet when that one has."""
    barrier = threading.Barrier(2)

    def program():
        params = fs.shard({"w": torch.ones(8)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))

        def loss_fn(params, fails):
            if fails:
                barrier.wait()
                computed = time.thread_time()
                while my_rank() == 0 and time.thread_time() < computed + 0.1:
                    pass
                raise ValueError("bad batch")
            return fs.gather(params)["w"].sum()

        run = fs.value_and_grad(loss_fn)
        with pytest.raises(ValueError, match="bad batch"):
            run(params, True)
        return run(params, False)[0].item()

    assert spmd(program, 2) == [8.0] * 2


def test_an_interrupt_that_loses_the_message_of_a_rank_leaves_none_behind():
    def interrupt(*_):
        patched.undo()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules["fshard.testing.spmd"]._Simulation, "_begin_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            spmd(sum_of_ranks, 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def call_by_rank(*calls):
    return lambda: calls[my_rank()]()


def crossing():
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    sum_of_ranks(groups[dist.get_rank()])


SUM = "AllReduce(op=RedOpType.SUM) of torch.float32 ()"
WAITS = "ranks wait for each other in different collectives\n  rank 0 waits in "
AT_ONCE = "ranks call different collectives at once: "
# Programs of two ranks or three whose collectives cannot be, and what their errors say of it.
STUCK = [
    (3, call_by_rank(sum_of_ranks, lambda: 0, sum_of_ranks), f"{WAITS}{SUM}\n  rank 1 has ended\n  rank 2"),
    (2, crossing, f"{WAITS}{SUM}\n  rank 1 waits in {SUM}"),
    (
        2,
        call_by_rank(sum_of_ranks, lambda: dist.all_gather([torch.empty(1), torch.empty(1)], torch.ones(1))),
        f"{AT_ONCE}AllGather(), {SUM}",
    ),
    (
        2,
        call_by_rank(*(partial(dist.broadcast, torch.ones(size), src=0) for size in (1, 2))),
        f"{AT_ONCE}Broadcast(src=0) of torch.float32 (1,), Broadcast(src=0) of torch.float32 (2,)",
    ),
    (2, lambda: dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(3)), "AllGather() failed: "),
]


def test_collectives_that_cannot_be_are_named():
    for world, program, text in STUCK:
        assert f"DistBackendError: {text}" in str(failure(program, world))


@pytest.fixture
def short_grace(monkeypatch):
    """Ranks of these tests end late in any case."""
    monkeypatch.setattr(sys.modules["fshard.testing.spmd"], "GRACE", 0.3)


def test_failed_ranks_leave_nothing_behind():
    """What a rank's program holds at its error is free as soon as the error is."""
    programs = []

    def fail():
        programs.append(weakref.ref(batch := torch.ones(2)))
        mesh = fs.init_mesh({"shard": -1}, device="cpu")
        if my_rank() == 1:
            raise ValueError(f"rank 1 of {mesh.size()} has {batch}")
        fs.psum(batch, fs.axis_of(mesh))

    with pytest.raises(RankError, match="rank 1 of 2 has"):
        spmd(fail, world=2)
    gc.collect()
    assert [program() for program in programs] == [None, None]


@pytest.mark.usefixtures("short_grace")
def test_stuck_rank_is_reported_at_the_timeout():
    release, went_on = threading.Event(), []

    def program():
        if dist.get_rank() == 1:
            release.wait()
            went_on.append(True)
        if dist.get_rank() == 2:
            sum_of_ranks()
        while dist.get_rank() == 3:
            pass

    text = str(failure(program, 4, timeout=0.5))
    assert text.startswith("timed out after 0.5 s: ranks [0] of 4 finished, ranks [1, 2, 3] did not\n")
    for part in ("rank 1 runs:\n", "release.wait()\n", f"rank 2 waits in {SUM}:\n", "while dist.get_rank() == 3"):
        assert part in text
    # A rank that waits outside of collectives ends when its wait does, and does nothing more.
    release.set()
    wait_for_ranks()
    assert went_on == []


@pytest.mark.usefixtures("short_grace")
def test_real_process_group_is_restored(tmp_path):
    """Also where a rank ends late, and where programs destroy their own group."""
    excepthook, release = sys.excepthook, threading.Event()
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert spmd(sum_of_ranks, 3) == [3.0] * 3
        spmd(dist.destroy_process_group, 2)
        failure(release.wait, 2, timeout=0.1)
        release.set()
        wait_for_ranks()
        assert dist.group.WORLD is group
        assert (dist.get_world_size(), dist.get_backend(), sum_of_ranks()) == (1, "gloo", 0.0)
    finally:
        dist.destroy_process_group()
        # torch puts its own there and leaves it.
        sys.excepthook = excepthook


class Seen(TorchDispatchMode):
    names = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names = (*self.names, str(function))
        return function(*args, **(kwargs or {}))


@on_ranks(3)
def test_modes_and_levels_see_the_rank_only():
    """Dispatch modes, inference mode, forward mode and torch.func, with a collective inside each."""
    x, total = torch.ones(3), torch.tensor(float(my_rank()))
    with Seen() as seen:
        for _ in range(my_rank()):
            x = x + 1
        dist.all_reduce(x)
    assert [name for name in seen.names if "add" in name or "copy" in name] == ["aten.add.Tensor"] * my_rank()
    with torch.inference_mode():
        assert sum_of_ranks() == 3.0

    def loss(x):
        dist.all_reduce(total)
        return x * total

    assert torch.func.grad(loss)(torch.tensor(1.0)).item() == 3.0
    tangent = torch.func.jvp(torch.square, (torch.tensor([3.0]),), (torch.tensor([my_rank() + 1.0]),))[1]
    dist.all_reduce(tangent)
    assert tangent.item() == 36.0


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward fails on rank 0 and is slow on the others."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if my_rank() == 0:
            raise ValueError("bad batch")
        time.sleep(0.02 * my_rank())
        return grad


def end_while_ranks_run():
    sys.modules["fshard.testing.spmd"].GRACE = 0.05
    try:
        spmd(lambda: SlowBackward.apply(torch.ones(3, requires_grad=True)).sum().backward(), 40)
    except RankError as error:
        print(str(error).splitlines()[-2])
    sys.exit(3)


@pytest.mark.slow
def test_ranks_that_are_slow_to_end_leave_the_exit_code_alone():
    """A thread that came back into Python from C++ while the interpreter ends would abort the process."""
    assert run_on_ranks(1, end_while_ranks_run) == [("ValueError: bad batch\n", "", 3)]
