"""StepFacts: a graph before any plan, with what may be copied, how long a copy takes, and which values are equal."""

import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard.extend import Rates, arguments_of, count_flops, find_lifetimes, graph_nodes

# Seconds of the host to start an operator.
_SECONDS_TO_START = 2e-6
# Operators of this namespace read the state of a generator, or say something to other ranks.
_NAMESPACE = "fshard"


@dataclass
class StepOperator:
    """A node of a graph.

    Attributes:
        node: The node.
        inputs: The numbers of the nodes that it reads.
        copy_inputs: The numbers of the nodes that a copy reads. They are those above, except for a tensor that was
            gathered together with others: its copy gathers this tensor alone.
        storages: The numbers of the storages that its results lie in, those of arguments left out.
        sent: The numbers of copies that it makes of what it sends.
        is_gathered: Whether it takes one tensor of a gather.
        can_copy: Whether it may run again.
        can_drop: Whether it need not run where nobody uses its result. The buffer of a gather is waited for once.
        fresh_until: The number of the first node that writes to what it reads, behind which a copy would read
            something else.
        seconds: An estimate of the time of a copy.
        equals: The numbers of the nodes whose values are equal to its own.
    """

    node: Node
    inputs: list[int]
    copy_inputs: list[int]
    storages: list[int]
    sent: list[int]
    fresh_until: int
    is_gathered: bool = False
    can_copy: bool = False
    can_drop: bool = False
    seconds: float = 0.0
    equals: list[int] = field(default_factory=list)


class PendingMessage(NamedTuple):
    """Storages that a collective holds from its start until somebody has waited for it.

    Attributes:
        start: The number of the node that starts it.
        wait: The number of the node that waits.
        storages: The numbers of the storages, of those of operators.
    """

    start: int
    wait: int
    storages: list[int]


class StepFacts:
    """A graph, whose nodes and storages are numbered in their order.

    Attributes:
        operators: The nodes.
        numbers: The number of each node.
        sizes: The bytes of each storage.
        makers: The number of the node that makes each storage.
        last_uses: The number of the last node that uses each storage.
        pending: What collectives hold.
        arguments: The bytes of arguments and constants.
    """

    def __init__(self, graph: Graph, rates: Rates) -> None:
        """Read a graph.

        Args:
            graph: The graph that a backend would get.
            rates: The speed of the device and its links.
        """
        lifetimes = find_lifetimes(graph)
        self.numbers = {node: number for number, node in enumerate(graph.nodes)}
        self.arguments = sum(lifetimes.always_held.values())
        self.sizes: list[int] = []
        self.makers: list[int] = []
        self.operators: list[StepOperator] = []
        # Names of storages differ from run to run; their order does not.
        number_of_storage: dict[Hashable, int] = {}
        for node, number in self.numbers.items():
            storages: list[int] = []
            sent: list[int] = []
            for name, nbytes in lifetimes.taken[node].items():
                if name not in number_of_storage:
                    number_of_storage[name] = len(self.sizes)
                    self.sizes.append(nbytes)
                    self.makers.append(number)
                storage = number_of_storage[name]
                if name in lifetimes.storages[node]:
                    storages.append(storage)
                elif self.makers[storage] == number:
                    sent.append(storage)
            inputs = [self.numbers[source] for source in node.all_input_nodes]
            self.operators.append(StepOperator(node, inputs, inputs, storages, sent, len(self.numbers)))
        self.last_uses = [0] * len(self.sizes)
        for node, names in lifetimes.freed.items():
            for name in names:
                self.last_uses[number_of_storage[name]] = self.numbers[node]
        self.pending: list[PendingMessage] = []
        for message in lifetimes.pending_buffers:
            sent = [number_of_storage[name] for name in message.held_storages if name in number_of_storage]
            self.pending.append(PendingMessage(self.numbers[message.start], self.numbers[message.wait], sent))
        self._find_copies(lifetimes.storages)
        self._find_equal_values()
        for entry in self.operators:
            entry.seconds = _estimate_seconds(entry, rates)

    def _find_copies(self, storages: Mapping[Node, Mapping[Hashable, int]]) -> None:
        """Decide which operators may run again, on which inputs, and until when these are as they were."""
        writes = defaultdict[Hashable, list[int]](list)
        for node, number in self.numbers.items():
            for target in graph_nodes.find_write_targets(node):
                for name in storages[target]:
                    writes[name].append(number)
        for number, entry in enumerate(self.operators):
            node = entry.node
            source = _find_gathered_tensor(node)
            if source is not None:
                entry.is_gathered = True
                entry.copy_inputs = [self.numbers[source]]
            is_written = any(name in writes for name in storages[node])
            entry.can_copy = not is_written and (entry.is_gathered or self._may_run_again(entry))
            entry.can_drop = entry.can_copy and not entry.is_gathered and not graph_nodes.is_wait(node)
            for read in entry.copy_inputs:
                for name in storages[self.operators[read].node]:
                    later = writes.get(name, [])[bisect_right(writes.get(name, []), number) :]
                    entry.fresh_until = min([entry.fresh_until, *later[:1]])

    def _may_run_again(self, entry: StepOperator) -> bool:
        """Whether an operator only computes its results from its inputs, and computes the same every time."""
        node = entry.node
        if graph_nodes.is_wait(node):
            return self.operators[entry.inputs[0]].is_gathered
        if node.target is operator.getitem:
            return True
        if arguments_of(node.target) is None or getattr(node.target, "namespace", "") == _NAMESPACE:
            return False
        is_repeatable = torch.Tag.nondeterministic_bitwise not in getattr(node.target, "tags", ())
        return is_repeatable and not graph_nodes.is_random(node) and not graph_nodes.is_impure(node)

    def _find_equal_values(self) -> None:
        """Find operators that compute the same as others from equal inputs, such as both gathers of a unit."""
        # For each node the first one whose value is equal, and by its call all nodes whose values are.
        first_equal: dict[Node, int] = {}
        members = defaultdict[str, list[int]](list)
        for number, entry in enumerate(self.operators):
            text = str(number)
            if entry.can_copy:
                node = entry.node
                args: Any = node.args
                target: Any = node.target
                if entry.is_gathered:
                    start: Any = node.args[0]
                    target = start.target
                    args = (self.operators[entry.copy_inputs[0]].node, *start.args[1:])
                values = map_arg((args, node.kwargs), lambda source: f"%{first_equal[source]}")
                # If something had been written in between, it would be fresh until another write.
                text = repr((target, values, entry.fresh_until))
            entry.equals = members[text]
            entry.equals.append(number)
            first_equal[entry.node] = entry.equals[0]


def _find_gathered_tensor(node: Node) -> Node | None:
    """Find which tensor a node takes the gathered form of; None if it takes none."""
    if node.target is not operator.getitem:
        return None
    start: Any = node.args[0]
    collective = graph_nodes.find_collective(start)
    if collective is None or collective.op != "all_gather":
        return None
    return start.args[0][node.args[1]]


def _estimate_seconds(entry: StepOperator, rates: Rates) -> float:
    """Estimate the seconds that a copy of an operator takes."""
    node = entry.node
    if entry.is_gathered:
        collective: Any = graph_nodes.find_collective(node.all_input_nodes[0])
        _, rate = rates.find_link(collective.axis)
        return rates.latency + _count_bytes(node) / rate
    if not entry.can_copy or graph_nodes.is_view(node) or graph_nodes.is_wait(node):
        return 0.0
    nbytes = sum(map(_count_bytes, (*node.all_input_nodes, node)))
    return _SECONDS_TO_START + max(count_flops(node) / rates.flops, nbytes / rates.memory)


def _count_bytes(node: Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return sum(part.nbytes for part in values if isinstance(part, torch.Tensor))
