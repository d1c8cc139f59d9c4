"""Export: a report as a picture, and as a file of trace events for ui.perfetto.dev and chrome://tracing."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fshard.trace.events import Event, Timeline
from fshard.trace.stragglers import BETWEEN, Kind, Matched, Span

# How the main thread spends its time, in the words of the picture, with a colour.
KINDS = (
    (Kind.COMPUTE, "computing", "0.8"),
    (Kind.BETWEEN, BETWEEN, "0.92"),
    (Kind.START, "starting a collective", "C0"),
    (Kind.WAIT, "waiting", "C1"),
)
LATE = "waiting for a late rank", "C3"

# Lanes that a picture has room for: of more ranks the worst stragglers are drawn.
LANES = 24

# The thread of a rank's process in Perfetto.
MAIN = 0


def draw(
    path: str | Path,
    title: str,
    timelines: Sequence[Timeline],
    spans: Mapping[int, Sequence[Span]],
    matched: Sequence[Matched],
) -> None:
    """Draw a lane for each rank, and memory below.

    Args:
        path: Where to.
        title: Its title.
        timelines: By rank, by one clock.
        spans: How each rank's main thread spent its time.
        matched: The collectives that all of their ranks recorded.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start = min(timeline.begin for timeline in timelines)

    def bars(pieces: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        return [((begin - start) / 1e6, (end - begin) / 1e6) for begin, end in pieces]

    late: dict[int, list[tuple[int, int]]] = {rank: [] for rank in spans}
    held_up: Counter[int] = Counter()
    for entry in matched:
        held_up[entry.straggler] += entry.held_up()
        for rank in entry.events:
            late[rank] += entry.late(rank)
    shown = sorted(sorted(timelines, key=lambda line: -held_up[line.rank])[:LANES], key=lambda line: line.rank)
    figure = Figure(figsize=(12, 3.5 + 0.45 * len(shown)), layout="constrained")
    lanes, held = figure.subplots(2, 1, sharex=True, height_ratios=[len(shown) + 1, 3])
    for place, timeline in enumerate(shown):
        pieces = [
            ([(span.begin, span.end) for span in spans[timeline.rank] if span.kind is kind], color)
            for kind, _, color in KINDS
        ]
        for found, color in (*pieces, (late[timeline.rank], LATE[1])):
            lanes.broken_barh(bars(found), (place - 0.35, 0.7), color=color, linewidth=0)
        times, numbers = zip(*timeline.held(), strict=True)
        x, mib = [(when - start) / 1e6 for when in times], [n / 2**20 for n in numbers]
        held.plot(x, mib, drawstyle="steps-post", linewidth=1, label=f"rank {timeline.rank}")
    lanes.set_yticks(range(len(shown)), [f"rank {timeline.rank}" for timeline in shown])
    lanes.invert_yaxis()
    lanes.set_title(title, fontsize="medium")
    named = [*((name, color) for _, name, color in KINDS), LATE]
    handles = [Patch(color=color, label=name) for name, color in named]
    lanes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(named), frameon=False)
    meters = ", ".join(dict.fromkeys(timeline.meter for timeline in shown))
    held.set(xlabel="ms", ylabel=f"MiB, {meters}")
    held.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


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
        kind = span.kind if span.event else Kind.COMPUTE
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
