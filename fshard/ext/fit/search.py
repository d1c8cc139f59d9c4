"""Search: which storages are not kept, so that the step fits a budget in little more time."""

from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fshard.ext.fit.emit import Placed, Schedule, StaleError, emit
from fshard.ext.fit.step import Step

# The search lowers the peak in steps of this part of what the step holds beyond the arguments, or of less.
_PARTS = (16, 128)
# It ends where it cannot lower the peak by this part.
_LEAST_PART = 512
# How often it halves decisions that do not lower the peak, and how many it tries one by one afterwards.
_HALVINGS = 5
_TRIES = 8


class Decision(NamedTuple):
    """A storage that is not kept while nobody uses it.

    Attributes:
        cuts: For the storage, and for those that a copy needs and nobody else holds by then, the place to cut.
        begin: The place of the last use before.
        end: The place of the next use.
        bytes: The bytes of the storage.
        worth: Bytes times places at which they are too many, by seconds of the copies.
    """

    cuts: dict[int, int]
    begin: int
    end: int
    bytes: int
    worth: float


class Plan(NamedTuple):
    """Decisions, and the order of operators that follows from them."""

    decisions: list[Decision]
    schedule: Schedule


def find_plan(step: Step, budget: int) -> Plan:
    """Find the first plan that fits a budget, on a way of plans that does not depend on the budget.

    Each plan of the way has the decisions of the one before and more, a lower peak, and no fewer copies and seconds. So
    with a larger budget the search stops earlier, and never needs more time.

    Args:
        step: The step.
        budget: The bytes that it may hold.

    Returns:
        The plan. If none fits, the last one, whose peak is the least that is reached.
    """
    plan = Plan([], emit(step, {}))
    before = plan
    beyond_arguments = plan.schedule.peak - step.arguments
    while plan.schedule.peak > budget:
        lower = _lower(step, plan, beyond_arguments)
        if lower is None:
            return plan
        before = plan
        plan = lower
    return _refine(step, before, plan, budget)


def _refine(step: Step, before: Plan, plan: Plan, budget: int) -> Plan:
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


def _costs_no_less(plan: Plan, other: Plan) -> bool:
    schedule = plan.schedule
    return schedule.seconds >= other.schedule.seconds and schedule.copies >= other.schedule.copies


def _make_plan(step: Step, decisions: list[Decision]) -> Plan | None:
    try:
        return Plan(decisions, emit(step, _join_cuts(decisions)))
    except StaleError:
        return None


def _join_cuts(decisions: Sequence[Decision]) -> dict[int, list[int]]:
    cuts = defaultdict[int, list[int]](list)
    for decision in decisions:
        for storage, time in decision.cuts.items():
            if time not in cuts[storage]:
                insort(cuts[storage], time)
    return dict(cuts)


def _lower(step: Step, plan: Plan, beyond_arguments: int) -> Plan | None:
    """Find a plan of a lower peak with the decisions of another and more; None if there is none."""
    peak = plan.schedule.peak
    enough = peak - max(1, beyond_arguments // _LEAST_PART)
    for part in _PARTS:
        target = peak - max(1, beyond_arguments // part)
        ranked = rank_decisions(step, plan, target)
        batch = _take_until(plan.schedule, ranked, target)
        attempts = [batch[: len(batch) >> halvings] for halvings in range(_HALVINGS)]
        if part == _PARTS[-1]:
            at_peak = int(plan.schedule.held.argmax())
            singles = [[decision] for decision in ranked if decision.begin < at_peak < decision.end]
            attempts += singles[:_TRIES]
        for decisions in filter(None, attempts):
            lower = _make_plan(step, plan.decisions + decisions)
            if lower is not None and lower.schedule.peak <= enough and _costs_no_less(lower, plan):
                return lower
    return None


def _take_until(schedule: Schedule, ranked: Sequence[Decision], target: int) -> list[Decision]:
    """Take decisions, the best first, until no more than the target is held anywhere, if copies need no memory."""
    held = schedule.held.copy()
    taken: list[Decision] = []
    for decision in ranked:
        span = held[decision.begin + 1 : decision.end]
        if span.max() > target:
            span -= decision.bytes
            taken.append(decision)
    return taken


def rank_decisions(step: Step, plan: Plan, target: int) -> list[Decision]:
    """List the decisions that free memory where more is held than the target, the best first."""
    schedule = plan.schedule
    finder = _ChainFinder(step, schedule)
    cuts = _join_cuts(plan.decisions)
    too_many = np.concatenate([[0], np.cumsum(schedule.held > target)])
    decisions: list[Decision] = []
    for buffer, places in enumerate(schedule.uses):
        storage = schedule.storages[buffer]
        for begin, end in pairwise(places):
            freed = int(too_many[end] - too_many[begin + 1]) if end > begin + 1 else 0
            time = schedule.placed[begin].time
            if freed == 0 or time >= schedule.placed[end].time or time in cuts.get(storage, ()):
                continue
            chain = finder.find_chain(buffer, begin, end)
            if chain is not None:
                nbytes = step.sizes[storage]
                worth = nbytes * freed / (chain.seconds + 1e-9)
                decisions.append(Decision(chain.cuts, begin, end, nbytes, worth))
    return sorted(decisions, key=lambda decision: (-decision.worth, decision.begin, decision.end))


class _Chain(NamedTuple):
    """The operators that run again for one storage: what has to be cut for it, and their seconds."""

    cuts: dict[int, int]
    seconds: float


class _ChainFinder:
    """Finds what would run again if a storage was not kept, in an order of operators."""

    def __init__(self, step: Step, schedule: Schedule) -> None:
        self._step = step
        self._schedule = schedule
        self._buffers_of_storage = defaultdict[int, list[int]](list)
        for buffer, storage in enumerate(schedule.storages):
            if schedule.uses[buffer]:
                self._buffers_of_storage[storage].append(buffer)

    def find_chain(self, buffer: int, begin: int, end: int) -> _Chain | None:
        """Find the chain of copies that make a buffer again for its next use; None if it cannot be made again."""
        user: Placed = self._schedule.placed[end]
        waiting = [
            number for number, place in user.inputs.items() if buffer in self._schedule.placed[place].buffers.values()
        ]
        if not waiting:
            # It is not read there: a message that is sent from it has arrived.
            return None
        cuts = {self._schedule.storages[buffer]: self._schedule.placed[begin].time}
        seconds = 0.0
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            entry = self._step.operators[number]
            if number in seen or not entry.storages or self._is_there(number, user.time, end, cuts):
                continue
            seen.add(number)
            if not entry.can_copy or entry.fresh_until < user.time:
                return None
            for storage in entry.storages:
                if storage not in cuts and not self._is_held_from(storage, end):
                    cuts[storage] = self._find_last_use(storage, end)
            seconds += entry.seconds
            waiting += entry.copy_inputs
        return _Chain(cuts, seconds)

    def _is_there(self, number: int, time: int, end: int, cuts: dict[int, int]) -> bool:
        """Whether a value, or an equal one, is held at a place; or made again behind it, where the copy moves up."""
        entry = self._step.operators[number]
        if cuts.keys().isdisjoint(entry.storages) and all(self._is_held_from(s, end) for s in entry.storages):
            return True
        for other in entry.equals:
            storages = self._step.operators[other].storages
            if other == number or other >= time or not cuts.keys().isdisjoint(storages):
                continue
            if storages and all(self._is_held_at(storage, end) for storage in storages):
                return True
        return False

    def _is_held_from(self, storage: int, place: int) -> bool:
        uses = self._schedule.uses
        return any(uses[buffer][-1] >= place for buffer in self._buffers_of_storage[storage])

    def _is_held_at(self, storage: int, place: int) -> bool:
        uses = self._schedule.uses
        return any(uses[buffer][0] < place <= uses[buffer][-1] for buffer in self._buffers_of_storage[storage])

    def _find_last_use(self, storage: int, before: int) -> int:
        """Return the time of the last use of a storage before a place, or of its maker if that is not needed now."""
        places: list[int] = []
        for buffer in self._buffers_of_storage[storage]:
            places += [place for place in self._schedule.uses[buffer] if place < before]
        if not places:
            return self._step.makers[storage]
        return self._schedule.placed[max(places)].time
