"""The schedule: which units are gathered, computed with, reduced and dropped, in one order on every rank.

All functions here are pure: they map descriptions of units, and facts of a forward, to lists of steps. The engine, its
trace by `fs.jit`, and error messages read those lists.
"""

import itertools
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of steps.

    GATHER starts the all-gather of a use. OPEN is where the forward starts to compute with it, and the backward to
    differentiate. REDUCE reduces gradients of leaves that come at once. CLOSE is where another use may replace it.
    COLLECTIVE is where the function's own collective begins or ends; no later step comes before it on any rank.
    """

    GATHER = "gather"
    OPEN = "open"
    REDUCE = "reduce"
    CLOSE = "close"
    COLLECTIVE = "collective"


class Step(NamedTuple):
    """One step of a forward or a backward.

    Attributes:
        kind: What it does.
        use: Number of the use, in the order of the forward; for COLLECTIVE, of the step among COLLECTIVE steps.
        leaves: For REDUCE, the numbers of the leaves in their unit.
    """

    kind: Kind
    use: int
    leaves: tuple[int, ...] = ()


class Part(NamedTuple):
    """A unit of a module, before small neighbours are merged.

    Attributes:
        nbytes: Bytes that a gather of it moves.
        regathered: Whether it is dropped after the forward and gathered again in the backward.
        merge_bytes: Neighbours are merged up to this size.
        end: Number of the first unit behind it that does not lie inside it.
        apart: Whether it is never merged, because ranks may enter it in an order of their own.
    """

    nbytes: int
    regathered: bool
    merge_bytes: int
    end: int
    apart: bool = False


class Bucket(NamedTuple):
    """Units that are gathered together.

    Attributes:
        regathered: Whether they are dropped after the forward and gathered again in the backward.
        first: Number of the first of them.
        last: Number of the last of them.
        end: Number of the unit after the last one that lies inside them.
    """

    regathered: bool
    first: int
    last: int
    end: int


class Ahead(NamedTuple):
    """How far gathers run ahead of the use that computes.

    Attributes:
        uses: Gather at least so many uses ahead.
        nbytes: Gather further ahead while the total stays within these bytes.
    """

    uses: int
    nbytes: int

    def count(self, sizes: Iterable[int]) -> int:
        """Count the uses that are gathered ahead, by the bytes of those that come next."""
        totals = enumerate(itertools.accumulate(sizes), start=1)
        return sum(1 for _ in itertools.takewhile(lambda n: n[0] <= self.uses or n[1] <= self.nbytes, totals))


def merge(parts: Sequence[Part]) -> list[Bucket]:
    """Merge small neighbours.

    Args:
        parts: Units in the order of their gathering, each before those that lie inside it.

    Returns:
        The buckets. A unit is merged with all units inside it or with none; units inside different parents are merged
        only along with those.
    """
    buckets: list[Bucket] = []
    around: list[int] = []
    i, size, parent_before = 0, 0, -1
    while i < len(parts):
        part = parts[i]
        while around and parts[around[-1]].end <= i:
            around.pop()
        parent = around[-1] if around else -1
        inside = parts[i : part.end]
        nbytes, end = sum(other.nbytes for other in inside), part.end
        if not (nbytes <= part.merge_bytes and _alike(inside)):
            nbytes, end = part.nbytes, i + 1
        last = buckets[-1] if buckets else None
        chained = last is not None and last.end == i and part.end == end and parent == parent_before
        # Units whose leaves ranks hold whole cost nothing to gather, and are merged with any neighbour.
        fits = nbytes == 0 or size + nbytes <= part.merge_bytes
        if last and chained and fits and _alike(parts[i - 1 : end]):
            size += nbytes
            buckets[-1] = Bucket(last.regathered, last.first, end - 1, end)
        else:
            size = nbytes
            buckets.append(Bucket(part.regathered, i, end - 1, part.end))
        if part.end > end:
            around.append(i)
        i, parent_before = end, parent
    return buckets


def _alike(parts: Sequence[Part]) -> bool:
    """Tell whether units may be merged: one always, several if they share a policy and ranks enter them in order."""
    return len(parts) == 1 or (len({part.regathered for part in parts}) == 1 and not any(part.apart for part in parts))


def forward(sizes: Sequence[int], aheads: Sequence[Ahead]) -> list[Step]:
    """List the steps of a pass over uses whose order is known.

    Args:
        sizes: For each use the bytes that its gather moves.
        aheads: For each use how far gathers run ahead while it computes.

    Returns:
        GATHER and OPEN of each.
    """
    steps: list[Step] = []
    started = 0
    for number, ahead in enumerate(aheads):
        to = max(started, number + 1 + ahead.count(sizes[number + 1 :]))
        steps.extend(Step(Kind.GATHER, use) for use in range(started, to))
        steps.append(Step(Kind.OPEN, number))
        started = to
    return steps


class Turn(NamedTuple):
    """The facts about one use that the backward needs.

    Attributes:
        again: Whether it is gathered again.
        size: The bytes that its gather moves.
        ahead: How far gathers run ahead while it is differentiated.
        due: Groups of leaves whose gradients are complete when the backward leaves the use, in the order of their
            reduction; the gradients of a group arrive at once.
        nbytes: Bytes of the gradients of each of these groups.
    """

    again: bool
    size: int
    ahead: Ahead
    due: tuple[tuple[int, ...], ...] = ()
    nbytes: tuple[int, ...] = ()

    def early(self) -> int:
        """Count the reductions within the first three quarters of the bytes: after them most full tensors are gone."""
        sums = list(itertools.accumulate(self.nbytes))
        return sum(4 * total <= 3 * sums[-1] for total in sums)


def backward(events: Sequence[Step], turns: Sequence[Turn]) -> list[Step]:
    """List the steps of a backward: those of its forward, turned around.

    Args:
        events: OPEN and CLOSE of each use, and COLLECTIVE, in the order of the forward.
        turns: The uses by their numbers.

    Returns:
        The steps: a unit's tensors are needed from where the forward closed it, and its gradients are complete where
        the forward opened it.
    """
    again = [step.use for step in reversed(events) if step.kind is Kind.CLOSE and turns[step.use].again]
    place = {use: n for n, use in enumerate(again)}
    steps: list[Step] = []
    started = passed = 0

    def gather(to: int) -> int:
        steps.extend(Step(Kind.GATHER, use) for use in again[started:to])
        return max(started, to)

    def gather_ahead(ahead: Ahead) -> int:
        return gather(passed + ahead.count(turns[use].size for use in again[passed:]))

    for event in reversed(events):
        if event.kind is Kind.COLLECTIVE:
            steps.append(event)
            continue
        turn = turns[event.use]
        early = turn.early()
        if event.kind is Kind.CLOSE:
            passed = max(passed, place.get(event.use, -1) + 1)
            # Gather ahead after the early reductions (three quarters of the bytes), or now if there are none.
            started = gather(passed) if early else gather_ahead(turn.ahead)
            steps.append(Step(Kind.OPEN, event.use))
            continue
        for n, leaves in enumerate(turn.due, start=1):
            steps.append(Step(Kind.REDUCE, event.use, leaves))
            if n == early:
                started = gather_ahead(turn.ahead)
        steps.append(Step(Kind.CLOSE, event.use))
    return steps


def gathered_first(events: Sequence[Step], turns: Sequence[Turn]) -> set[int]:
    """Find the uses that a backward would gather first: those that are still full can stay.

    Args:
        events: As for `backward`.
        turns: As for `backward`.

    Returns:
        Their numbers.
    """
    kinds = (Kind.GATHER, Kind.COLLECTIVE)
    first = itertools.takewhile(lambda step: step.kind in kinds, backward(events, turns))
    return {step.use for step in first if step.kind is Kind.GATHER}


def postponed(events: Sequence[Step], needed: Sequence[int]) -> list[Step]:
    """Move the CLOSE of a use behind the checkpoints that will need it, because the backward comes to them first.

    Args:
        events: OPEN and CLOSE of each use, and COLLECTIVE, in the order of the forward.
        needed: For each use how many events came before the end of a checkpoint that will need it; 0 where none will.

    Returns:
        The events in their new order.
    """

    def key(numbered: tuple[int, Step]) -> tuple[int, bool]:
        number, event = numbered
        until = needed[event.use] - 1 if event.kind is Kind.CLOSE else 0
        return max(number, until), until > number

    return [event for _, event in sorted(enumerate(events), key=key)]
