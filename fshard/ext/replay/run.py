"""run_nodes: run a graph on values node by node, and show what each node reads and makes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fshard.extend import Traced, graph_nodes, prepare

# Called after each node with the node, the values that it read, by their nodes, and its result.
Watch = Callable[[Node, Mapping[Node, Any], Any], None]


def run_nodes(traced: Traced, tensors: Sequence[torch.Tensor], watch: Watch) -> list[Any]:
    """Run a graph node by node, with the operators that the backend "graph" of `jit` runs.

    Collectives are sent, so every rank must run its graph. A value is freed after its last use. Inputs that the graph
    writes to are copied first, and a value that an operator writes to is shown as it was before.

    Args:
        traced: What `trace` returned, or the program of a function of `jit`, which may write to donated inputs.
        tensors: The graph's inputs.
        watch: Called after each node, inputs included; not for collectives in flight, whose buffers must not be read
            before they are waited for.

    Returns:
        The results: tensors, or None.
    """
    graph = traced.module.graph
    nodes = list(graph.nodes)
    prepared: Any = prepare(traced.module, "graph")
    run_by = zip(nodes, prepared.graph.nodes, strict=True)
    in_flight = find_in_flight(nodes)
    last_uses = _find_last_uses(nodes)
    values: dict[Node, Any] = dict(zip(graph_nodes.find_inputs(graph), tensors, strict=True))
    for node in _find_written_inputs(nodes):
        values[node] = values[node].clone()
    with torch.no_grad():
        for node, running in run_by:
            if node.op == "output":
                return list(map_arg(node.args[0], values.__getitem__))
            operands: dict[Node, Any] = {}
            if node.op == "get_attr":
                values[node] = attrgetter(node.target)(traced.module)
            elif node.op == "call_function":
                operands = _keep_operands(node, values)
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = running.target(*args, **kwargs)
            if node not in in_flight:
                watch(node, operands, values[node])
            for source in last_uses.get(node, ()):
                del values[source]
    raise AssertionError("a graph ends with its output")


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


def _find_last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Find for each node the values that nobody reads after it."""
    last_use = {node: node for node in nodes}
    for node in nodes:
        last_use |= dict.fromkeys(node.all_input_nodes, node)
    values: dict[Node, list[Node]] = {}
    for value, node in last_use.items():
        values.setdefault(node, []).append(value)
    return values


def _find_written_inputs(nodes: Sequence[Node]) -> list[Node]:
    """Find the inputs and constants in whose memory some operator writes."""
    storages = graph_nodes.find_storages(nodes)
    written: set[Hashable] = set()
    for node in nodes:
        for target in graph_nodes.find_write_targets(node):
            written |= storages[target].keys()
    return [node for node in nodes if node.op == "placeholder" and not written.isdisjoint(storages[node])]


def _keep_operands(node: Node, values: Mapping[Node, Any]) -> dict[Node, Any]:
    """Take the values that a node reads, with copies of those that it writes to."""
    operands = {source: values[source] for source in node.all_input_nodes}
    for target in graph_nodes.find_write_targets(node):
        if isinstance(values[target], torch.Tensor):
            operands[target] = values[target].clone()
    return operands
