"""StepFacts: a graph before any plan, with what may be copied, how long a copy takes, and which values are equal."""

import operator
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard.extend import Rates, arguments_of, estimate_operator, find_lifetimes, graph_nodes

# Seconds of the host to start an operator.
_SECONDS_TO_START = 2e-6
# Operators of this namespace read the state of a generator, or say something to other ranks.
_NAMESPACE = "fshard"


class StepFacts:
    """A graph and its nodes, which are compared by their order.

    Attributes:
        graph: The graph.
        arguments: The bytes of arguments and constants.
        storages: For each node the bytes of the storages that its results lie in, those of arguments left out. Until
            somebody has waited for a message, what it sends is among them.
        last_uses: The last node that uses each storage.
        gathered: For each node that takes one tensor of a gather the tensor that is sent.
        reads: The nodes that a copy of a node reads. A tensor that was gathered together with others is gathered alone.
        copy_until: For each node the first one that writes to what a copy of it reads, or the last one of the graph.
            Behind it a copy would read something else. It is the node itself if that may not run again.
        must_run: The nodes that run even if nobody uses their results.
        equals: For each node those whose values are equal to its own, which is among them.
        seconds: An estimate of the time of each node.
    """

    def __init__(self, graph: Graph, rates: Rates) -> None:
        """Read a graph.

        Args:
            graph: The graph that a backend would get.
            rates: The speed of the device and its links.
        """
        lifetimes = find_lifetimes(graph)
        self.graph = graph
        self.arguments = sum(lifetimes.always_held.values())
        self.must_run = set(filter(graph_nodes.is_impure, graph.nodes))
        self.gathered: dict[Node, Node] = {}
        self.reads: dict[Node, list[Node]] = {}
        self.seconds: dict[Node, float] = {}
        for node in graph.nodes:
            self.reads.setdefault(node, node.all_input_nodes)
            seconds = estimate_operator(node, rates)
            if seconds:
                seconds += _SECONDS_TO_START
            self.seconds.setdefault(node, seconds)
            collective = graph_nodes.find_collective(node)
            if collective is not None and collective.op == "all_gather":
                _, rate = rates.find_link(collective.axis)
                sources: Any = node.args[0]
                for taken in node.users:
                    position: Any = taken.args[1]
                    source = sources[position]
                    self.gathered[taken] = source
                    self.reads[taken] = [source]
                    self.seconds[taken] = rates.latency + taken.meta["val"].nbytes / rate
        self.copy_until = self._find_last_copies(lifetimes.storages)
        self.equals = self._find_equal_values()
        for pending in lifetimes.pending_buffers:
            for node in (pending.start, *pending.start.users):
                if pending.buffer in lifetimes.storages[node] and not graph_nodes.is_wait(node):
                    lifetimes.storages[node].update(pending.held_storages)
        self.storages: dict[Node, dict[Hashable, int]] = {}
        for node, storages in lifetimes.storages.items():
            self.storages[node] = {name: storages[name] for name in storages if name not in lifetimes.always_held}
        self.last_uses = lifetimes.last_uses

    def _find_last_copies(self, storages: dict[Node, dict[Hashable, int]]) -> dict[Node, Node]:
        """Find for each node the last one before which it may run again."""
        last_copies: dict[Node, Node] = {}
        next_writes: dict[Hashable, Node] = {}
        for node in reversed(self.graph.nodes):
            last_copies[node] = node
            if self._may_run_again(node) and next_writes.keys().isdisjoint(storages[node]):
                last_copies[node] = self.graph.output_node()
                for source in self.reads[node]:
                    writes = [next_writes[name] for name in storages[source] if name in next_writes]
                    last_copies[node] = min([last_copies[node], *writes])
            for target in graph_nodes.find_write_targets(node):
                next_writes |= dict.fromkeys(storages[target], node)
        return last_copies

    def _may_run_again(self, node: Node) -> bool:
        """Whether an operator only computes its results from its inputs, and computes the same every time."""
        target: Any = node.target
        if graph_nodes.is_wait(node):
            return node.args[0] in self.gathered
        if node in self.must_run or graph_nodes.is_random(node):
            return False
        if target is operator.getitem:
            return True
        if arguments_of(target) is None or target.namespace == _NAMESPACE:
            return False
        return torch.Tag.nondeterministic_bitwise not in target.tags

    def _find_equal_values(self) -> dict[Node, list[Node]]:
        """Find nodes that compute the same from equal values, such as both gathers of a unit."""
        equals: dict[Node, list[Node]] = {}
        nodes_of_call = defaultdict[str, list[Node]](list)
        for node in self.graph.nodes:
            call: Any = (node.target, node.args, node.kwargs)
            if node in self.gathered:
                start: Any = node.args[0]
                call = (start.target, self.gathered[node], start.args[1:])
            call = map_arg(call, lambda value: equals[value][0])
            # If something had been written in between, copies could run until another write.
            equals[node] = nodes_of_call[repr((call, self.copy_until[node]))]
            equals[node].append(node)
        return equals
