"""The order of a forward's collectives: ranks vote on it when it is new, and follow it by themselves afterwards."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.engine.schedule import Bucket
from fshard.engine.unit import Leaf, Unit, Use
from fshard.tree import Spec


class Member(NamedTuple):
    """One leaf of a unit, without its values.

    Attributes:
        path: Its path.
        derived: For a leaf computed inside the call its spec, dtype and whether it takes a gradient; else None.
    """

    path: str
    derived: tuple[Spec, torch.dtype, bool] | None

    @classmethod
    def of(cls, leaf: Leaf) -> "Member":
        """Describe a leaf."""
        return cls(leaf.path, (leaf.spec, leaf.stored.dtype, leaf.trained) if leaf.derived else None)


class UnitEvent(NamedTuple):
    """A unit is gathered.

    Attributes:
        name: The unit's name.
        members: Its leaves.
        opened: How many uses were opened before.
    """

    name: str
    members: tuple[Member, ...]
    opened: int = 0

    @classmethod
    def of(cls, unit: Unit) -> "UnitEvent":
        """Describe a unit."""
        return cls(unit.name, tuple(map(Member.of, unit.leaves)))

    @property
    def label(self) -> comm.Label:
        """Name the event to other ranks."""
        return comm.Label(comm.Verb.AGREE, (self.name,), call="gather")


class PassEvent(NamedTuple):
    """A model starts to run.

    Attributes:
        name: Its name.
        units: Those that are gathered together, as one.
        buckets: Numbers of the model's units in each.
        opened: How many uses were opened before.
    """

    name: str
    units: tuple[UnitEvent, ...]
    buckets: tuple[Bucket, ...]
    opened: int = 0

    @classmethod
    def of(cls, name: str, units: Sequence[Unit], buckets: Sequence[Bucket]) -> "PassEvent":
        """Describe a pass."""
        return cls(name, tuple(map(UnitEvent.of, units)), tuple(buckets))

    @property
    def label(self) -> comm.Label:
        """Name the event to other ranks."""
        count = self.buckets[-1].last + 1 if self.buckets else 0
        return comm.Label(comm.Verb.AGREE, call=f"{count} units of {self.name}")

    @property
    def parts(self) -> dict[str, str]:
        """Name its parts to other ranks."""
        pairs = zip(self.units, self.buckets, strict=True)
        return {f"unit {unit.name}": f"regathered={bucket.regathered}" for unit, bucket in pairs}


class CollectiveEvent(NamedTuple):
    """The function calls a collective of its own.

    Attributes:
        name: Its name.
        axis: Name of its axis.
        differentiated: Whether its transpose runs in the backward.
        opened: How many uses were opened before.
    """

    name: str
    axis: str
    differentiated: bool
    opened: int = 0

    @property
    def label(self) -> comm.Label:
        """Name the event to other ranks."""
        call = f"{self.name} over {self.axis!r}"
        return comm.Label(comm.Verb.AGREE, call=call if self.differentiated else f"{call} of what needs no gradient")


Event = UnitEvent | PassEvent | CollectiveEvent


# What ranks tell each other at the end of a forward: whether a checkpoint will run something again, whether the last
# use has lost tensors, and from the third number on which uses were saved.
CHECKPOINTED, LAST_GONE, SAVED = 0, 1, 2


class Facts(NamedTuple):
    """What ranks found at the end of a forward.

    Attributes:
        flags: The numbers that any rank told.
        needed: See `Forward.needed`; empty where no checkpoint runs anything again.
        dtype: Of the loss.
    """

    flags: frozenset[int]
    needed: tuple[int, ...]
    dtype: torch.dtype

    def saved(self, use: Use) -> bool:
        """Whether any rank has saved a use, or its number is too large to be told."""
        return SAVED + use.number in self.flags or SAVED + use.number >= comm.FLAGS


class Learned(NamedTuple):
    """An order that all ranks had in an earlier call, which ran the same code on equal specs.

    Attributes:
        events: In their order.
        uses: How many uses a forward opens.
        facts: Of the end of each forward.
    """

    events: tuple[Event, ...]
    uses: int
    facts: Facts


# So many orders are remembered; an order that ranks departed from so often is not followed any more.
ORDERS, DEPARTURES = 64, 2


class Known(NamedTuple):
    """What is remembered of a call.

    Attributes:
        learned: Its order; None where ranks must vote.
        departures: How often ranks departed from an order of this call.
    """

    learned: Learned | None = None
    departures: int = 0


class _Orders(dict[Hashable, Known]):
    """The orders that this rank remembers, by the keys of calls."""


def code_of(function: Callable[..., Any]) -> Hashable:
    """Find what stands for a function whose order may be known: its code, which equals that of its like."""
    while isinstance(function, partial):
        function = function.func
    code: Hashable = getattr(function, "__code__", None)
    return code if code is not None else type(function)  # type: ignore[return-value]


def known(key: Hashable) -> Learned | None:
    """Look up the order of a call.

    Args:
        key: Of the code that runs, and what it was told.
    """
    return comm.of_this_rank(_Orders).get(key, Known()).learned


def remember(key: Hashable, learned: Learned | None, departed: bool = False) -> None:
    """Remember the order of a call that every rank has come to the end of.

    Args:
        key: As for `known`.
        learned: The order; None where ranks must vote in the next call.
        departed: Whether ranks did not follow the order that they had.
    """
    orders = comm.of_this_rank(_Orders)
    departures = orders.pop(key, Known()).departures + departed
    orders[key] = Known(learned if departures < DEPARTURES else None, departures)
    if len(orders) > ORDERS:
        del orders[next(iter(orders))]


class Departed(Exception):  # noqa: N818
    """This rank does something else than all ranks did in an earlier call."""


class Order:
    """The events of one forward.

    Attributes:
        events: Those that came, in their order.
        learned: The order that ranks follow; None where they vote.
        shared: Whether there are several ranks.
        votes: Whether they vote on each event.
    """

    def __init__(self, peers: comm.Peers, learned: Learned | None, *, votes: bool) -> None:
        """Follow an order, vote, or do neither."""
        self.events: list[Event] = []
        self.learned, self.shared = learned, bool(peers.axes)
        self.votes = self.shared and votes
        self._peers = peers

    def next(self, event: Event) -> None:
        """Take the next event.

        Raises:
            Departed: if it is another one than in the order that ranks follow.
            ValueError: if ranks vote and do different things.
        """
        if self.learned is not None and event != self.expected:
            raise Departed
        self.events.append(event)
        if not isinstance(event, UnitEvent):
            # Ranks vote on a unit where its gather starts.
            self.vote(event)

    def vote(self, event: Event) -> None:
        """Vote on an event where ranks follow no order."""
        if self.votes:
            self._peers.agree(event.label, event.parts if isinstance(event, PassEvent) else {})

    @property
    def expected(self) -> Event | None:
        """The next event of the order that ranks follow; None at its end."""
        events, at = self.learned.events if self.learned else (), len(self.events)
        return events[at] if at < len(events) else None
