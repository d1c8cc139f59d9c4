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


class StepFacts:
    """A graph and its nodes, which are compared by their order.

    Attributes:
        graph: The graph.
        arguments: The bytes of arguments and constants.
        storages: For each node the bytes of the storages that its results lie in, those of arguments left out. Until
            somebody has waited for a message, what it sends is among them.
        last_uses: The last node that uses each storage.
        gathered: The nodes that take one tensor of a gather.
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
        self.storages = lifetimes.taken
        self.last_uses = lifetimes.last_uses
        self.must_run = set(filter(graph_nodes.is_impure, graph.nodes))
        self.gathered = set[Node]()
        self.reads = {node: node.all_input_nodes for node in graph.nodes}
        self.seconds: dict[Node, float] = {}
        for node in graph.nodes:
            seconds = estimate_operator(node, rates)
            if seconds:
                seconds += _SECONDS_TO_START
            self.seconds[node] = seconds
        for pending in lifetimes.pending_buffers:
            collective: Any = graph_nodes.find_collective(pending.start)
            if collective.op == "all_gather":
                _, rate = rates.find_link(collective.axis)
                self.gathered.add(pending.taken)
                self.reads[pending.taken] = [pending.source]
                self.seconds[pending.taken] = rates.latency + pending.taken.meta["val"].nbytes / rate
        self.copy_until = self._find_last_copies(lifetimes.storages)
        self.equals = self._find_equal_values()

    def _find_last_copies(self, storages: dict[Node, dict[Hashable, int]]) -> dict[Node, Node]:
        """Find for each node the last one before which it may run again."""
        last_copies: dict[Node, Node] = {}
        next_writes: dict[Hashable, Node] = {}
        for node in reversed(self.graph.nodes):
            last_copies[node] = node
            if self._may_run_again(node) and next_writes.keys().isdisjoint(storages[node]):
                ends = [self.graph.output_node()]
                for source in self.reads[node]:
                    ends += [next_writes[name] for name in storages[source] if name in next_writes]
                last_copies[node] = min(ends)
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
        # Operators of fshard read the state of a generator, or say something to other ranks.
        if arguments_of(target) is None or target.namespace == "fshard":
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
                call = (start.target, self.reads[node], start.args[1:])
            call = map_arg(call, lambda value: equals[value][0])
            # If something had been written in between, copies could run until another write.
            equals[node] = nodes_of_call[repr((call, self.copy_until[node]))]
            equals[node].append(node)
        return equals
