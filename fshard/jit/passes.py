"""Passes over a traced graph that remove what it does not need, and refuse what it must not do."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fshard import _compat, random
from fshard.jit.nodes import find_storages, find_write_targets, find_written_reshapes, is_impure, is_random, is_view


def fold_views_and_remove_dead_nodes(graph: Graph) -> None:
    """Remove views that repeat the tensor they view or one that it is a view of, chains of reshapes, and unused nodes.

    Args:
        graph: The graph, which is changed.
    """
    # An operator such as t_ changes the shape of an earlier node, so equal shapes no longer mean equal views.
    if not any(_compat.changes_geometry(node.target) for node in graph.nodes):
        _fold_views(graph)
    graph.eliminate_dead_code(is_impure)


def _fold_views(graph: Graph) -> None:
    """Let an earlier node with the same view of the same memory take a view's place, and shorten chains of reshapes."""
    stands_for = {}
    written = find_written_reshapes(graph)
    # For each tensor the nodes that it is a view of, itself included, by how each views the memory.
    views_by_geometry: dict[Node, dict[Any, Node]] = {}
    for node in graph.nodes:
        geometry = _describe_geometry(node)
        if geometry is None or node in written:
            continue
        sources = node.all_input_nodes
        earlier: dict[Any, Node] = {}
        if is_view(node) and len(sources) == 1:
            earlier = views_by_geometry.get(sources[0], {})
        if geometry in earlier:
            stands_for[node] = earlier[geometry]
        elif node.target in _compat.RESHAPES and sources[0].target in _compat.RESHAPES:
            root = sources[0].all_input_nodes[0]
            if root.meta["val"].is_contiguous():
                node.args = (root, *node.args[1:])
        # An earlier node with this geometry wins, so that no entry names a node that is erased below.
        views_by_geometry[node] = {geometry: node} | earlier
    replace_nodes(graph, stands_for)


def _describe_geometry(node: Node) -> Any:
    """Describe how a tensor views its memory; None if it is no tensor, or if a size is only known when it runs."""
    value = node.meta.get("val")
    if not torch.is_tensor(value) or value.layout is not torch.strided:
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        return None
    return numbers, value.dtype, value.is_conj(), value.is_neg()


def replace_nodes(graph: Graph, stands_for: Mapping[Node, Node]) -> None:
    """Let nodes take the place of others, and erase those.

    All are replaced in one walk: an optimizer's operator takes every leaf, and is written once rather than once a leaf.

    Args:
        graph: The graph, which is changed.
        stands_for: For each node to erase the one that takes its place.
    """
    users: dict[Node, None] = {}
    for node in stands_for:
        users |= dict.fromkeys(node.users)
    for user in users:
        arguments = user.args, user.kwargs
        user.args, user.kwargs = map_arg(arguments, lambda node: stands_for.get(node, node))
    for node in stands_for:
        graph.erase_node(node)


def refuse_written_inputs(graph: Graph, path_of_protected_input: Mapping[Node, str]) -> None:
    """Refuse a graph that writes to some inputs, or to a tensor that the function closes over.

    Args:
        graph: The graph.
        path_of_protected_input: The inputs that may not be written to, with their paths.

    Raises:
        ValueError: if it does; the error names the path and the operator.
    """
    storages = find_storages(graph.nodes)
    # For the name of each protected storage why nothing may be written to it.
    refusals: dict[Hashable, str] = {}
    for node, path in path_of_protected_input.items():
        text = f"{path}, which is not donated. Return a new value, or donate the argument."
        refusals |= dict.fromkeys(storages[node], text)
    for node in graph.find_nodes(op="get_attr"):
        text = (
            "a tensor that the function closes over. Pass the tensor as an argument, and return its new value from the "
            "function."
        )
        refusals |= dict.fromkeys(storages[node], text)
    for node in graph.nodes:
        for target in find_write_targets(node):
            for name in refusals.keys() & storages[target]:
                raise ValueError(f"jit: {node.target} writes in place to {refusals[name]}")


def refuse_ambient_random(graph: Graph) -> None:
    """Refuse random numbers without a key, which a graph would draw from torch's generator as it happens to be.

    Args:
        graph: The graph.

    Raises:
        ValueError: if there are any; the error names the operator.
    """
    has_key = False
    # For each saved state of the generator, whether a key was active when it was saved.
    had_key: dict[Any, bool] = {}
    for node in _walk_branches_first(graph):
        if node.target is random.random_state:
            had_key[node] = has_key
        elif node.target is random.seed:
            has_key = True
        elif node.target is random.set_random_state:
            has_key = had_key.get(node.args[0], False)
        elif is_random(node) and node.kwargs.get("generator") is not None:
            raise ValueError(
                f"jit: {node.target} draws from a torch.Generator, which a graph does not seed. Leave it out, and draw "
                "inside a module that is called with a key."
            )
        elif is_random(node) and not has_key:
            raise ValueError(
                f"jit: {node.target} draws random numbers without a key. Pass model.apply(..., key=...) a key that "
                "changes every step, such as fs.fold_in(state.key, state.step)."
            )


def _walk_branches_first(graph: Graph) -> Iterator[Node]:
    """List the nodes of the branches of torch.cond, in which no key holds, and then those of the graph."""
    modules = list(graph.owning_module.modules())  # type: ignore[union-attr]
    for module in modules[1:]:
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
    yield from graph.nodes
