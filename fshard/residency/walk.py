"""Walk: units gathered in one order on every rank, whichever of them a rank enters."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fshard.residency.slots import Slot
from fshard.residency.units import Unit, Use, is_regathered

if TYPE_CHECKING:
    from fshard.residency.call import Call


class Stop(NamedTuple):
    """One entry of a schedule: units that are gathered together.

    Attributes:
        unit: All their leaves.
        first: Number of the first of them.
        last: Number of the last of them.
        end: Number of the unit after the last one that lies inside them.
        small: Whether it is gathered ahead together with the next one, rather than in its place.
    """

    unit: Unit
    first: int
    last: int
    end: int
    small: bool


def schedule(units: Sequence[Unit], ends: Sequence[int], apart: Sequence[bool]) -> list[Stop]:
    """Merge small neighbours of a sequence of units.

    Args:
        units: In the order of their gathering, each before those that lie inside it.
        ends: For each unit, the number of the first unit behind it that does not lie inside it.
        apart: Which units are never merged, because ranks may enter them in an order of their own.

    Returns:
        The schedule. Units that hold others or lie in different ones are not merged.
    """
    stops: list[Stop] = []
    around: list[int] = []
    size, last_parent = 0, -1
    for i, unit in enumerate(units):
        while around and ends[around[-1]] <= i:
            around.pop()
        parent = around[-1] if around else -1
        nbytes = _bytes(unit)
        last = stops[-1] if stops else None
        again = is_regathered(unit)
        alike = last is not None and is_regathered(last.unit) == again and parent == last_parent
        # What is stored whole costs nothing to gather, and can go with any.
        fits = nbytes == 0 or size + nbytes <= unit.residency.merge_bytes
        if last is not None and alike and last.end == i == ends[i] - 1 and fits and not (apart[i] or apart[i - 1]):
            slots = tuple(dict.fromkeys((*last.unit.slots, *unit.slots)))
            name = f"{last.unit.name.partition(' to ')[0]} to {unit.name}"
            size += nbytes
            stops[-1] = Stop(Unit(name, slots, again), last.first, i, i + 1, size < unit.residency.merge_bytes)
        else:
            size = nbytes
            stops.append(Stop(unit, i, i, ends[i], size < unit.residency.merge_bytes))
        last_parent = parent
        if ends[i] > i + 1:
            around.append(i)
    return stops


def _bytes(unit: Unit) -> int:
    """What gathering a unit moves, in bytes of the full leaves as they are stored."""
    split = (slot for slot in unit.slots if slot.spec.partition)
    return sum(math.prod(slot.spec.padded_shape) * slot.stored.element_size() for slot in split)


class Walk:
    """One pass over a schedule, as one application of a model is.

    Units are gathered ahead by the schedule. One that is passed over is gathered at its turn all the same, so that
    ranks stay in step whatever each of them enters; inside a submodule that runs it is held until that has ended,
    because it may only come later than its turn. One that is entered again is gathered outside the order.
    """

    def __init__(self, call: "Call", stops: Sequence[Stop]) -> None:
        """Begin before the first stop."""
        self.stops = stops
        self._call = call
        self._ahead: list[Use] = []
        self._next = self._entered = 0
        self._over = False
        self._of_unit = {i: number for number, stop in enumerate(stops) for i in range(stop.first, stop.last + 1)}
        self._of_slot: dict[Slot, list[int]] = {}
        # For each stop the one before it that keeps a leaf of its, which is not to be gathered twice.
        self._kept_by = [-1] * len(stops)
        for number, stop in enumerate(stops):
            for slot in stop.unit.slots:
                holders = self._of_slot.setdefault(slot, [])
                holders.append(number)
                first = holders[0]
                if first < number and not is_regathered(stop.unit):
                    self._kept_by[number] = max(self._kept_by[number], first)
        self._open: dict[int, Use] = {}
        self._held: dict[int, Use] = {}
        self._latest: dict[int, Use] = {}
        self._scopes: list[int] = []
        self._running: list[range] = []

    def enter(self, number: int) -> None:
        """Open the scope of a unit."""
        self._reach(self._of_unit[number])
        self._scopes.append(number)

    def leave(self, number: int) -> None:
        """Close the scope of a unit; its tensors go with the last unit of its stop."""
        while self._scopes and self._scopes.pop() != number:
            pass
        stop = self._of_unit[number]
        if number == self.stops[stop].last and not self._in_scope(stop) and stop in self._open:
            self._call.leave(self._open.pop(stop))

    def begin(self, units: range) -> None:
        """A submodule that holds these units starts to run."""
        self._running.append(units)

    def finish(self, units: range) -> None:
        """It has run."""
        while self._running and self._running.pop() != units:
            pass
        for stop in list(self._held):
            if not self._is_held(stop, stop):
                self._call.leave(self._held.pop(stop))

    def has(self, unit: Unit) -> bool:
        """Whether a stop of the schedule holds all leaves of a unit, and may still come, or come again."""
        stop = self._stop_of(unit.slots[0])
        if self._over and not self._call.in_backward:
            return False
        return stop is not None and all(slot in self.stops[stop].unit.places for slot in unit.slots)

    def find(self, slot: Slot, in_turn: bool = False) -> tuple[Use, int]:
        """Find the use that holds a leaf, innermost scope first; opens its unit where none does."""
        for number in reversed(self._scopes):
            use = self._open[self._of_unit[number]]
            if slot in use.unit.places:
                return use, use.unit.places[slot]
        found = next((use for use in self._open.values() if slot in use.unit.places), None)
        if found is None:
            stop = self._stop_of(slot)
            assert stop is not None
            found = self._reach(stop, in_turn)
        return found, found.unit.places[slot]

    def _stop_of(self, slot: Slot) -> int | None:
        """The stop that holds a leaf: of several, as of tied ones, the next that has not been passed over."""
        holders = self._of_slot.get(slot, [None])
        return next((stop for stop in holders if stop is not None and stop >= self._next), holders[0])

    def end(self) -> None:
        """Take part in what is left of the schedule, and close everything."""
        self._over = True
        self._scopes, self._running = [], []
        for use in (*self._open.values(), *self._held.values()):
            self._call.leave(use)
        self._open, self._held = {}, {}
        if not self._call.in_backward:
            self._pass_over(len(self.stops))

    def abandon(self) -> None:
        """Take part in what is left of the schedule without using it, because this rank has failed."""
        while self._next < len(self.stops):
            self._call.timeline.keep(self._take())
            self._entered = self._next

    def _in_scope(self, stop: int) -> bool:
        return any(self._of_unit[number] == stop for number in self._scopes)

    def _reach(self, stop: int, in_turn: bool = True) -> Use:
        """Open a stop, and close what stands open without a scope, such as a leaf read from outside its module.

        Such a reading before its module's turn, as of a weight's dtype, leaves the schedule alone.
        """
        for other in [s for s in self._open if s != stop and not self._in_scope(s)]:
            self._call.leave(self._open.pop(other))
        if stop in self._open:
            return self._open[stop]
        if self._call.in_backward:
            use = self._call.again(self.stops[stop].unit)
        elif stop in self._held:
            use = self._held.pop(stop)
        elif stop < self._next or not (in_turn or stop == self._next or self._is_held(self._next, stop)):
            use = self._call.timeline.use_of(self.stops[stop].unit)
            self._call.open(use, inside=[self._open[self._of_unit[number]] for number in self._scopes])
        else:
            self._pass_over(stop)
            use = self._take()
            self._look_ahead(self.stops[stop].unit.residency.prefetch)
            self._enter(stop, use)
        self._open[stop] = use
        return use

    def _pass_over(self, to: int) -> None:
        while self._next < to:
            stop, use = self._next, self._take()
            self._enter(stop, use)
            if self._is_held(stop, to):
                self._held[stop] = use
            else:
                self._call.leave(use)

    def _is_held(self, stop: int, entered: int) -> bool:
        """Whether a submodule runs that holds both a stop that is passed over and the one that is entered."""
        firsts = [self.stops[s].first for s in (stop, entered) if s < len(self.stops)]
        return len(firsts) == 2 and any(all(first in units for first in firsts) for units in self._running)

    def _enter(self, stop: int, use: Use) -> None:
        self._latest[stop], self._entered = use, stop + 1
        around = (s for s in range(stop) if self.stops[s].end > self.stops[stop].first)
        self._call.open(use, inside=[self._latest[s] for s in around])

    def _take(self) -> Use:
        """The use of the next stop, its gather started."""
        if not self._ahead:
            self._look_ahead(1)
        self._next += 1
        return self._ahead.pop(0)

    def _look_ahead(self, count: int) -> None:
        """Start gathers until `count` large ones, and what is small before them, are under way."""
        while count and self._next + len(self._ahead) < len(self.stops):
            number = self._next + len(self._ahead)
            stop = self.stops[number]
            large = sum(not self.stops[self._next + i].small for i in range(len(self._ahead)))
            if large + (not stop.small) > count or self._kept_by[number] >= self._entered:
                break
            use = self._call.timeline.use_of(stop.unit)
            self._call.timeline.make_room()
            use.start()
            self._ahead.append(use)
