"""Messages of collectives that fail: one full text of each kind, and stores that do not answer."""

import atexit
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import comm
from fshard.comm import failure, ops
from fshard.comm.groups import ChainEntry, Group, PendingCollective, RankState
from tests.comm.steps import make_step
from tests.forked_programs import run_on_ranks

REMEDY = (
    "To fix: correct the first error. Then restart from the last checkpoint, or stay in the same processes: call "
    "fs.init_mesh on every rank and repeat the step, with states of the same step on all ranks."
)


def test_ranks_that_do_different_things(workers):
    """All of them fail, and each hears from all others where these were."""

    def differ(axis):
        if dist.get_rank() == 2:
            return comm.reduce_scatter([torch.ones(3, 2)], axis, "sums")
        with comm.annotate_collectives(["blocks.7"], [f"['w{n}']" for n in range(8)]):
            return comm.all_gather([torch.ones(2)], axis, "gather")

    def program():
        # All have loaded what they need before they wait for each other.
        step, state, x = make_step()
        step(state, x)
        group = dist.new_group(timeout=timedelta(seconds=30))
        dist.barrier()
        axis = fs.Axis("shard", dist.get_world_size(), group.group_name)
        comm.all_gather([torch.ones(2)], axis, "before")
        with pytest.raises(comm.CollectiveError) as caught:
            differ(axis)
        dist.destroy_process_group(group)
        # The backend's own words.
        assert isinstance(caught.value.__cause__, RuntimeError)
        return str(caught.value)

    gather = "all_gather number 2 (gather of blocks.7) over 'shard' of float32 (2,), 8 bytes"
    steps = [gather, gather, "reduce_scatter number 2 (sums) over 'shard' of float32 (2,), 8 bytes"]
    for rank, text in enumerate(workers(3).run(program)):
        first, *others, this_rank, remedy = text.splitlines()
        assert first == "ranks differ in a collective"
        # Those that were waiting when the difference was found.
        assert {f"  rank 2: {steps[2]}"} <= set(others) <= {f"  rank {n}: {step}" for n, step in enumerate(steps)}
        assert (this_rank, remedy) == (f"  rank {rank}, this one, was in {steps[rank]}", REMEDY)


def make_buffer(happens):
    """Make a buffer that is copied from an accelerator, while something happens to the state of its rank."""
    state = RankState(0, None)

    class Buffer(torch.Tensor):
        def copy_(self, landing):
            happens(state)
            return super().copy_(landing)

    buffer = torch.zeros(2).as_subclass(Buffer)
    issued = PendingCollective(None, state, Group("shard", [0, 1], 0, None, 1.0), ChainEntry(1, 0, "all_gather"))
    vars(buffer).update(issued=issued, landing=torch.ones(2))
    return state, buffer


def test_a_second_thread_is_refused_while_a_call_runs(workers):
    """Its collectives would take the place of those of the first, in another order on each rank."""

    def program():
        params = fs.shard({"w": torch.arange(4.0)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))

        def loss(params):
            if dist.get_rank() == 0:
                pool.submit(fs.gather, params).result(timeout=60)
            return fs.gather(params)["w"].sum()

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(fs.gather, params).result(timeout=60)["w"].sum() == 6
            with pytest.raises(comm.CollectiveError) as caught:
                fs.value_and_grad(loss)(params)
        fs.init_mesh({"shard": -1}, device="cpu")
        assert fs.gather(params)["w"].sum() == 6
        return str(caught.value).splitlines()[0]

    text = "rank 0 calls fshard from two threads at once, one of them in value_and_grad"
    assert workers(2).run(program) == [text, text]


def test_others_are_looked_at_while_the_host_waits_for_a_copy_from_an_accelerator():
    """The backend of an accelerator has not ended when its wait returns, but when the copy does."""
    waits = []
    _, buffer = make_buffer(lambda state: waits.append(state.awaited))
    issued = vars(buffer)["issued"]
    assert ops.wait(buffer).eq(1).all()
    assert waits == [issued]


def test_a_copy_of_what_an_ended_backend_has_left_is_no_result():
    """A backend that is ended early says nothing to those who copy from its memory."""

    def end(state):
        state.failure = "rank 1 was killed or has ended"
        state.is_cut = True

    _, buffer = make_buffer(end)
    with pytest.raises(comm.CollectiveError, match="rank 1 was killed or has ended"):
        ops.wait(buffer)


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(failure, "STORE_TIMEOUT", 0.1)

    def gone():
        raise dist.DistNetworkError("gone")

    assert failure.ask_store(threading.Event().wait) is None
    monkeypatch.setattr(failure, "STORE_TIMEOUT", 20.0)
    assert failure.ask_store(gone, 5.0) is None
    assert failure.ask_store(lambda: "note", 5.0) == "note"


def test_a_watcher_that_ends_before_its_first_look_ends_well(monkeypatch):
    """As in a program that is over at once."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    watcher = failure.FailureWatcher(RankState(0, dist.HashStore()))
    watcher.start()
    watcher.close()
    assert not watcher.is_alive()
    assert not errors


def make_watcher():
    """Make a rank of one group, and a thread to watch it that has not started."""
    state = RankState(0, dist.HashStore())
    watcher = failure.FailureWatcher(state)
    atexit.unregister(watcher.close)
    group = Group("shard", [0, 1], 0, None, 1.0)
    state.groups["shard"] = group
    return state, watcher, group


def test_ctrl_c_that_comes_as_a_wait_begins_ends_the_wait():
    state, watcher, group = make_watcher()

    def begin_to_wait():
        state.awaited = PendingCollective(None, state, group, group.record_start("psum", "", ""))
        return True

    watcher.interrupts.has_come = begin_to_wait
    watcher._look_at(state)
    assert state.is_cut
    assert failure.read_note(state.board).endswith(": KeyboardInterrupt")


def test_a_rank_says_that_its_long_wait_is_over():
    """Others would take it for one that waits, where it computes or hangs later."""
    state, watcher, group = make_watcher()
    places = []
    for collective in ("psum", "psum", None):
        if collective:
            entry = group.record_start(collective, "", "")
            issued = PendingCollective(None, state, group, entry, awaits=(-1, [0, 1]))
            # The first wait is long already, and the second one has just begun.
            issued.since = time.monotonic() - (1.0 if entry.number == 1 else 0.0)
        state.awaited = issued if collective else None
        watcher._look_at(state)
        position = failure.Position(*json.loads(state.board.get("at/0")))
        places.append((position.group, ChainEntry(*position.entry).number))
    assert places == [("shard", 1), ("shard", 2), ("", 0)]


def test_a_rank_that_goes_on_has_started_what_its_thread_says_that_it_waits_for():
    """Others would wait for its message, and might find a circle where there is none."""
    group = Group("shard", [0, 1], 0, None, 30.0)

    class GoesOn:
        """Starts its next collective as soon as something of it has been read."""

        @property
        def awaited(self):
            return PendingCollective(None, self, group, group.record_start("all_reduce", "", ""))

        @property
        def groups(self):
            read = replace(group, chain=group.chain.copy())
            group.record_start("all_reduce", "", "")
            return {"shard": read}

    read = failure.Position.of(GoesOn())
    assert read.entry.number == read.groups["shard"][-1].number == 1


def position(waits=None, **numbers):
    """A rank of two groups that has started some collectives in each, all alike, and may wait in the last of one."""
    trails = {
        name: [ChainEntry(n, n, f"psum {n} in {name}") for n in range(number + 1)] for name, number in numbers.items()
    }
    return failure.Position(trails, waits, trails[waits][-1], -1, [0, 1, 2]) if waits else failure.Position(trails)


# For each rank the group that it waits in and how many collectives it has started in both; and those in a circle.
CIRCLES = [
    ([("a", 1, 0), ("b", 0, 1), (None, 0, 0)], [0, 1]),
    ([("a", 2, 1), ("a", 1, 1), ("b", 0, 2)], [0, 1, 2]),
    # One computes, all have come, one is behind.
    ([("a", 1, 0), (None, 0, 0), ("a", 1, 0)], None),
    ([("a", 1, 0)] * 3, None),
    ([("a", 2, 0), ("a", 1, 0), (None, 0, 0)], None),
]


def test_circles_are_found_and_nothing_else():
    for table, expected in CIRCLES:
        positions = {rank: position(waits, a=a, b=b) for rank, (waits, a, b) in enumerate(table)}
        # Ranks tell each other in JSON.
        heard = {rank: failure.Position(*json.loads(json.dumps(each))) for rank, each in positions.items()}
        text = failure.find_circle(0, heard)
        if expected is None:
            assert text is None
            continue
        first, *lines = text.splitlines()
        assert first == "ranks wait for each other in different collectives"
        assert [int(line.split()[1]) for line in lines] == expected


def fail_in_a_step(way, directory):
    """As under torchrun. Rank 1 is killed, or raises an error; rank 0 prints what torchrun would read."""
    mesh = fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
    path = Path(directory) / f"error-{mesh.get_rank()}.json"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
    params = fs.shard({"w": torch.ones(4)}, fs.zero3(mesh, min_shard_elements=0))

    def loss_fn(params):
        if mesh.get_rank() == 1:
            if way == "raises":
                raise ValueError("bad batch")
            os.kill(os.getpid(), signal.SIGKILL)
        return fs.gather(params)["w"].sum()

    try:
        fs.value_and_grad(loss_fn)(params)
    except fs.comm.CollectiveError as error:
        print(json.dumps([str(error), json.loads(path.read_text()) if path.exists() else None]))
    except ValueError:
        assert not path.exists()
    if way == "raises":
        fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0)
        assert not path.exists()


LAST = (
    "The last collectives of this rank over these ranks:\n"
    "  all_gather number 1 (shard) over 'shard' of a digest in shard\n"
    "  all_gather number 2 (start of value_and_grad) over 'shard' of a digest in value_and_grad\n"
    "  all_gather number 3 (gather of ['w']) over 'shard' of float32 (2,), 8 bytes in value_and_grad\n"
)


def leave_out_warnings(errors):
    """Leave out that torch warns, under load, of a store that answers late."""
    return "".join(line for line in errors.splitlines(keepends=True) if "[c10d]" not in line)


def test_the_error_of_a_survivor_goes_to_torchrun_at_once(tmp_path):
    """In the form of torch's ErrorHandler. A program that goes on in the same processes withdraws it."""
    for way, first in (("killed", "rank 1 was killed or has ended"), ("raises", "rank 1 failed in value_and_grad: ")):
        survivor, other = run_on_ranks(2, fail_in_a_step, way, tmp_path, interpreter_ends=True)
        text, report = json.loads(survivor.output)
        assert text.startswith(first)
        message = report["message"]["message"]
        assert message == report["message"]["extraInfo"]["py_callstack"] == f"CollectiveError: {text}\n{LAST.rstrip()}"
        assert int(report["message"]["extraInfo"]["timestamp"]) > 0
        assert leave_out_warnings(survivor.errors) == f"CollectiveError: {text}\n{LAST}"
        assert leave_out_warnings(other.errors) == ""
        assert (survivor.code, other.code) == (0, -signal.SIGKILL if way == "killed" else 0)


def test_a_survivor_tells_nobody_where_torchrun_did_not_start_it(capsys, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failure.report_at_once("a text")
    assert capsys.readouterr() == ("", "")


def fail_before_others_look():
    """Rank 0 fails, while rank 1 does something else until rank 0 waits for it."""
    # A rank that lingers in vain does not end.
    failure.LINGER_TIME = 1000.0
    axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu", timeout=30.0))
    state = comm.groups.rank_state()
    if state.rank:
        while not state.board.check(["read/0"]):
            assert not state.board.check(["read/1"])
    errors = (comm.CollectiveError, ZeroDivisionError)
    with pytest.raises(errors), comm.agree.calling("a call", lambda: [axis], begins=False):
        fs.psum(torch.ones(()), axis) if state.rank else 1 / 0
    print(state.board.check(["read/1"]))


def test_the_rank_that_holds_the_store_waits_for_a_living_one():
    for program in run_on_ranks(2, fail_before_others_look):
        assert (program.code, program.output) == (0, "True\n"), program


def test_a_rank_waits_for_those_of_its_round_of_an_exchange_that_are_not_there_yet():
    """Rank 0 waits in round 1 for rank 2, which waits in round 0 for rank 3, which is still one collective behind."""
    ranks = [0, 1, 2, 3]

    def position(started, awaits):
        entries = [(started, 0, "")]
        groups = {"a group": entries}
        return failure.Position(groups, "a group", entries[-1], *awaits) if awaits else failure.Position(groups)

    positions = {0: position(5, (1, [2])), 1: position(5, (1, [3])), 2: position(5, (0, [3])), 3: position(4, None)}
    assert [failure._awaited_by(rank, positions) for rank in ranks] == [{2}, {3}, {3}, set()]
    # A message of round 0 may come from a rank that waits in round 1.
    positions[3] = position(5, (1, [1]))
    assert failure._awaited_by(2, positions) == set()
