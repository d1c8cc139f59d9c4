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
        large_axes = [axis for axis in axes if axis.size > 1]
        self.axes = sorted(large_axes, key=lambda axis: axis.name)
        self.numbers: list[int] = self.gather(process_rank())
        self.place = self.numbers.index(process_rank())
        # The first axis varies fastest.
        self._coordinates: list[tuple[int, ...]] = []
        for coordinates in itertools.product(*(range(axis.size) for axis in reversed(self.axes))):
            self._coordinates.append(coordinates[::-1])

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return all_gather_object(value, self.axes, self._api_name)

    def along(self, names: Axes) -> list[int]:
        """List the indices of the ranks that differ from this one in no coordinate but those of some axes."""
        here = self._coordinates[self.place]
        indices = []
        for index, coordinates in enumerate(self._coordinates):
            is_along = True
            for axis, coordinate, own_coordinate in zip(self.axes, coordinates, here, strict=True):
                if axis.name not in names and coordinate != own_coordinate:
                    is_along = False
            if is_along:
                indices.append(index)
        return indices

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
        entries = self.gather([order, name, finding, process_rank()])
        entries = [entry for entry in entries if entry[2] is not None]
        if not entries:
            return None
        first_order, first_name, first, _ = min(entries, key=lambda entry: entry[0])
        ranks = []
        for other_order, other_name, _, number in entries:
            if other_name == first_name and other_order[0] == first_order[0]:
                ranks.append(number)
        return first, ranks
