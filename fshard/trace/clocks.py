"""Clocks: how far those of ranks are apart."""

import time
from collections.abc import Sequence

from fshard import comm
from fshard.tree import Axis

# Exchanges of which the closest ones count.
ROUNDS = 16

LABEL = "trace"


def exchange(axis: Axis) -> list[tuple[int, int]]:
    """Exchange a number with all ranks several times, and note when each exchange began and ended here."""
    noted = []
    for _ in range(ROUNDS if axis.size > 1 else 0):
        begin = time.perf_counter_ns()
        comm.highest([0], [axis], LABEL)
        noted.append((begin, time.perf_counter_ns()))
    return noted


def offsets(exchanges: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[int], int]:
    """Find how far each rank's clock is ahead of the first one's.

    No exchange ends on any rank before it has begun on all, which bounds the difference of two clocks from both sides.
    Where the bounds allow none, as on one host, whose processes share a clock, there is none.

    Args:
        exchanges: What `exchange` noted on each rank.

    Returns:
        Nanoseconds for each rank, and by how many they may be wrong.

    >>> offsets([[(0, 10), (20, 24)], [(2, 11), (20, 25)]])
    ([0, 0], 5)
    >>> offsets([[(0, 10), (20, 24)], [(1002, 1011), (1020, 1025)]])
    ([0, 1000], 5)
    """
    found, errors = [0], [0]
    first, *others = exchanges
    for other in others:
        pairs = list(zip(first, other, strict=True))
        low = max(theirs[0] - mine[1] for mine, theirs in pairs)
        high = min(theirs[1] - mine[0] for mine, theirs in pairs)
        ahead = 0 if low <= 0 <= high else (low + high) // 2
        found.append(ahead)
        errors.append(max(ahead - low, high - ahead))
    return found, max(errors)
