"""trace: what it records is what runs, eager and jitted, whatever becomes of the context."""

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import comm
from fshard.ext.trace.events import list_spans
from fshard.testing import assert_trees_close
from tests.comm.steps import UNITS, make_step
from tests.jit.steps import refused
from tests.ranks import BrokenError, my_rank, on_ranks
from tests.test_mesh import check_a_foreign_mesh_is_refused_at_once, check_ddp_of_some_processes
from tests.tolerance import within
from tests.trees import one_axis


def check_events(timeline):
    """Times of an event are in order and inside of the trace."""
    for event in timeline.events:
        times = [event.begin, event.issued]
        for wait in event.waits:
            times += wait
        assert event.waits
        assert times == sorted(times)
        assert timeline.begin <= event.begin <= event.end <= timeline.end
        assert event.members == (0, 1)
    assert any("weight" in str(event.collective.about.leaves) for event in timeline.events)


def check_row(row, timeline):
    """Spans follow one another, and what a rank does adds up to the whole trace."""
    spans = list(list_spans(timeline))
    assert [span.begin for span in spans] == [timeline.begin, *(span.end for span in spans[:-1])]
    assert spans[-1].end == timeline.end
    seconds = row.computing + row.starting + row.waiting
    assert_trees_close(seconds, row.seconds, **within(row.seconds, len(timeline.events)))
    assert row.waiting_for_late <= row.waiting


@pytest.mark.parametrize("jitted", (False, True), ids=("eager", "jitted"))
@on_ranks(2)
def test_records_what_the_recorder_does(jitted):
    step, state, x = make_step()
    if jitted:
        step = fs.jit(step)
        step(state, x)
    with fs.trace() as trace, comm.record() as record:
        state, _ = step(state, x)
        step(state, x)
    report = trace.report()
    timeline = report.timelines[my_rank()]
    assert [event.collective for event in timeline.events] == list(record)
    assert len(report.matched) == len(timeline.events)
    check_events(timeline)
    for row, timeline in zip(report.ranks, report.timelines):
        check_row(row, timeline)
    assert set(UNITS) <= {row.unit for row in report.units if row.computing.get(0)}
    assert all(text in str(report) for text in ("trace of 2 ranks", *UNITS))
    return str(report)


@pytest.mark.rows(1)
@pytest.mark.parametrize("late", (0, 1, 2))
@on_ranks("3 processes")
def test_names_the_rank_and_the_unit_that_the_others_waited_for(late):
    """One rank goes on only when the others wait for the last unit, whose gather it has not started."""
    store, last = dist.distributed_c10d._get_default_store(), UNITS[2]
    others = {0, 1, 2} - {late}

    def between(place):
        if (my_rank(), place) == (late, 1):
            store.wait([f"{late} {other}" for other in others])

    class Signals:
        """Tells the other ranks when this one waits for the last unit."""

        def waits(self, issued):
            if issued.collective.unit == last:
                store.set(f"{late} {my_rank()}", "")

    step, state, x = make_step(between=between)
    with fs.trace() as trace, comm.watched(Signals()):
        step(state, x)
    report = trace.report()
    assert next(row for row in report.units if row.unit == last).held_up[late] > 0
    entry = next(m for m in report.matched if m.straggler == late and m.events[late].collective.unit == last)
    assert all(entry.count_wait(other) > 0 for other in others)
    assert entry.count_wait(late) == 0
    assert report.ranks[late].held_up > 0
    assert 0 < report.waiting_share < 1
    # On a busy machine another rank may be later still elsewhere, and the headline names the latest of all.
    assert f"for rank {report.latest}, of which" in str(report)


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
    inside, unfinished = trace.report().timelines[0].events
    assert (inside.collective.label, len(inside.waits)) == ("inside", 1)
    assert (unfinished.collective.label, unfinished.waits) == ("not waited for", [])
    assert unfinished.end == unfinished.issued
    assert not comm.watchers()


def test_refused_while_it_runs_and_inside_of_a_jitted_function():
    def f(x):
        with fs.trace():
            return x + 1

    with fs.trace() as trace, refused("trace.report: the trace is still running. Leave its context first."):
        trace.report()
    text = r"^trace: it is called inside a function that fs.jit traces, where nothing runs\. Put"
    with pytest.raises(ValueError, match=text):
        fs.jit(f)(torch.ones(2))


@on_ranks("3 processes")
def test_some_processes():
    with fs.trace() as trace:
        mesh = check_ddp_of_some_processes()
    if mesh is not None:
        report = trace.report(mesh=mesh)
        assert [line.rank for line in report.timelines] == [0, 2]
        assert {event.members for line in report.timelines for event in line.events} == {(0, 2)}


def test_a_foreign_mesh_is_refused_at_once():
    def outside(mesh):
        with fs.trace() as trace:
            pass
        yield lambda: trace.report(mesh=mesh)

    check_a_foreign_mesh_is_refused_at_once(outside)
