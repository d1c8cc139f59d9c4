"""Report: the stragglers of a trace, as numbers, a table, a picture and a file."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fshard.ext.trace.events import BETWEEN, Activity, Event, Matched, Span, Timeline, list_spans, match_events

# The row of collectives for no unit, and that of those by which ranks compare what they do.
OTHERS = "(no unit)"
AGREEMENT = "(agreement)"
# Explanations of rows that are no units.
MEANINGS = (
    (AGREEMENT, "ranks compare what they do, where a pass begins or ends; one that is late there was slow before"),
    (BETWEEN, "between a step's last gradients and the next step: the update, data, the caller's own code"),
    (OTHERS, "work for no unit, such as the sum of the losses"),
)
RANK_COLUMNS = ("computing", "starting", "waiting", "for late ranks", "came last", "held others up (sum)")
UNIT_COLUMNS = (
    *("collectives", "sent", "computing (mean)", "slowest rank", "waiting (mean)", "held up by", "for (sum)"),
)
# At most so many leaves of a collective are named.
MAX_LEAVES = 6
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


class UnitRow:
    """One unit; all but its name is by rank, and times are seconds.

    Attributes:
        unit: Its name.
        collectives: How many were for it.
        bytes: Bytes that they sent in nominal ring terms.
        computing: How long the rank computed with it.
        waiting: How long it waited for it.
        held_up: How long the others waited for the rank, summed over them.
    """

    def __init__(self, unit: str) -> None:
        """Nothing is known of the unit yet."""
        self.unit = unit
        self.collectives = Counter[int]()
        self.bytes = defaultdict[int, float](float)
        self.computing = defaultdict[int, float](float)
        self.waiting = defaultdict[int, float](float)
        self.held_up = defaultdict[int, float](float)


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
        self.timelines = list(timelines)
        self.clock_error = clock_error / 1e9
        self.matched = match_events(self.timelines)
        self.spans: dict[int, list[Span]] = {timeline.rank: list(list_spans(timeline)) for timeline in self.timelines}
        self.ranks = [self._sum_rank(timeline) for timeline in self.timelines]
        self.units = self._sum_units()

    @property
    def latest(self) -> int | None:
        """The rank that others waited for longest; None where no rank waited."""
        row = max(self.ranks, key=lambda row: row.held_up)
        return row.rank if row.held_up else None

    @property
    def waiting_share(self) -> float:
        """The part of all ranks' time that was waiting for ranks that came later."""
        seconds = sum(row.seconds for row in self.ranks)
        return sum(row.waiting_for_late for row in self.ranks) / (seconds or 1)

    def save(self, path: str | Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open. One rank calls it.

        A rank is a process there: what its main thread does, its collectives while they are under way, and an arrow
        from the rank that came last to each one that waited.

        Args:
            path: Where to write it, such as "trace.json".
        """
        entries: list[dict[str, Any]] = []
        for timeline in self.timelines:
            entries += _draw_rank(timeline, self.spans[timeline.rank])
        for number, matched in enumerate(self.matched):
            entries += _draw_arrows(number, matched)
        begin = min(timeline.begin for timeline in self.timelines)
        for entry in entries:
            # Metadata have no time.
            if "ts" in entry:
                entry["ts"] = (entry["ts"] - begin) / 1e3
        Path(path).write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        return "\n".join(self._write_lines())

    __repr__ = __str__

    def _sum_rank(self, timeline: Timeline) -> RankRow:
        nanoseconds: Counter[Activity] = Counter()
        for span in self.spans[timeline.rank]:
            nanoseconds[span.kind] += span.end - span.begin
        entries = [entry for entry in self.matched if timeline.rank in entry.events]
        last = [entry for entry in entries if entry.straggler == timeline.rank]
        return RankRow(
            timeline.rank,
            seconds=(timeline.end - timeline.begin) / 1e9,
            computing=nanoseconds[Activity.COMPUTE] / 1e9,
            starting=nanoseconds[Activity.START] / 1e9,
            waiting=nanoseconds[Activity.WAIT] / 1e9,
            waiting_for_late=sum(entry.count_wait(timeline.rank) for entry in entries) / 1e9,
            last=len(last),
            held_up=sum(entry.sum_waits() for entry in last) / 1e9,
        )

    def _sum_units(self) -> list[UnitRow]:
        rows: dict[str, UnitRow] = {}

        def find_row(name: str) -> UnitRow:
            return rows.setdefault(name, UnitRow(name))

        for timeline in self.timelines:
            rank = timeline.rank
            for event in timeline.events:
                row = find_row(_name_row(event))
                row.collectives[rank] += 1
                row.bytes[rank] += event.collective.sent
                for begin, end in event.waits:
                    row.waiting[rank] += (end - begin) / 1e9
            for span in self.spans[rank]:
                if span.event is None:
                    find_row(span.unit or OTHERS).computing[rank] += (span.end - span.begin) / 1e9
        for entry in self.matched:
            row = find_row(_name_row(entry.events[entry.straggler]))
            row.held_up[entry.straggler] += entry.sum_waits() / 1e9
        return list(rows.values())

    def _write_headline(self) -> str:
        if self.latest is None:
            return "no rank waited for another"
        row = next(row for row in self.ranks if row.rank == self.latest)
        unit = max(self.units, key=lambda unit: unit.held_up.get(row.rank, 0.0))
        share = f"{100 * self.waiting_share:.1f}% of all ranks' time is waiting for late ranks"
        most = f"{1e3 * unit.held_up[row.rank]:.1f} ms at {unit.unit}"
        return f"{share}; most, {1e3 * row.held_up:.1f} ms, for rank {row.rank}, of which {most}"

    def _write_lines(self) -> Iterator[str]:
        ranks = f"{len(self.timelines)} ranks"
        clocks = f", clocks equal to {1e3 * self.clock_error:.2f} ms"
        if len(self.timelines) == 1:
            ranks = "1 rank"
            clocks = ""
        seconds = max(row.seconds for row in self.ranks)
        yield f"trace of {ranks}, {1e3 * seconds:.1f} ms{clocks}"
        yield self._write_headline()
        for timeline in self.timelines:
            if timeline.error:
                yield f"rank {timeline.rank} was interrupted: {timeline.error}"
        yield from _write_table("rank", RANK_COLUMNS, {f"{row.rank}": _write_rank(row) for row in self.ranks})
        yield from _write_table("unit", UNIT_COLUMNS, {row.unit: _write_unit(row) for row in self.units})
        yield "of the whole trace; mean and sum over ranks, collectives and sent of the rank with the most"
        units = {row.unit for row in self.units}
        for name, meaning in MEANINGS:
            if name in units:
                yield f"{name}: {meaning}"


def _name_row(event: Event) -> str:
    return AGREEMENT if event.collective.about.is_comparison else event.collective.unit or OTHERS


def _write_rank(row: RankRow) -> list[str]:
    cells = []
    for seconds in (row.computing, row.starting, row.waiting, row.waiting_for_late):
        cells.append(f"{100 * seconds / (row.seconds or 1):.1f}%")
    return [*cells, f"{row.last}", _write_ms(row.held_up)]


def _write_unit(row: UnitRow) -> list[str]:
    slowest = max(row.computing, key=row.computing.__getitem__, default=None)
    held_up = {rank: seconds for rank, seconds in row.held_up.items() if seconds}
    late = max(held_up, key=held_up.__getitem__, default=None)
    return [
        f"{max(row.collectives.values(), default=0)}",
        f"{max(row.bytes.values(), default=0.0) / 2**20:.2f} MiB",
        _write_ms(_mean(row.computing)),
        "-" if slowest is None else f"{slowest}: {_write_ms(row.computing[slowest])}",
        _write_ms(_mean(row.waiting)),
        "-" if late is None else f"rank {late}",
        "-" if late is None else _write_ms(held_up[late]),
    ]


def _mean(seconds: Mapping[int, float]) -> float:
    return sum(seconds.values()) / (len(seconds) or 1)


def _write_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _write_table(first: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Write a table, with the names of rows on the left, of which long ones are shortened."""
    table = {first: columns, **rows}
    names = [name if len(name) <= 32 else f"{name[:14]}...{name[-15:]}" for name in table]
    name_width = max(map(len, names))
    widths = [max(map(len, column)) for column in zip(*table.values(), strict=True)]
    yield ""
    for name, cells in zip(names, table.values(), strict=True):
        aligned = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        yield "  ".join([f"{name:<{name_width}}", *aligned])


def _draw_rank(timeline: Timeline, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Draw a rank as a process, in the trace event format."""
    rank = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": MAIN, "args": {"name": "main thread"}}
    for span in spans:
        yield {
            "ph": "X",
            "pid": rank,
            "tid": MAIN,
            "ts": span.begin,
            "dur": (span.end - span.begin) / 1e3,
            "cat": span.kind,
            "name": f"{span.kind} {span.name}".rstrip(),
            "args": _list_facts(span.event) if span.event else {},
        }
    for number, event in enumerate(timeline.events):
        # Collectives under way at once have tracks of their own.
        common = {"cat": "collective", "name": event.name, "pid": rank, "tid": MAIN, "id2": {"local": f"{number}"}}
        yield {"ph": "b", "ts": event.begin, **common, "args": _list_facts(event)}
        yield {"ph": "e", "ts": event.end, **common}


def _list_facts(event: Event) -> dict[str, Any]:
    collective = event.collective
    return {
        "unit": collective.unit,
        "leaves": ", ".join(collective.about.leaves[:MAX_LEAVES]),
        "axis": collective.axis,
        "operator": collective.op,
        "bytes": collective.sent,
        "ranks": list(event.members),
    }


def _draw_arrows(number: int, matched: Matched) -> Iterator[dict[str, Any]]:
    """Draw an arrow from the call of the straggler to each wait that it ended."""
    for rank in matched.events:
        if matched.count_wait(rank):
            common = {"id": f"{number} {rank}", "cat": "waited for", "name": "waited for", "tid": MAIN}
            yield {"ph": "s", "pid": matched.straggler, "ts": matched.began, **common}
            yield {"ph": "f", "bp": "e", "pid": rank, "ts": matched.began, **common}
