"""Cursors as tables, without ranks: in which order steps and gathers come.

Steps are written as letters: g where the gather of a use starts, o where its full tensors are needed, r where its
gradients are due.
"""

import pytest

from fshard.engine import plan
from fshard.engine.cursor import Cursor, Step
from fshard.engine.use import State
from fshard.tree import ReshardPolicy


class Unit:
    def __init__(self, nbytes, ahead):
        self.nbytes, (uses, most) = nbytes, ahead
        policy = ReshardPolicy(merge_bytes=most // 2) if most else ReshardPolicy(prefetch=uses)
        self.ahead = plan.Unit("", (), nbytes, policy, True).ahead


class Use:
    """A use that notes when its gather starts, unless it is there."""

    def __init__(self, number, unit, log, state=State.ABSENT, lazy=False):
        self.number, self.unit, self.log, self.state, self.lazy = number, unit, log, state, lazy

    def start(self):
        if self.state is State.ABSENT:
            self.log.append(f"g{self.number}")


def walked(uses, steps, log):
    cursor = Cursor([Step(uses[int(step[1:])], step[0] == "o") for step in steps], lambda: None)
    for step in cursor.advance(len(cursor.steps)):
        log.append(f"{'o' if step.needs else 'r'}{step.use.number}")
    assert cursor.all_begun
    return " ".join(log)


# Sizes of uses, how far gathers run ahead of each (uses at least, and bytes), and the steps.
FORWARDS = {
    "none ahead": ((4, 4, 4), (0, 0), "g0 o0 g1 o1 g2 o2"),
    "one ahead": ((4, 4, 4), (1, 0), "g0 g1 o0 g2 o1 o2"),
    "two ahead": ((4, 4, 4, 4), (2, 0), "g0 g1 g2 o0 g3 o1 o2 o3"),
    "as many as fit": ((4, 4, 4, 4), (1, 8), "g0 g1 g2 o0 g3 o1 o2 o3"),
    "one that does not fit": ((4, 9, 4, 4), (1, 8), "g0 g1 o0 g2 g3 o1 o2 o3"),
    "one that does not fit behind one that does": ((4, 4, 9, 4), (1, 8), "g0 g1 o0 g2 o1 g3 o2 o3"),
    "nothing to move": ((4, 0, 4), (0, 0), "g0 g1 o0 o1 g2 o2"),
    "no uses": ((), (1, 0), ""),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name):
    sizes, ahead, expected = FORWARDS[name]
    log = []
    uses = [Use(n, Unit(nbytes, ahead), log) for n, nbytes in enumerate(sizes)]
    assert walked(uses, [f"o{n}" for n in range(len(uses))], log) == expected


CHAIN = "o2 r2 o1 r1 o0 r0"
# How far gathers run ahead, uses that are there already, those that are gathered on demand alone, and the steps.
BACKWARDS = {
    "prefetch 0": ((0, 0), "", "", CHAIN, "g2 o2 r2 g1 o1 r1 g0 o0 r0"),
    "prefetch 1": ((1, 0), "", "", CHAIN, "g2 g1 o2 r2 g0 o1 r1 o0 r0"),
    "prefetch 2": ((2, 0), "", "", CHAIN, "g2 g1 g0 o2 r2 o1 r1 o0 r0"),
    "as many as fit": ((1, 8), "", "", CHAIN, "g2 g1 g0 o2 r2 o1 r1 o0 r0"),
    "the last one is there": ((1, 0), "2", "", CHAIN, "g1 o2 r2 g0 o1 r1 o0 r0"),
    "all are there": ((1, 0), "012", "", CHAIN, "o2 r2 o1 r1 o0 r0"),
    "a table comes on demand alone": ((1, 0), "", "0", CHAIN, "g2 g1 o2 r2 o1 r1 o0 r0"),
    "nested": ((1, 0), "", "", "o0 o2 r2 o1 r1 r0", "g0 g2 o0 g1 o2 r2 o1 r1 r0"),
    "a checkpoint around two": ((1, 0), "", "", "o2 r2 o0 o1 r1 r0", "g2 g0 o2 r2 g1 o0 o1 r1 r0"),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(name):
    ahead, full, lazy, steps, expected = BACKWARDS[name]
    log = []
    uses = [
        Use(n, Unit(4, ahead), log, State.FULL if str(n) in full else State.ABSENT, str(n) in lazy) for n in range(3)
    ]
    assert walked(uses, steps.split(), log) == expected


def test_each_use_is_gathered_before_it_is_needed_and_reduced_behind_it():
    """In every walk above, and each once."""
    for _, full, lazy, steps, expected in BACKWARDS.values():
        place = {word: n for n, word in enumerate(expected.split())}
        assert len(place) == len(expected.split())
        for use in "012":
            assert (f"g{use}" in place) == (use not in full + lazy)
            assert place.get(f"g{use}", -1) < place[f"o{use}"] < place[f"r{use}"]
        assert [word for word in expected.split() if word[0] != "g"] == steps.split()


def test_a_cursor_stands_where_it_was_led():
    """Steps are taken once; going to where it stands, or has been, takes none."""
    log = []
    uses = [Use(n, Unit(4, (1, 0)), log) for n in range(3)]
    cursor = Cursor([Step(use, True) for use in uses], lambda: None)
    assert [step.use.number for step in cursor.advance(1)] == [0]
    assert (cursor.at, cursor.all_begun, log) == (1, False, ["g0", "g1"])
    assert list(cursor.advance(1)) == list(cursor.advance(0)) == []
    assert [step.use.number for step in cursor.advance(3)] == [1, 2]
    assert (cursor.at, cursor.all_begun, log) == (3, True, ["g0", "g1", "g2"])


def test_room_is_made_before_gathers_start_and_never_else():
    log = []
    uses = [Use(n, Unit(4, (1, 0)), log) for n in range(3)]
    cursor = Cursor([Step(use, True) for use in uses], lambda: log.append("room"))
    log += [f"o{step.use.number}" for step in cursor.advance(3)]
    assert log == ["room", "g0", "g1", "room", "g2"] + [f"o{n}" for n in range(3)]
