"""Which nodes of a step's graph have equal values on several ranks: found from the graph, without running it."""

import operator
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fshard.ext.replay.run import find_in_flight
from fshard.extend import generators, graph_nodes

# The names of axes.
Axes = frozenset[str]

_NONE: Axes = frozenset()
_ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_UNBIND = torch.ops.aten.unbind.int
# These write to their running mean and variance, which their schemas deny.
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
# Where an operator that starts a collective says whether ranks send each other rows, counted from its last argument.
_DIRECT = -5


class _PartialSum(NamedTuple):
    """A sum over ranks that the graph itself adds up, a row at a time.

    Attributes:
        buffer: The node of the buffer that the rows of other ranks arrive in.
        source: The node of this rank's row.
        size: The number of rows.
        terms: The rows that have been added: 0 for this rank's, others in the order in which they lie in the buffer.
        agreement: The axes over which ranks agree on the whole sum.
    """

    buffer: Node
    source: Node
    size: int
    terms: frozenset[int]
    agreement: Axes

    @property
    def is_complete(self) -> bool:
        return len(self.terms) == self.size


def find_common_axes(
    graph: Graph, axes: Axes, shared_inputs: Mapping[Node, Axes], varying_constants: Mapping[Node, Axes]
) -> dict[Node, Axes]:
    """Find for each node the axes over which ranks must agree on its value.

    Ranks agree on what a gather returns, on a sum once it has the rows of all ranks, on inputs that are replicated, and
    on whatever is computed from these alone.

    Args:
        graph: The graph. Its nodes hold fake tensors.
        axes: The axes of the mesh.
        shared_inputs: For inputs and constants of the graph the axes over which they are replicated.
        varying_constants: For nodes with numbers that differ between ranks, such as the rank's own, the axes over which
            these differ.

    Returns:
        The axes of each node. Buffers that are in flight are left out.
    """
    walk = _Walk(graph, axes, shared_inputs, varying_constants)
    for node in graph.nodes:
        walk.visit(node)
    return walk.agreement


class _Walk:
    """A walk through a graph in the order of its nodes."""

    def __init__(
        self, graph: Graph, axes: Axes, shared_inputs: Mapping[Node, Axes], varying_constants: Mapping[Node, Axes]
    ) -> None:
        self.agreement: dict[Node, Axes] = {}
        self._axes = axes
        self._shared_inputs = shared_inputs
        self._varying_constants = varying_constants
        self._in_flight = find_in_flight(list(graph.nodes))
        self._storages = graph_nodes.find_storages(graph.nodes)
        # For storages that something was written to, perhaps through a view, the axes over which ranks agree on it.
        self._written: dict[Hashable, Axes] = {}
        self._sums: dict[Node, _PartialSum] = {}
        # Nodes in whose memory a sum was completed, which later operators may read: what they hold then.
        self._completed: dict[Node, Axes] = {}

    def visit(self, node: Node) -> None:
        if node.op != "call_function":
            self.agreement[node] = self._shared_inputs.get(node, _NONE)
        elif graph_nodes.is_wait(node):
            self.agreement[node] = self._receive(node)
        elif node not in self._in_flight:
            partial = self._continue_sum(node)
            if partial is None:
                self.agreement[node] = self._compute(node)
            else:
                self._sums[node] = partial
                self._complete(node, partial)
                self.agreement[node] = partial.agreement if partial.is_complete else _NONE

    def _receive(self, node: Node) -> Axes:
        """Find the axes of a buffer that has arrived."""
        buffer: Any = node.args[0]
        start, index = buffer.args
        collective = graph_nodes.find_collective(start)
        assert collective is not None
        source = start.args[0][index]
        # The axis of all ranks of a mesh has the names of its axes.
        travelled = frozenset(collective.axis.split("+"))
        agreement = self._of_operand(source)
        if collective.op in ("reduce_scatter", "all_to_all"):
            return agreement - travelled
        agreement |= travelled & self._axes
        if collective.op == "all_gather" or not start.args[_DIRECT]:
            return agreement
        rows = frozenset(range(1, collective.size))
        self._sums[node] = _PartialSum(buffer, source, collective.size, rows, agreement)
        return _NONE

    def _continue_sum(self, node: Node) -> _PartialSum | None:
        """Return the sum that a node goes on with, by a view of its rows or by an addition; None of other nodes."""
        operands = node.all_input_nodes
        if not self._completed.keys().isdisjoint(operands):
            return None
        partial = next((self._sums[operand] for operand in operands if operand in self._sums), None)
        if partial is None or any(operand in self._sums and self._sums[operand].is_complete for operand in operands):
            return None
        if node.target in _ADDITIONS:
            terms = [self._terms_of(operand, partial) for operand in operands]
            return partial._replace(terms=frozenset().union(*terms)) if all(terms) else None
        if not graph_nodes.is_view(node):
            return None
        if node.target is operator.getitem and operands[0].target is _UNBIND:
            row: Any = node.args[1]
            return partial._replace(terms=frozenset([row + 1]))
        return partial

    def _complete(self, node: Node, partial: _PartialSum) -> None:
        """Note the earlier nodes in whose memory an addition in place completes a sum."""
        if partial.is_complete and node.target is torch.ops.aten.add_.Tensor:
            for other in self._sums:
                if not self._storages[node].keys().isdisjoint(self._storages[other]):
                    self._completed[other] = partial.agreement

    def _terms_of(self, operand: Node, partial: _PartialSum) -> frozenset[int]:
        """Return the rows that an operand adds to a sum; none if it belongs to another one."""
        if operand is partial.source:
            return frozenset([0])
        other = self._sums.get(operand)
        return other.terms if other is not None and other.buffer is partial.buffer else frozenset()

    def _compute(self, node: Node) -> Axes:
        """Find the axes of an operator's result, and note what it writes to."""
        agreement = self._axes - self._varying_constants.get(node, _NONE)
        if graph_nodes.is_random(node) or node.target is generators.random_state:
            # It depends on a generator's state, which is no operand.
            agreement = _NONE
        for operand in node.all_input_nodes:
            agreement &= self._of_operand(operand)
        for target in _find_write_targets(node):
            for storage in self._storages[target]:
                # The memory is an operand too, so earlier writes count.
                self._written[storage] = agreement
        return agreement

    def _of_operand(self, operand: Node) -> Axes:
        """Find the axes of an operand, whose memory may have been written to since it was made."""
        agreement = self._completed.get(operand, self.agreement.get(operand, _NONE))
        for storage in self._storages[operand]:
            agreement &= self._written.get(storage, self._axes)
        return agreement


def _find_write_targets(node: Node) -> list[Node]:
    """List the nodes whose memory a node writes to, also where its schema does not say so."""
    targets = graph_nodes.find_write_targets(node)
    if getattr(node.target, "__name__", "").partition(".")[0] in _BATCH_NORMS:
        targets += [source for source in node.args[3:5] if isinstance(source, Node)]
    return targets
