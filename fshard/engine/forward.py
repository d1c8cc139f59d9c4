"""The forward: gathers units in one order on every rank, and knows which are open."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from fshard import _compat, comm
from fshard.engine import schedule
from fshard.engine.order import CHECKPOINTED, LAST_GONE, SAVED, Event, Facts, Order, PassEvent, UnitEvent
from fshard.engine.saved import Saved
from fshard.engine.schedule import Bucket, Kind, Step
from fshard.engine.unit import State, Unit, Use


class Forward:
    """One run of the function.

    Attributes:
        uses: In the order in which they were opened.
        events: OPEN and CLOSE of each.
        failed: Whether this rank goes on only because others do.
        over: Whether the function has returned.
    """

    def __init__(self, what: str, saved: Saved, order: Order, opened: Callable[[Use], None]) -> None:
        """Before the first event.

        Args:
            what: The verb that runs, for errors.
            saved: The hooks by which autograd saves tensors.
            order: The order that ranks share.
            opened: Called with each use that opens.
        """
        self.uses: list[Use] = []
        self.events: list[Step] = []
        self.failed = self.over = False
        self._what, self._saved, self._order, self._opened = what, saved, order, opened
        self._made: list[Use] = []
        self._steps: list[Step] = []
        self._at = 0
        self._inside: dict[Use, tuple[Use, ...]] = {}
        self._open: list[Use] = []
        self._left: Use | None = None
        self._pool = comm.Pool()
        self._checkpointed: WeakKeyDictionary[Any, tuple[int, dict[Use, None]]] = WeakKeyDictionary()

    def insert(self, unit: Unit, inside: Sequence[Use] = ()) -> Use:
        """Gather a unit that the schedule does not name here.

        Args:
            unit: The unit.
            inside: Uses within which it lies, which stay open.

        Returns:
            Its use, open.
        """
        if self._order.shared:
            self.note(UnitEvent.of(unit))
        use = self._make(unit)
        self._inside[use] = tuple(inside)
        number = len(self._made) - 1
        self._steps[self._at : self._at] = [Step(Kind.GATHER, number), Step(Kind.OPEN, number)]
        self.reach(use)
        return use

    def begin(self, name: str, units: Sequence[Unit], buckets: Sequence[Bucket]) -> list[Use]:
        """Put the uses of a pass next into the schedule.

        Args:
            name: The model's name, for errors.
            units: A unit for each bucket.
            buckets: How the units of the model are merged.

        Returns:
            A use for each bucket.
        """
        if self._order.shared:
            self.note(PassEvent.of(name, units, buckets))
        first = len(self._made)
        uses = [self._make(unit) for unit in units]
        for use, bucket in zip(uses, buckets, strict=True):
            around = (other for other, b in zip(uses, buckets, strict=True) if b.first < bucket.first < b.end)
            self._inside[use] = tuple(around)
        small, prefetch = [bucket.small for bucket in buckets], [use.unit.policy.prefetch for use in uses]
        self._steps[self._at : self._at] = schedule.forward(small, prefetch, first)
        return uses

    def reach(self, use: Use, passed: Callable[[Use], None] | None = None) -> None:
        """Take the steps up to where a use opens.

        Args:
            use: The use.
            passed: Called with each use that is passed over, which else is left at once.
        """
        while not use.opened:
            opened = self._take()
            if opened is not None and opened is not use:
                (passed or self.leave)(opened)

    def note(self, event: Event) -> None:
        """Take the next event that ranks must share, after the uses that come before it in the order they follow."""
        expected = self._order.expected
        if expected is not None and expected._replace(opened=0) == event:
            self.catch_up(expected.opened)
        self._order.next(event._replace(opened=len(self.uses)))

    def catch_up(self, opened: int) -> None:
        """Pass over uses until so many have been opened."""
        while len(self.uses) < opened and self._at < len(self._steps):
            passed = self._take()
            if passed is not None:
                self.leave(passed)

    def _take(self) -> Use | None:
        """Take the next step; returns the use that it opens."""
        step = self._steps[self._at]
        self._at += 1
        use = self._made[step.use]
        if step.kind is Kind.OPEN:
            self._enter(use)
            return use
        self._make_room()
        if self._order.votes:
            self._order.vote(UnitEvent.of(use.unit))
        use.start(self._pool)
        return None

    def leave(self, use: Use) -> None:
        """Leave a use's scope; its tensors are dropped when the next one opens."""
        use.take_back()
        if not self.failed:
            use.check_writes(self._what)
        self._make_room()
        self._pool.clear()
        self._left = use if use.regathered else None

    def fail(self) -> None:
        """Forget the checkpoints of this rank, which goes on without a loss."""
        self.failed = True
        self._checkpointed.clear()

    def compute(self, use: Use) -> None:
        """Note that the function takes a use's tensors, and which checkpoints will do so again."""
        for checkpoint in _compat.checkpoints():
            use.saved = True
            _, uses = self._checkpointed.get(checkpoint, (0, {}))
            self._checkpointed[checkpoint] = len(self.events), {**uses, use: None}

    def open_uses(self) -> tuple[Use, ...]:
        """List the uses that no other has taken the place of."""
        return tuple(self._open)

    def finish(self) -> None:
        """Close all uses, and note which checkpoints of this rank need which of them again."""
        self.over = True
        self._close_all_but(())
        for _, uses in self._checkpointed.values():
            first = min(use.number for use in uses)
            for use in uses:
                use.until = first if use.until is None else min(first, use.until)
                use.checkpoints += 1

    def needed(self) -> list[int]:
        """For each use how many events came before a checkpoint ended that will need it again; 0 where none will."""
        numbers = [0] * len(self.uses)
        for events, uses in self._checkpointed.values():
            for use in uses:
                numbers[use.number] = max(numbers[use.number], events)
        return numbers

    def flags(self) -> frozenset[int]:
        """What this rank tells the others at the end of the forward."""
        flags = {SAVED + use.number for use in self.uses if use.saved}
        flags |= {LAST_GONE} if self.uses and self._last().state is not State.FULL else set()
        return frozenset(flags | ({CHECKPOINTED} if any(self.needed()) else set()))

    def settle(self, facts: Facts) -> None:
        """Drop tensors as the policy says, the same on every rank; those that this rank alone has saved stay with it.

        Args:
            facts: Those of all ranks.
        """
        last = self._last() if self.uses else None
        for use in self.uses:
            own, use.saved = use.saved, facts.saved(use)
            if use.regathered and (use is not last or LAST_GONE in facts.flags):
                if use.saved or not own:
                    use.release()
            elif use is last:
                # The unit that computed last is needed first: it is kept rather than gathered again.
                use.saved = False
        if any(facts.needed):
            self.events = schedule.postponed(self.events, facts.needed)

    def _make(self, unit: Unit) -> Use:
        # One rank alone holds everything anyway.
        use = Use(unit, regathered=self._order.shared and unit.is_regathered)
        self._made.append(use)
        return use

    def _enter(self, use: Use) -> None:
        """Open a use, wait for its tensors, and close those that it does not lie inside."""
        self._make_room()
        self._pool.clear()
        self._close_all_but(self._inside[use])
        use.opened, use.number, use.sequence = True, len(self.uses), _compat.next_sequence_number()
        self.events.append(Step(Kind.OPEN, use.number))
        self._open.append(use)
        self.uses.append(use)
        use.wait()
        for leaf in use.unit.leaves:
            leaf.first = leaf.first or use
        self._saved.watch(use)
        self._opened(use)

    def _close_all_but(self, inside: Iterable[Use]) -> None:
        """Let other uses take the place of those that are open: tensors computed with them from here on are kept."""
        for use in reversed(self._open):
            if use not in inside:
                self.events.append(Step(Kind.CLOSE, use.number))
                use.closed = True
        self._open = [use for use in self._open if use in inside]

    def _make_room(self) -> None:
        """Drop the tensors of the use that was left last."""
        use, self._left = self._left, None
        learned = self._order.learned
        # Tensors that the order does not regather stay, where this rank alone has saved them.
        if use is not None and (learned is None or not use.saved or learned.facts.saved(use)):
            use.release(self._pool)

    def _last(self) -> Use:
        """The use that closed last."""
        return self.uses[self.events[-1].use]
