"""The backward: walks what its forward opened and closed in reverse, gathers again, and reduces gradients."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fshard import _compat, comm
from fshard.collectives import divided
from fshard.engine.cursor import Cursor
from fshard.engine.forward import Forward
from fshard.engine.leaf import Leaf
from fshard.engine.use import Use, checked, transform_of
from fshard.transforms.compose import reduction, start_scatter
from fshard.tree import grouped


class Backward:
    """One backward over the events of a forward, in one order on every rank.

    Autograd runs nodes from the last made to the first, so that the number of the node that runs tells which steps it
    has passed; ranks agree on that though one has gradients there and another has none.
    """

    def __init__(self, forward: Forward, *, divisor: Any, early: bool, last: bool) -> None:
        """Begin before the first step.

        Args:
            forward: The forward.
            divisor: What reduced gradients of the call's own leaves are divided by.
            early: Whether gradients of the call's own leaves are reduced as they appear, where their policies say so.
            last: Whether no other forward follows, so that tensors kept from use to use may be dropped.
        """
        self._uses, self._divisor, self._early, self._last = forward.uses, divisor, early, last
        steps = forward.events[::-1]
        for number, step in enumerate(steps):
            if not step.needs:
                step.use.due = number
        self._cursor = Cursor(steps, lambda: None, least=0)
        self._again: set[Any] = {None}
        # Of each leaf the last one first, once something is computed again.
        self._uses_of: dict[Leaf, list[Use]] = {}
        self._queue: list[Leaf] = []
        self._nbytes = 0
        self._flying: deque[tuple[list[Leaf], Any, int]] = deque()

    def catch_up(self, behind: int = 1) -> None:
        """Take the steps that autograd has passed; then this rank is where all others are, whatever it computed.

        Args:
            behind: 0 to take those of the node that runs, too.
        """
        if (running := _compat.running_sequence_number()) is not None:
            steps, to = self._cursor.steps, self._cursor.at
            while to < len(steps) and steps[to].sequence >= running + behind:
                to += 1
            self._advance(to)

    def recomputed(self, leaves: Sequence[Leaf]) -> Use | None:
        """Find the use to compute with again: of some leaves the last one, if possible one that is not left."""
        self.catch_up()
        for other in () if self._uses_of else reversed(self._uses):
            for leaf in other.leaves:
                self._uses_of.setdefault(leaf, []).append(other)
        # Those of one leaf of them, not of all.
        among = self._uses_of.get(leaves[0], ()) if leaves else ()
        found = [use for use in among if use.places.keys() >= set(leaves)]
        use = next((use for use in found if use.due >= self._cursor.at), found[0] if found else None)
        self._again.add(use and use.checkpoint)
        return use

    def receive(self, use: Use, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a use: mostly the last thing that autograd comes to in it, so that they are due."""
        for leaf, grad in zip(use.trained, grads, strict=True):
            if grad is not None:
                leaf.add_full(grad)
        self.catch_up(0)

    def finish(self) -> None:
        """Take every step that is left, with zeros where this rank has no gradient, and wait for all reductions."""
        self._advance(len(self._cursor.steps))
        self.reduce(())

    def reduce(self, leaves: Sequence[Leaf]) -> None:
        """Reduce leaves behind all steps, and wait for all reductions."""
        self._enqueue(leaves)
        self._start_due()
        while self._flying:
            self._land()

    def release(self) -> None:
        """Drop what the backward is the last to need."""
        for use in self._uses:
            if use.unit.regathered or self._last:
                use.release()

    def _advance(self, to: int) -> None:
        for step in self._cursor.advance(to):
            if not step.needs:
                self._leave(step.use)

    def _leave(self, use: Use) -> None:
        """Reduce the gradients that are complete behind a use: those of leaves that the forward used here first."""
        if (use.unit.regathered or self._last) and use.checkpoint in self._again:
            # Else a checkpoint may yet compute with it again on this rank.
            use.release()
        now = self._early and use.unit.policy.early
        self._enqueue(leaf for leaf in use.trained if leaf.first is use and (leaf.derived or now))

    def _enqueue(self, leaves: Iterable[Leaf]) -> None:
        for leaf in leaves:
            self._queue.append(leaf)
            self._nbytes += leaf.nbytes
            if self._nbytes >= max(leaf.policy.merge_bytes, comm.PACK_BYTES):
                self._start_due()
        # Small leaves of one unit travel together.
        if self._queue and self._nbytes >= self._queue[-1].policy.merge_bytes:
            self._start_due()

    @_compat.outside_selective_checkpoint()
    def _start_due(self) -> None:
        due, self._queue, self._nbytes = self._queue, [], 0
        # Own leaves and derived ones, from whose undivided sums autograd goes on, never wait together.
        for transform, group in grouped(due, transform_of).items():
            self._start(transform, [due[i] for i in group])

    def _start(self, transform: Any, leaves: list[Leaf]) -> None:
        grads, nbytes = [leaf.take_full() for leaf in leaves], sum([leaf.nbytes for leaf in leaves])
        while self._flying and nbytes + sum(size for *_, size in self._flying) > leaves[0].policy.ahead_bytes:
            self._land()
        units = dict.fromkeys(leaf.first.unit.name for leaf in leaves if leaf.first is not None)
        specs, states = [leaf.spec for leaf in leaves], [leaf.state for leaf in leaves]
        with torch.no_grad(), comm.concerning(tuple(units), [leaf.path for leaf in leaves]):
            self._flying.append((leaves, start_scatter(transform, grads, specs, states), nbytes))

    @_compat.outside_selective_checkpoint()
    def _land(self) -> None:
        leaves, finish, _ = self._flying.popleft()
        with torch.no_grad():
            grads, states = finish()
            checked("scatter", leaves, grads)
            grads = [leaf.wide(grad) for leaf, grad in zip(leaves, grads, strict=True)]
            # Now, while they are in the processor's cache.
            divisor = 1 if leaves[0].derived else self._divisor
            if reduction(leaves[0].spec.transform).is_new and not (isinstance(divisor, int) and divisor == 1):
                _compat.divide_in_place(grads, divisor)
            else:
                grads = [divided(grad, divisor) for grad in grads]
            for leaf, grad, state in zip(leaves, grads, states, strict=True):
                leaf.state = state
                leaf.add_reduced(grad)
