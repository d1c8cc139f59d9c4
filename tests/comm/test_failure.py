"""Messages of collectives that fail: one full text of each kind, and stores that do not answer."""

import json
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import comm
from fshard.comm import failure
from fshard.comm.groups import ChainEntry, RankState
from tests.comm.steps import make_step

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


def test_a_store_that_does_not_answer_holds_nobody_up():
    def gone():
        raise dist.DistNetworkError("gone")

    assert failure.ask_store(threading.Event().wait) is None
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


def position(waits=None, **numbers):
    """A rank of two groups that has started some collectives in each, all alike, and may wait in the last of one."""
    trails = {
        name: [ChainEntry(n, n, f"psum {n} in {name}") for n in range(number + 1)] for name, number in numbers.items()
    }
    groups = {name: ([0, 1, 2], trail) for name, trail in trails.items()}
    return comm.Position(waits and (waits, trails[waits][-1]), groups)


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
        heard = {rank: comm.Position(*json.loads(json.dumps(each))) for rank, each in positions.items()}
        text = failure.find_circle(0, heard)
        if expected is None:
            assert text is None
            continue
        first, *lines = text.splitlines()
        assert first == "ranks wait for each other in different collectives"
        assert [int(line.split()[1]) for line in lines] == expected
