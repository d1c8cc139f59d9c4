"""Search: which storages are not kept, so that the step fits a budget in little more time."""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from fshard.ext.fit.emit import Placed, Schedule, StaleError, emit
from fshard.ext.fit.step import StepFacts
from fshard.extend import graph_nodes

# The search lowers the peak in steps of this part of what the step holds beyond the arguments, or of less.
_PARTS = (16, 128)
# It ends where it cannot lower the peak by this part.
_LEAST_PART = 512
# How often it halves decisions that do not lower the peak, and how many it tries one by one afterwards.
_HALVINGS = 5
_TRIES = 8
# Seconds that are added to those of a chain, which may be 0.
_SHORTEST = 1e-9


class Decision(NamedTuple):
    """A storage that is not kept while nobody uses it.

    Attributes:
        storage: The storage.
        time: The place behind which it is not kept.
        begin: The place of the last use before.
        end: The place of the next use.
        bytes: The bytes of the storage.
    """

    storage: int
    time: int
    begin: int
    end: int
    bytes: int


class FitPlan(NamedTuple):
    """Decisions, and the order of operators that follows from them."""

    decisions: list[Decision]
    schedule: Schedule


def find_plan(step: StepFacts, budget: int) -> FitPlan:
    """Find the first plan that fits a budget, on a way of plans that does not depend on the budget.

    Each plan of the way has the decisions of the one before and more, a lower peak, and no fewer copies and seconds. So
    with a larger budget the search stops earlier, and never needs more time.

    Args:
        step: The step.
        budget: The bytes that it may hold.

    Returns:
        The plan. If none fits, the last one, whose peak is the least that is reached.
    """
    plan = FitPlan([], emit(step, {}))
    before = plan
    beyond_arguments = plan.schedule.peak - step.arguments
    while plan.schedule.peak > budget:
        lower = _lower(step, plan, beyond_arguments)
        if lower is None:
            return plan
        before = plan
        plan = lower
    return _refine(step, before, plan, budget)


def _refine(step: StepFacts, before: FitPlan, plan: FitPlan, budget: int) -> FitPlan:
    """Take the decisions between two plans that the budget does not need back, by halving their number.

    For a larger budget each turn takes back as many or more, so that the way stays one for all budgets.
    """
    while len(plan.decisions) - len(before.decisions) > 1:
        middle = (len(plan.decisions) + len(before.decisions)) // 2
        halfway = _make_plan(step, plan.decisions[:middle])
        if halfway is None or not (_costs_no_less(halfway, before) and _costs_no_less(plan, halfway)):
            return plan
        if halfway.schedule.peak <= budget:
            plan = halfway
        else:
            before = halfway
    return plan


def _costs_no_less(plan: FitPlan, other: FitPlan) -> bool:
    schedule = plan.schedule
    return schedule.seconds >= other.schedule.seconds and schedule.copies >= other.schedule.copies


def _make_plan(step: StepFacts, decisions: list[Decision]) -> FitPlan | None:
    try:
        return FitPlan(decisions, emit(step, _join_cuts(decisions)))
    except StaleError:
        return None


def _join_cuts(decisions: Sequence[Decision]) -> dict[int, list[int]]:
    cuts = defaultdict[int, list[int]](list)
    for decision in decisions:
        if decision.time not in cuts[decision.storage]:
            insort(cuts[decision.storage], decision.time)
    return dict(cuts)


def _lower(step: StepFacts, plan: FitPlan, beyond_arguments: int) -> FitPlan | None:
    """Find a plan of a lower peak with the decisions of another and more; None if there is none."""
    peak = plan.schedule.peak
    enough = peak - max(1, beyond_arguments // _LEAST_PART)
    for part in _PARTS:
        for decisions in _propose(step, plan, peak - max(1, beyond_arguments // part), part == _PARTS[-1]):
            lower = _make_plan(step, plan.decisions + decisions)
            if lower is not None and lower.schedule.peak <= enough and _costs_no_less(lower, plan):
                return lower
    return None


def _propose(step: StepFacts, plan: FitPlan, target: int, singly: bool) -> Iterator[list[Decision]]:
    """Propose decisions that may lower the peak to a target: many, fewer of them, and then single ones."""
    batch = _take_until(plan.schedule, rank_decisions(step, plan, target), target)
    for halvings in range(len(batch).bit_length())[:_HALVINGS]:
        yield batch[: len(batch) >> halvings]
    if singly:
        at_peak = int(plan.schedule.held.argmax())
        ranked = rank_decisions(step, plan, target)
        singles = ([decision] for decision in ranked if decision.begin < at_peak < decision.end)
        yield from islice(singles, _TRIES)


def _take_until(schedule: Schedule, ranked: Iterable[Decision], target: int) -> list[Decision]:
    """Take decisions, the best first, until no more than the target is held anywhere, if copies need no memory."""
    held = schedule.held.copy()
    taken: list[Decision] = []
    for decision in ranked:
        span = held[decision.begin + 1 : decision.end]
        if span.max() > target:
            span -= decision.bytes
            taken.append(decision)
        if held.max() <= target:
            break
    return taken


def rank_decisions(step: StepFacts, plan: FitPlan, target: int) -> Iterator[Decision]:
    """List the decisions that free memory where more is held than the target, the best first."""
    schedule = plan.schedule
    finder = _ChainFinder(step, schedule)
    # A chain is followed only while it may be the best of all: most chains of deep models are long, and never taken.
    heap: list[tuple[float, int, int, int, int]] = []
    for begin, end, buffer, freed in _list_gaps(step, plan, target):
        gain = step.sizes[schedule.storages[buffer]] * freed
        heap.append((-gain / _SHORTEST, begin, end, buffer, gain))
    heapify(heap)
    while heap:
        _, begin, end, buffer, gain = heappop(heap)
        next_worth = -heap[0][0] if heap else 1e-30
        seconds = finder.estimate_seconds(buffer, end, 8 * gain / next_worth)
        if seconds is None:
            continue
        entry = (-gain / (seconds + _SHORTEST), begin, end, buffer, gain)
        if heap and entry > heap[0]:
            heappush(heap, entry)
        else:
            storage = schedule.storages[buffer]
            yield Decision(storage, schedule.placed[begin].time, begin, end, step.sizes[storage])


def _list_gaps(step: StepFacts, plan: FitPlan, target: int) -> Iterator[tuple[int, int, int, int]]:
    """List between which two uses a buffer is idle where too much is held, and at how many places that is."""
    schedule = plan.schedule
    cuts = _join_cuts(plan.decisions)
    too_many = np.concatenate([[0], np.cumsum(schedule.held > target)])
    for buffer, places in enumerate(schedule.uses):
        done = cuts.get(schedule.storages[buffer], ())
        for begin, end in pairwise(places):
            freed = int(too_many[end] - too_many[begin + 1]) if end > begin + 1 else 0
            time = schedule.placed[begin].time
            user = step.operators[schedule.placed[end].number]
            is_pending = graph_nodes.is_wait(user.node) and not schedule.placed[end].is_copy
            if freed and not is_pending and time < schedule.placed[end].time and time not in done:
                yield begin, end, buffer, freed


class _ChainFinder:
    """Finds how long it takes to make a storage again that was not kept, in an order of operators."""

    def __init__(self, step: StepFacts, schedule: Schedule) -> None:
        self._step = step
        self._schedule = schedule
        # For each storage the places of the first and the last use of each of its buffers.
        self._lives = defaultdict[int, list[tuple[int, int]]](list)
        # The place of the last use of each storage, whichever buffer it is.
        self._last_places = [-1] * len(step.sizes)
        for storage, places in zip(schedule.storages, schedule.uses, strict=True):
            if places:
                self._lives[storage].append((places[0], places[-1]))
                self._last_places[storage] = max(self._last_places[storage], places[-1])

    def estimate_seconds(self, buffer: int, end: int, limit: float) -> float | None:
        """Estimate the time to make a buffer again for its next use; None if it cannot be made again.

        Of a chain of copies that takes longer than the limit, it is the time of the part until then.
        """
        placed = self._schedule.placed
        user: Placed = placed[end]
        # Nothing, if a message that is sent from the buffer has arrived.
        waiting = [number for number, place in user.inputs.items() if buffer in placed[place].buffers.values()]
        seconds = 0.0
        seen: set[int] = set()
        while waiting and seconds <= limit:
            number = waiting.pop()
            entry = self._step.operators[number]
            if number in seen or self._is_there(number, user.time, end, self._schedule.storages[buffer]):
                continue
            seen.add(number)
            if not entry.can_copy or entry.fresh_until < user.time:
                return None
            seconds += entry.seconds
            waiting += entry.copy_inputs
        return seconds if seen else None

    def _is_there(self, number: int, time: int, end: int, dropped: int) -> bool:
        """Whether a value, or an equal one, is held at a place; or made again behind it, where the copy moves up."""
        entry = self._step.operators[number]
        if all(storage != dropped and self._last_places[storage] >= end for storage in entry.storages):
            return True
        return any(other < time and self._is_held(other, end, dropped) for other in entry.equals if other != number)

    def _is_held(self, number: int, place: int, dropped: int) -> bool:
        storages = self._step.operators[number].storages
        if not storages or dropped in storages:
            return False
        return all(any(first < place <= last for first, last in self._lives[storage]) for storage in storages)
