"""The ranks of a call: what they show each other, and which of them agree."""

import itertools
from collections.abc import Sequence
from typing import Any

from fshard import Axis
from fshard.ext.replay.shared import Axes
from fshard.extend import all_gather_object, process_rank


class Ranks:
    """The ranks of some axes, in the order of `all_gather_object`.

    Attributes:
        axes: The axes.
        numbers: The numbers of the ranks in the run.
        place: The index of this rank.
    """

    def __init__(self, api_name: str, axes: Sequence[Axis]) -> None:
        self._api_name = api_name
        self.axes = sorted((axis for axis in axes if axis.size > 1), key=lambda axis: axis.name)
        self.numbers: list[int] = self.gather(process_rank())
        self.place = self.numbers.index(process_rank())
        # The first axis varies fastest.
        sizes = [range(axis.size) for axis in reversed(self.axes)]
        self._coordinates: list[tuple[int, ...]] = [coordinates[::-1] for coordinates in itertools.product(*sizes)]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return all_gather_object(value, self.axes, self._api_name)

    def along(self, names: Axes) -> list[int]:
        """List the indices of the ranks that differ from this one in no coordinate but those of some axes."""
        fixed = [number for number, axis in enumerate(self.axes) if axis.name not in names]
        keys = [[coordinates[number] for number in fixed] for coordinates in self._coordinates]
        return [index for index, key in enumerate(keys) if key == keys[self.place]]

    def find_agreement(self, values: Sequence[Any]) -> Axes:
        """Find the axes along which values of all ranks are equal."""
        agreement = set()
        for number, axis in enumerate(self.axes):
            # For the coordinates on the other axes the values along this one.
            lines: dict[tuple[int, ...], set[Any]] = {}
            for coordinates, value in zip(self._coordinates, values, strict=True):
                others = coordinates[:number] + coordinates[number + 1 :]
                lines.setdefault(others, set()).add(value)
            if all(len(line) == 1 for line in lines.values()):
                agreement.add(axis.name)
        return frozenset(agreement)

    def find_first(self, order: Any, name: str, finding: Any) -> tuple[Any, list[int]] | None:
        """Find which of the findings of all ranks comes first, and the numbers of the ranks that have it.

        Args:
            order: The key of this rank's finding: how many waits come before it, and its number.
            name: The name of its operation.
            finding: What this rank has found, as JSON holds it; None if nothing.

        Returns:
            The finding of the rank whose key is least, and the ranks that found the same operation after as many waits;
            None if no rank has found any.
        """
        entries = [entry for entry in self.gather([order, name, finding, process_rank()]) if entry[2] is not None]
        if not entries:
            return None
        first_order, first_name, first, _ = min(entries, key=lambda entry: entry[0])
        ranks = []
        for other_order, other_name, _, number in entries:
            if other_name == first_name and other_order[0] == first_order[0]:
                ranks.append(number)
        return first, ranks
