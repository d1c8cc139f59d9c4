"""The ranks of a call: what they show each other, which of them agree, and what is first on any of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.fx import Node

from fshard import Axis
from fshard.ext.replay.places import Operations, Place
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
        self._grid = np.arange(len(self.numbers)).reshape([axis.size for axis in self.axes], order="F")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return all_gather_object(value, self.axes, self._api_name)

    def along(self, names: Axes) -> list[int]:
        """List the indices of the ranks that differ from this one in no coordinate but those of some axes."""
        here = np.unravel_index(self.place, self._grid.shape, order="F")
        chosen: list[Any] = list(here)
        for number, axis in enumerate(self.axes):
            if axis.name in names:
                chosen[number] = slice(None)
        indices: list[int] = self._grid[tuple(chosen)].ravel(order="F").tolist()
        return indices

    def find_agreement(self, values: Sequence[Any]) -> Axes:
        """Find the axes along which values of all ranks are equal."""
        table = np.array(values, dtype=object)[self._grid]
        agreement = set()
        for number, axis in enumerate(self.axes):
            if (table == table.take([0], axis=number)).all():
                agreement.add(axis.name)
        return frozenset(agreement)

    def find_first(
        self, operations: Operations, node: Node | None, facts: Sequence[Any], is_last: bool = False
    ) -> tuple[Place, list[Any]] | None:
        """Find which of the nodes that ranks bring comes first.

        Args:
            operations: The nodes of this rank's graph.
            node: This rank's node; None if it has none.
            facts: What it says of it, as JSON holds it.
            is_last: Whether it comes after the nodes of all other ranks.

        Returns:
            The place of the first node, with the ranks that brought the same operation after as many waits, and the
            facts of the first of these; None if no rank has brought any.
        """
        entry = None
        if node is not None:
            waits, number = operations.order(node)
            entry = [
                is_last,
                waits,
                number,
                str(operations.names[node]),
                operations.locate(node),
                facts,
                process_rank(),
            ]
        entries = [entry for entry in self.gather(entry) if entry is not None]
        if not entries:
            return None
        first = min(entries, key=lambda entry: entry[:3])
        numbers = []
        for *order, _, name, _, _, number in entries:
            if [*order, name] == [*first[:2], first[3]]:
                numbers.append(number)
        return Place.read(first[4], numbers), first[5]
