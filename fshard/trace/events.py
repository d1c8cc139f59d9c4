"""Events: what a rank saw of its collectives, in a form that travels."""

import base64
import json
import zlib
from typing import Any, NamedTuple

from fshard import comm


class Event(NamedTuple):
    """One collective as one rank saw it; times are nanoseconds of this rank's clock.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Name of the mesh axis.
        members: Global ranks that take part.
        who: Who asked for it.
        unit: The unit it is for; empty where nobody said.
        leaves: Its leaves, or the first of them.
        bytes: What this rank sends, in nominal ring terms.
        begin: When it was called.
        issued: When the call returned, with the collective under way.
        waits: When its buffers were waited for, and when they had landed.
        memory: Bytes held when it was called, and when the last buffer had landed.
    """

    op: str
    axis: str
    members: tuple[int, ...]
    who: str
    unit: str
    leaves: str
    bytes: float
    begin: int
    issued: int
    waits: tuple[tuple[int, int], ...]
    memory: tuple[int, int]

    @property
    def end(self) -> int:
        """When the last buffer that was waited for had landed."""
        return self.waits[-1][1] if self.waits else self.issued

    @property
    def agrees(self) -> bool:
        """Whether ranks compare what they do, rather than send what a step needs."""
        return self.who == comm.AGREE

    @property
    def ends(self) -> bool:
        """Whether it is where ranks agree that a forward or a backward has ended."""
        return self.agrees and (self.unit.endswith(" ended") or " raised " in self.unit)

    @property
    def begins(self) -> bool:
        """Whether it is where ranks agree on what comes next."""
        return self.agrees and bool(self.unit) and not self.ends

    @property
    def name(self) -> str:
        """What it is, and for which unit."""
        who = "agreement" if self.agrees else self.who
        return f"{who} of {self.unit}" if self.unit else who


class Timeline(NamedTuple):
    """What one rank saw; times are those of its own clock.

    Attributes:
        rank: Its global rank.
        begin: When the trace began.
        end: When it ended.
        memory: Bytes held then and there.
        meter: What counts them.
        error: What the trace was interrupted by; empty if nothing.
        events: In the order of their start.
    """

    rank: int
    begin: int
    end: int
    memory: tuple[int, int]
    meter: str
    error: str
    events: tuple[Event, ...]

    def shifted(self, nanoseconds: int) -> "Timeline":
        """The same by a clock that is behind by so much."""
        if not nanoseconds:
            return self
        n = nanoseconds
        events = tuple(
            event._replace(
                begin=event.begin - n, issued=event.issued - n, waits=tuple((a - n, b - n) for a, b in event.waits)
            )
            for event in self.events
        )
        return self._replace(begin=self.begin - n, end=self.end - n, events=events)


def packed(timeline: Timeline, exchanges: list[tuple[int, int]]) -> str:
    """A timeline, and when this rank exchanged clocks, as a text."""
    return base64.b85encode(zlib.compress(json.dumps([timeline, exchanges]).encode(), 1)).decode()


def unpacked(text: str) -> tuple[Timeline, list[tuple[int, int]]]:
    """What `packed` was given."""
    (*parts, events), exchanges = json.loads(zlib.decompress(base64.b85decode(text)))
    rank, begin, end, memory, meter, error = parts
    timeline = Timeline(rank, begin, end, tuple(memory), meter, error, tuple(map(_event, events)))
    return timeline, [(a, b) for a, b in exchanges]


def _event(values: list[Any]) -> Event:
    event = Event(*values)
    before, after = event.memory
    waits = tuple((begin, end) for begin, end in event.waits)
    return event._replace(members=tuple(event.members), waits=waits, memory=(before, after))
