"""The backward: executes its schedule, which regathers units and reduces gradients in one order on every rank."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.engine import schedule
from fshard.engine.schedule import Kind, Step
from fshard.engine.unit import Leaf, Unit, Use, divided_parts, transform_of, turn_of
from fshard.transforms.compose import start_scatter


@dataclass
class _Bucket:
    """Gradients that are reduced together."""

    leaves: list[Leaf] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0

    def add(self, leaf: Leaf, grad: torch.Tensor) -> None:
        self.leaves.append(leaf)
        self.grads.append(grad)
        self.nbytes += leaf.nbytes

    def take(self) -> tuple[list[Leaf], list[torch.Tensor], int]:
        """Hand over the contents, and leave the bucket empty."""
        taken = self.leaves, self.grads, self.nbytes
        self.leaves, self.grads, self.nbytes = [], [], 0
        return taken


class _Flight(NamedTuple):
    leaves: list[Leaf]
    finish: Any
    nbytes: int


class Backward:
    """One backward pass over the uses of a forward."""

    def __init__(self, uses: Sequence[Use], scopes: Sequence[Step], *, divisor: Any, reduce: bool, last: bool) -> None:
        """Begin before the first step.

        Args:
            uses: Those of the forward.
            scopes: OPEN and CLOSE of each, as for `schedule.backward`.
            divisor: What reduced gradients of the call's own leaves are divided by.
            reduce: Whether gradients of the call's own leaves are reduced in this backward.
            last: Whether no other forward follows, so that tensors kept from use to use may be dropped.
        """
        self._uses, self._divisor = uses, divisor
        self._reduce_now, self._last = reduce, last
        self._turns = [turn_of(use, reduce) for use in uses]
        self._steps = schedule.backward(scopes, self._turns)
        self._place = {step: n for n, step in enumerate(self._steps)}
        self._last_gather = max((n for n, step in enumerate(self._steps) if step.kind is Kind.GATHER), default=-1)
        self._at = 0
        self._ready: list[set[int]] = [set() for _ in uses]
        self._pool = comm.Pool()
        self._buckets: dict[Any, _Bucket] = {}
        self._pinned: list[Use] = []
        self._flying: deque[_Flight] = deque()
        for use in uses:
            for leaf in use.unit.leaves:
                leaf.owed = leaf.owed or (leaf.trained and not leaf.derived and leaf.first is use)

    def fetch(self, use: Use, index: int) -> torch.Tensor:
        """Look up a full tensor that autograd saved a handle of."""
        self._advance(self._place[Step(Kind.OPEN, use.number)] + 1)
        full = use.wait()[index]
        if full is None:
            # Autograd came back to a leaf whose gradient it had finished.
            use.release()
            full = use.wait()[index]
            assert full is not None
        return full

    def find(self, unit: Unit) -> Use | None:
        """Find the use to recompute: the unit's last one that the backward has not closed, or still holds."""
        self._pass_left()
        uses = (use for use in reversed(self._uses) if use.unit.leaves == unit.leaves)
        left = (use for use in uses if self._at <= self._closes(use) or use in self._pinned)
        return next(left, None)

    def recomputed(self, use: Use) -> Use:
        """Regather a use that is about to be recomputed, and all that the backward needs before it.

        Only gathers are taken out of turn; the use's gradients come later, after those of later uses.
        """
        # One checkpoint runs once; of several, or of nested ones, a later one may need the use again.
        use.until = None if use.checkpoints == 1 else use.until
        self._pass_left()
        to = self._place[Step(Kind.OPEN, use.number)]
        if all(step.kind in (Kind.OPEN, Kind.GATHER) for step in self._steps[self._at : to]):
            self._advance(to + 1)
        for step in self._steps[self._at : to + 1]:
            if step.kind is Kind.GATHER and not self._uses[step.use].stays:
                self._uses[step.use].start(self._pool)
        return use

    def passed(self, number: int) -> None:
        """Take all steps up to where a collective of the function's own ends, or begins.

        Args:
            number: Number of the COLLECTIVE step.
        """
        self._advance(self._place[Step(Kind.COLLECTIVE, number)] + 1)

    def arrived(self, use: Use, group: Sequence[int], grads: Sequence[torch.Tensor | None]) -> None:
        """Take this rank's full gradients for some leaves of a use."""
        leaves = use.unit.leaves
        for i, grad in zip(group, grads, strict=True):
            if grad is not None:
                leaves[i].add_partial(grad)
        if use.until is None and (use.regathered or self._last):
            use.drop(group, self._pool if self._at <= self._last_gather else None)
        self._ready[use.number].update(group)
        while self._at < len(self._steps) and self._may_take(self._at):
            self._take(self._steps[self._at])

    def reduced_now(self, use: Use, group: Sequence[int]) -> list[torch.Tensor]:
        """Reduce the gradients of derived leaves and wait for them, because autograd goes on from these."""
        self._advance(1 + self._place[Step(Kind.REDUCE, use.number, self._turns[use.number].due[-1])])
        self._land_all()
        return [use.unit.leaves[i].take_reduced() for i in group]

    def finish(self, leaves: Sequence[Leaf]) -> None:
        """Take every step that is left, with zeros where this rank has no gradient, and wait for all reductions.

        Args:
            leaves: All trained leaves of the call.
        """
        self._advance(len(self._steps))
        if self._reduce_now:
            # Leaves that were not reduced at their step, or used in earlier microbatches only.
            self._reduce([leaf for leaf in reversed(leaves) if leaf.owed])
        self._start_all()
        self._land_all()

    def _closes(self, use: Use) -> int:
        return self._place[Step(Kind.CLOSE, use.number)]

    def _may_take(self, number: int) -> bool:
        """Whether a step may be taken before the backward has come to it."""
        step = self._steps[number]
        match step.kind:
            case Kind.REDUCE:
                return self._ready[step.use].issuperset(step.leaves)
            case Kind.GATHER:
                if self._uses[step.use].stays:
                    return True
                # Right behind a reduction it reuses the memory just freed; elsewhere it waits until it is needed.
                before = self._steps[number - 1].kind if number else None
                return before is Kind.REDUCE or (before is Kind.GATHER and self._may_take(number - 1))
            case Kind.OPEN:
                return True
            case Kind.COLLECTIVE:
                return False
        use = self._uses[step.use]
        # A checkpoint may compute with a use again until autograd has left it, whether or not a reduction is due there.
        return not use.regathered and (not use.checkpoints or _is_left(use, _compat.running_sequence_number()))

    def _pass_left(self) -> None:
        """Take the steps of uses that autograd has left: all nodes that may have used them have run."""
        running = _compat.running_sequence_number()
        self._advance(max((self._closes(use) for use in self._uses if _is_left(use, running)), default=-1) + 1)

    def _advance(self, to: int) -> None:
        while self._at < to:
            self._take(self._steps[self._at])
        # Gathers right behind a reduction go with it.
        while self._at < len(self._steps) and self._steps[self._at].kind is Kind.GATHER and self._may_take(self._at):
            self._take(self._steps[self._at])

    @_compat.outside_selective_checkpoint()
    def _take(self, step: Step) -> None:
        self._at += 1
        if step.kind is Kind.COLLECTIVE:
            return
        use = self._uses[step.use]
        match step.kind:
            case Kind.GATHER:
                if not use.stays:
                    use.start(self._pool)
            case Kind.REDUCE:
                leaves = [use.unit.leaves[i] for i in step.leaves]
                if use.unit.policy.early or leaves[0].derived:
                    self._reduce(leaves)
                if step.leaves == self._turns[step.use].due[-1]:
                    # Autograd waits for a derived leaf: its bucket starts here, whatever else this rank has ready.
                    self._start_all(0 if leaves[0].derived else use.unit.policy.bucket_bytes)
            case Kind.CLOSE:
                self._pinned.append(use)
                for other in self._pinned:
                    if (other.regathered or self._last) and (other.until is None or other.until >= use.number):
                        other.release()
                self._pinned = [other for other in self._pinned if other.until is not None and other.until < use.number]

    def _reduce(self, leaves: Sequence[Leaf]) -> None:
        transform, bucket = None, _Bucket()
        for leaf in leaves:
            grad, size = leaf.take_partial(), leaf.bucket_bytes
            if leaf.nbytes >= size:
                self._start(_Bucket([leaf], [grad], leaf.nbytes))
                continue
            # Neighbours share one transform, which is slow to hash.
            if leaf.spec.transform is not transform:
                transform = leaf.spec.transform
                bucket = self._buckets.setdefault(transform, _Bucket())
            if bucket.nbytes + leaf.nbytes > size:
                self._start(bucket)
            bucket.add(leaf, grad)
            if bucket.nbytes >= size:
                self._start(bucket)

    @_compat.outside_selective_checkpoint()
    def _start(self, bucket: _Bucket) -> None:
        """Start to reduce a bucket's gradients, and empty it."""
        leaves, grads, nbytes = bucket.take()
        most = leaves[0].policy.ahead_bytes
        while self._flying and nbytes + sum(flight.nbytes for flight in self._flying) > most:
            self._land()
        units = dict.fromkeys(leaf.first.unit.name for leaf in leaves if leaf.first is not None)
        specs, states = [leaf.spec for leaf in leaves], [leaf.state for leaf in leaves]
        with torch.no_grad(), comm.concerning(tuple(units), [leaf.path for leaf in leaves]):
            finish = start_scatter(transform_of(leaves[0]), grads, specs, states)
        self._flying.append(_Flight(leaves, finish, nbytes))

    @_compat.outside_selective_checkpoint()
    def _land(self) -> None:
        leaves, finish, _ = self._flying.popleft()
        with torch.no_grad():
            grads, states = finish()
            pairs = list(zip(leaves, grads, strict=True))
            for leaf, state in zip(leaves, states, strict=True):
                leaf.state = state
            # Divided now, while they are in the processor's cache.
            for derived, divisor in ((True, 1), (False, self._divisor)):
                chosen = [(leaf, grad) for leaf, grad in pairs if leaf.derived is derived]
                parts = divided_parts([leaf.as_part(grad) for leaf, grad in chosen], divisor)
                for (leaf, _), part in zip(chosen, parts, strict=True):
                    leaf.add_reduced(part)

    def _start_all(self, least: int = 0) -> None:
        """Start all buckets of at least so many bytes."""
        for bucket in self._buckets.values():
            # Leaves without elements are reduced too.
            if bucket.leaves and bucket.nbytes >= least:
                self._start(bucket)

    def _land_all(self) -> None:
        while self._flying:
            self._land()


def _is_left(use: Use, running: int | None) -> bool:
    """Whether autograd has left a use: it runs a node that was made before the use."""
    return running is not None and use.sequence > running
