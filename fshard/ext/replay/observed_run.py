"""Runs a step's graph node by node on its arguments, and shows what each node reads and makes."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Interpreter, Node

from fshard.ext._compat import name_operator
from fshard.ext.replay.operations import Operations
from fshard.extend import generators, graph_nodes, tensor_of

_GENERATORS = (generators.random_state, generators.set_random_state, generators.seed)
# Simulated ranks are threads, which share the generators of the process.
_SHARED_GENERATORS = threading.Lock()


@torch.no_grad()
def run_step(operations: Operations) -> Iterator[tuple[Node, dict[Node, Any], list[torch.Tensor]]]:
    """Run a graph node by node, with the operators that the backend "graph" of `jit` runs.

    Collectives are sent, so every rank must run its graph to the end. A value is freed after its last use. The run
    gives the same bits each time, unless something is wrong: empty memory is filled with zeros, and random numbers are
    drawn from states of torch's generators that nothing else moves.

    Args:
        operations: The graph and its arguments, which it does not write to.

    Yields:
        Each node but those that make empty memory, inputs and output included, the values that it read by their nodes,
        and the tensors that it made or wrote; both are emptied when the next node runs. A value that a node writes to
        is shown as it was before. Collectives in flight are shown without results, because their buffers must not be
        read before they are waited for; so is the output.
    """
    prepared: Any = operations.program.run
    run = Interpreter(prepared)
    run.args_iter = (tensor_of(leaf).detach() for leaf in operations.leaves.values())
    operands: dict[Node, Any] = {}
    results: list[torch.Tensor] = []
    with _SHARED_GENERATORS:
        generator_states = generators.random_state()
    for node, prepared_node in zip(operations.nodes, prepared.graph.nodes, strict=True):
        operands.clear()
        results.clear()
        # No name but these may hold a value while the next node runs.
        values = map(run.env.__getitem__, prepared_node.all_input_nodes)
        operands.update(zip(node.all_input_nodes, values, strict=True))
        written = {target: operands[target] for target in graph_nodes.find_write_targets(node)}
        for target in written:
            operands[target] = written[target].clone()
        if draws(node):
            # The states of generators are those of this run.
            with _SHARED_GENERATORS, generators.keeping_generators():
                generators.set_random_state(generator_states)
                result = run.run_node(prepared_node)
                generator_states = generators.random_state()
        else:
            result = run.run_node(prepared_node)
        run.env[prepared_node] = result
        for source in run.user_to_last_uses.get(prepared_node, ()):
            del run.env[source]
        if is_empty(node):
            result.zero_()
            continue
        is_in_flight = not operations.collectives.keys().isdisjoint([node, *operands])
        if not is_in_flight and node.op != "output":
            # An operator that writes to many tensors, as a fused optimizer does, may return nothing.
            results += tensors_in(result) or written.values()
        yield node, operands, results


def draws(node: Node) -> bool:
    """Whether a node reads, sets or draws from torch's generators, or has branches, which may."""
    has_branches = getattr(node.target, "namespace", "") == "higher_order"
    return has_branches or node.target in _GENERATORS or graph_nodes.is_random(node)


def is_empty(node: Node) -> bool:
    """Whether a node makes memory that nothing has been written to."""
    return name_operator(node).startswith(("aten.empty", "aten.new_empty"))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors of a node's value."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]
