"""Blame: for each collective the rank that the others waited for, and for how long."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fshard.trace.events import Event, Timeline

# What lies between the last gradients of a step and the begin of the next one.
BETWEEN = "(update, between steps)"


class Meeting(NamedTuple):
    """One collective as all of its ranks saw it.

    Attributes:
        events: By rank.
        last: The rank that came last.
        began: When it came.
    """

    events: dict[int, Event]
    last: int
    began: int

    def waited(self, rank: int) -> int:
        """Nanoseconds that a rank waited before the last one came."""
        if rank == self.last:
            return 0
        return sum(max(0, min(end, self.began) - begin) for begin, end in self.events[rank].waits)


class Parting(NamedTuple):
    """Where ranks first did different things: what each did, by rank."""

    events: dict[int, Event | None]


def meetings(timelines: Sequence[Timeline]) -> tuple[list[Meeting], list[Parting]]:
    """Match the collectives of ranks, by their members and their order.

    Returns:
        The collectives that all of their ranks recorded, and for each group of ranks that parted where it did.
    """
    of_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Event]]] = {}
    for timeline in timelines:
        for event in timeline.events:
            ranks = of_group.setdefault((event.axis, event.members), {})
            ranks.setdefault(timeline.rank, []).append(event)
    present = {timeline.rank for timeline in timelines}
    met, parted = [], []
    for (_, members), ranks in of_group.items():
        rows = {rank: ranks.get(rank, []) for rank in members if rank in present}
        for n in range(max(map(len, rows.values()))):
            events = {rank: row[n] if n < len(row) else None for rank, row in rows.items()}
            found = {rank: event for rank, event in events.items() if event is not None}
            if len(found) < len(events) or len({(event.op, event.who) for event in found.values()}) > 1:
                # What comes behind cannot be matched any more.
                parted.append(Parting(events))
                break
            last = max(found, key=lambda rank: found[rank].begin)
            met.append(Meeting(found, last, found[last].begin))
    return sorted(met, key=lambda meeting: meeting.began), parted


class Span(NamedTuple):
    """What the main thread of a rank did for a while.

    Attributes:
        kind: "compute", "start" or "wait".
        name: Of the unit that is computed with, BETWEEN, or of the collective; empty where nobody can tell.
        begin: When, in nanoseconds.
        end: Until when.
        event: The collective; None for "compute".
    """

    kind: str
    name: str
    begin: int
    end: int
    event: Event | None


def spans(timeline: Timeline) -> Iterator[Span]:
    """Tell what a rank did from the begin of its trace to the end, in order and without gaps."""
    calls = [Span("start", event.name, event.begin, event.issued, event) for event in timeline.events]
    waits = [Span("wait", event.name, begin, end, event) for event in timeline.events for begin, end in event.waits]
    apart, at, unit = list(between(timeline)), timeline.begin, ""

    def computed(end: int, name: str) -> Span:
        inside = any(begin <= at and end <= until for begin, until in apart)
        return Span("compute", BETWEEN if inside else name, at, end, None)

    for span in sorted((*calls, *waits), key=lambda span: (span.begin, span.end)):
        event = span.event
        assert event is not None
        scattered = span.kind == "start" and event.who == "scatter"
        if span.begin > at:
            # Before gradients are sent they are made.
            yield computed(span.begin, event.unit if scattered else unit)
        yield span
        at = max(at, span.end)
        if event.unit and event.who in ("gather", "scatter") and (span.kind == "wait") == (event.who == "gather"):
            unit = event.unit
    if timeline.end > at:
        yield computed(timeline.end, unit)


def between(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """Tell when a rank was between steps: from where a step's last gradients had landed to where the next one began.

    A step begins where ranks agree on what comes next. A jitted one, where they agree on nothing, begins where a unit
    is gathered whose gradients have been sent; one that gathers nothing, as by ddp, begins nowhere that can be told.
    """
    since: int | None = timeline.begin
    first, sent, cut = "", set[str](), False
    for event in timeline.events:
        gathers, again = event.who == "gather", event.unit in sent or (cut and event.unit == first)
        if event.begins or (gathers and (again or not first)):
            if since is not None:
                yield since, event.begin
            since, sent, cut = None, set(), False
        if gathers:
            since, first = None, first or event.unit
        elif event.who == "scatter":
            since, sent = event.end, sent.union(event.unit.split(", "))
            # A long list of units is cut, and the one that is gathered first comes last in it.
            cut = cut or event.unit.endswith("...")
        elif event.ends:
            since = event.end
    if since is not None and timeline.events:
        yield since, timeline.end
