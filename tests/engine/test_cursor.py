"""A cursor without ranks; `test_overlap.py` has the orders of steps and gathers that follow from it."""

from types import SimpleNamespace

from fshard.engine.cursor import Cursor, Step
from fshard.engine.plan import Unit
from fshard.tree import ReshardPolicy


def test_a_cursor_stands_where_it_was_led_and_makes_room_before_gathers_start():
    """Steps are taken once; going to where it stands, or has been, takes none."""
    log = []
    unit = Unit("", (), 4, ReshardPolicy(prefetch=1), is_regathered=True)
    steps = []
    for name in ("g0", "g1", "g2"):
        gathered = SimpleNamespace(name=name, unit=unit, is_lazy=False, start=lambda name=name: log.append(name))
        steps.append(Step(gathered, needs_full=True))
    cursor = Cursor(steps, lambda: log.append("room"))
    assert [step.gathered.name for _, step in cursor.advance(1)] == ["g0"]
    assert (cursor.position, cursor.all_started, log) == (1, False, ["room", "g0", "g1"])
    assert list(cursor.advance(1)) == list(cursor.advance(0)) == []
    assert [step.gathered.name for _, step in cursor.advance(2)] == ["g1"]
    assert (cursor.position, cursor.all_started, log) == (2, True, ["room", "g0", "g1", "room", "g2"])
    assert [step.gathered.name for _, step in cursor.advance(3)] == ["g2"]
