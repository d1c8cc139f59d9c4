"""Reductions: gradients that wait to be reduced together, and those that are being reduced."""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import divide
from fshard.engine.gathered_unit import get_transform
from fshard.engine.leaf import Leaf
from fshard.transforms.base import ShardTransform
from fshard.transforms.run import PendingScatter, check_results, start_scatter
from fshard.transforms.structure import reduction, sum_dtype
from fshard.tree import grouped


class PendingReduction(NamedTuple):
    """A reduction that has started.

    Attributes:
        leaves: The leaves whose gradients are reduced; they have one transform.
        scatter: Finishes what is under way.
        nbytes: The bytes of the full gradients.
        turn: The turn in which what is under way has started.
        outer: What follows it: the sum over the outermost axis, or None.
    """

    leaves: list[Leaf]
    scatter: PendingScatter
    nbytes: int
    turn: int
    outer: ShardTransform | None


class Reductions:
    """Reduces the gradients of leaves in the order in which they are queued, the same on every rank.

    Small gradients wait for each other, because latency would cost more than the transfer. While the backward of a unit
    runs, gradients of the units before it are under way: as many as fit into the policy's `ahead_bytes`, but at least
    those of one unit. Where gradients are summed over two axes, the second sum starts when the next unit's gradients
    are complete, and is waited for when those of the unit after that one are.
    """

    def __init__(self, divisor: Any, *, defers_outer: bool) -> None:
        """Begin with no gradient.

        Args:
            divisor: The number to divide the reduced gradients of bound leaves by. Those of derived leaves stay sums,
                because autograd goes on from them.
            defers_outer: Whether sums of bound leaves over the outermost of several axes wait for a later microbatch.
        """
        self._divisor = divisor
        self._defers_outer = defers_outer
        self._queue: list[Leaf] = []
        self._queued_bytes = 0
        self._pending: deque[PendingReduction] = deque()
        self._pending_bytes = 0
        # Sums over the outermost axis, after others. They send shards alone.
        self._outer_pending: deque[PendingReduction] = deque()
        # Counts the units whose gradients are complete.
        self._turn = 0
        self._turn_bytes = 0

    def queue_unit(self, leaves: Sequence[Leaf]) -> None:
        """Queue the leaves of a unit, whose gradients are complete.

        Args:
            leaves: The leaves.
        """
        self._turn += 1
        self._turn_bytes = sum([leaf.full_facts.nbytes for leaf in leaves])
        self.queue(leaves)
        if self._pending and self._pending[-1].turn == self._turn:
            self._start_next_stages()
        self._turn_bytes = 0

    def queue(self, leaves: Sequence[Leaf]) -> None:
        """Queue leaves for reduction. Small gradients wait for others, large ones start now.

        Args:
            leaves: The leaves.
        """
        # Inside a unit, start no message smaller than PACK_BYTES. After it, start as soon as a bucket is full.
        for leaf in leaves:
            self._queue.append(leaf)
            self._queued_bytes += leaf.full_facts.nbytes
            if self._queued_bytes >= max(leaf.policy.bucket_bytes, comm.PACK_BYTES):
                self._start_queued()
        if self._queue and self._queued_bytes >= self._queue[-1].policy.bucket_bytes:
            self._start_queued()

    def finish(self) -> None:
        """Reduce the gradients that are queued, and wait for all reductions."""
        self._start_queued()
        while self._pending:
            self._take_pending()
        while self._outer_pending:
            self._finish_reduction(self._outer_pending.popleft())

    @_compat.outside_selective_checkpoint
    def _start_queued(self) -> None:
        leaves = self._queue
        self._queue = []
        self._queued_bytes = 0
        # Bound and derived leaves never wait together, because bound leaves are not reduced early if there are derived
        # ones. So each group is of one kind.
        for transform, indices in grouped(leaves, get_transform).items():
            self._start_reduction(transform, [leaves[index] for index in indices])

    def _start_reduction(self, transform: Any, leaves: list[Leaf]) -> None:
        grads = [leaf.take_full() for leaf in leaves]
        nbytes = sum([leaf.full_facts.nbytes for leaf in leaves])
        # A message never waits for another one of its unit, because nothing computes in between.
        max_bytes = max(leaves[0].policy.ahead_bytes, self._turn_bytes)
        while self._pending and self._pending_bytes + nbytes > max_bytes:
            self._take_pending()

        specs = [leaf.spec for leaf in leaves]
        states = [leaf.transform_state for leaf in leaves]
        outer = None
        facts = reduction(transform)
        if facts.halves is not None:
            has_inner_sums = any(leaf.inner_sum is not None for leaf in leaves)
            if facts.sends_twice or self._defers_outer or has_inner_sums:
                outer, transform = facts.halves
        with torch.no_grad(), _annotate(leaves):
            scatter = start_scatter(transform, grads, specs, states)
        self._pending.append(PendingReduction(leaves, scatter, nbytes, self._turn, outer))
        self._pending_bytes += nbytes

    def _start_next_stages(self) -> None:
        """Let the reductions of earlier units go on, which have had the time of this unit's backward."""
        while self._outer_pending and self._outer_pending[0].turn < self._turn:
            self._finish_reduction(self._outer_pending.popleft())
        if self._defers_outer:
            return
        while self._pending[0].turn < self._turn and self._pending[0].outer is not None:
            self._take_pending()

    @_compat.outside_selective_checkpoint
    def _take_pending(self) -> None:
        """Wait for the oldest reduction, or for the inner half of it and start the outer one."""
        pending = self._pending.popleft()
        self._pending_bytes -= pending.nbytes
        if pending.outer is None:
            self._finish_reduction(pending)
            return

        leaves = pending.leaves
        with torch.no_grad(), _annotate(leaves):
            grads, states = pending.scatter()
            # Autograd goes on from the gradients of derived leaves, so these are summed now.
            if self._defers_outer and not leaves[0].derived:
                for leaf, grad, new_state in zip(leaves, grads, states, strict=True):
                    leaf.transform_state = new_state
                    leaf.inner_sum = leaf.take_inner(leaf.cast_for_sum(grad))
                return
            totals = [leaf.take_inner(grad) for leaf, grad in zip(leaves, grads, strict=True)]
            scatter = start_scatter(pending.outer, totals, [leaf.spec for leaf in leaves], states)
        self._outer_pending.append(pending._replace(scatter=scatter, turn=self._turn, outer=None))

    @_compat.outside_selective_checkpoint
    def _finish_reduction(self, pending: PendingReduction) -> None:
        """Wait for a reduction, and hand its gradients to their leaves."""
        leaves = pending.leaves
        with torch.no_grad():
            grads, states = pending.scatter()
            transform = get_transform(leaves[0])
            paths = (leaf.path for leaf in leaves)
            check_results(transform, "scatter", grads, paths, (leaf.spec for leaf in leaves))
            # A sum may be too large for a dtype that holds the mean.
            stored_dtypes = [leaf.dtype for leaf in leaves]
            wide_dtypes = {dtype: sum_dtype(leaves[0].spec, dtype) for dtype in set(stored_dtypes)}
            grads = _compat.cast_all(grads, list(map(wide_dtypes.__getitem__, stored_dtypes)))
            # Divide now, while they are in the processor's cache.
            divisor = 1 if leaves[0].derived else self._divisor
            needs_division = not (isinstance(divisor, int) and divisor == 1)
            if needs_division and reduction(transform).is_new:
                _compat.divide_in_place(grads, divisor)
            elif needs_division:
                grads = [divide(grad, divisor) for grad in grads]
            for leaf, grad, state in zip(leaves, grads, states, strict=True):
                leaf.transform_state = state
                leaf.add_reduced(leaf.cast_for_sum(grad))


def _annotate(leaves: Sequence[Leaf]) -> AbstractContextManager[None]:
    """Say that collectives are for some leaves and their units."""
    units = dict.fromkeys([leaf.gathered_units[0].unit.name for leaf in leaves if leaf.gathered_units])
    return comm.annotate_collectives(tuple(units), [leaf.path for leaf in leaves])
