"""Events and timelines of the ranks, in a form that travels and by one clock, and the stragglers among them."""

import base64
import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from typing import Any, NamedTuple

import fshard as fs

# The name of an axis, and the ranks on it that communicate.
Group = tuple[str, tuple[int, ...]]
# The time between the last gradients of a step and the begin of the next one.
BETWEEN = "(update, between steps)"


@dataclass(slots=True)
class Event:
    """One collective as one rank recorded it; times are nanoseconds of this rank's clock.

    Attributes:
        collective: What ran, who asked for it and what for; see `fshard.comm.Collective`.
        members: Global ranks that take part.
        begin: When it was called.
        issued: When the call returned, with the collective under way.
        waits: For each buffer that was waited for, when that began and when the buffer had landed.
    """

    collective: fs.comm.Collective
    members: tuple[int, ...]
    begin: int
    issued: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """When the last buffer that was waited for had landed."""
        return self.waits[-1][1] if self.waits else self.issued

    @property
    def name(self) -> str:
        """Its verb and its units, as text."""
        verb = "agreement" if self.collective.about.is_comparison else self.collective.label
        return f"{verb} of {self.collective.unit}" if self.collective.unit else verb


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

    def shift(self, ahead: int) -> "Timeline":
        """Move the timeline to another clock, which this rank's clock is ahead of by so many nanoseconds."""
        events = []
        for event in self.events:
            waits = [(begin - ahead, end - ahead) for begin, end in event.waits]
            events.append(replace(event, begin=event.begin - ahead, issued=event.issued - ahead, waits=waits))
        return self._replace(begin=self.begin - ahead, end=self.end - ahead, events=tuple(events))


def pack(value: Any) -> str:
    """Write a value as a text that other ranks read with `unpack`."""
    return base64.b85encode(zlib.compress(pickle.dumps(value), 1)).decode()


def unpack(text: str) -> Any:
    """Read a value that `pack` wrote on a rank of this program."""
    return pickle.loads(zlib.decompress(base64.b85decode(text)))


def find_offsets(exchanges: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[int], int]:
    """Find how far each rank's clock is ahead of the first one's.

    No exchange ends on any rank before it has begun on all, which bounds the difference of two clocks from both sides.
    If the bounds allow that there is no difference, none is assumed: processes of one host share a clock.

    Args:
        exchanges: For each rank, when exchanges between all ranks began and ended there.

    Returns:
        Nanoseconds for each rank, and by how many they may be wrong.

    >>> find_offsets([[(0, 10), (20, 24)], [(2, 11), (20, 25)]])
    ([0, 0], 5)
    >>> find_offsets([[(0, 10), (20, 24)], [(1002, 1011), (1020, 1025)]])
    ([0, 1000], 5)
    """
    offsets = [0]
    errors = [0]
    first, *others = exchanges
    for other in others:
        pairs = list(zip(first, other, strict=True))
        low = max(theirs[0] - mine[1] for mine, theirs in pairs)
        high = min(theirs[1] - mine[0] for mine, theirs in pairs)
        offset = 0 if low <= 0 <= high else (low + high) // 2
        offsets.append(offset)
        errors.append(max(offset - low, high - offset))
    return offsets, max(errors)


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

    def count_wait(self, rank: int) -> int:
        """Count the nanoseconds that a rank waited before the straggler came."""
        waits = self.events[rank].waits if rank != self.straggler else []
        return sum(min(end, self.began) - begin for begin, end in waits if begin < self.began)

    def sum_waits(self) -> int:
        """Count the nanoseconds that all ranks together waited before the straggler came."""
        return sum(map(self.count_wait, self.events))


def match_events(timelines: Sequence[Timeline]) -> list[Matched]:
    """Match the collectives of ranks, by their members and their order.

    Returns:
        The collectives that all of their ranks recorded, by the time when the last rank came to them.
    """
    rows = defaultdict[tuple[Group, int], dict[int, Event]](dict)
    for timeline in timelines:
        numbers = Counter[Group]()
        for event in timeline.events:
            group = (event.collective.axis, event.members)
            rows[group, numbers[group]][timeline.rank] = event
            numbers[group] += 1
    present = {timeline.rank for timeline in timelines}
    matched: list[Matched] = []
    interrupted = set[Group]()
    for (group, _), events in rows.items():
        kinds = {(event.collective.op, event.collective.label) for event in events.values()}
        if len(kinds) > 1 or events.keys() != present.intersection(group[1]):
            # The recording of one rank ended earlier, so later events of the group cannot be matched either.
            interrupted.add(group)
        if group not in interrupted:
            straggler = max(events, key=lambda rank: events[rank].begin)
            matched.append(Matched(events, straggler, events[straggler].begin))
    return sorted(matched, key=lambda entry: entry.began)


class Activity(StrEnum):
    """How the main thread of a rank spent a while."""

    COMPUTE = auto()
    START = auto()
    WAIT = auto()


class Span(NamedTuple):
    """A while of the main thread of a rank.

    Attributes:
        kind: Computing, starting a collective, or waiting for one.
        unit: The unit that is computed with, or BETWEEN; of a call the unit whose gradients it sends, or whose weights
            it waits for. Empty if there is none.
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
        return self.unit if self.event is None else self.event.name


def list_spans(timeline: Timeline) -> Iterator[Span]:
    """List how a rank spent its trace, in order and without gaps."""
    gaps = list(list_gaps(timeline))
    position = timeline.begin
    unit = ""

    def span_until(end: int) -> Span:
        """Make the span from the position on, in which the rank computes."""
        is_between = any(begin <= position and end <= until for begin, until in gaps)
        return Span(Activity.COMPUTE, BETWEEN if is_between else unit, position, end)

    for span in _list_calls(timeline):
        if span.kind is Activity.START:
            # Gradients are computed before they are sent.
            unit = span.unit or unit
        if span.begin > position:
            yield span_until(span.begin)
        yield span
        position = max(position, span.end)
        # Weights are computed with once they have landed.
        unit = span.unit or unit
    if timeline.end > position:
        yield span_until(timeline.end)


def _list_calls(timeline: Timeline) -> list[Span]:
    """List the starts of collectives and the waits for them, by the time when they began."""
    starts, waits = list[Span](), list[Span]()
    for event in timeline.events:
        verb = event.collective.label
        sent = event.collective.unit if verb == fs.comm.Verb.SCATTER else ""
        received = event.collective.unit if verb == fs.comm.Verb.GATHER else ""
        starts.append(Span(Activity.START, sent, event.begin, event.issued, event))
        waits += [Span(Activity.WAIT, received, begin, end, event) for begin, end in event.waits]
    return sorted([*starts, *waits], key=lambda span: (span.begin, span.end))


def list_gaps(timeline: Timeline) -> Iterator[tuple[int, int]]:
    """List when a rank was between steps: from where a step's last gradients had landed to where the next one began.

    A step begins where ranks agree on it. A jitted one without an agreement begins where a unit is gathered whose
    gradients have been sent; one that also gathers nothing, as by ddp on an accelerator, has no known begin.
    """
    since: int | None = timeline.begin
    has_gathered = False
    sent_units: set[str] = set()
    for event in timeline.events:
        verb, label = event.collective.label, event.collective.about
        units = label.units or label.leaves
        is_gather = verb == fs.comm.Verb.GATHER
        if verb == fs.comm.Verb.START or (is_gather and (not has_gathered or not sent_units.isdisjoint(units))):
            if since is not None:
                yield since, event.begin
            since = None
            sent_units = set()
        if is_gather:
            since = None
            has_gathered = True
        elif verb == fs.comm.Verb.SCATTER:
            since = event.end
            sent_units.update(units)
        elif verb == fs.comm.Verb.OBJECTIVE:
            since = event.end
    if since is not None and timeline.events:
        yield since, timeline.end
