"""run_nodes: run a graph on values node by node, and show what each node reads and makes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from fshard.extend import Traced, graph_nodes, prepare

# Called after each node with the node, the values that it read, by their nodes, and the tensors that it made or wrote.
Watch = Callable[[Node, Mapping[Node, Any], Sequence[torch.Tensor]], None]


def run_nodes(traced: Traced, tensors: Sequence[torch.Tensor], watch: Watch) -> list[Any]:
    """Run a graph node by node, with the operators that the backend "graph" of `jit` runs.

    Collectives are sent, so every rank must run its graph. A value is freed after its last use. Inputs that the graph
    writes to are copied first, and a value that an operator writes to is shown as it was before.

    Args:
        traced: What `trace` returned, or the program of a function of `jit`, which may write to donated inputs.
        tensors: The graph's inputs.
        watch: Called after each node, inputs and output included. Collectives in flight are shown without tensors,
            because their buffers must not be read before they are waited for; so is the output.

    Returns:
        The results: tensors, or None.
    """
    with torch.no_grad():
        return list(_WatchedRun(traced, watch).run(*tensors))


class _WatchedRun(Interpreter):
    """Runs the operators of the backend, and shows the nodes of the graph that they were prepared from."""

    def __init__(self, traced: Traced, watch: Watch) -> None:
        prepared: Any = prepare(traced.module, "graph")
        super().__init__(prepared)
        self.extra_traceback = False
        nodes = list(traced.module.graph.nodes)
        self._shown_as = dict(zip(prepared.graph.nodes, nodes, strict=True))
        self._in_flight = find_in_flight(nodes)
        self._written_inputs = _find_written_inputs(nodes)
        self._watch = watch

    def run_node(self, n: Node) -> Any:
        """Run a node and show it."""
        node = self._shown_as[n]
        targets = graph_nodes.find_write_targets(node)
        operands = {}
        written = []
        for source in n.all_input_nodes:
            value = self.env[source]
            operands[self._shown_as[source]] = value
            if self._shown_as[source] in targets and isinstance(value, torch.Tensor):
                operands[self._shown_as[source]] = value.clone()
                written.append(value)
        result = super().run_node(n)
        if node in self._written_inputs:
            result = result.clone()
        results = []
        if node not in self._in_flight and node.op != "output":
            # An operator that writes to many tensors, as a fused optimizer does, may return nothing.
            results = tensors_in(result) or written
        self._watch(node, operands, results)
        return result


def find_in_flight(nodes: Sequence[Node]) -> set[Node]:
    """Find the collectives of a graph and their buffers, whose values are not there before they are waited for."""
    in_flight: set[Node] = set()
    for node in nodes:
        if graph_nodes.find_collective(node) is not None:
            in_flight |= {node, *node.users}
    return in_flight


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors of a node's value."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _find_written_inputs(nodes: Sequence[Node]) -> list[Node]:
    """Find the inputs and constants in whose memory some operator writes."""
    storages = graph_nodes.find_storages(nodes)
    written: set[Hashable] = set()
    for node in nodes:
        for target in graph_nodes.find_write_targets(node):
            written |= storages[target].keys()
    return [node for node in nodes if node.op == "placeholder" and not written.isdisjoint(storages[node])]
