"""Timeline: the uses of one forward, opened and closed in an order that is the same on every rank."""

from collections.abc import Sequence

import torch

from fshard import _compat
from fshard.residency.saved import Saved
from fshard.residency.slots import Slot
from fshard.residency.units import Unit, Use, is_regathered


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
        self._open: list[Use] = []
        self._lingering: Use | None = None

    def use_of(self, unit: Unit) -> Use:
        """Make a new use of a unit, with the tensors where the policy has kept them."""
        return Use(unit, regathered=not self._alone and is_regathered(unit), kept=self._kept, log=self._log)

    def open(self, use: Use, inside: Sequence[Use] = ()) -> None:
        """Enter a use, wait for its tensors, and close those that it does not lie inside."""
        self.make_room()
        self.close_but(inside)
        self.events.append(("enter", use))
        self._open.append(use)
        use.index, use.sequence = len(self.uses), _compat.next_sequence_number()
        self.uses.append(use)
        full = use.wait()
        for slot, tensor in zip(use.unit.slots, full, strict=True):
            slot.first = slot.first or use
            if not use.regathered and tensor is not None:
                self._kept[slot] = tensor
        self._saved.watch(use)

    def close_but(self, inside: Sequence[Use]) -> None:
        """End the turn of uses: what is computed with them from here on is saved as it is."""
        for use in reversed(self._open):
            if use not in inside:
                self.events.append(("exit", use))
                use.closed = True
        self._open = [use for use in self._open if use in inside]

    def leave(self, use: Use) -> None:
        """Leave a use's scope; its tensors are dropped when the next one is opened."""
        use.close()
        use.check_writes(self._what)
        self.make_room()
        self._lingering = use if use.regathered else None

    def make_room(self) -> None:
        """Drop the tensors of the use that was left last."""
        if self._lingering is not None:
            self._lingering.full = None
            self._lingering = None

    def last(self) -> Use | None:
        """The use whose turn ended last: the backward needs it first."""
        return self.events[-1][1] if self.events else None
