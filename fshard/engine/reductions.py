"""Reductions: gradients that wait to be reduced together, and those that are being reduced."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.collectives import divide
from fshard.engine.gathered_unit import check_transform_results, get_transform
from fshard.engine.leaf import Leaf
from fshard.transforms.run import start_scatter
from fshard.transforms.structure import reduction
from fshard.tree import grouped


class PendingReduction(NamedTuple):
    """A reduction that has started.

    Attributes:
        leaves: The leaves whose gradients are reduced; they have one transform.
        finish: Waits for the reduced gradients and returns them, with the new states of the transform.
        nbytes: The bytes of the full gradients.
    """

    leaves: list[Leaf]
    finish: Callable[[], Any]
    nbytes: int


class Reductions:
    """Reduces the gradients of leaves in the order in which they are queued, the same on every rank.

    Small gradients wait for each other, because latency would cost more than the transfer. The bytes of the reductions
    in flight are bounded by the policy of the leaves.
    """

    def __init__(self, divisor: Any) -> None:
        """Begin with no gradient.

        Args:
            divisor: The number to divide the reduced gradients of bound leaves by. Those of derived leaves stay sums,
                because autograd goes on from them.
        """
        self._divisor = divisor
        self._queue: list[Leaf] = []
        self._queued_bytes = 0
        self._pending: deque[PendingReduction] = deque()
        self._pending_bytes = 0

    def queue(self, leaves: Iterable[Leaf]) -> None:
        """Queue leaves of one unit for reduction. Small gradients wait for others, large ones start now."""
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
            self._finish_reduction()

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
        while self._pending and self._pending_bytes + nbytes > leaves[0].policy.ahead_bytes:
            self._finish_reduction()

        units = dict.fromkeys([leaf.first_gathered.unit.name for leaf in leaves if leaf.first_gathered is not None])
        specs = [leaf.spec for leaf in leaves]
        states = [leaf.transform_state for leaf in leaves]
        with torch.no_grad(), comm.annotate_collectives(tuple(units), [leaf.path for leaf in leaves]):
            finish = start_scatter(transform, grads, specs, states)
        self._pending.append(PendingReduction(leaves, finish, nbytes))
        self._pending_bytes += nbytes

    @_compat.outside_selective_checkpoint()
    def _finish_reduction(self) -> None:
        """Wait for the oldest reduction, and hand its gradients to their leaves."""
        leaves, finish, nbytes = self._pending.popleft()
        self._pending_bytes -= nbytes
        with torch.no_grad():
            grads, states = finish()
            check_transform_results("scatter", leaves, grads)
            grads = [leaf.cast_for_sum(grad) for leaf, grad in zip(leaves, grads, strict=True)]
            grads = self._divide(leaves[0], grads)
            for leaf, grad, state in zip(leaves, grads, states, strict=True):
                leaf.transform_state = state
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
