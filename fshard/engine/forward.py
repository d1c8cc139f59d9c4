"""The forward: gathers units in one order on every rank, and knows which are open."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from fshard import _compat, comm
from fshard.engine import schedule
from fshard.engine.order import (
    CHECKPOINTED,
    FACTS,
    GONE,
    SAVED,
    Departed,
    Event,
    Order,
    PassEvent,
    Place,
    UnitEvent,
)
from fshard.engine.saved import Saved
from fshard.engine.schedule import Bucket, Kind, Step
from fshard.engine.unit import State, Unit, Use, turn_of

if TYPE_CHECKING:
    from fshard.engine.passes import Pass


class Forward:
    """One run of the function, in an order of collectives that ranks share.

    Attributes:
        uses: In the order in which they were opened.
        scopes: OPEN and CLOSE of each, and COLLECTIVE, in their order.
        open: Uses that are open: opened, and not yet closed by another.
        passes: Applications of models in it.
        saved: The hooks by which autograd saves tensors.
        over: Whether the function has returned.
        news: Whether this rank has saved tensors that the order does not regather.
    """

    def __init__(
        self,
        what: str,
        peers: comm.Peers,
        order: Order | None,
        votes: bool,
        saved: Saved,
        opened: Callable[[Use], None],
    ) -> None:
        """Begin before the first event.

        Args:
            what: The verb that runs, for errors.
            peers: The ranks.
            order: The order that they follow; None where there is none.
            votes: Whether they vote on each event.
            saved: The hooks by which autograd saves tensors.
            opened: Called with each use that opens.
        """
        self.uses: list[Use] = []
        self.scopes: list[Step] = []
        self.passes: list[Pass] = []
        self.over = self.news = False
        self.saved, self._what, self._peers, self._opened = saved, what, peers, opened
        self._order, self._shared, self._votes = order, bool(peers.axes), bool(peers.axes) and votes
        self._events: list[Place] = []
        # GATHER and OPEN steps that are left, in their order.
        self._steps: list[tuple[Kind, Use]] = []
        self.open: tuple[Use, ...] = ()
        self._left: list[Use] = []
        self._near: set[Use] = set()
        self._differentiated = votes or order is not None
        self._refetched: Use | None = None
        self._leave_outside: Callable[[], None] | None = None
        self._pool = comm.Pool()
        self._checkpointed: WeakKeyDictionary[Any, tuple[int, dict[Use, None]]] = WeakKeyDictionary()

    def insert(self, unit: Unit, inside: Sequence[Use] = ()) -> Use:
        """Gather a unit that the schedule does not name here.

        Args:
            unit: The unit.
            inside: The uses that it lies inside, which stay open.

        Returns:
            Its use, open.
        """
        if self._shared:
            self.note(UnitEvent.of(unit, inside))
        use = self._make(unit)
        use.inside = tuple(inside)
        self._start(use)
        self._enter(use)
        return use

    def begin(self, name: str, units: Sequence[Unit], buckets: Sequence[Bucket]) -> list[Use]:
        """Put the steps of a pass before those that are left.

        Args:
            name: The model's name, for errors.
            units: A unit for each bucket.
            buckets: How the units of the model are merged.

        Returns:
            A use for each bucket.
        """
        if self._shared:
            self.note(PassEvent.of(name, units, buckets))
        uses = [self._make(unit) for unit in units]
        for use, bucket in zip(uses, buckets, strict=True):
            around = (other for other, b in zip(uses, buckets, strict=True) if b.first < bucket.first < b.end)
            use.inside = tuple(around)
        steps = schedule.forward([unit.nbytes for unit in units], [unit.ahead for unit in units])
        self._steps[:0] = [(step.kind, uses[step.use]) for step in steps]
        return uses

    def note(self, event: Event) -> None:
        """Take the next shared event; uses that the order opens before it are passed over first.

        Args:
            event: The event.

        Raises:
            Departed: if the order has another event there.
            ValueError: if ranks vote and do different things.
        """
        expected = self._expected
        if expected is not None and expected.event == event:
            self._pass_over(expected.opened)
        if self._votes:
            # Another rank may have opened more uses by now; pass over as many here.
            self._pass_over(max(self._vote(event, len(self.uses)), default=0))
        place = Place(event, len(self.uses))
        if self._order is not None and place != expected:
            raise Departed
        self._events.append(place)

    def reach(self, use: Use, passed: Callable[[Use], None] | None = None) -> None:
        """Take the steps up to where a use opens.

        Args:
            use: The use.
            passed: Called with each use passed over; None leaves it at once.
        """
        while not use.opened:
            opened = self._next()
            if opened is not use:
                (passed or self.leave)(opened)

    def leave(self, use: Use) -> None:
        """Leave a use's scope; its tensors are dropped when the next gather or use begins, unless they stay."""
        use.take_back()
        if self.over:
            return
        use.check_writes(self._what)
        self._make_room()
        self._pool.clear()
        if use.regathered:
            self._left.append(use)

    def outside(self, leave: Callable[[], None] | None) -> None:
        """Leave the scope outside of any model, and enter another.

        Args:
            leave: Leaves the new scope; called when the next one begins.
        """
        before, self._leave_outside = self._leave_outside, leave
        if before is not None:
            before()

    def fetch(self, use: Use, index: int) -> torch.Tensor:
        """Look up a full tensor while the function itself differentiates, with one use regathered at a time."""
        if use.state is not State.FULL:
            if self._refetched is not None:
                self._refetched.release()
            self._refetched = use
            use.wait()
            self.saved.watch(use)
        return use.tensor_of(use.unit.leaves[index])

    def compute(self, use: Use) -> None:
        """Note that the function takes a use's tensors, and which checkpoints will do so again."""
        for checkpoint in _compat.checkpoints():
            use.saved = True
            _, uses = self._checkpointed.get(checkpoint, (0, {}))
            self._checkpointed[checkpoint] = len(self.scopes), {**uses, use: None}

    def mark(self) -> int | None:
        """Note where a collective of the function's own begins or ends.

        Returns:
            The number of the step; None where a checkpoint only runs it again.
        """
        if self.over:
            return None
        number = sum(step.kind is Kind.COLLECTIVE for step in self.scopes)
        self.scopes.append(Step(Kind.COLLECTIVE, number))
        return number

    def finish(self) -> None:
        """Take the steps that are left, close all uses, and note which checkpoints of this rank need them again.

        Raises:
            Departed: if events of the order have not come on this rank.
        """
        if self._expected is not None:
            raise Departed
        self.outside(None)
        for one in self.passes:
            one.end()
        while self._steps:
            self.leave(self._next())
        self._make_room()
        self.over = True
        self._close_all_but(())
        for _, uses in self._checkpointed.values():
            first = min(use.number for use in uses)
            for use in uses:
                use.until = first if use.until is None else min(first, use.until)
                use.checkpoints += 1

    def conclude(self, dtype: torch.dtype) -> Order | None:
        """Check that every rank had the same events, and drop tensors as the policy says.

        Args:
            dtype: Of the loss.

        Returns:
            The order; None where there is one rank.

        Raises:
            Departed: if this rank did not follow the order.
            ValueError: if ranks vote and do different things.
        """
        if not self._shared:
            return None
        needed, order, flags = self._needed(), self._order, self._flags()
        flags |= {CHECKPOINTED} if any(needed) else set()
        if order is None:
            order = self._voted(flags, needed, dtype)
        else:
            late = any(mine > most for mine, most in zip(needed, order.needed, strict=False))
            if late or dtype != order.dtype or not flags & FACTS <= order.flags:
                raise Departed
            self.news = not flags <= order.flags
        self._settle(order)
        return order

    def _flags(self) -> set[int]:
        """List which uses this rank has saved, and which of the last ones to close have lost tensors."""
        gone = {GONE + n for n, use in enumerate(self._closed_last()) if use.state is not State.FULL}
        return {SAVED + use.number for use in self.uses if use.saved} | gone

    def _voted(self, flags: set[int], needed: Sequence[int], dtype: torch.dtype) -> Order:
        """Vote on the end of the forward, on its flags, and on the needs of checkpoints."""
        end = comm.Label(comm.Verb.AGREE, call="f", phase=comm.Phase.END)
        told = {"the loss": f"dtype {str(dtype).removeprefix('torch.')}"}
        agreed = self._peers.agree(end, told, flags)
        numbers = needed or [0] * len(self.uses)
        highest = tuple(comm.highest(numbers, self._peers.axes, comm.Verb.AGREE)) if CHECKPOINTED in agreed else ()
        return Order(tuple(self._events), len(self.uses), agreed, highest, dtype)

    def drop(self) -> None:
        """Wait for gathers that are under way, and drop all full tensors."""
        for use in (*self.uses, *(use for _, use in self._steps)):
            use.release()

    def end(self) -> None:
        """Drop outputs and all that refers to this forward, so that memory is freed without the garbage collector."""
        for use in self.uses:
            use.take_back()
        self.passes, self._leave_outside = [], None

    @property
    def _expected(self) -> Place | None:
        """The next event of the order that ranks follow; None at its end."""
        events, at = self._order.events if self._order else (), len(self._events)
        return events[at] if at < len(events) else None

    def _vote(self, event: Event, *flags: int) -> frozenset[int]:
        return self._peers.agree(event.label, event.parts if isinstance(event, PassEvent) else {}, flags)

    def _pass_over(self, opened: int) -> None:
        """Pass over uses until so many have been opened, or none is left."""
        while len(self.uses) < opened and self._steps:
            self.leave(self._next())

    def _next(self) -> Use:
        """Take the steps up to the next OPEN, and return its use.

        Raises:
            Departed: if the order has an event before it that has not come on this rank.
        """
        expected = self._expected
        if expected is not None and expected.opened == len(self.uses):
            raise Departed
        kind, use = self._steps.pop(0)
        while kind is Kind.GATHER:
            if self._votes:
                self._vote(UnitEvent.of(use.unit))
            self._start(use)
            kind, use = self._steps.pop(0)
        self._enter(use)
        return use

    def _start(self, use: Use) -> None:
        """Drop uses that were left, and start a gather in their memory."""
        self._near = set()
        self._make_room()
        use.start(self._pool)

    def _make(self, unit: Unit) -> Use:
        # A single rank holds everything anyway.
        return Use(unit, regathered=self._shared and unit.is_regathered)

    def _enter(self, use: Use) -> None:
        """Open a use, wait for its tensors, and close the uses that it does not lie inside."""
        self._near = {use, *use.inside}
        if self._differentiated and not any(kind is Kind.GATHER for kind, _ in self._steps):
            # Once nothing is left to gather ahead, as many uses stay as the backward would regather first.
            before = [other for other in reversed(self.uses) if other.regathered]
            self._near.update(before[: use.unit.ahead.count(other.unit.nbytes for other in before)])
        self._make_room()
        self._pool.clear()
        self._close_all_but(use.inside)
        use.opened, use.number, use.sequence = True, len(self.uses), _compat.next_sequence_number()
        self.scopes.append(Step(Kind.OPEN, use.number))
        self.open = (*self.open, use)
        self.uses.append(use)
        use.wait()
        for leaf in use.unit.leaves:
            leaf.first = leaf.first or use
        self.saved.watch(use)
        self._opened(use)

    def _close_all_but(self, inside: Iterable[Use]) -> None:
        """Close all open uses but some: from here on autograd saves tensors of the closed ones as they are."""
        for use in reversed(self.open):
            if use not in inside:
                self.scopes.append(Step(Kind.CLOSE, use.number))
                use.closed = True
        self.open = tuple(use for use in self.open if use in inside)

    def _make_room(self) -> None:
        """Drop the tensors of uses that were left, except those near the use that was opened last."""
        for use in self._left:
            # A use that only this rank saved, and that the order does not regather, keeps its tensors.
            if use not in self._near and (self._order is None or not use.saved or self._order.saved(use)):
                use.release(self._pool)
        self._left = [use for use in self._left if use in self._near]

    def _needed(self) -> list[int]:
        """Count for each use the scopes before the end of the last checkpoint that will need it; 0 if none will."""
        numbers = [0] * len(self.uses)
        for scopes, uses in self._checkpointed.values():
            for use in uses:
                numbers[use.number] = max(numbers[use.number], scopes)
        return numbers

    def _settle(self, order: Order) -> None:
        """Decide which uses stay for the backward, and drop the others; tensors that only this rank saved are kept."""
        full = {use for n, use in enumerate(self._closed_last()) if GONE + n not in order.flags}
        own = {use for use in self.uses if use.saved}
        for use in self.uses:
            use.saved = order.saved(use)
        if any(order.needed):
            self.scopes = schedule.postponed(self.scopes, order.needed)
        first = schedule.gathered_first(self.scopes, [turn_of(use, reduce=True) for use in self.uses])
        for use in self.uses:
            use.stays = use in full and use.number in first
            if use.regathered and not use.stays and (use.saved or use not in own):
                use.release()

    def _closed_last(self) -> list[Use]:
        """List the last uses to close, latest first, as many as there are flags for."""
        closed = (self.uses[step.use] for step in reversed(self.scopes) if step.kind is Kind.CLOSE)
        return list(itertools.islice((use for use in closed if use.regathered), SAVED - GONE))
