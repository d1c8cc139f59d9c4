"""Search: which storages are not kept, so that the step fits a budget in little more time."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from fshard.ext.fit.schedule import Cut, Schedule, StaleError
from fshard.ext.fit.step import StepFacts
from fshard.extend import graph_nodes

# The search lowers the peak in steps of this part of what the step holds beyond the arguments, or of less.
_PARTS = (16, 128)
# It ends where it cannot lower the peak by this part.
_LEAST_PART = 512
# How many cuts it tries one by one.
_TRIES = 8
# A chain of copies that takes longer than this part of the step is not followed to its end.
_LONGEST_PART = 32
# Seconds that are added to those of a chain, which may be 0.
_SHORTEST = 1e-9


def find_plan(step: StepFacts, budget: int) -> Schedule:
    """Find the first schedule that fits a budget, on a way of schedules that does not depend on the budget.

    Each schedule of the way has the cuts of the one before and more, a lower peak, and no fewer copies and seconds. So
    with a larger budget the search stops earlier, and never needs more time.

    Args:
        step: The step.
        budget: The bytes that it may hold.

    Returns:
        The schedule. If none fits, the last one, whose peak is the least that is reached.
    """
    schedule = before = Schedule(step, [])
    beyond_arguments = schedule.peak - step.arguments
    while schedule.peak > budget:
        before = schedule
        enough = before.peak - max(1, beyond_arguments // _LEAST_PART)
        for cuts in _propose(before, beyond_arguments):
            lower = _try(before, cuts)
            if lower is not None and lower.peak <= enough:
                schedule = lower
                break
        else:
            return before
    # Take back cuts that the budget does not need, by halving their number: for a larger budget as many or more.
    while len(added := schedule.cuts[len(before.cuts) :]) > 1:
        halfway = _try(before, added[: len(added) // 2])
        if halfway is None or not _costs_no_less(schedule, halfway):
            return schedule
        if halfway.peak <= budget:
            schedule = halfway
        else:
            before = halfway
    return schedule


def _try(schedule: Schedule, cuts: Iterable[Cut]) -> Schedule | None:
    """Make a schedule with more cuts; None if a copy would be stale, or if it had fewer copies or seconds."""
    try:
        other = Schedule(schedule.step, [*schedule.cuts, *cuts])
    except StaleError:
        return None
    return other if _costs_no_less(other, schedule) else None


def _costs_no_less(schedule: Schedule, other: Schedule) -> bool:
    return schedule.seconds >= other.seconds and len(schedule.copies) >= len(other.copies)


def _propose(schedule: Schedule, beyond_arguments: int) -> Iterator[list[Cut]]:
    """Propose cuts that may lower the peak: many, fewer of them, and then single ones where most is held."""
    for part in _PARTS:
        target = schedule.peak - max(1, beyond_arguments // part)
        ranked = rank_cuts(schedule, target)
        held = schedule.held.copy()
        cuts: list[Cut] = []
        # Those that would lower the peak if copies needed no memory.
        for cut in ranked:
            span = held[cut.begin + 1 : cut.end]
            if span.max() > target:
                span -= cut.bytes
                cuts.append(cut)
            if held.max() <= target:
                break
        while cuts:
            yield cuts
            cuts = cuts[: len(cuts) // 2]
    at_peak = schedule.held.argmax()
    singles = [cut for cut in ranked if cut.begin < at_peak < cut.end]
    yield from ([cut] for cut in singles[:_TRIES])


def rank_cuts(schedule: Schedule, target: int) -> list[Cut]:
    """List the cuts that free memory where more is held than the target, the best first."""
    is_too_much = schedule.held > target
    longest = schedule.seconds / _LONGEST_PART
    worths: dict[Cut, float] = {}
    for buffer in schedule.buffers:
        for begin, end in pairwise(buffer.uses):
            freed = np.count_nonzero(is_too_much[begin + 1 : end])
            cut = Cut(buffer.storage, schedule.placed[begin].time, begin, end, buffer.bytes)
            user = schedule.placed[end]
            # The buffer of a message that nobody waits for would be held until the process ends.
            if not freed or cut.time >= user.time or graph_nodes.is_wait(user.node):
                continue
            try:
                missing = schedule.find_missing(user.inputs, user.time, cut.storage, longest)
            except StaleError:
                continue
            if missing:
                seconds = math.fsum(schedule.step.seconds[node] for node in missing)
                worths[cut] = buffer.bytes * freed / (seconds + _SHORTEST)
    return sorted(worths, key=worths.__getitem__, reverse=True)
