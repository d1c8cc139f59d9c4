"""The backward: takes the forward's events in reverse, gathers again, and reduces gradients."""

from collections.abc import Sequence
from typing import Any

import torch

from fshard import _compat
from fshard.engine.cursor import Cursor
from fshard.engine.forward import Forward
from fshard.engine.gathered_unit import GatheredUnit
from fshard.engine.leaf import Leaf
from fshard.engine.reductions import Reductions


class Backward:
    """One backward over the events of a forward, in one order on every rank.

    Autograd runs nodes from the last made to the first. So the number of the node that runs tells which steps it has
    passed, and ranks agree on that even if one has gradients there and another has none.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        divisor: Any,
        reduce_early: bool,
        defers_outer: bool,
        is_last: bool,
    ) -> None:
        """Start before the first step.

        Args:
            forward: The forward.
            divisor: The number to divide the reduced gradients of bound leaves by.
            reduce_early: Whether gradients of bound leaves are reduced as they appear, if their policies say so.
            defers_outer: As for `Reductions`.
            is_last: Whether no other forward follows, so that tensors that were kept for it can be dropped.
        """
        self._gathered_units = forward.gathered_units
        self._reduce_early = reduce_early
        self._is_last = is_last
        # No gather makes room: each unit is dropped at the step where its gradients are due.
        self._cursor = Cursor(forward.events[::-1], make_room=lambda: None)
        self._reductions = Reductions(divisor, defers_outer=defers_outer)
        # The checkpoints that this rank has started to recompute; None stands for what is in no checkpoint.
        self._recomputed_checkpoints: set[Any] = {None}

    def catch_up(self, include_current: bool = False) -> None:
        """Take the steps that autograd has passed. Then this rank is where all others are, whatever it computed.

        Args:
            include_current: Whether to take the steps of the node that runs, too, because it has nothing left to do.
        """
        running = _compat.running_sequence_number()
        if running is None:
            return
        first_passed = running if include_current else running + 1
        steps = self._cursor.steps
        end = self._cursor.position
        while end < len(steps) and steps[end].sequence >= first_passed:
            end += 1
        self._advance(end)

    def receive(self, gathered: GatheredUnit, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a unit.

        Its delivering node usually runs last in the unit, so then the unit's step is due.
        """
        for leaf, grad in zip(gathered.trained, grads, strict=True):
            if grad is not None:
                leaf.add_full(grad)
        self.catch_up(include_current=True)

    def prepare_recompute(self, leaves: Sequence[Leaf]) -> GatheredUnit | None:
        """Find the gathered unit with which a checkpoint recomputes some leaves. This may communicate.

        Args:
            leaves: The leaves, one at least.

        Returns:
            Of the units that hold all of them the last one whose gradients are still to come; if there is none, the
            last one; None if the forward gathered no such unit.
        """
        self.catch_up()
        # Look through the units of one leaf, not through all.
        required = set(leaves)
        candidates = []
        for gathered in reversed(leaves[0].gathered_units):
            if required.issubset(gathered.leaves):
                candidates.append(gathered)
        if not candidates:
            return None
        still_due = (gathered for gathered in candidates if not gathered.is_finished)
        recomputed = next(still_due, candidates[0])
        self._recomputed_checkpoints.add(recomputed.checkpoint)
        return recomputed

    def finish(self) -> None:
        """Take every step that is left, with zeros where this rank has no gradient, and wait for all reductions."""
        self._advance(len(self._cursor.steps))
        self._reductions.finish()

    def reduce(self, leaves: Sequence[Leaf]) -> None:
        """Reduce the gradients of leaves after all steps, and wait for all reductions."""
        self._reductions.queue(leaves)
        self._reductions.finish()

    def release(self) -> None:
        """Drop the full tensors that the backward is the last to need."""
        for gathered in self._gathered_units:
            if self._may_release(gathered):
                gathered.release()

    def _advance(self, end: int) -> None:
        for _, step in self._cursor.advance(end):
            if not step.needs_full:
                self._finish_unit(step.gathered)

    def _finish_unit(self, gathered: GatheredUnit) -> None:
        """Drop the full tensors of a unit whose gradients are due, and reduce the gradients that are complete here.

        A leaf's gradient is complete at the unit that held the leaf first.
        """
        gathered.is_finished = True
        # Otherwise a checkpoint may still recompute with the unit on this rank.
        is_recomputed = gathered.checkpoint in self._recomputed_checkpoints
        if is_recomputed and self._may_release(gathered):
            gathered.release()
        reduces_bound = self._reduce_early and gathered.unit.policy.reduce_each_microbatch
        complete = [leaf for leaf in gathered.trained if leaf.gathered_units[0] is gathered]
        self._reductions.queue_unit([leaf for leaf in complete if leaf.derived or reduces_bound])

    def _may_release(self, gathered: GatheredUnit) -> bool:
        """Tell whether no other microbatch needs a unit's full tensors."""
        return gathered.unit.is_regathered or self._is_last
