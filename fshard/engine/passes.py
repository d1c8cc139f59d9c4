"""Passes: applications of a model, which gather its units in one order whichever of them a rank enters."""

import itertools
from collections.abc import Callable, Sequence

from fshard.engine.forward import Forward
from fshard.engine.schedule import Part, merge
from fshard.engine.unit import Leaf, Unit, Use


class Pass:
    """One pass over the units of a model, or over those that a caller's schedule names.

    Units are gathered ahead by the schedule. One that is passed over is gathered at its turn all the same, so that
    ranks stay in step whatever each of them enters; inside a submodule that runs it is held until that has ended,
    because its own entry may come later in that submodule. One that is entered again is gathered outside the schedule.
    """

    def __init__(self, forward: Forward, name: str, units: Sequence[Unit], again: Callable[[Unit], Use]) -> None:
        """Begin before the first unit.

        Args:
            forward: The forward that it is a part of.
            name: The model's name.
            units: In the order of their gathering, each before those that lie inside it.
            again: Finds and regathers the use of a unit for a checkpoint that recomputes with it.
        """
        parts = [
            Part(unit.nbytes, unit.is_regathered, unit.policy.merge_bytes, i + 1 + unit.inside, unit.apart)
            for i, unit in enumerate(units)
        ]
        self._forward, self._again, self._buckets = forward, again, merge(parts)
        self._ends = [part.end for part in parts]
        self._units = [_merged(units[b.first : b.last + 1], b.regathered) for b in self._buckets]
        self._uses = [] if forward.over else forward.begin(name, self._units, self._buckets)
        self._bucket_of = [n for n, b in enumerate(self._buckets) for _ in range(b.first, b.last + 1)]
        self._over = False
        self._open: dict[int, Use] = {}
        self._held: dict[int, Use] = {}
        self._scopes: list[int] = []
        self._running: list[range] = []

    def enter(self, number: int | None, inside: range | None) -> None:
        """Begin to run a submodule.

        Args:
            number: Of the unit whose scope it is, which opens; None where it is that of none.
            inside: The units that it holds, if it holds several.
        """
        if inside is not None:
            self._running.append(inside)
        if number is not None:
            self._reach(self._bucket_of[number])
            self._scopes.append(number)

    def leave(self, number: int | None, inside: range | None) -> None:
        """End a submodule; the use of its bucket is left with the bucket's last unit."""
        if number is not None:
            while self._scopes and self._scopes.pop() != number:
                pass
            bucket = self._bucket_of[number]
            ended = self._ends[number] == self._buckets[bucket].last + 1
            if ended and not self._in_scope(bucket) and bucket in self._open:
                self._forward.leave(self._open.pop(bucket))
        if inside is None:
            return
        while self._running and self._running.pop() != inside:
            pass
        for bucket in list(self._held):
            if not self._share_submodule(bucket, bucket):
                self._forward.leave(self._held.pop(bucket))

    def has(self, unit: Unit) -> bool:
        """Whether a bucket holds all leaves of a unit, and may still be opened, or opened again."""
        bucket = self._bucket_with(unit.leaves[0])
        if bucket is None or (self._over and not self._forward.over):
            return False
        return all(leaf in self._units[bucket].places for leaf in unit.leaves)

    def find(self, leaf: Leaf, in_turn: bool = False) -> Use:
        """Find the use that holds a leaf, innermost scope first; open its bucket where none does.

        Args:
            leaf: The leaf.
            in_turn: Whether the schedule moves on to its bucket; else one out of turn is gathered outside the schedule.
        """
        inner = (self._open[self._bucket_of[number]] for number in reversed(self._scopes))
        for use in itertools.chain(inner, self._open.values()):
            if leaf in use.unit.places:
                return use
        bucket = self._bucket_with(leaf)
        assert bucket is not None
        return self._reach(bucket, in_turn)

    def end(self) -> None:
        """Take part in the rest of the schedule, and close everything."""
        self._over = True
        self._scopes, self._running = [], []
        for use in (*self._open.values(), *self._held.values()):
            self._forward.leave(use)
        self._open, self._held = {}, {}
        if self._uses and not self._uses[-1].opened and not self._forward.over:
            self._forward.reach(self._uses[-1])
            self._forward.leave(self._uses[-1])

    def _bucket_with(self, leaf: Leaf) -> int | None:
        """Find the bucket that holds a leaf; of several (tied leaves) the next that has not been opened."""
        holders = [number for number, unit in enumerate(self._units) if leaf in unit.places]
        ahead = (number for number in holders if self._uses and not self._uses[number].opened)
        return next(ahead, holders[0] if holders else None)

    def _in_scope(self, bucket: int) -> bool:
        return any(self._bucket_of[number] == bucket for number in self._scopes)

    def _reach(self, bucket: int, in_turn: bool = True) -> Use:
        """Open a bucket, and leave those that are open without a scope, because a leaf was read outside its module.

        Reading a leaf before its module runs (a weight's dtype) does not move the schedule.
        """
        for other in [n for n in self._open if n != bucket and not self._in_scope(n)]:
            self._forward.leave(self._open.pop(other))
        if bucket in self._open:
            return self._open[bucket]
        if self._forward.over:
            use = self._again(self._units[bucket])
        elif bucket in self._held:
            use = self._held.pop(bucket)
        elif self._uses[bucket].opened or not (in_turn or self._is_next(bucket)):
            inside = [self._open[self._bucket_of[number]] for number in self._scopes]
            use = self._forward.insert(self._units[bucket], inside)
        else:
            use = self._uses[bucket]
            self._forward.reach(use, lambda passed: self._pass_over(passed, bucket))
        self._open[bucket] = use
        return use

    def _is_next(self, bucket: int) -> bool:
        first = next(n for n, use in enumerate(self._uses) if not use.opened)
        return bucket == first or self._share_submodule(first, bucket)

    def _pass_over(self, use: Use, entered: int) -> None:
        """Hold a use that was passed over if a running submodule may still come to it; else leave it."""
        number = self._uses.index(use) if use in self._uses else None
        if number is not None and self._share_submodule(number, entered):
            self._held[number] = use
        else:
            self._forward.leave(use)

    def _share_submodule(self, one: int, other: int) -> bool:
        """Whether a submodule runs that holds both buckets."""
        firsts = [self._buckets[number].first for number in (one, other)]
        return any(all(first in units for first in firsts) for units in self._running)


def _merged(units: Sequence[Unit], regathered: bool) -> Unit:
    """Join the units of a bucket into one."""
    if len(units) == 1:
        return units[0]
    leaves = dict.fromkeys(leaf for unit in units for leaf in unit.leaves)
    return Unit(f"{units[0].name} to {units[-1].name}", tuple(leaves), regathered=regathered)
