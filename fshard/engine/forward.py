"""The forward: gathers units in the order of the program, and knows which uses are open."""

from collections.abc import Sequence
from typing import Any

import torch

from fshard import _compat
from fshard.engine.cursor import Step
from fshard.engine.saved import Saved
from fshard.engine.use import Use


class Forward:
    """One run of the function: the uses that it opens, and the events that order its backward.

    Attributes:
        uses: In the order in which they were opened.
        events: Where each use was opened and closed.
        over: Whether the function has returned.
        saved: The hooks by which autograd saves tensors.
    """

    def __init__(self, what: str, trains: bool, saved: Saved) -> None:
        """Begin before the first use.

        Args:
            what: The verb that runs, for errors.
            trains: Whether a backward follows.
            saved: The hooks by which autograd saves tensors.
        """
        self.uses, self.events = list[Use](), list[Step]()
        self.over, self.saved = False, saved
        self._what, self._trains, self._differentiated = what, trains, False
        self._open, self._left = list[Use](), list[Use]()
        self._plain: Use | None = None

    def insert_plain(self, use: Use) -> None:
        """Gather for a plain function; the scope of the plain gather before it ends."""
        self.leave_plain()
        self._plain = use
        self.open(use, [other for other in self._open if not other.left])

    def leave_plain(self) -> None:
        """End the scope of the last plain gather."""
        use, self._plain = self._plain, None
        if use is not None:
            self.leave(use)

    def open(self, use: Use, inside: Sequence[Use], last: bool = False, running: Any = None) -> None:
        """Open a use, wait for its tensors, and close the uses that it does not lie inside.

        Args:
            use: The use.
            inside: The uses that it lies inside, which stay open.
            last: Whether nothing is left to gather ahead: then as many uses before it stay as the backward would gather
                first.
            running: The outermost checkpoint that computes with it again, and whether autograd records, on every rank;
                None takes the ones of this rank.
        """
        checkpoint, differentiates = running or (outermost_checkpoint(), torch.is_grad_enabled())
        before = [other for other in reversed(self.uses) if other.unit.regathered] if last and self._trains else []
        self.make_room(before[: use.unit.ahead(other.unit.nbytes for other in before)])
        self._close_all_but(inside)
        use.checkpoint, use.lazy = checkpoint, True
        self.uses.append(use)
        self._open.append(use)
        self.events.append(Step(use, False, _compat.next_sequence_number()))
        self._differentiated = self._differentiated or bool(use.trained)
        if self._differentiated and differentiates:
            for other in self._open:
                # A backward reads no table of embeddings, but in a recomputation, nor what has closed before.
                other.lazy = other.unit.lookup and other.checkpoint is None
        use.wait()
        for leaf in use.leaves:
            leaf.first = leaf.first or use
            leaf.owed = leaf.owed or (leaf.trained and not leaf.derived)
        if self._trains:
            self.saved.watch(use)

    def leave(self, use: Use) -> None:
        """End a use's scope; its tensors are dropped when the next gather starts, unless they stay."""
        use.take_back()
        use.left = True
        if not self.over:
            use.check_writes(self._what)
            if use.unit.regathered:
                self._left.append(use)

    def make_room(self, near: Sequence[Use] = ()) -> None:
        """Drop the tensors of uses that were left, except those near the use that opens."""
        for use in self._left:
            if use not in near:
                use.release()
        self._left = [use for use in self._left if use in near]

    def finish(self) -> None:
        """Close all uses when the function has returned."""
        self.leave_plain()
        self._close_all_but(())
        self.over = True
        if not self._trains:
            self.make_room()

    def end(self) -> None:
        """Drop outputs and all that refers to this forward, so that memory is freed without the garbage collector."""
        for use in self.uses:
            use.take_back()
        self.uses, self.events, self._open, self._left, self._plain = [], [], [], [], None
        # A graph that stays may hold the hooks, and a use may lead back to it, which no collector sees.
        self.saved.known = {}

    def _close_all_but(self, inside: Sequence[Use]) -> None:
        """Close open uses: from here on autograd saves their tensors as they are.

        Those of a checkpoint stay open until it has ended: the backward needs all of them where it begins to compute
        again.
        """
        checkpoint = outermost_checkpoint()
        kept = [use for use in self._open if use in inside or (use.checkpoint is checkpoint is not None)]
        for use in reversed(self._open):
            if use not in kept:
                self.events.append(Step(use, True, _compat.next_sequence_number()))
                use.closed = True
        self._open = kept


def outermost_checkpoint() -> Any:
    """Find the outermost checkpoint that will run again what runs now, or None."""
    return next(reversed(_compat.checkpoints()), None)
