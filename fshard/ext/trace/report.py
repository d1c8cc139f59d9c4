"""Report: the stragglers of a trace, as numbers, a table, a picture and a file."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fshard.ext.trace.events import BETWEEN, Activity, Event, Matched, Span, Timeline, match, spans

# Rows of collectives for no unit, and of those by which ranks compare what they do.
OTHERS, AGREEMENT = "(no unit)", "(agreement)"
# Explanations of rows that are no units.
MEANINGS = (
    (AGREEMENT, "ranks compare what they do, where a pass begins or ends; one that is late there was slow before"),
    (BETWEEN, "between a step's last gradients and the next step: the update, data, the caller's own code"),
    (OTHERS, "work for no unit, such as the sum of the losses"),
)


# The thread of a rank's process in Perfetto.
MAIN = 0


class RankRow(NamedTuple):
    """One rank; times are seconds.

    Attributes:
        rank: Its global rank.
        seconds: From the begin of its trace to the end.
        computing: Between collectives.
        starting: In calls that start collectives, copies into their buffers included.
        waiting: For collectives to finish.
        waiting_for_late: The part of it before the last rank had come.
        last: How many collectives it was the last one to come to.
        held_up: How long the others waited for it, summed over them.
    """

    rank: int
    seconds: float
    computing: float
    starting: float
    waiting: float
    waiting_for_late: float
    last: int
    held_up: float


class UnitRow(NamedTuple):
    """One unit; times are seconds.

    Attributes:
        unit: Its name.
        collectives: How many were for it, on the rank that had the most.
        bytes: Bytes that they sent in nominal ring terms, on the rank that sent the most.
        computing: By rank.
        waiting: By rank.
        held_up: By rank how long the others waited for it, summed over them.
    """

    unit: str
    collectives: int
    bytes: float
    computing: dict[int, float]
    waiting: dict[int, float]
    held_up: dict[int, float]


class Report:
    """The time of all ranks during a trace.

    Attributes:
        timelines: By rank, all by the clock of the first one.
        clock_error: Seconds by which times of different ranks may be off.
        matched: The collectives that all of their ranks recorded.
        spans: By rank, how its main thread spent its time.
        ranks: A row for each rank.
        units: A row for each unit, in the order of their first collective.
    """

    def __init__(self, timelines: Sequence[Timeline], clock_error: int) -> None:
        """Match the recorded events, and sum them up."""
        self.timelines, self.clock_error = list(timelines), clock_error / 1e9
        self.matched = match(self.timelines)
        self.spans: dict[int, list[Span]] = {timeline.rank: list(spans(timeline)) for timeline in self.timelines}
        self.ranks = [self._rank_row(timeline) for timeline in self.timelines]
        self.units = self._unit_rows()

    @property
    def latest(self) -> int | None:
        """The rank that others waited for longest; None where no rank waited."""
        row = max(self.ranks, key=lambda row: row.held_up)
        return row.rank if row.held_up else None

    @property
    def waiting_share(self) -> float:
        """The part of all ranks' time that was waiting for ranks that came later."""
        return sum(row.waiting_for_late for row in self.ranks) / (sum(row.seconds for row in self.ranks) or 1)

    def save(self, path: str | Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open. One rank calls it.

        A rank is a process there: what its main thread does, its collectives while they are under way, and an arrow
        from the rank that came last to each one that waited.

        Args:
            path: Where to write it, such as "trace.json".
        """
        start = min(timeline.begin for timeline in self.timelines)
        events = [entry for timeline in self.timelines for entry in _of_rank(timeline, self.spans[timeline.rank])]
        events += [entry for number, one in enumerate(self.matched) for entry in _arrows(number, one)]
        # Metadata have no time.
        events = [entry | ({"ts": (entry["ts"] - start) / 1e3} if "ts" in entry else {}) for entry in events]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _rank_row(self, timeline: Timeline) -> RankRow:
        took: Counter[Activity] = Counter()
        for span in self.spans[timeline.rank]:
            took[span.kind] += span.end - span.begin
        entries = [entry for entry in self.matched if timeline.rank in entry.events]
        last = [entry for entry in entries if entry.straggler == timeline.rank]
        return RankRow(
            timeline.rank,
            seconds=(timeline.end - timeline.begin) / 1e9,
            computing=(took[Activity.COMPUTE] + took[Activity.BETWEEN]) / 1e9,
            starting=took[Activity.START] / 1e9,
            waiting=took[Activity.WAIT] / 1e9,
            waiting_for_late=sum(entry.waited(timeline.rank) for entry in entries) / 1e9,
            last=len(last),
            held_up=sum(entry.held_up() for entry in last) / 1e9,
        )

    def _unit_rows(self) -> list[UnitRow]:
        """Sum up by unit, and for each column by rank."""
        rows: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
        for timeline in self.timelines:
            rank = timeline.rank
            for event in timeline.events:
                rows[_row_name(event)]["collectives"][rank] += 1
                rows[_row_name(event)]["bytes"][rank] += event.collective.sent
            for span in self.spans[rank]:
                column = "waiting" if span.kind is Activity.WAIT else "computing"
                if span.kind is not Activity.START:
                    name = _row_name(span.event) if span.event else span.name or OTHERS
                    rows[name][column][rank] += (span.end - span.begin) / 1e9
        for entry in self.matched:
            name = _row_name(entry.events[entry.straggler])
            rows[name]["held_up"][entry.straggler] += entry.held_up() / 1e9
        return [
            UnitRow(
                unit,
                int(max(row["collectives"].values(), default=0)),
                max(row["bytes"].values(), default=0.0),
                *(dict(row[column]) for column in ("computing", "waiting", "held_up")),
            )
            for unit, row in rows.items()
        ]

    def _headline(self) -> str:
        if self.latest is None:
            return "no rank waited for another"
        row = next(row for row in self.ranks if row.rank == self.latest)
        unit = max(self.units, key=lambda unit: unit.held_up.get(row.rank, 0.0))
        share = f"{100 * self.waiting_share:.1f}% of all ranks' time is waiting for late ranks"
        most = f"{1e3 * unit.held_up[row.rank]:.1f} ms at {unit.unit}"
        return f"{share}; most, {1e3 * row.held_up:.1f} ms, for rank {row.rank}, of which {most}"

    def _lines(self) -> Iterator[str]:
        one = len(self.timelines) == 1
        clocks = "" if one else f", clocks equal to {1e3 * self.clock_error:.2f} ms"
        seconds = max(row.seconds for row in self.ranks)
        yield f"trace of {len(self.timelines)} rank{'' if one else 's'}, {1e3 * seconds:.1f} ms{clocks}"
        yield self._headline()
        yield from (f"rank {line.rank} was interrupted: {line.error}" for line in self.timelines if line.error)
        held = "held others up (sum)"
        columns = ("computing", "starting", "waiting", "for late ranks", "came last", held)
        yield from _table("rank", columns, {f"{row.rank}": _rank_cells(row) for row in self.ranks})
        means = ("computing (mean)", "slowest rank", "waiting (mean)")
        of_units = ("collectives", "sent", *means, "held up by", "for (sum)")
        yield from _table("unit", of_units, {row.unit: _unit_cells(row) for row in self.units})
        yield "of the whole trace; mean and sum over ranks, collectives and sent of the rank with the most"
        units = {row.unit for row in self.units}
        yield from (f"{name}: {meaning}" for name, meaning in MEANINGS if name in units)


def _row_name(event: Event) -> str:
    return AGREEMENT if event.collective.about.is_comparison else event.collective.unit or OTHERS


def _rank_cells(row: RankRow) -> list[str]:
    parts = (row.computing, row.starting, row.waiting, row.waiting_for_late)
    shares = (f"{100 * part / (row.seconds or 1):.1f}%" for part in parts)
    return [*shares, f"{row.last}", f"{1e3 * row.held_up:.1f} ms"]


def _unit_cells(row: UnitRow) -> list[str]:
    mean = sum(row.computing.values()) / (len(row.computing) or 1)
    slowest = max(row.computing, key=row.computing.__getitem__, default=None)
    held_up = {rank: seconds for rank, seconds in row.held_up.items() if seconds}
    late = max(held_up, key=held_up.__getitem__, default=None)
    return [
        f"{row.collectives}",
        f"{row.bytes / 2**20:.2f} MiB",
        f"{1e3 * mean:.1f} ms",
        "-" if slowest is None else f"{slowest}: {1e3 * row.computing[slowest]:.1f} ms",
        f"{1e3 * sum(row.waiting.values()) / (len(row.waiting) or 1):.1f} ms",
        "-" if late is None else f"rank {late}",
        "-" if late is None else f"{1e3 * held_up[late]:.1f} ms",
    ]


def _table(first: str, columns: Sequence[str], rows: dict[str, list[str]]) -> Iterator[str]:
    names = max(map(len, (first, *rows)))
    widths = [max(map(len, column)) for column in zip(columns, *rows.values(), strict=True)]
    yield ""
    for name, cells in {first: list(columns), **rows}.items():
        yield f"{name:<{names}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


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


def _about(event: Event) -> dict[str, Any]:
    sent = event.collective
    named = {"unit": sent.unit, "leaves": event.leaves, "axis": sent.axis, "operator": sent.op}
    return {**named, "bytes": sent.sent, "ranks": list(event.members)}


def _arrows(number: int, matched: Matched) -> Iterator[dict[str, Any]]:
    """Draw an arrow from the call of the straggler to each wait that it ended."""
    for rank in matched.events:
        if matched.waited(rank):
            name = {"id": f"{number} {rank}", "cat": "waited for", "name": "waited for", "tid": MAIN}
            yield {"ph": "s", "pid": matched.straggler, "ts": matched.began, **name}
            yield {"ph": "f", "bp": "e", "pid": rank, "ts": matched.began, **name}
