"""Emit: from cuts of the lives of storages to an order of operators and copies, its bytes, and its graph."""

import operator
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
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


class Choice(NamedTuple):
    """One operator that runs again, as its copy has it in `node.meta["fit"]`.

    Attributes:
        kind: "recompute" or "gather".
        dropped: The name of the node whose result is not kept.
        bytes: The bytes that the copy makes again; 0 for a view.
        before: The name of the node that the copy runs before.
        seconds: An estimate of its time.
    """

    kind: str
    dropped: str
    bytes: int
    before: str
    seconds: float


class Placed(NamedTuple):
    """An operator in an order.

    Attributes:
        number: Its number in the step.
        time: The number of the node before which it runs, which is its own unless it is a copy.
        inputs: The places of its inputs in the order, by their numbers.
        buffers: The buffers of its results, by their storages. Each copy of a storage is a buffer.
        is_copy: Whether it runs again.
    """

    number: int
    time: int
    inputs: dict[int, int]
    buffers: dict[int, int]
    is_copy: bool


class Schedule:
    """An order of a step's operators and copies.

    Attributes:
        placed: The operators in their order.
        storages: For each buffer its storage.
        uses: For each buffer the places that use it, in their order.
        held: The bytes that are held at each place, arguments included.
        peak: The most of them.
        copies: How many operators run again.
        seconds: An estimate of the time of all operators that may run again.
    """

    def __init__(self, step: StepFacts, placed: list[Placed], storages: list[int]) -> None:
        self.placed = placed
        self.storages = storages
        self.uses = _find_uses(step, placed, len(storages))
        change = np.zeros(len(placed) + 1, dtype=np.int64)
        change[0] = step.arguments
        for storage, places in zip(storages, self.uses, strict=True):
            if places:
                change[places[0]] += step.sizes[storage]
                change[places[-1] + 1] -= step.sizes[storage]
        place_of = _find_originals(placed)
        for message in step.pending:
            change[place_of[message.start]] += message.bytes_copied
            change[place_of[message.wait] + 1] -= message.bytes_copied
        self.held = np.cumsum(change[:-1])
        self.peak = int(self.held.max())
        self.copies = sum(entry.is_copy for entry in placed)
        self.seconds = sum(step.operators[entry.number].seconds for entry in placed)


def _find_originals(placed: Sequence[Placed]) -> dict[int, int]:
    return {entry.number: place for place, entry in enumerate(placed) if not entry.is_copy}


def _find_uses(step: StepFacts, placed: Sequence[Placed], number_of_buffers: int) -> list[list[int]]:
    uses: list[list[int]] = [[] for _ in range(number_of_buffers)]
    place_of = _find_originals(placed)
    for place, entry in enumerate(placed):
        for buffer in entry.buffers.values():
            uses[buffer].append(place)
        for source in entry.inputs.values():
            for buffer in placed[source].buffers.values():
                uses[buffer].append(place)
    for message in step.pending:
        for source in placed[place_of[message.start]].inputs.values():
            for storage, buffer in placed[source].buffers.items():
                if storage in message.storages:
                    uses[buffer].append(place_of[message.wait])
                    uses[buffer].sort()
    return uses


def emit(step: StepFacts, cuts: Cuts) -> Schedule:
    """Find the order of operators and copies of some cuts.

    The operators of the step keep their order. One that needs a storage whose cut lies behind has it made again right
    before itself, and later ones share that copy until the next cut. A storage is gone after its last use, too: a copy
    that needs it has it made again, for the same operator alone.

    Args:
        step: The step.
        cuts: The cuts.

    Returns:
        The order.

    Raises:
        StaleError: if a copy would read something else than its original did.
    """
    emitter = _Emitter(step, cuts)
    for number in range(len(step.operators)):
        emitter.place_original(number)
    placed = _drop_idle(step, emitter.placed) if cuts else emitter.placed
    return Schedule(step, placed, emitter.storages)


class _Emitter:
    """Places operators one after another, and copies of those whose results are not there any more."""

    def __init__(self, step: StepFacts, cuts: Cuts) -> None:
        self._step = step
        self._cuts = cuts
        # The places of values, by the operator and by `_count_times_gone` of its storages.
        self._places: dict[Hashable, int] = {}
        self.placed: list[Placed] = []
        self.storages: list[int] = []

    def place_original(self, number: int) -> None:
        """Append an operator of the step, behind copies of what it reads and is not there any more."""
        inputs: dict[int, int] = {}
        for source in self._step.operators[number].inputs:
            inputs[source] = self.bring(source, number)
            brought = self.placed[inputs[source]]
            if graph_nodes.is_wait(self._step.operators[number].node) and (brought.is_copy or brought.number != source):
                # Nobody would wait for the first message, and its buffer would be held until the process ends.
                raise StaleError(self._step.operators[number].node.name)
        self.place(number, number, inputs)

    def place(self, number: int, time: int, inputs: dict[int, int]) -> None:
        """Append an operator, unless its result is there."""
        key = self._make_key(number, time)
        if key in self._places:
            return
        entry = self._step.operators[number]
        is_copy = number != time
        buffers: dict[int, int] = {}
        for storage in entry.storages:
            if self._step.makers[storage] == number or (is_copy and entry.is_gathered):
                buffers[storage] = len(self.storages)
                self.storages.append(storage)
            else:
                available: dict[int, int] = {}
                for source in inputs.values():
                    available |= self.placed[source].buffers
                # A view of an equal value lies in the memory of that one.
                buffers[storage] = available.get(storage, next(iter(available.values())))
        self._places[key] = len(self.placed)
        self.placed.append(Placed(number, time, inputs, buffers, is_copy))

    def bring(self, number: int, time: int) -> int:
        """Return the place of a value, which is made again if it is not there any more."""
        # A list instead of recursion: in deep models, chains of copies are longer than Python's stack.
        waiting = [number]
        while waiting:
            latest = waiting[-1]
            missing: list[int] = []
            if self._find(latest, time) is None:
                entry = self._step.operators[latest]
                if not entry.can_copy or entry.fresh_until < time:
                    raise StaleError(entry.node.name)
                missing = [source for source in entry.copy_inputs if self._find(source, time) is None]
                if not missing:
                    self._copy(latest, time)
            if not missing:
                waiting.pop()
            waiting += missing
        place = self._find(number, time)
        assert place is not None
        return place

    def _copy(self, number: int, time: int) -> None:
        """Append a copy. Several results are taken apart at once, or the list would hold all of them."""
        entry = self._step.operators[number]
        inputs: Any = {source: self._find(source, time) for source in entry.copy_inputs}
        self.place(number, time, inputs)
        if len(entry.storages) < 2:
            return
        for user in entry.node.users:
            part = self._step.numbers[user]
            if user.target is operator.getitem:
                self.place(part, time, {number: self._places[self._make_key(number, time)]})

    def _find(self, number: int, time: int) -> int | None:
        """Find the place of a value, or of an equal one."""
        for other in (number, *self._step.operators[number].equals):
            place = self._places.get(self._make_key(other, time))
            if place is not None:
                return self._places.setdefault(self._make_key(number, time), place)
        return None

    def _make_key(self, number: int, time: int) -> Hashable:
        storages = self._step.operators[number].storages
        return number, *[self._count_times_gone(storage, time) for storage in storages]

    def _count_times_gone(self, storage: int, time: int) -> int:
        """Count how often a storage was gone before a time; after its last use it is gone at each time anew."""
        is_over = self._step.last_uses[storage] < time
        return time if is_over else bisect_left(self._cuts.get(storage, ()), time)


def _drop_idle(step: StepFacts, placed: Sequence[Placed]) -> list[Placed]:
    """Drop copies that nobody uses, and operators whose results are computed later instead."""
    used: set[int] = set()
    for place in reversed(range(len(placed))):
        if place in used or not (placed[place].is_copy or step.operators[placed[place].number].can_drop):
            used.add(place)
            used.update(placed[place].inputs.values())
    new_place = {place: new for new, place in enumerate(sorted(used))}
    kept: list[Placed] = []
    for place in new_place:
        entry = placed[place]
        inputs = {number: new_place[source] for number, source in entry.inputs.items()}
        kept.append(entry._replace(inputs=inputs))
    return kept


def build(step: StepFacts, schedule: Schedule) -> Graph:
    """Make the graph of an order.

    Args:
        step: The step.
        schedule: The order.

    Returns:
        The graph. Each copy has a `Choice` in `node.meta["fit"]`, and a value with memory of its own, because
        lifetimes would take it for the original otherwise. So have the views of a copy.
    """
    graph = Graph()
    nodes: list[Node] = []
    with_new_memory = set[Node]()
    for entry in schedule.placed:
        original = step.operators[entry.number]
        at_place = {step.operators[number].node: nodes[place] for number, place in entry.inputs.items()}
        if not entry.is_copy:
            node = graph.node_copy(original.node, at_place.__getitem__)
            if graph_nodes.is_view(node) and with_new_memory.intersection(node.all_input_nodes):
                node.meta["val"] = _compute_value(node)
                with_new_memory.add(node)
            nodes.append(node)
            continue
        sizes = [step.sizes[storage] for storage in entry.buffers if step.makers[storage] == entry.number]
        kind = "recompute"
        if original.is_gathered:
            kind = "gather"
            sizes = [step.sizes[storage] for storage in entry.buffers]
            node = _gather_again(graph, original.node, *at_place.values())
        else:
            node = graph.node_copy(original.node, at_place.__getitem__)
        before = step.operators[entry.time].node.name
        choice = Choice(kind, original.node.name, sum(sizes), before, original.seconds)
        node.meta = {**original.node.meta, "val": _compute_value(node), "fit": choice}
        with_new_memory.add(node)
        nodes.append(node)
    graph.lint()
    return graph


def _gather_again(graph: Graph, taken: Node, source: Node) -> Node:
    """Gather one tensor of a gather of several."""
    start: Any = taken.args[0]
    again = graph.call_function(start.target, ([source], *start.args[1:]))
    again.meta = {**start.meta, "val": _compute_value(again)}
    return graph.call_function(operator.getitem, (again, 0))


def _compute_value(node: Node) -> Any:
    """Compute the value of a copy, which is a tensor without values."""
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    mode = node.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    with mode:
        return target(*args, **kwargs)
