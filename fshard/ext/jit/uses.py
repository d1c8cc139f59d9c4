"""The use of each storage of a step's graph: parameters, gradients, full parameters, activations and others."""

from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fshard import Sharded, comm
from fshard.ext import _compat
from fshard.extend import flatten, graph_nodes

aten = torch.ops.aten
# The uses of a TrainState's fields.
_USES_OF_FIELDS = (
    ("params", "parameters"),
    ("opt_state", "optimizer_state"),
    ("transform_state", "optimizer_state"),
)
# The uses of the buffers that collectives of these verbs fill.
_USES_OF_VERBS: Mapping[str, str] = MappingProxyType(
    {comm.Verb.GATHER: "gathered", comm.Verb.SCATTER: "gradients"},
)
# Operators that bring numbers elsewhere, or to another dtype.
_MOVES = (
    aten.clone.default,
    aten.cat.default,
    _compat.TO_COPY,
    aten.constant_pad_nd.default,
    aten.copy_.default,
    aten.stack.default,
    aten.slice_scatter.default,
)


def find_uses(graph: Any, args: Any) -> dict[Hashable, str]:
    """Find the use of each storage of a step's graph, as the method of `StepGraph` says.

    Args:
        graph: A `StepGraph`.
        args: The arguments that it was traced with.
    """
    memory = graph.memory
    uses: dict[Hashable, str] = {}
    collectives = {moment.node: moment.collective for moment in graph.moments if moment.collective}
    known_uses = _find_known_uses(graph, args)
    for node in _find_gradients(graph.module, collectives):
        known_uses.setdefault(node, "gradients")
    for node, use in known_uses.items():
        for storage in memory.storages[node]:
            uses.setdefault(storage, use)
    for node in graph.module.graph.nodes:
        sources = set[str]()
        for source in node.all_input_nodes:
            # A single number, such as a norm or a scale, says nothing of what is computed with it.
            if _count_elements(source) > 1:
                sources.update(uses[storage] for storage in memory.storages[source])
        use = _find_use_of_result(node, collectives.get(node), sources)
        for storage in memory.storages[node]:
            uses.setdefault(storage, use)
        for storage in memory.taken[node]:
            uses.setdefault(storage, "in_flight")
    return uses


def _find_use_of_result(node: Node, collective: comm.Collective | None, sources: set[str]) -> str:
    """Find the use of a node's result by the uses of its sources."""
    use = "inputs" if node.op == "get_attr" else "activations"
    if collective is not None:
        return _USES_OF_VERBS.get(collective.label, use)
    if sources == {"gathered"}:
        return "gathered"
    if node.target in _MOVES and sources and sources <= {"gathered", "parameters"}:
        return "gathered"
    sizes = (1, _count_elements(node))
    have_its_size = all(_count_elements(source) in sizes for source in node.all_input_nodes)
    if sources == {"gradients"} and have_its_size:
        return "gradients"
    return use


def _find_gradients(module: GraphModule, collectives: Mapping[Node, comm.Collective]) -> set[Node]:
    """Find the gradients that reductions and fused optimizers are given, and those that they are copies of."""
    gradients = set[Node]()
    for node in reversed(module.graph.nodes):
        arguments = node.normalized_arguments(module, normalize_to_only_use_kwargs=True)
        if node in collectives and collectives[node].label == comm.Verb.SCATTER:
            gradients.update(node.all_input_nodes)
        elif arguments and "grads" in arguments.kwargs:
            gradients.update(arguments.kwargs["grads"])
        elif node in gradients and (node.target in _MOVES or graph_nodes.is_view(node)):
            # A cat packs several gradients. Other copies and views are as large as their gradient.
            is_pack = node.target is aten.cat.default
            size = _count_elements(node)
            gradients.update(source for source in node.all_input_nodes if is_pack or _count_elements(source) == size)
    return gradients


def _find_known_uses(graph: Any, args: Any) -> dict[Node, str]:
    """Find the uses of a graph's inputs, and of those results that are fields of a state."""
    uses = {}
    for use, node in _list_uses(graph.results):
        if use and node is not None:
            uses[node] = use
    inputs = []
    for use, leaf in _list_uses(args):
        if isinstance(leaf, Sharded | torch.Tensor):
            inputs.append(use or "inputs")
    uses |= zip(graph_nodes.find_inputs(graph.module.graph), inputs, strict=True)
    return uses


def _list_uses(trees: Any) -> list[tuple[str, Any]]:
    """List the leaves of a step's arguments or results, each with its use, which is empty outside of a state."""
    uses: dict[int, str] = {}
    for state in _find_states(trees):
        for name, use in _USES_OF_FIELDS:
            uses |= dict.fromkeys(map(id, flatten(getattr(state, name, None)).leaves), use)
    return [(uses.get(id(leaf), ""), leaf) for leaf in flatten(trees).leaves]


def _find_states(tree: Any) -> Iterator[Any]:
    """Find states, of which a step may have several, such as one for each network of a GAN."""
    if hasattr(tree, "params"):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _find_states(part)


def _count_elements(node: Node) -> int:
    """Count the elements of a node's result; 0 if it is no tensor."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0
