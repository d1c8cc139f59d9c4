"""Cursors as tables, without ranks: in which order steps and gathers come.

Steps are written as letters: g where the gather of a unit starts, o where its full tensors are needed, r where its
gradients are due.
"""

from fshard.engine.cursor import Cursor, Step
from fshard.engine.plan import Unit
from fshard.tree import ReshardPolicy


class Gathered:
    """A gathered unit that notes when its gather starts, unless it is there."""

    def __init__(self, number, nbytes, ahead, log, there=False, lazy=False):
        units, max_bytes = ahead
        policy = ReshardPolicy(bucket_bytes=max_bytes // 2) if max_bytes else ReshardPolicy(prefetch=units)
        self.number, self.unit, self.is_lazy = number, Unit("", (), nbytes, policy, True), lazy
        self.start = lambda: None if there else log.append(f"g{number}")


def walk(units, steps, log):
    cursor = Cursor([Step(units[int(step[1:])], needs_full=step[0] == "o") for step in steps], lambda: None)
    for _, step in cursor.advance(len(cursor.steps)):
        log.append(f"{'o' if step.needs_full else 'r'}{step.gathered.number}")
    assert cursor.all_started
    return " ".join(log)


# Sizes of units, how far gathers run ahead of each (units at least, and bytes), and the steps.
FORWARDS = [
    ((4, 4, 4), (0, 0), "g0 o0 g1 o1 g2 o2"),
    ((4, 4, 4), (1, 0), "g0 g1 o0 g2 o1 o2"),
    ((4, 4, 4, 4), (2, 0), "g0 g1 g2 o0 g3 o1 o2 o3"),
    # As many as fit, with one that does not fit, behind one that does.
    ((4, 4, 4, 4), (1, 8), "g0 g1 g2 o0 g3 o1 o2 o3"),
    ((4, 9, 4, 4), (1, 8), "g0 g1 o0 g2 g3 o1 o2 o3"),
    ((4, 4, 9, 4), (1, 8), "g0 g1 o0 g2 o1 g3 o2 o3"),
    # Nothing to move.
    ((4, 0, 4), (0, 0), "g0 g1 o0 o1 g2 o2"),
]
CHAIN = "o2 r2 o1 r1 o0 r0"
# How far gathers run ahead, units that are there already, those that are gathered on demand alone, and the steps.
BACKWARDS = [
    ((0, 0), "", "", CHAIN, "g2 o2 r2 g1 o1 r1 g0 o0 r0"),
    ((1, 0), "", "", CHAIN, "g2 g1 o2 r2 g0 o1 r1 o0 r0"),
    ((1, 8), "", "", CHAIN, "g2 g1 g0 o2 r2 o1 r1 o0 r0"),
    ((1, 0), "2", "", CHAIN, "g1 o2 r2 g0 o1 r1 o0 r0"),
    ((1, 0), "", "0", CHAIN, "g2 g1 o2 r2 o1 r1 o0 r0"),
    # Units inside another, and a checkpoint around two.
    ((1, 0), "", "", "o0 o2 r2 o1 r1 r0", "g0 g2 o0 g1 o2 r2 o1 r1 r0"),
    ((1, 0), "", "", "o2 r2 o0 o1 r1 r0", "g2 g0 o2 r2 g1 o0 o1 r1 r0"),
]


def test_forward():
    for sizes, ahead, expected in FORWARDS:
        log = []
        units = [Gathered(n, nbytes, ahead, log) for n, nbytes in enumerate(sizes)]
        assert walk(units, [f"o{n}" for n in range(len(units))], log) == expected


def test_backward():
    for ahead, there, lazy, steps, expected in BACKWARDS:
        log = []
        units = [Gathered(n, 4, ahead, log, str(n) in there, str(n) in lazy) for n in range(3)]
        assert walk(units, steps.split(), log) == expected


def test_a_cursor_stands_where_it_was_led_and_makes_room_before_gathers_start():
    """Steps are taken once; going to where it stands, or has been, takes none."""
    log = []
    cursor = Cursor([Step(Gathered(n, 4, (1, 0), log), needs_full=True) for n in range(3)], lambda: log.append("room"))
    assert [step.gathered.number for _, step in cursor.advance(1)] == [0]
    assert (cursor.position, cursor.all_started, log) == (1, False, ["room", "g0", "g1"])
    assert list(cursor.advance(1)) == list(cursor.advance(0)) == []
    assert [step.gathered.number for _, step in cursor.advance(2)] == [1]
    assert (cursor.position, cursor.all_started, log) == (2, True, ["room", "g0", "g1", "room", "g2"])
    assert [step.gathered.number for _, step in cursor.advance(3)] == [2]
