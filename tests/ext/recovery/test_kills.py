"""A run whose ranks are killed again and again loses no state, and ends with the bits of a run without kills."""

import itertools
import random

import pytest

from tests.ext.recovery import kills
from tests.ext.recovery.launch import Event
from tests.ext.recovery.simulated import simulate

RUN, TORCHRUN = "fshard.run", "torch.distributed.run"


def check(row, most_repeated=1):
    """Nothing was lost or torn, and no more steps were repeated than may be."""
    assert row["problems"] == []
    assert row["kills"] > 0
    assert max(map(int, row["repeated_steps"])) <= most_repeated
    assert row["lost"] == row["torn"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks, form, number", [(2, "eager", 2), (2, "jitted", 20), (4, "eager", 20)])
def test_kills_at_random_moments(ranks, form, number, tmp_path):
    """Of one rank, of half of them or of all, in steps, saves and recoveries."""
    undisturbed = simulate(ranks, form, kills.steps_of(number), tmp_path / "simulated")
    row = kills.prove(kills.Setting(RUN, ranks, form), tmp_path, number, 5, undisturbed)
    check(row)
    assert {*row["moments"]} & {*kills.TRAINING}
    assert {*row["moments"]} & {*kills.RECOVERY}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_launched_anew_with_another_number_of_ranks(tmp_path):
    """After each kill, from the memory that the launch before has left; sums in a tree have the same bits."""
    settings = []
    undisturbed = {}
    for ranks in (4, 2, 1):
        settings.append(kills.Setting(RUN, ranks, "eager", has_tree_sums=True, job="resized"))
        options = ("--reduction-order", "tree")
        undisturbed[ranks] = simulate(ranks, "eager", kills.steps_of(6), tmp_path / f"{ranks}", *options)
    row = kills.prove_resized(settings, tmp_path / "killed", 6, 3, undisturbed)
    check(row)
    assert row["restarts"] > 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_under_torchrun(tmp_path):
    check(kills.prove(kills.Setting(TORCHRUN, 2, "jitted"), tmp_path, 6, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_a_run_that_saves_each_step_to_the_disk(tmp_path):
    check(kills.prove(kills.Setting(RUN, 2, "eager", uses_memory=False), tmp_path, 6, seed=2))


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
    row = kills.summarize(kills.Setting(RUN, 2, "eager"), ledger, ledger.problems)
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
