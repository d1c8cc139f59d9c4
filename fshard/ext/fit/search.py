"""Search: which storages are not kept, so that the step fits a budget in little more time."""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from fshard.ext.fit.schedule import Schedule, StaleError
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
    plan = FitPlan([], Schedule(step, {}))
    before = plan
    beyond_arguments = plan.schedule.peak - step.arguments
    while plan.schedule.peak > budget:
        lower = _lower(plan, beyond_arguments)
        if lower is None:
            return plan
        before = plan
        plan = lower
    return _refine(before, plan, budget)


def _refine(before: FitPlan, plan: FitPlan, budget: int) -> FitPlan:
    """Take the decisions between two plans that the budget does not need back, by halving their number.

    For a larger budget each turn takes back as many or more, so that the way stays one for all budgets.
    """
    while len(plan.decisions) - len(before.decisions) > 1:
        middle = (len(plan.decisions) + len(before.decisions)) // 2
        halfway = _make_plan(plan.schedule.step, plan.decisions[:middle])
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
    cuts = defaultdict[int, list[int]](list)
    for decision in decisions:
        if decision.time not in cuts[decision.storage]:
            insort(cuts[decision.storage], decision.time)
    try:
        return FitPlan(decisions, Schedule(step, dict(cuts)))
    except StaleError:
        return None


def _lower(plan: FitPlan, beyond_arguments: int) -> FitPlan | None:
    """Find a plan of a lower peak with the decisions of another and more; None if there is none."""
    peak = plan.schedule.peak
    enough = peak - max(1, beyond_arguments // _LEAST_PART)
    for part in _PARTS:
        for decisions in _propose(plan.schedule, peak - max(1, beyond_arguments // part), part == _PARTS[-1]):
            lower = _make_plan(plan.schedule.step, plan.decisions + decisions)
            if lower is not None and lower.schedule.peak <= enough and _costs_no_less(lower, plan):
                return lower
    return None


def _propose(schedule: Schedule, target: int, singly: bool) -> Iterator[list[Decision]]:
    """Propose decisions that may lower the peak to a target: many, fewer of them, and then single ones."""
    batch = _take_until(schedule, rank_decisions(schedule, target), target)
    for halvings in range(len(batch).bit_length())[:_HALVINGS]:
        yield batch[: len(batch) >> halvings]
    if singly:
        at_peak = int(schedule.held.argmax())
        ranked = rank_decisions(schedule, target)
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


def rank_decisions(schedule: Schedule, target: int) -> Iterator[Decision]:
    """List the decisions that free memory where more is held than the target, the best first."""
    # A chain is followed only while it may be the best of all: most chains of deep models are long, and never taken.
    heap: list[tuple[float, int, int, int, int]] = []
    for begin, end, buffer, freed in _list_gaps(schedule, target):
        gain = schedule.step.sizes[schedule.storages[buffer]] * freed
        heap.append((-gain / _SHORTEST, begin, end, buffer, gain))
    heapify(heap)
    while heap:
        _, begin, end, buffer, gain = heappop(heap)
        next_worth = -heap[0][0] if heap else 1e-30
        seconds = schedule.estimate_seconds(buffer, end, 8 * gain / next_worth)
        if seconds is None:
            continue
        entry = (-gain / (seconds + _SHORTEST), begin, end, buffer, gain)
        if heap and entry > heap[0]:
            heappush(heap, entry)
        else:
            storage = schedule.storages[buffer]
            yield Decision(storage, schedule.placed[begin].time, begin, end, schedule.step.sizes[storage])


def _list_gaps(schedule: Schedule, target: int) -> Iterator[tuple[int, int, int, int]]:
    """List between which two uses a buffer is idle where too much is held, and at how many places that is."""
    too_many = np.concatenate([[0], np.cumsum(schedule.held > target)])
    for buffer, places in enumerate(schedule.uses):
        done = schedule.cuts.get(schedule.storages[buffer], ())
        for begin, end in pairwise(places):
            freed = int(too_many[end] - too_many[begin + 1]) if end > begin + 1 else 0
            time = schedule.placed[begin].time
            user = schedule.placed[end]
            is_pending = graph_nodes.is_wait(schedule.step.operators[user.number].node) and not user.is_copy
            if freed and not is_pending and time < user.time and time not in done:
                yield begin, end, buffer, freed
