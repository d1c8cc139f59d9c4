"""The order of a forward's collectives: ranks vote on it when it is new, and follow it without votes afterwards."""

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from fshard import comm
from fshard.engine.schedule import Bucket
from fshard.engine.unit import Unit, Use
from fshard.tree import Spec

# A leaf of a unit without its values: its path, and for a derived leaf its spec, dtype and whether it takes a gradient.
Member = tuple[str, tuple[Spec, torch.dtype, bool] | None]


class UnitEvent(NamedTuple):
    """A unit is gathered.

    Attributes:
        name: The unit's name.
        members: Its leaves.
        inside: Numbers of the uses that it lies inside, if it is gathered by itself.
    """

    name: str
    members: tuple[Member, ...]
    inside: tuple[int, ...] = ()

    @classmethod
    def of(cls, unit: Unit, inside: Sequence[Use] = ()) -> "UnitEvent":
        """Describe a unit."""
        members = [
            (leaf.path, (leaf.spec, leaf.stored.dtype, leaf.trained) if leaf.derived else None) for leaf in unit.leaves
        ]
        return cls(unit.name, tuple(members), tuple(use.number for use in inside))

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
    """

    name: str
    units: tuple[UnitEvent, ...]
    buckets: tuple[Bucket, ...]

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
    """

    name: str
    axis: str
    differentiated: bool

    @property
    def label(self) -> comm.Label:
        """Name the event to other ranks."""
        call = f"{self.name} over {self.axis!r}"
        return comm.Label(comm.Verb.AGREE, call=call if self.differentiated else f"{call} of what needs no gradient")


Event = UnitEvent | PassEvent | CollectiveEvent


class Place(NamedTuple):
    """An event and where it comes.

    Attributes:
        event: The event.
        opened: How many uses were opened before.
    """

    event: Event
    opened: int


# Flags at the end of a forward. CHECKPOINTED: a checkpoint runs a unit again. GONE + n: the n-th last use to close has
# lost its tensors. SAVED + n: use n was saved.
CHECKPOINTED, GONE, SAVED = 0, 1, 17
# A later call that raises a new flag of the first two kinds departs.
FACTS = frozenset(range(SAVED))


class Order(NamedTuple):
    """The order that all ranks had in one forward; later calls that run the same code on equal specs follow it.

    Attributes:
        events: The events that ranks share.
        uses: How many uses the forward opens.
        flags: The flags that any rank raised at the end.
        needed: For each use how many scopes came before the end of the last checkpoint that needs it, on any rank;
            empty where no checkpoint runs anything again.
        dtype: Of the loss.
    """

    events: tuple[Place, ...]
    uses: int
    flags: frozenset[int]
    needed: tuple[int, ...]
    dtype: torch.dtype

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is regathered, because the only use stays for the backward."""
        return self.uses == 1 and GONE not in self.flags

    def saved(self, use: Use) -> bool:
        """Whether any rank has saved a use, or its number is too large for a flag."""
        return SAVED + use.number in self.flags or SAVED + use.number >= comm.FLAGS


def common(orders: Sequence[Order | None]) -> Order | None:
    """Find the order that the forwards of several microbatches share; None if one has none, or they differ."""
    first, *others = orders
    for order in others:
        if first is None or order is None or (order.events, order.uses) != (first.events, first.uses):
            return None
        needed = itertools.zip_longest(first.needed, order.needed, fillvalue=0)
        first = first._replace(flags=first.flags | order.flags, needed=tuple(max(pair) for pair in needed))
    return first


# Orders are remembered up to this number; after so many departures from one, ranks vote in every call.
ORDERS, DEPARTURES = 64, 2


class _Orders(dict[Hashable, tuple[Order | None, int]]):
    """The orders that this rank remembers, by the keys of calls, and how often ranks departed from one."""


class Departed(Exception):  # noqa: N818
    """This rank does something else than all ranks did in an earlier call."""


def known(key: Hashable) -> Order | None:
    """Look up the order of a call; None where ranks must vote.

    Args:
        key: Of the code that runs, and its arguments.
    """
    return comm.of_this_rank(_Orders).get(key, (None, 0))[0]


def remember(key: Hashable, order: Order | None, departed: bool = False) -> None:
    """Remember the order of a call that every rank has ended.

    Args:
        key: As for `known`.
        order: The order; None where ranks must vote in the next call.
        departed: Whether ranks did not follow the order that they had.
    """
    orders = comm.of_this_rank(_Orders)
    departures = orders.pop(key, (None, 0))[1] + departed
    orders[key] = (order if departures < DEPARTURES and not departed else None), departures
    if len(orders) > ORDERS:
        del orders[next(iter(orders))]
