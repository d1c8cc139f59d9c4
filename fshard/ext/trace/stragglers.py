"""Stragglers: for each collective the rank that came last, and how long the others waited for it."""

from collections.abc import Iterator, Sequence
from enum import StrEnum, auto
from itertools import zip_longest
from typing import NamedTuple

import fshard as fs
from fshard.ext.trace.events import Event, Timeline

# The time between the last gradients of a step and the begin of the next one.
BETWEEN = "(update, between steps)"


class Matched(NamedTuple):
    """One collective as all of its ranks recorded it.

    Attributes:
        events: By rank.
        straggler: The rank that came last.
        began: When it came.
    """

    events: dict[int, Event]
    straggler: int
    began: int

    def late(self, rank: int) -> list[tuple[int, int]]:
        """List the parts of a rank's waits before the straggler came."""
        waits = self.events[rank].waits if rank != self.straggler else []
        return [(begin, min(end, self.began)) for begin, end in waits if begin < self.began]

    def waited(self, rank: int) -> int:
        """Count the nanoseconds that a rank waited before the straggler came."""
        return sum(end - begin for begin, end in self.late(rank))

    def held_up(self) -> int:
        """Count the nanoseconds that all ranks waited for the straggler."""
        return sum(map(self.waited, self.events))


def match(timelines: Sequence[Timeline]) -> list[Matched]:
    """Match the collectives of ranks, by their members and their order.

    Returns:
        The collectives that all of their ranks recorded.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Event]]] = {}
    for timeline in timelines:
        for event in timeline.events:
            groups.setdefault((event.axis, event.members), {}).setdefault(timeline.rank, []).append(event)
    present = {timeline.rank for timeline in timelines}
    matched = []
    for (_, members), by_rank in groups.items():
        ranks = [rank for rank in members if rank in present]
        for row in zip_longest(*(by_rank.get(rank, []) for rank in ranks)):
            events = {rank: event for rank, event in zip(ranks, row, strict=True) if event is not None}
            if len(events) < len(ranks) or len({(event.op, event.who) for event in events.values()}) > 1:
                # Where one rank's recording ended earlier, later events of the group cannot be matched.
                break
            straggler = max(events, key=lambda rank: events[rank].begin)
            matched.append(Matched(events, straggler, events[straggler].begin))
    return sorted(matched, key=lambda entry: entry.began)


class Activity(StrEnum):
    """How the main thread of a rank spent a while."""

    COMPUTE = auto()
    BETWEEN = auto()
    START = auto()
    WAIT = auto()


# The ends and begins of computing for a unit.
RECEIVES, SENDS = (fs.comm.Verb.GATHER, Activity.WAIT), (fs.comm.Verb.SCATTER, Activity.START)


class Span(NamedTuple):
    """A while of the main thread of a rank.

    Attributes:
        kind: Computing for a unit, or between steps; starting a collective, or waiting for one.
        unit: The unit that is computed with; empty where it is unknown.
        begin: When, in nanoseconds.
        end: Until when.
        event: The collective; None where the rank computes.
    """

    kind: Activity
    unit: str
    begin: int
    end: int
    event: Event | None = None

    @property
    def name(self) -> str:
        """The collective or the unit, as text."""
        return self.event.name if self.event else BETWEEN if self.kind is Activity.BETWEEN else self.unit


def spans(timeline: Timeline) -> Iterator[Span]:
    """List how a rank spent its trace, in order and without gaps."""
    calls = [Span(Activity.START, event.unit, event.begin, event.issued, event) for event in timeline.events]
    waits = [Span(Activity.WAIT, event.unit, *wait, event) for event in timeline.events for wait in event.waits]
    apart, at, unit = list(between(timeline)), timeline.begin, ""

    def computed(end: int, unit: str) -> Span:
        inside = any(begin <= at and end <= until for begin, until in apart)
        return Span(Activity.BETWEEN, "", at, end) if inside else Span(Activity.COMPUTE, unit, at, end)

    for span in sorted((*calls, *waits), key=lambda span: (span.begin, span.end)):
        who = span.event.who if span.event else ""
        if span.begin > at:
            # Gradients are computed before they are sent.
            yield computed(span.begin, span.unit if (who, span.kind) == SENDS else unit)
        yield span
        at = max(at, span.end)
        if span.unit and (who, span.kind) in (RECEIVES, SENDS):
            unit = span.unit
    if timeline.end > at:
        yield computed(timeline.end, unit)


def between(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """List when a rank was between steps: from where a step's last gradients had landed to where the next one began.

    A step begins where ranks agree on it. A jitted one without an agreement begins where a unit is gathered whose
    gradients have been sent; one that also gathers nothing, as by ddp on an accelerator, has no known begin.
    """
    since: int | None = timeline.begin
    gathered = False
    sent: set[str] = set()
    for event in timeline.events:
        gathers, units = event.who == fs.comm.Verb.GATHER, event.collective.about.units or event.collective.about.leaves
        if event.begins_step or (gathers and (not gathered or not sent.isdisjoint(units))):
            if since is not None:
                yield since, event.begin
            since, sent = None, set()
        if gathers:
            since, gathered = None, True
        elif event.who == fs.comm.Verb.SCATTER:
            since, sent = event.end, sent.union(units)
        elif event.ends_pass:
            since = event.end
    if since is not None and timeline.events:
        yield since, timeline.end
