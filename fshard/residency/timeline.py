"""Timeline: the uses of one forward, opened and closed in an order that is the same on every rank."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fshard import _compat
from fshard.residency.saved import Saved
from fshard.residency.slots import Slot
from fshard.residency.units import Unit, Use, is_regathered

# What ranks tell each other at the end of a phase: whether a checkpoint will run something again, whether the last use
# has lost tensors, and from the third number on which uses were saved.
CHECKPOINTED, _LAST_GONE, _SAVED = 0, 1, 2


class Timeline:
    """What has been gathered in one forward.

    Attributes:
        events: "enter" and "exit" of each use.
        uses: In the order in which they were entered.
    """

    def __init__(self, what: str, saved: Saved, kept: dict[Slot, torch.Tensor], log: list[str], *, alone: bool) -> None:
        """Before the first event.

        Args:
            what: The verb that runs, for errors.
            saved: What autograd saves.
            kept: Tensors that policies keep from one use to the next, and from one forward to the next.
            log: Where collectives are noted.
            alone: Whether there is one rank only, which holds everything anyway.
        """
        self.events: list[tuple[str, Use]] = []
        self.uses: list[Use] = []
        self._what, self._saved, self._kept, self._log, self._alone = what, saved, kept, log, alone
        # Memory of dropped tensors that the next gather may write to.
        self._spares: list[torch.Tensor] = []
        self._open: list[Use] = []
        self._checkpointed: WeakKeyDictionary[Any, tuple[int, dict[Use, None]]] = WeakKeyDictionary()
        self._lingering: Use | None = None

    def note(self, what: str) -> None:
        """Add to what ranks compare at the end of a phase."""
        self._log.append(what)

    def use_of(self, unit: Unit) -> Use:
        """Make a new use of a unit, with the tensors where the policy has kept them."""
        return Use(
            unit,
            regathered=not self._alone and is_regathered(unit),
            kept=self._kept,
            log=self._log,
            spares=self._spares,
        )

    def open(self, use: Use, inside: Sequence[Use] = ()) -> None:
        """Enter a use, wait for its tensors, and close those that it does not lie inside."""
        self.make_room()
        self._spares.clear()
        self.close_but(inside)
        self.events.append(("enter", use))
        self._open.append(use)
        use.index, use.sequence = len(self.uses), _compat.next_sequence_number()
        self.uses.append(use)
        self.keep(use)
        for slot in use.unit.slots:
            slot.first = slot.first or use
        self._saved.watch(use)

    def keep(self, use: Use) -> None:
        """Wait for a use's tensors, and keep them where the policy says so."""
        full = use.wait()
        if not use.regathered:
            self._kept.update(
                (slot, tensor) for slot, tensor in zip(use.unit.slots, full, strict=True) if tensor is not None
            )

    def close_but(self, inside: Sequence[Use]) -> None:
        """End the turn of uses: what is computed with them from here on is saved as it is."""
        for use in reversed(self._open):
            if use not in inside:
                self.events.append(("exit", use))
                use.closed = True
        self._open = [use for use in self._open if use in inside]

    def compute(self, use: Use) -> None:
        """Note that the function takes a use's tensors, and which checkpoints will do so again."""
        for checkpoint in _compat.checkpoints():
            use.saved = True
            _, uses = self._checkpointed.get(checkpoint, (0, {}))
            self._checkpointed[checkpoint] = len(self.events), {**uses, use: None}

    def needed(self) -> list[int]:
        """For each use how many events came before a checkpoint ended that will need it again; 0 where none will."""
        numbers = [0] * len(self.uses)
        for events, uses in self._checkpointed.values():
            first = min(use.index for use in uses)
            for use in uses:
                numbers[use.index] = max(numbers[use.index], events)
                use.until = first if use.until is None else min(first, use.until)
                use.checkpoints += 1
        return numbers

    def postpone(self, needed: Sequence[int]) -> None:
        """Let turns end no sooner than the checkpoints that need them on any rank: the backward begins with those.

        Args:
            needed: The highest numbers of all ranks, as `needed` returns them.
        """

        def turn(numbered: tuple[int, tuple[str, Use]]) -> tuple[int, bool]:
            number, (kind, use) = numbered
            until = needed[use.index] - 1 if kind == "exit" else 0
            return max(number, until), until > number

        self.events = [event for _, event in sorted(enumerate(self.events), key=turn)]

    def leave(self, use: Use) -> None:
        """Leave a use's scope; its tensors are dropped when the next one is opened."""
        use.close()
        use.check_writes(self._what)
        self.make_room()
        self._spares.clear()
        self._lingering = use if use.regathered else None

    def make_room(self) -> None:
        """Drop the tensors of the use that was left last."""
        if self._lingering is not None:
            self._lingering.drop_all()
            self._lingering = None

    def flags(self, needed: Sequence[int]) -> list[int]:
        """What this rank tells the others at the end of a forward, and of a backward."""
        flags = [_SAVED + use.index for use in self.uses if use.saved]
        if self.uses and self._last().full is None:
            flags.append(_LAST_GONE)
        if any(needed):
            flags.append(CHECKPOINTED)
        return flags

    def drop(self, flags: frozenset[int]) -> None:
        """Drop what the policy says, the same on every rank by the flags of all."""
        for use in self.uses:
            use.saved = _SAVED + use.index in flags
            if use.regathered and (use is not self._last() or _LAST_GONE in flags):
                use.full = None
            elif use is self._last():
                # What was computed last is needed first: it is kept rather than gathered again.
                use.saved = False

    def open_uses(self) -> tuple[Use, ...]:
        """The uses whose turn is not over."""
        return tuple(self._open)

    def _last(self) -> Use:
        """The use whose turn ended last."""
        return self.events[-1][1]
