"""Tables of pipelines: how many ticks they take, what lives on a stage, and that nothing is used before it is there."""

import pytest

from fshard.parallel.ticks import SCHEDULES, Op, receiver, ticks

SIZES = [(stages, count) for stages in (1, 2, 3, 4, 8) for count in (1, 2, 3, 4, 8, 16)]


def tables(schedule, virtual_stages=1, backward=True):
    sizes = [(n, m) for n, m in SIZES if schedule != "interleaved" or m % n == 0]
    return [(n, m, ticks(n, m, schedule, virtual_stages, backward)) for n, m in sizes]


def live(table, stage):
    """Count how many microbatches of virtual stages a stage holds at most, between forward and backward."""
    held = most = 0
    for row in table:
        op = row[stage]
        held += 0 if op is None else -1 if op.backward else 1
        most = max(most, held)
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_ticks_and_live_microbatches(schedule):
    for n, m, table in tables(schedule):
        assert len(table) == 2 * (m + n - 1)
        held = [m if schedule == "gpipe" else min(m, n - stage) for stage in range(n)]
        assert [live(table, stage) for stage in range(n)] == held
    assert all(len(table) == m + n - 1 for n, m, table in tables(schedule, backward=False))


def test_ticks_of_virtual_stages():
    for v in (1, 2, 3):
        for n, m, table in tables("interleaved", v):
            assert len(table) == 2 * (m * v + n - 1)
            held = [min(m * v, 2 * (n - stage - 1) + (v - 1) * n + 1) for stage in range(n)]
            assert [live(table, stage) for stage in range(n)] == held
        assert all(len(table) == m * v + n - 1 for n, m, table in tables("interleaved", v, backward=False))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_does_all_and_takes_what_was_computed_before(schedule):
    v = 2 if schedule == "interleaved" else 1
    for n, m, table in tables(schedule, v):
        when = {(stage, op): t for t, row in enumerate(table) for stage, op in enumerate(row) if op is not None}
        every = {Op(back, i, chunk) for back in (False, True) for i in range(m) for chunk in range(v)}
        assert set(when) == {(stage, op) for stage in range(n) for op in every}
        for (stage, op), t in when.items():
            found = receiver(stage, op, n, v)
            if found is not None:
                assert when[found] > t
                step = -1 if op.backward else 1
                assert found[1].chunk * n + found[0] == op.chunk * n + stage + step
            if op.backward:
                assert when[stage, op._replace(backward=False)] < t


def test_a_table_as_it_is_drawn():
    """Two stages, three microbatches."""
    drawn = [
        ["".join("." if op is None else "FB"[op.backward] + str(op.microbatch) for op in column)]
        for column in zip(*ticks(2, 3, "1f1b"), strict=True)
    ]
    assert drawn == [["F0F1.B0F2B1.B2"], [".F0B0F1B1F2B2."]]
