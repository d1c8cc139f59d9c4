"""Events and timelines of the ranks, in a form that travels, and one clock for all."""

import base64
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
        memory: Bytes held when it was called, and when the last buffer had landed.
        begin: When it was called.
        issued: When the call returned, with the collective under way.
        waits: When its buffers were waited for, and when they had landed.
    """

    collective: fs.comm.Collective
    members: tuple[int, ...]
    memory: tuple[int, int]
    begin: int = 0
    issued: int = 0
    waits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def op(self) -> str:
        """The operator: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all"."""
        return self.collective.op

    @property
    def axis(self) -> str:
        """The name of the mesh axis."""
        return self.collective.axis

    @property
    def who(self) -> str:
        """The verb that started it."""
        return self.collective.label

    @property
    def unit(self) -> str:
        """The units it is for, as text; empty where none is known."""
        return self.collective.unit

    @property
    def leaves(self) -> str:
        """The paths of its leaves, or of the first of them, as text."""
        first, more = self.collective.about.leaves[:LEAVES], len(self.collective.about.leaves) - LEAVES
        return ", ".join([*first, *([f"and {more} more"] if more > 0 else [])])

    @property
    def bytes(self) -> float:
        """Bytes that this rank sends, in nominal ring terms."""
        return self.collective.sent

    @property
    def end(self) -> int:
        """When the last buffer that was waited for had landed."""
        return self.waits[-1][1] if self.waits else self.issued

    @property
    def is_agreement(self) -> bool:
        """Whether ranks compare their calls with it, rather than send tensors of a step."""
        return self.collective.about.is_comparison

    @property
    def begins_step(self) -> bool:
        """Whether a step begins with it."""
        return self.who == fs.comm.Verb.START

    @property
    def ends_pass(self) -> bool:
        """Whether one of a step's passes ends with it."""
        return self.who == fs.comm.Verb.OBJECTIVE

    @property
    def name(self) -> str:
        """Its verb and its units, as text."""
        who = "agreement" if self.is_agreement else self.who
        return f"{who} of {self.unit}" if self.unit else who


class Timeline(NamedTuple):
    """The events of one rank; times are those of its own clock.

    Attributes:
        rank: Its global rank.
        begin: When the trace began.
        end: When it ended.
        memory: Bytes held then and there.
        meter: The name of the memory that is counted.
        error: The exception that interrupted the trace; empty if none did.
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
        """Move the timeline to a clock that is behind by so much."""
        n = nanoseconds
        events = (
            replace(
                event, begin=event.begin - n, issued=event.issued - n, waits=[(a - n, b - n) for a, b in event.waits]
            )
            for event in self.events
        )
        return self._replace(begin=self.begin - n, end=self.end - n, events=tuple(events))

    def held(self) -> list[tuple[int, int]]:
        """List when memory was read and the bytes held then, in order."""
        ends = [(self.begin, self.memory[0]), (self.end, self.memory[1])]
        marks = ((event.begin, event.end, event.memory) for event in self.events)
        return sorted([*ends, *(pair for begin, end, held in marks for pair in ((begin, held[0]), (end, held[1])))])


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
