"""Schedules: from cuts of the lives of storages to an order of operators and copies, its bytes, and its graph."""

import math
import operator
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard.ext.fit.step import StepFacts
from fshard.extend import graph_nodes

# For storages the places behind which they are not kept, in their order.
Cuts = Mapping[int, Sequence[int]]


class StaleError(Exception):
    """A copy would read what has been written to since, or may not be made, or a message would not be waited for."""


class Placed(NamedTuple):
    """An operator in an order.

    Attributes:
        number: Its number in the step.
        time: The number of the node before which it runs, which is its own unless it is a copy.
        inputs: The places of its inputs in the order, by their numbers.
        buffers: The buffers of its results, by their storages. Each copy of a storage is a buffer.
    """

    number: int
    time: int
    inputs: dict[int, int]
    buffers: dict[int, int]

    @property
    def is_copy(self) -> bool:
        """Whether the operator runs again."""
        return self.number != self.time


class Schedule:
    """The order of a step's operators and copies that follows from cuts.

    The operators of the step keep their order. One that needs a storage whose cut lies behind has it made again right
    before itself, and later ones share that copy until the next cut. A storage is gone after its last use, too: a copy
    that needs it has it made again, for the same operator alone.

    Attributes:
        step: The step.
        cuts: The cuts.
        placed: The operators in their order.
        storages: For each buffer its storage.
        uses: For each buffer the places that use it, in their order.
        held: The bytes that are held at each place, arguments included.
        peak: The most of them.
        copies: How many operators run again.
        seconds: An estimate of the time of all operators that may run again.
    """

    def __init__(self, step: StepFacts, cuts: Cuts) -> None:
        """Place the operators; StaleError if a copy would read something else than its original did."""
        self.step = step
        self.cuts = cuts
        # The places of values, by the operator and by `_count_times_gone` of its storages.
        self._places: dict[Hashable, int] = {}
        self.placed: list[Placed] = []
        self.storages: list[int] = []
        for number in range(len(step.operators)):
            self._place_original(number)
        if cuts:
            self._drop_idle()
        self.uses = self._find_uses()
        change = np.zeros(len(self.placed) + 1, dtype=np.int64)
        change[0] = step.arguments
        for storage, places in zip(self.storages, self.uses, strict=True):
            if places:
                change[places[0]] += step.sizes[storage]
                change[places[-1] + 1] -= step.sizes[storage]
        self.held = np.cumsum(change[:-1])
        self.peak = int(self.held.max())
        self.copies = sum(entry.is_copy for entry in self.placed)
        self.seconds = self._sum_seconds(entry.number for entry in self.placed)

    def estimate_seconds(self, buffer: int, end: int, limit: float) -> float | None:
        """Estimate the time to make a buffer again for the operator at a place; None if it cannot be made again.

        Of a chain of copies that takes longer than the limit, it is the time of the part until then.
        """
        user = self.placed[end]
        starts = [number for number, place in user.inputs.items() if buffer in self.placed[place].buffers.values()]
        try:
            missing = self._find_missing(starts, user.time, self.storages[buffer], limit)
        except StaleError:
            return None
        return self._sum_seconds(missing) if missing else None

    def _sum_seconds(self, numbers: Iterable[int]) -> float:
        return sum(self.step.operators[number].seconds for number in numbers)

    def _place_original(self, number: int) -> None:
        """Append an operator of the step, behind copies of what it reads and is not there any more."""
        entry = self.step.operators[number]
        inputs: dict[int, int] = {}
        for source in entry.inputs:
            for missing in sorted(self._find_missing([source], number)):
                # A copy of an equal value may have been made meanwhile.
                if self._find(missing, number) is None:
                    self._copy(missing, number)
            inputs[source] = self._get_place(source, number)
            brought = self.placed[inputs[source]]
            if graph_nodes.is_wait(entry.node) and (brought.is_copy or brought.number != source):
                # Nobody would wait for the first message, and its buffer would be held until the process ends.
                raise StaleError(entry.node.name)
        self._place(number, number, inputs)

    def _copy(self, number: int, time: int) -> None:
        """Append a copy. Several results are taken apart at once, or the list would hold all of them."""
        entry = self.step.operators[number]
        self._place(number, time, {source: self._get_place(source, time) for source in entry.copy_inputs})
        if len(entry.storages) < 2:
            return
        for user in entry.node.users:
            if user.target is operator.getitem:
                self._place(self.step.numbers[user], time, {number: self._get_place(number, time)})

    def _place(self, number: int, time: int, inputs: dict[int, int]) -> None:
        """Append an operator, unless its result is there."""
        key = self._make_key(number, time)
        if key in self._places:
            return
        entry = self.step.operators[number]
        # An equal value may stand in the place of an input: its storages are others, in the same order.
        buffers: dict[int, int] = {}
        for source, place in inputs.items():
            buffers |= zip(self.step.operators[source].storages, self.placed[place].buffers.values(), strict=False)
        results: dict[int, int] = {}
        for storage in (*entry.storages, *entry.sent):
            if self.step.makers[storage] == number or (entry.is_gathered and number != time):
                results[storage] = len(self.storages)
                self.storages.append(storage)
            else:
                results[storage] = buffers[storage]
        self._places[key] = len(self.placed)
        self.placed.append(Placed(number, time, inputs, results))

    def _find_missing(
        self, starts: Iterable[int], time: int, dropped: int | None = None, limit: float = math.inf
    ) -> set[int]:
        """Find the operators that have to run again for values that are needed at a time.

        Args:
            starts: The numbers of the values.
            time: The time.
            dropped: A storage that counts as gone.
            limit: Seconds of copies after which the search ends.

        Raises:
            StaleError: if one of them may not run again, or would read what has been written to since.
        """
        missing: set[int] = set()
        waiting = list(starts)
        seconds = 0.0
        while waiting and seconds <= limit:
            number = waiting.pop()
            if number in missing or self._find(number, time, dropped) is not None:
                continue
            entry = self.step.operators[number]
            if not entry.can_copy or entry.fresh_until < time:
                raise StaleError(entry.node.name)
            missing.add(number)
            seconds += entry.seconds
            waiting += entry.copy_inputs
        return missing

    def _find(self, number: int, time: int, dropped: int | None = None) -> int | None:
        """Find the place of a value, or of an equal one."""
        for other in (number, *self.step.operators[number].equals):
            place = self._places.get(self._make_key(other, time))
            if place is not None and dropped not in self.step.operators[other].storages:
                return place
        return None

    def _get_place(self, number: int, time: int) -> int:
        place = self._find(number, time)
        assert place is not None
        return place

    def _make_key(self, number: int, time: int) -> Hashable:
        storages = self.step.operators[number].storages
        return number, *[self._count_times_gone(storage, time) for storage in storages]

    def _count_times_gone(self, storage: int, time: int) -> int:
        """Count how often a storage was gone before a time; after its last use it is gone at each time anew."""
        is_over = self.step.last_uses[storage] < time
        return time if is_over else bisect_left(self.cuts.get(storage, ()), time)

    def _drop_idle(self) -> None:
        """Drop copies that nobody uses, and operators whose results are computed later instead."""
        used: set[int] = set()
        for place in reversed(range(len(self.placed))):
            entry = self.placed[place]
            if place in used or not (entry.is_copy or self.step.operators[entry.number].can_drop):
                used.add(place)
                used.update(entry.inputs.values())
        new_place = {place: new for new, place in enumerate(sorted(used))}
        kept: list[Placed] = []
        for place in new_place:
            entry = self.placed[place]
            inputs = {number: new_place[source] for number, source in entry.inputs.items()}
            kept.append(entry._replace(inputs=inputs))
        self.placed = kept
        self._places = {key: new_place[place] for key, place in self._places.items() if place in new_place}

    def _find_uses(self) -> list[list[int]]:
        uses: list[list[int]] = [[] for _ in self.storages]
        for place, entry in enumerate(self.placed):
            for _, buffer in self._list_buffers(entry):
                uses[buffer].append(place)
        place_of = {entry.number: place for place, entry in enumerate(self.placed) if not entry.is_copy}
        for message in self.step.pending:
            for storage, buffer in self._list_buffers(self.placed[place_of[message.start]]):
                if storage in message.storages:
                    uses[buffer].append(place_of[message.wait])
        return [sorted(places) for places in uses]

    def _list_buffers(self, entry: Placed) -> Iterator[tuple[int, int]]:
        """List the buffers of what an operator makes and reads, each with its storage."""
        for other in (entry, *[self.placed[source] for source in entry.inputs.values()]):
            yield from other.buffers.items()


def build(schedule: Schedule) -> Graph:
    """Make the graph of an order.

    Args:
        schedule: The order.

    Returns:
        The graph. Each copy has "recompute" or "gather" in `node.meta["fit"]`, and a value with memory of its own,
        because lifetimes would take it for the original otherwise. So have the views of a copy.
    """
    graph = Graph()
    nodes: list[Node] = []
    with_new_memory = set[Node]()
    for entry in schedule.placed:
        original = schedule.step.operators[entry.number]
        at_place = {schedule.step.operators[number].node: nodes[place] for number, place in entry.inputs.items()}
        gathers_again = entry.is_copy and original.is_gathered
        if gathers_again:
            node = _gather_again(graph, original.node, *at_place.values())
        else:
            node = graph.node_copy(original.node, at_place.__getitem__)
        if entry.is_copy:
            node.meta["fit"] = "gather" if gathers_again else "recompute"
        is_new_view = graph_nodes.is_view(node) and not with_new_memory.isdisjoint(node.all_input_nodes)
        if entry.is_copy or is_new_view:
            node.meta["val"] = _compute_value(node)
            with_new_memory.add(node)
        nodes.append(node)
    graph.lint()
    return graph


def _gather_again(graph: Graph, taken: Node, source: Node) -> Node:
    """Gather one tensor of a gather of several."""
    start: Any = taken.args[0]
    again = graph.call_function(start.target, ([source], *start.args[1:]))
    again.meta = {**start.meta, "val": _compute_value(again)}
    node = graph.call_function(operator.getitem, (again, 0))
    node.meta = dict(taken.meta)
    return node


def _compute_value(node: Node) -> Any:
    """Compute the value of a copy, which is a tensor without values."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    mode = node.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    with mode:
        return target(*args, **kwargs)
