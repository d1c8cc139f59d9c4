"""Reductions: gradients that wait to be reduced together, and those that are being reduced."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import divide
from fshard.engine.gathered_unit import check_transform_results, get_transform
from fshard.engine.leaf import Leaf
from fshard.transforms.run import Deferral, PendingScatter, start_scatter
from fshard.transforms.structure import reduction
from fshard.tree import grouped


class PendingReduction(NamedTuple):
    """A reduction that has started.

    Attributes:
        leaves: The leaves whose gradients are reduced; they have one transform.
        unit_names: Their units.
        scatter: Finishes the reduction. It may have several stages, such as the sums over two axes.
        nbytes: The bytes of the full gradients.
        turn: The turn in which the stage that is under way has started.
        is_inner: Whether the gradients stay to be summed over the outermost axis.
    """

    leaves: list[Leaf]
    unit_names: tuple[str, ...]
    scatter: PendingScatter
    nbytes: int
    turn: int
    is_inner: bool


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
        # Reductions whose last stage is under way, after others. They send shards alone.
        self._last_stages: deque[PendingReduction] = deque()
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
        while self._last_stages:
            self._finish_reduction(self._last_stages.popleft())

    @_compat.outside_selective_checkpoint()
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

        units = dict.fromkeys([leaf.first_gathered.unit.name for leaf in leaves if leaf.first_gathered is not None])
        unit_names = tuple(units)
        specs = [leaf.spec for leaf in leaves]
        states = [leaf.transform_state for leaf in leaves]
        deferral = self._make_deferral(transform, leaves)
        with torch.no_grad(), comm.annotate_collectives(unit_names, [leaf.path for leaf in leaves]):
            scatter = start_scatter(transform, grads, specs, states, deferral)
        is_inner = deferral is not None and deferral.inner_sums is None
        self._pending.append(PendingReduction(leaves, unit_names, scatter, nbytes, self._turn, is_inner))
        self._pending_bytes += nbytes

    def _make_deferral(self, transform: Any, leaves: Sequence[Leaf]) -> Deferral | None:
        """Decide what the outer stages do with some gradients: derived ones go on at once, so they are summed now."""
        num_outer_stages = reduction(transform).num_outer_stages
        if num_outer_stages and self._defers_outer and not leaves[0].derived:
            return Deferral(num_outer_stages)
        inner_sums = [leaf.take_inner() for leaf in leaves]
        has_sums = any(inner_sum is not None for inner_sum in inner_sums)
        return Deferral(num_outer_stages, inner_sums) if has_sums else None

    def _start_next_stages(self) -> None:
        """Let the reductions of earlier units go on, which have had the time of this unit's backward."""
        while self._last_stages and self._last_stages[0].turn < self._turn:
            self._finish_reduction(self._last_stages.popleft())
        while self._pending[0].turn < self._turn and self._pending[0].scatter.sends_again:
            self._take_pending()

    @_compat.outside_selective_checkpoint()
    def _take_pending(self) -> None:
        """Wait for the oldest reduction, or for a stage of it and start the next one."""
        reduction = self._pending.popleft()
        self._pending_bytes -= reduction.nbytes
        if not reduction.scatter.sends_again:
            self._finish_reduction(reduction)
            return
        paths = [leaf.path for leaf in reduction.leaves]
        with torch.no_grad(), comm.annotate_collectives(reduction.unit_names, paths):
            reduction.scatter.start_next()
        self._last_stages.append(reduction._replace(turn=self._turn))

    @_compat.outside_selective_checkpoint()
    def _finish_reduction(self, pending: PendingReduction) -> None:
        """Wait for a reduction, and hand its gradients to their leaves."""
        leaves = pending.leaves
        with torch.no_grad():
            grads, states = pending.scatter()
            if not pending.is_inner:
                check_transform_results("scatter", leaves, grads)
            grads = _compat.cast_all(grads, [leaf.sum_dtype() for leaf in leaves])
            grads = self._divide(leaves[0], grads)
            for leaf, grad, state in zip(leaves, grads, states, strict=True):
                leaf.transform_state = state
                if pending.is_inner:
                    leaf.add_inner(grad)
                else:
                    leaf.add_reduced(grad)

    def _divide(self, first: Leaf, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """Divide reduced gradients now, while they are in the processor's cache."""
        divisor = 1 if first.derived else self._divisor
        if isinstance(divisor, int) and divisor == 1:
            return grads
        if reduction(first.spec.transform).is_new:
            _compat.divide_in_place(grads, divisor)
            return grads
        return [divide(grad, divisor) for grad in grads]
