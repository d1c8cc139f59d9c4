"""Tiers: `make test` runs a sample of each large table, `make slow` the other rows."""

import random
from collections.abc import Container, Hashable, Sequence
from itertools import combinations

import pytest

# Rows of one test that `make test` runs, where the test does not say another number by @pytest.mark.rows(number).
ROWS = 3

Row = tuple[Hashable, ...]


def sample(table: Sequence[Row], most: int, seed: str, preferred: Container[int] = ()) -> list[int]:
    """Choose rows of a table: as many values of each column as possible, then as many pairs of values.

    Args:
        table: Rows of equal length.
        most: Rows to choose, if there are as many.
        seed: Chooses between rows that add as much.
        preferred: Numbers of the rows to choose first of those that add as much.

    Returns:
        The numbers of the chosen rows, in order.
    """
    order = list(range(len(table)))
    random.Random(seed).shuffle(order)
    order.sort(key=lambda number: number not in preferred)
    values, pairs, chosen = set(), set(), []
    while order and len(chosen) < most:

        def gain(number: int) -> tuple[int, int]:
            return len(_values(table[number]) - values), len(_pairs(table[number]) - pairs)  # noqa: B023

        best = max(order, key=gain)
        order.remove(best)
        chosen.append(best)
        values |= _values(table[best])
        pairs |= _pairs(table[best])
    return sorted(chosen)


def _values(row: Row) -> set[Hashable]:
    return set(enumerate(row))


def _pairs(row: Row) -> set[Hashable]:
    return set(combinations(enumerate(row), 2))


def mark_slow_rows(items: Sequence[pytest.Item]) -> None:
    """Mark the rows slow that are not in the sample of their table; the same rows in every run."""
    tables: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, rows in tables.items():
        marker = rows[0].get_closest_marker("rows")
        most = ROWS if marker is None else marker.args[0]
        # Values by identity: they need no hash, and rows share those of a column. pytest's own indices count rows.
        columns = [tuple(id(value) for _, value in sorted(row.callspec.params.items())) for row in rows]
        # One rank shows little, and eight take long.
        few = {
            number for number, row in enumerate(rows) if row.callspec.params.get("world_size") in (2, 3, "2 processes")
        }
        chosen = set(sample(columns, most, name, few))
        for number, row in enumerate(rows):
            if number not in chosen:
                row.add_marker(pytest.mark.slow)
