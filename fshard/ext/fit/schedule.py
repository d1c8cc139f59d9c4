"""Schedules: from cuts of the lives of storages to an order of operators and copies, its bytes, and its graph."""

import math
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Graph, Node

from fshard.ext.fit.step import StepFacts
from fshard.extend import graph_nodes, walk_graph


class StaleError(Exception):
    """A copy would read what has been written to since, or may not be made."""


class Cut(NamedTuple):
    """A place behind which a storage is not kept, because nobody uses it for a while.

    Attributes:
        storage: The storage.
        time: The node behind which it is not kept.
        begin: The place of the last use before, in the schedule that gets the cut.
        end: The place of the next use there.
        bytes: The bytes of the storage.
    """

    storage: Hashable
    time: Node
    begin: int
    end: int
    bytes: int


class Buffer(NamedTuple):
    """Memory of a storage, or of what a copy has in its place.

    Attributes:
        storage: The storage.
        bytes: Its bytes.
        uses: The places that use it, in their order.
    """

    storage: Hashable
    bytes: int
    uses: list[int]


@dataclass(eq=False)
class Placed:
    """An operator in an order.

    Attributes:
        node: Its node in the step.
        time: The node before which it runs, which is its own unless it is a copy.
        inputs: For each of its inputs the operator whose result it reads.
        buffers: The buffers of its results, by their storages.
    """

    node: Node
    time: Node
    inputs: dict[Node, "Placed"]
    buffers: dict[Hashable, Buffer]


class Schedule:
    """The order of a step's operators and copies that follows from cuts.

    The operators of the step keep their order. One that needs a storage whose cut lies behind has it made again right
    before itself, and later ones share that copy until the next cut. A storage is gone after its last use, too: a copy
    that needs it has it made again, for the same operator alone.

    Attributes:
        step: The step.
        cuts: The cuts.
        placed: The operators in their order, but for those whose results nobody uses.
        buffers: The buffers, in the order in which they are made.
        held: The bytes that are held at each place, arguments included.
        peak: The most of them.
        copies: The operators that run again.
        seconds: An estimate of the time of all operators.
    """

    def __init__(self, step: StepFacts, cuts: Sequence[Cut]) -> None:
        """Place the operators; StaleError if a copy would read something else than its original did."""
        self.step = step
        self.cuts = cuts
        # For each storage the nodes behind which it is gone.
        self._ends = {storage: [node] for storage, node in step.last_uses.items()}
        for cut in cuts:
            self._ends[cut.storage].append(cut.time)
        # The operators, by their nodes and by when the storages of their results will be gone.
        self._values: dict[Hashable, Placed] = {}
        for node in step.graph.nodes:
            for source in node.all_input_nodes:
                for missing in sorted(self.find_missing([source], node)):
                    self._copy(missing, node)
            self._place(node, node, node.all_input_nodes)
        must_run = [entry for entry in self._values.values() if entry.node in step.must_run]
        runs = set(walk_graph(must_run, lambda entry: entry.inputs.values()))
        self.placed = [entry for entry in self._values.values() if entry in runs]
        self.buffers = self._list_buffers()
        self.held = np.full(len(self.placed), step.arguments)
        for buffer in self.buffers:
            self.held[buffer.uses[0] : buffer.uses[-1] + 1] += buffer.bytes
        self.peak = int(self.held.max())
        self.copies = [entry for entry in self.placed if entry.node is not entry.time]
        self.seconds = math.fsum(step.seconds[entry.node] for entry in self.placed)

    def find_missing(
        self, starts: Iterable[Node], time: Node, dropped: Hashable = None, limit: float = math.inf
    ) -> set[Node]:
        """Find the nodes that have to run again for values that are needed at a time.

        Args:
            starts: The values.
            time: The time.
            dropped: A storage that counts as gone.
            limit: Seconds of copies after which the search ends.

        Raises:
            StaleError: if one of them may not run again, or would read what has been written to since.
        """
        missing: set[Node] = set()
        waiting = list(starts)
        seconds = 0.0
        while waiting and seconds <= limit:
            node = waiting.pop()
            if node in missing or any(self._list_equal(node, time, dropped)):
                continue
            if self.step.copy_until[node] < time:
                raise StaleError(node.name)
            missing.add(node)
            seconds += self.step.seconds[node]
            waiting += self.step.reads[node]
        return missing

    def _copy(self, node: Node, time: Node) -> None:
        """Append a copy, unless one of an equal value has been made meanwhile.

        Several results are taken apart at once, or the list would hold all of them.
        """
        if any(self._list_equal(node, time)):
            return
        self._place(node, time, self.step.reads[node])
        for user in node.users:
            if user.target is operator.getitem:
                self._copy(user, time)

    def _place(self, node: Node, time: Node, sources: Iterable[Node]) -> None:
        """Append an operator."""
        inputs = {source: next(self._list_equal(source, time)) for source in sources}
        buffers: dict[Hashable, Buffer] = {}
        for source, entry in inputs.items():
            # An equal value may stand in the place of an input: its storages are others, in the same order.
            buffers |= zip(self.step.storages[source], entry.buffers.values(), strict=False)
        storages = self.step.storages[node]
        results = {storage: buffers.get(storage) or Buffer(storage, storages[storage], []) for storage in storages}
        self._values[self._make_key(node, time)] = Placed(node, time, inputs, results)

    def _list_equal(self, node: Node, time: Node, dropped: Hashable = None) -> Iterator[Placed]:
        """List the operators whose results are there and have a value: its own, then equal ones."""
        for other in (node, *self.step.equals[node]):
            key = self._make_key(other, time)
            if key in self._values and dropped not in self.step.storages[other]:
                yield self._values[key]

    def _make_key(self, node: Node, time: Node) -> Hashable:
        """Name a value by when its storages will be gone; one that is made behind their last uses is gone at once."""
        key = [node]
        for storage in self.step.storages[node]:
            key += [end for end in self._ends[storage] if end >= time] or [time]
        return tuple(key)

    def _list_buffers(self) -> list[Buffer]:
        """List the buffers, and note the places that use each, its own among them."""
        buffers = []
        for place, entry in enumerate(self.placed):
            for used in (entry, *entry.inputs.values()):
                for buffer in used.buffers.values():
                    if not buffer.uses:
                        buffers.append(buffer)
                    buffer.uses.append(place)
        return buffers


def build(schedule: Schedule) -> Graph:
    """Make the graph of an order.

    Args:
        schedule: The order.

    Returns:
        The graph. Each copy has "recompute" or "gather" in `node.meta["fit"]`, and a value with memory of its own,
        because lifetimes would take it for the original otherwise. So have the views of a copy.
    """
    graph = Graph()
    nodes: dict[Placed, Node] = {}
    for entry in schedule.placed:
        sources = {source: nodes[made] for source, made in entry.inputs.items()}
        is_copy = entry.node is not entry.time
        if is_copy and entry.node in schedule.step.gathered:
            # Gather this tensor alone.
            start: Any = entry.node.args[0]
            again = graph.call_function(start.target, ([*sources.values()], *start.args[1:]))
            again.meta = {**start.meta, "fit": "gather"}
            nodes[entry] = graph.call_function(operator.getitem, (again, 0))
            nodes[entry].meta = dict(entry.node.meta)
            continue
        nodes[entry] = graph.node_copy(entry.node, sources.__getitem__)
        if is_copy:
            nodes[entry].meta["fit"] = "recompute"
    for node in graph.nodes:
        if "fit" in node.meta or graph_nodes.is_view(node):
            target: Any = node.target
            args, kwargs = graph_nodes.find_values(node)
            with graph_nodes.find_inputs(graph)[0].meta["val"].fake_mode:
                node.meta["val"] = target(*args, **kwargs)
    return graph
