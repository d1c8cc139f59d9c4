"""Schedules: from cuts of the lives of storages to an order of operators and copies, its bytes, and its graph."""

import math
import operator
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.fx import Graph, Node
from torch.fx.node import map_arg

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


class Placed(NamedTuple):
    """An operator in an order.

    Attributes:
        node: Its node in the step.
        time: The node before which it runs, which is its own unless it is a copy.
        inputs: The places of its inputs in the order.
        buffers: The buffers of its results, by their storages.
    """

    node: Node
    time: Node
    inputs: dict[Node, int]
    buffers: dict[Hashable, Buffer]

    @property
    def is_copy(self) -> bool:
        """Whether the operator runs again."""
        return self.node is not self.time


class Schedule:
    """The order of a step's operators and copies that follows from cuts.

    The operators of the step keep their order. One that needs a storage whose cut lies behind has it made again right
    before itself, and later ones share that copy until the next cut. A storage is gone after its last use, too: a copy
    that needs it has it made again, for the same operator alone.

    Attributes:
        step: The step.
        cuts: The cuts.
        placed: The operators in their order.
        runs: The places of those that run, in their order; nobody uses the results of the others.
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
        self._cut_times = defaultdict[Hashable, list[Node]](list)
        for cut in cuts:
            insort(self._cut_times[cut.storage], cut.time)
        # The places of values, by the node and by how often its storages were gone.
        self._places: dict[Hashable, int] = {}
        self.placed: list[Placed] = []
        for node in step.graph.nodes:
            for source in node.all_input_nodes:
                for missing in sorted(self.find_missing([source], node)):
                    self._copy(missing, node)
            self._place(node, node, node.all_input_nodes)
        must_run = [place for place, entry in enumerate(self.placed) if entry.node in step.must_run]
        self.runs = sorted(walk_graph(must_run, lambda place: self.placed[place].inputs.values()))
        self._find_uses()
        self.buffers: list[Buffer] = []
        change = np.zeros(len(self.placed) + 1, dtype=np.int64)
        change[0] = step.arguments
        for place in self.runs:
            for buffer in self.placed[place].buffers.values():
                if buffer.uses[0] == place:
                    self.buffers.append(buffer)
                    change[place] += buffer.bytes
                    change[buffer.uses[-1] + 1] -= buffer.bytes
        self.held = np.cumsum(change[:-1])
        self.peak = int(self.held.max())
        running = [self.placed[place] for place in self.runs]
        self.copies = [entry for entry in running if entry.is_copy]
        self.seconds = math.fsum(step.seconds[entry.node] for entry in running)

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
            if node in missing or self._find(node, time, dropped) is not None:
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
        if self._find(node, time) is not None:
            return
        self._place(node, time, self.step.reads[node])
        for user in node.users:
            if user.target is operator.getitem:
                self._place(user, time, [node])

    def _place(self, node: Node, time: Node, sources: Iterable[Node]) -> None:
        """Append an operator, unless its result is there."""
        key = self._make_key(node, time)
        if key in self._places:
            return
        inputs: dict[Node, int] = {}
        buffers: dict[Hashable, Buffer] = {}
        for source in sources:
            place = self._find(source, time)
            assert place is not None
            inputs[source] = place
            # An equal value may stand in the place of an input: its storages are others, in the same order.
            buffers |= zip(self.step.storages[source], self.placed[place].buffers.values(), strict=False)
        results: dict[Hashable, Buffer] = {}
        for storage, nbytes in self.step.storages[node].items():
            results[storage] = buffers.get(storage) or Buffer(storage, nbytes, [])
        self._places[key] = len(self.placed)
        self.placed.append(Placed(node, time, inputs, results))

    def _find(self, node: Node, time: Node, dropped: Hashable = None) -> int | None:
        """Find the place of a value, or of an equal one."""
        for other in (node, *self.step.equals[node]):
            place = self._places.get(self._make_key(other, time))
            if place is not None and dropped not in self.step.storages[other]:
                return place
        return None

    def _make_key(self, node: Node, time: Node) -> Hashable:
        """Name a value by how often its storages were gone; after its last use one is gone at each time anew."""
        key: list[Hashable] = [node]
        for storage in self.step.storages[node]:
            is_over = self.step.last_uses[storage] < time
            key.append(time if is_over else bisect_left(self._cut_times.get(storage, ()), time))
        return tuple(key)

    def _find_uses(self) -> None:
        """Find the places that use each buffer, its own among them."""
        for place in self.runs:
            for used in (place, *self.placed[place].inputs.values()):
                for buffer in self.placed[used].buffers.values():
                    buffer.uses.append(place)


def build(schedule: Schedule) -> Graph:
    """Make the graph of an order.

    Args:
        schedule: The order.

    Returns:
        The graph. Each copy has "recompute" or "gather" in `node.meta["fit"]`, and a value with memory of its own,
        because lifetimes would take it for the original otherwise. So have the views of a copy.
    """
    graph = Graph()
    nodes: dict[int, Node] = {}
    for place in schedule.runs:
        entry = schedule.placed[place]
        sources = {source: nodes[at] for source, at in entry.inputs.items()}
        if entry.is_copy and entry.node in schedule.step.gathered:
            # Gather this tensor alone.
            start: Any = entry.node.args[0]
            again = graph.call_function(start.target, ([*sources.values()], *start.args[1:]))
            again.meta = {**start.meta, "fit": "gather"}
            nodes[place] = graph.call_function(operator.getitem, (again, 0))
            nodes[place].meta = dict(entry.node.meta)
            continue
        nodes[place] = graph.node_copy(entry.node, sources.__getitem__)
        if entry.is_copy:
            nodes[place].meta["fit"] = "recompute"
    for node in graph.nodes:
        if "fit" in node.meta or graph_nodes.is_view(node):
            target: Any = node.target
            args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            with graph_nodes.find_inputs(graph)[0].meta["val"].fake_mode:
                node.meta["val"] = target(*args, **kwargs)
    graph.lint()
    return graph
