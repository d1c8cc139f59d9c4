"""Perfetto: a report as a file of trace events, which ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fshard.trace.blame import Meeting, Span
from fshard.trace.events import Event, Timeline

# Threads of a rank's process.
MAIN = 0


def write(
    path: str | Path, timelines: Sequence[Timeline], spans: Mapping[int, Sequence[Span]], met: Sequence[Meeting]
) -> None:
    """Write the file.

    Args:
        path: Where to.
        timelines: By rank, by one clock.
        spans: What each rank's main thread did.
        met: The collectives that ranks met in.
    """
    start = min(timeline.begin for timeline in timelines)

    def at(nanoseconds: int) -> float:
        return (nanoseconds - start) / 1e3

    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += _of_rank(timeline, spans[timeline.rank], at)
    for number, meeting in enumerate(met):
        events += _arrows(number, meeting, at)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _of_rank(timeline: Timeline, spans: Sequence[Span], at: Any) -> Iterator[dict[str, Any]]:
    pid = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": MAIN, "args": {"name": "main thread"}}
    for span in spans:
        name = f"{span.kind} {span.name}".rstrip()
        times = {"ts": at(span.begin), "dur": (span.end - span.begin) / 1e3}
        about = {} if span.event is None else _about(span.event)
        yield {"ph": "X", "cat": span.kind, "name": name, "pid": pid, "tid": MAIN, **times, "args": about}
    for number, event in enumerate(timeline.events):
        # Those under way at once have tracks of their own.
        common = {"cat": "collective", "name": event.name, "pid": pid, "tid": MAIN, "id2": {"local": f"{number}"}}
        yield {"ph": "b", "ts": at(event.begin), **common, "args": _about(event)}
        yield {"ph": "e", "ts": at(event.end), **common}
    for when, held in memory(timeline):
        yield {"ph": "C", "name": timeline.meter, "pid": pid, "ts": at(when), "args": {"bytes": held}}


def _about(event: Event) -> dict[str, Any]:
    named = {"unit": event.unit, "leaves": event.leaves, "axis": event.axis, "operator": event.op}
    return {**named, "bytes": event.bytes, "ranks": list(event.members)}


def _arrows(number: int, meeting: Meeting, at: Any) -> Iterator[dict[str, Any]]:
    """From the call of the rank that came last to the waits that it ended."""
    common = {"cat": "waited for", "name": "waited for", "tid": MAIN}
    for rank, event in meeting.events.items():
        if meeting.waited(rank):
            begin = next(begin for begin, end in event.waits if end > meeting.began)
            name = {"id": f"{number} {rank}", **common}
            yield {"ph": "s", "pid": meeting.last, "ts": at(meeting.began), **name}
            yield {"ph": "f", "bp": "e", "pid": rank, "ts": at(max(begin, meeting.began)), **name}


def memory(timeline: Timeline) -> list[tuple[int, int]]:
    """What a rank held, and when, in order."""
    ends = [(timeline.begin, timeline.memory[0]), (timeline.end, timeline.memory[1])]
    begins = [(event.begin, event.memory[0]) for event in timeline.events]
    return sorted([*ends, *begins, *((event.end, event.memory[1]) for event in timeline.events)])
