"""A run whose ranks are killed again and again loses no state, and ends with the bits of a run without kills."""

import itertools
import os
import random
import shutil
import sys

import pytest

from tests.test_processes import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import kills
from launch import Event

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
NEEDS_ROOT = [
    *SLOW,
    # torch's ZeroRedundancyOptimizer, which the benchmark of hosts imports, warns of what it imports.
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
        reason="network namespaces need root and iproute2",
    ),
]
RUN, TORCHRUN = "fshard.run", "torch.distributed.run"
# What is launched, how many kills of one rank, of half of them or of all, and the seed of their moments.
LAUNCHES = {
    "eager": (kills.Setting(RUN, 2, "eager"), 2, 5),
    "jitted": (kills.Setting(RUN, 2, "jitted"), 20, 5),
    "four ranks": (kills.Setting(RUN, 4, "eager"), 20, 5),
    "torchrun": (kills.Setting(TORCHRUN, 2, "jitted"), 6, 1),
    "each step saved to the disk": (kills.Setting(RUN, 2, "eager", uses_memory=False), 6, 2),
}


def check(row):
    """Nothing was lost or torn, and no more than one step was repeated."""
    assert row["problems"] == []
    assert row["kills"] > 0
    assert max(map(int, row["repeated_steps"])) <= 1
    assert row["lost"] == row["torn"] == 0


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in LAUNCHES])
def test_kills_at_random_moments(name, tmp_path):
    """In steps, saves and recoveries."""
    setting, number, seed = LAUNCHES[name]
    row = kills.prove(setting, tmp_path, number, seed)
    check(row)
    assert {*row["moments"]} & {*kills.TRAINING}
    assert {*row["moments"]} & {*kills.RECOVERY}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_launched_anew_with_another_number_of_ranks(tmp_path):
    """After each kill, from the memory that the launch before has left; sums in a tree have the same bits."""
    settings = [kills.Setting(RUN, ranks, "eager", has_tree_sums=True, job="resized") for ranks in (4, 2, 1)]
    row = kills.prove_resized(settings, tmp_path, 6, 3)
    check(row)
    assert row["restarts"] > 2


@pytest.fixture
def two_hosts():
    """A launch of four ranks on two network namespaces of this machine, with a memory each."""
    with kills.network(2) as hosts:
        yield kills.Setting(RUN, 4, "eager", hosts=hosts)


@pytest.mark.parametrize("number", [pytest.param(8, marks=NEEDS_ROOT)])
def test_kills_of_ranks_and_of_whole_hosts(two_hosts, number, tmp_path):
    """At random moments; a host's ranks all at once, with their memory: their shards come from the neighbour's."""
    row = kills.prove(two_hosts, tmp_path, number, 4)
    check(row)
    assert row["ranks_killed"]["a host"] > 1


@pytest.mark.parametrize("steps", [pytest.param(20, marks=NEEDS_ROOT)])
def test_neighbours_that_are_lost_together_leave_the_disk(two_hosts, steps, tmp_path):
    """Both memories are gone: the run goes on from the last checkpoint, and says so."""
    setting = two_hosts._replace(every=5)
    # In the middle of step 9.
    kill = kills.Kill("step begins", 9, 0.5, hosts=setting.hosts)
    ledger = kills.run(setting, tmp_path, steps, [kill], kills.simulate(setting, steps, tmp_path))
    assert ledger.problems == []
    assert ledger.repeated == {0: 0, 1: 3}
    printed = "".join((tmp_path / f"killed/output-{number}").read_text() for number in range(2))
    assert "no state in memory is whole" in printed


def event(rank, name, life, **values):
    return Event(rank, 100 + 10 * life + rank, name, 0.0, values)


def life_of(number, first, last, digests):
    """The events of two ranks that restore a step and complete others."""
    for rank in range(2):
        yield event(rank, "restored", number, step=first, digest=digests[first])
    for step in range(first + 1, last + 1):
        for rank in range(2):
            yield event(rank, "step", number, step=step, digest=digests[step])
            yield event(rank, "saved", number, step=step)


@pytest.mark.parametrize(
    "restored, digest, repeated, lost, torn",
    [(5, "5", 0, 0, 0), (4, "4", 1, 0, 0), (3, "3", 2, 1, 0), (0, "0", 5, 1, 0), (5, "4", 0, 0, 2)],
)
@pytest.mark.rows(5)
def test_a_ledger_counts_what_a_kill_has_cost(restored, digest, repeated, lost, torn):
    """Else a harness that sees nothing would prove recovery."""
    digests = {step: str(step) for step in range(8)}
    ledger = kills.Ledger(2, {(rank, step): text for rank in range(2) for step, text in digests.items()})
    for each in life_of(0, 0, 5, digests):
        ledger.add(each)
    ledger.kills.append((0.0, kills.Kill("step", 1, 0.5, (0,))))
    for each in life_of(1, restored, 6, digests | {restored: digest}):
        ledger.add(each)
    row = kills.summarize(kills.Setting(RUN, 2, "eager"), ledger)
    assert row["repeated_steps"] == {str(repeated): 1}
    assert (row["lost"], row["torn"]) == (lost, torn)
    assert len(ledger.problems) == torn


def test_ranks_that_restore_different_steps_are_a_problem():
    ledger = kills.Ledger(2, {})
    for rank in range(2):
        ledger.add(event(rank, "restored", 0, step=rank, digest=""))
    assert ledger.problems == ["ranks restore steps 0 and 1, life 0"]


def test_moments_of_kills_are_of_all_kinds():
    setting = kills.Setting(RUN, 4, "eager")
    drawn = [kills.draw_kill(random.Random(seed), setting) for seed in range(200)]
    assert {kill.event for kill in drawn} == {*kills.RECOVERY, *kills.TRAINING}
    assert {len(kill.ranks) for kill in drawn} == {1, 2, 4}
    assert {rank for kill in drawn for rank in kill.ranks} == set(range(4))
    setting = setting._replace(hosts=("a", "b"))
    drawn = kills.draw_kills(random.Random(0), setting, 200)
    assert {kill.ranks or kill.hosts for kill in drawn} == {(0,), (1,), (2,), (3,), ("a",), ("b",)}
    # Between the losses of two hosts, one at least has saved a step.
    lost = [(number, kill.hosts) for number, kill in enumerate(drawn) if kill.hosts]
    for (first, one), (second, other) in itertools.pairwise(lost):
        assert one == other or any(kill.count > 1 for kill in drawn[first + 1 : second + 1])
