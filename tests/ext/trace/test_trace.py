"""trace: what it records is what runs, eager and jitted, whatever becomes of the context."""

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import comm
from fshard.ext.trace.events import spans
from tests.comm.steps import UNITS, make_step
from tests.ranks import BrokenError, on_ranks
from tests.trees import one_axis

BACKENDS = (None, "graph", "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@on_ranks("2 processes")
def test_records_what_the_recorder_does(backend):
    step, state, x = make_step()
    if backend:
        step = fs.jit(step, backend=backend)
        step(state, x)
    with fs.trace() as trace, comm.record() as record:
        state, _ = step(state, x)
        step(state, x)
    report = trace.report()
    timeline = report.timelines[dist.get_rank()]
    assert [(e.op, e.axis, e.label, e.unit) for e in (event.collective for event in timeline.events)] == [
        (e.op, e.axis, e.label, e.unit) for e in record
    ]
    assert sum(event.collective.sent for event in timeline.events) == sum(entry.sent for entry in record)
    for event in timeline.events:
        times = [event.begin, event.issued, *(time for wait in event.waits for time in wait)]
        assert event.waits
        assert times == sorted(times)
        assert timeline.begin <= event.begin <= event.end <= timeline.end
        assert min(event.memory) > 0
        assert event.members == (0, 1)
    # The first one's weights are not needed in the backward, those of the last two stay for it.
    gathered = [event.collective.unit for event in timeline.events if event.collective.label == "gather"]
    # The first is gathered again, though its input takes no gradient and nobody needs its weight.
    assert {unit: gathered.count(unit) for unit in UNITS} == {**dict.fromkeys(UNITS, 2), UNITS[0]: 4}
    assert any(UNITS[0] in event.collective.unit for event in timeline.events if event.collective.label == "scatter")
    assert any("weight" in event.leaves for event in timeline.events)
    assert len(report.matched) == len(timeline.events)
    assert "trace of 2 ranks" in str(report)
    assert all(unit in str(report) for unit in UNITS)
    return str(report)


@on_ranks("2 processes")
def test_spans_have_no_gaps_and_count_for_units():
    step, state, x = make_step()
    with fs.trace() as trace:
        step(state, x)
    report = trace.report()
    for timeline, row in zip(report.timelines, report.ranks):
        found = list(spans(timeline))
        assert [span.begin for span in found] == [timeline.begin, *(span.end for span in found[:-1])]
        assert found[-1].end == timeline.end
        assert row.computing + row.starting + row.waiting == pytest.approx(row.seconds)
        assert row.waiting_for_late <= row.waiting
    computed = {row.unit for row in report.units if row.computing.get(0)}
    assert set(UNITS) <= computed


class Signals:
    """Tells the other ranks when this one waits for a unit."""

    def __init__(self, unit, signal):
        self.unit, self.signal = unit, signal

    def waits(self, issued):
        if issued.collective.unit == self.unit:
            self.signal()


@pytest.mark.rows(1)
@pytest.mark.parametrize("late", (0, 1, 2))
@pytest.mark.parametrize("jitted", (False, True), ids=("eager", "jitted"))
@on_ranks("3 processes")
def test_names_the_rank_and_the_unit_that_the_others_waited_for(late, jitted):
    """One rank goes on only when the others wait for the last unit, whose gather it has not started."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    others = [other for other in range(3) if other != late]
    key = f"{late} {jitted}"

    def come_late():
        store.wait([f"{key} {other}" for other in others])

    if jitted:
        # The call of the step is late as a whole: the others wait in the message at its start.
        step, state, x = make_step()
        step = fs.jit(step)
        step(state, x)
        unit, between = "jit", come_late
    else:
        step, state, x = make_step(between=lambda place: come_late() if (rank, place) == (late, 1) else None)
        unit, between = UNITS[2], None
    with fs.trace() as trace, comm.watched(Signals(unit, lambda: store.set(f"{key} {rank}", ""))):
        if between and rank == late:
            between()
        step(state, x)
    report = trace.report()
    if not jitted:
        row = next(row for row in report.units if row.unit == unit)
        assert row.held_up[late] > 0
    entry = next(m for m in report.matched if m.straggler == late and m.events[late].collective.unit == unit)
    assert all(entry.waited(other) > 0 for other in others)
    assert entry.waited(late) == 0
    assert report.ranks[late].held_up > 0
    assert 0 < report.waiting_share < 1
    assert f"rank {late}" in str(report)


@on_ranks(2)
def test_one_that_is_interrupted_has_what_there_was():
    def between(place):
        if place == 2:
            raise BrokenError("in the middle\nof it")

    step, state, x = make_step(between=between)
    with pytest.raises(BrokenError), fs.trace() as trace:
        step(state, x)
    alone, report = trace.report(alone=True), trace.report()
    assert [line.error for line in report.timelines] == ["BrokenError: in the middle"] * 2
    assert "rank 1 was interrupted: BrokenError: in the middle" in str(report)
    assert len(alone.timelines) == 1
    assert {"layers.0", "layers.1"} <= {event.collective.unit for event in alone.timelines[0].events}


@on_ranks(2)
def test_collectives_before_and_after_are_not_recorded():
    """Nor that one that was under way before has finished."""
    axis = fs.axis_of(one_axis())
    finish = comm.start_all_gather([torch.ones(2)], axis, "before")
    with fs.trace() as trace:
        finish()
        comm.all_gather([torch.ones(2)], axis, "inside")
        late = comm.start_all_gather([torch.ones(2)], axis, "not waited for")
    late()
    comm.all_gather([torch.ones(2)], axis, "outside")
    (inside, behind) = trace.report().timelines[0].events
    assert (inside.collective.label, len(inside.waits)) == ("inside", 1)
    assert (behind.collective.label, behind.waits, behind.end) == ("not waited for", [], behind.issued)
    assert not comm.watchers()


def test_a_running_trace_has_no_report():
    still_running = pytest.raises(ValueError, match="expected a trace that has ended, got one still running")
    with fs.trace() as trace, still_running:
        trace.report()


def test_refused_inside_of_a_jitted_function():
    def f(x):
        with fs.trace():
            return x + 1

    with pytest.raises(
        ValueError, match="trace: expected a place around the call of a traced function, got one inside"
    ):
        fs.jit(f)(torch.ones(2))
