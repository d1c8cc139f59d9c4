"""Export: a report as a file of trace events for ui.perfetto.dev and chrome://tracing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fshard.ext.trace.events import Event, Timeline
from fshard.ext.trace.stragglers import Activity, Matched, Span

# The thread of a rank's process in Perfetto.
MAIN = 0


def write_perfetto(
    path: str | Path, timelines: Sequence[Timeline], spans: Mapping[int, Sequence[Span]], matched: Sequence[Matched]
) -> None:
    """Write a file of trace events.

    Args:
        path: Where to.
        timelines: By rank, by one clock.
        spans: How each rank's main thread spent its time.
        matched: The collectives that all of their ranks recorded.
    """
    start = min(timeline.begin for timeline in timelines)
    events = [entry for timeline in timelines for entry in _of_rank(timeline, spans[timeline.rank])]
    events += [entry for number, one in enumerate(matched) for entry in _arrows(number, one)]
    for entry in events:
        # Metadata have no time.
        if "ts" in entry:
            entry["ts"] = (entry["ts"] - start) / 1e3
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _of_rank(timeline: Timeline, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    pid = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": MAIN, "args": {"name": "main thread"}}
    for span in spans:
        kind = span.kind if span.event else Activity.COMPUTE
        about = {"cat": kind, "name": f"{kind} {span.name}".rstrip(), "args": _about(span.event) if span.event else {}}
        yield {"ph": "X", "pid": pid, "tid": MAIN, "ts": span.begin, "dur": (span.end - span.begin) / 1e3, **about}
    for number, event in enumerate(timeline.events):
        # Collectives under way at once have tracks of their own.
        common = {"cat": "collective", "name": event.name, "pid": pid, "tid": MAIN, "id2": {"local": f"{number}"}}
        yield {"ph": "b", "ts": event.begin, **common, "args": _about(event)}
        yield {"ph": "e", "ts": event.end, **common}
    for when, held in timeline.held():
        yield {"ph": "C", "name": timeline.meter, "pid": pid, "ts": when, "args": {"bytes": held}}


def _about(event: Event) -> dict[str, Any]:
    named = {"unit": event.unit, "leaves": event.leaves, "axis": event.axis, "operator": event.op}
    return {**named, "bytes": event.bytes, "ranks": list(event.members)}


def _arrows(number: int, matched: Matched) -> Iterator[dict[str, Any]]:
    """Draw an arrow from the call of the straggler to each wait that it ended."""
    for rank in matched.events:
        if matched.waited(rank):
            name = {"id": f"{number} {rank}", "cat": "waited for", "name": "waited for", "tid": MAIN}
            yield {"ph": "s", "pid": matched.straggler, "ts": matched.began, **name}
            yield {"ph": "f", "bp": "e", "pid": rank, "ts": matched.began, **name}
