"""Runs a step's graph node by node on its arguments, and shows an observer what each node reads and makes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Interpreter, Node

import fshard as fs
from fshard.ext._compat import noting_origins
from fshard.extend import (
    Jitted,
    Traced,
    describe,
    expect,
    flatten,
    generators,
    graph_nodes,
    is_donated,
    prepare,
    refuse,
    tensor_of,
)

# Called after each node with the node, the values that it read, by their nodes, and the tensors that it made or wrote.
Observer = Callable[[Node, Mapping[Node, Any], Sequence[torch.Tensor]], None]

_GENERATORS = (generators.random_state, generators.set_random_state, generators.seed)
# Simulated ranks are threads, which share the generators of the process.
_SHARED_GENERATORS = threading.Lock()
_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})


class TracedCall(NamedTuple):
    """A step as a graph, and its arguments.

    Attributes:
        flat: The arguments, taken apart.
        traced: The graph, whose nodes know their origins.
        inputs: The inputs of the graph, each with the index of its leaf.
    """

    flat: Any
    traced: Traced
    inputs: dict[Node, int]

    def leaf_of(self, node: Node) -> Any:
        """Return the leaf that an input stands for; None of other nodes."""
        return self.flat.leaves[self.inputs[node]] if node in self.inputs else None


def trace_call(
    api_name: str, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> TracedCall:
    """Trace a call of a step. Ranks compare their graphs.

    Args:
        api_name: The function that asks, for errors.
        step: The step. Of a function of `jit` it is the function inside, which writes to no argument.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        The call.

    Raises:
        ValueError: if an argument was donated, or the step cannot be one graph.
    """
    expect(callable(step), api_name, "the step to be a function", describe(step))
    _refuse_empty_arguments(api_name, args, kwargs or {})
    function: Any = getattr(step, "__wrapped__", step) if isinstance(step, Jitted) else step
    try:
        with noting_origins():
            _, program, flat = fs.jit(function).find_call(args, kwargs or {})
    except (TypeError, ValueError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{api_name}: {name} cannot be made one graph, which {api_name} runs. {error}") from error
    traced = program.traced
    inputs = dict(zip(graph_nodes.find_inputs(traced.module.graph), traced.input_leaves, strict=True))
    return TracedCall(flat, traced, inputs)


def _refuse_empty_arguments(api_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    def misfit(leaf: Any) -> str | None:
        return "was donated to an earlier call, so it is empty now" if is_donated(leaf) else None

    remedy = (
        "keep the argument of the step that went wrong, as fs.tree_map(torch.clone, state), or leave out "
        "donate_argnums and donate=True while you search; or restore the last checkpoint and go on from there"
    )
    headline = f"{api_name}: arguments were donated, and a step cannot run again without them"
    refuse(headline, flatten((args, kwargs)).problems(misfit), remedy)


def run_call(call: TracedCall, observe: Observer) -> list[Any]:
    """Run a graph node by node, with the operators that the backend "graph" of `jit` runs.

    Collectives are sent, so every rank must run its graph. A value is freed after its last use. The run gives the same
    bits each time, unless something is wrong: empty memory is filled with zeros, and random numbers are drawn from
    states of torch's generators that nothing else moves.

    Args:
        call: The graph and its arguments, which it does not write to.
        observe: Called after each node but those that make empty memory, inputs and output included. A value that a
            node writes to is shown as it was before. Collectives in flight are shown without results, because their
            buffers must not be read before they are waited for; so is the output.

    Returns:
        The results: tensors, or None.
    """
    tensors = [tensor_of(call.flat.leaves[index]) for index in call.inputs.values()]
    with torch.no_grad():
        return list(_ObservedRun(call.traced.module, observe).run(*tensors))


class _ObservedRun(Interpreter):
    """Runs the operators of the backend, and shows the nodes of the graph that they were prepared from."""

    def __init__(self, module: Any, observe: Observer) -> None:
        prepared: Any = prepare(module, "graph")
        super().__init__(prepared)
        self.extra_traceback = False
        nodes = list(module.graph.nodes)
        self._shown_as = dict(zip(prepared.graph.nodes, nodes, strict=True))
        self._in_flight = find_in_flight(nodes)
        self._observe = observe
        with _SHARED_GENERATORS:
            self._generator_states = generators.random_state()

    def run_node(self, n: Node) -> Any:
        """Run a node and show it."""
        node = self._shown_as[n]
        operands = {self._shown_as[source]: self.env[source] for source in n.all_input_nodes}
        written = []
        for target in dict.fromkeys(graph_nodes.find_write_targets(node)):
            written.append(operands[target])
            operands[target] = operands[target].clone()
        result = self._run_privately(n) if draws(node) else super().run_node(n)
        if is_empty(node):
            result.zero_()
            return result
        results: list[torch.Tensor] = []
        if node not in self._in_flight and node.op != "output":
            # An operator that writes to many tensors, as a fused optimizer does, may return nothing.
            results = tensors_in(result) or written
        self._observe(node, operands, results)
        return result

    def _run_privately(self, n: Node) -> Any:
        """Run a node that draws from states of torch's generators that belong to this run."""
        with _SHARED_GENERATORS, generators.keeping_generators():
            generators.set_random_state(self._generator_states)
            result = super().run_node(n)
            self._generator_states = generators.random_state()
        return result


def draws(node: Node) -> bool:
    """Whether a node reads, sets or draws from torch's generators, or has branches, which may."""
    has_branches = getattr(node.target, "namespace", "") == "higher_order"
    return has_branches or node.target in _GENERATORS or graph_nodes.is_random(node)


def is_empty(node: Node) -> bool:
    """Whether a node makes memory that nothing has been written to."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") in _EMPTY


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
