"""Events and timelines of the ranks, in a form that travels and by one clock, and the stragglers among them."""

import base64
import pickle
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from itertools import zip_longest
from typing import Any, NamedTuple

import fshard as fs

# So many leaves are named.
LEAVES = 6


@dataclass(slots=True)
class Event:
    """One collective as one rank recorded it; times are nanoseconds of this rank's clock.

    Attributes:
        collective: What ran, who asked for it and what for; see `fshard.comm.Collective`.
        members: Global ranks that take part.
        begin: When it was called.
        issued: When the call returned, with the collective under way.
        waits: When its buffers were waited for, and when they had landed.
    """

    collective: fs.comm.Collective
    members: tuple[int, ...]
    begin: int
    issued: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def leaves(self) -> str:
        """The paths of its first leaves, as text."""
        return ", ".join(self.collective.about.leaves[:LEAVES])

    @property
    def end(self) -> int:
        """When the last buffer that was waited for had landed."""
        return self.waits[-1][1] if self.waits else self.issued

    @property
    def name(self) -> str:
        """Its verb and its units, as text."""
        who = "agreement" if self.collective.about.is_comparison else self.collective.label
        return f"{who} of {self.collective.unit}" if self.collective.unit else who


class Timeline(NamedTuple):
    """The events of one rank; times are those of its own clock.

    Attributes:
        rank: Its global rank.
        begin: When the trace began.
        end: When it ended.
        error: The exception that interrupted the trace; empty if none did.
        events: In the order of their start.
    """

    rank: int
    begin: int
    end: int
    error: str
    events: tuple[Event, ...]

    def shifted(self, nanoseconds: int) -> "Timeline":
        """Move the timeline to a clock that is behind by so much."""
        n, events = nanoseconds, list[Event]()
        for event in self.events:
            waits = [(begin - n, end - n) for begin, end in event.waits]
            events.append(replace(event, begin=event.begin - n, issued=event.issued - n, waits=waits))
        return self._replace(begin=self.begin - n, end=self.end - n, events=tuple(events))


def packed(value: Any) -> str:
    """Write a value as a text that other ranks read by `unpacked`."""
    return base64.b85encode(zlib.compress(pickle.dumps(value), 1)).decode()


def unpacked(text: str) -> Any:
    """Read a value that `packed` wrote on a rank of this program."""
    return pickle.loads(zlib.decompress(base64.b85decode(text)))


def offsets(exchanges: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[int], int]:
    """Find how far each rank's clock is ahead of the first one's.

    No exchange ends on any rank before it has begun on all, which bounds the difference of two clocks from both sides.
    Where the bounds allow none, as on one host, whose processes share a clock, there is none.

    Args:
        exchanges: For each rank, when exchanges between all ranks began and ended there.

    Returns:
        Nanoseconds for each rank, and by how many they may be wrong.

    >>> offsets([[(0, 10), (20, 24)], [(2, 11), (20, 25)]])
    ([0, 0], 5)
    >>> offsets([[(0, 10), (20, 24)], [(1002, 1011), (1020, 1025)]])
    ([0, 1000], 5)
    """
    found, errors = [0], [0]
    first, *others = exchanges
    for other in others:
        pairs = list(zip(first, other, strict=True))
        low = max(theirs[0] - mine[1] for mine, theirs in pairs)
        high = min(theirs[1] - mine[0] for mine, theirs in pairs)
        ahead = 0 if low <= 0 <= high else (low + high) // 2
        found.append(ahead)
        errors.append(max(ahead - low, high - ahead))
    return found, max(errors)


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

    def waited(self, rank: int) -> int:
        """Count the nanoseconds that a rank waited before the straggler came."""
        waits = self.events[rank].waits if rank != self.straggler else []
        return sum(min(end, self.began) - begin for begin, end in waits if begin < self.began)

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
            groups.setdefault((event.collective.axis, event.members), {}).setdefault(timeline.rank, []).append(event)
    present = {timeline.rank for timeline in timelines}
    matched = []
    for (_, members), by_rank in groups.items():
        ranks = [rank for rank in members if rank in present]
        for row in zip_longest(*(by_rank.get(rank, []) for rank in ranks)):
            events = {rank: event for rank, event in zip(ranks, row, strict=True) if event is not None}
            calls = {(event.collective.op, event.collective.label) for event in events.values()}
            if len(events) < len(ranks) or len(calls) > 1:
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
    calls = [Span(Activity.START, event.collective.unit, event.begin, event.issued, event) for event in timeline.events]
    waits = [
        Span(Activity.WAIT, event.collective.unit, *wait, event) for event in timeline.events for wait in event.waits
    ]
    apart, at, unit = list(between(timeline)), timeline.begin, ""

    def computed(end: int, unit: str) -> Span:
        inside = any(begin <= at and end <= until for begin, until in apart)
        return Span(Activity.BETWEEN, "", at, end) if inside else Span(Activity.COMPUTE, unit, at, end)

    for span in sorted((*calls, *waits), key=lambda span: (span.begin, span.end)):
        who = span.event.collective.label if span.event else ""
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
        who, about = event.collective.label, event.collective.about
        gathers, units = who == fs.comm.Verb.GATHER, about.units or about.leaves
        if who == fs.comm.Verb.START or (gathers and (not gathered or not sent.isdisjoint(units))):
            if since is not None:
                yield since, event.begin
            since, sent = None, set()
        if gathers:
            since, gathered = None, True
        elif who == fs.comm.Verb.SCATTER:
            since, sent = event.end, sent.union(units)
        elif who == fs.comm.Verb.OBJECTIVE:
            since = event.end
    if since is not None and timeline.events:
        yield since, timeline.end
