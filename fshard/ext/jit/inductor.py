"""The backend "inductor": kernels of Inductor between the collectives of a graph."""

import operator
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fshard.ext import _compat
from fshard.extend import arguments_of, graph_nodes, make_aval


class GraphPiece(NamedTuple):
    """A run of operators without effects.

    Attributes:
        nodes: The operators, in their order.
        first_after: The node behind the last of them.
    """

    nodes: list[Node]
    first_after: Node


def compile_pieces(module: GraphModule) -> None:
    """Let Inductor compile what lies between collectives, and leave these, and everything else with effects, in place.

    Inductor would reorder a whole graph: it would wait for a unit early to fuse it with the previous one, start
    reductions late, and keep gathered leaves for recomputation. Equal pieces, such as those of a model's layers, are
    compiled once.

    Args:
        module: The graph, which is changed.
    """
    graph = module.graph
    compiled: dict[Any, Callable[..., Any]] = {}
    for piece in list(_find_pieces(graph)):
        inside = set(piece.nodes)
        first_after_piece = _move_views_out(graph, piece, inside)
        results = [node for node in piece.nodes if _is_tensor(node) and not inside.issuperset(node.users)]
        number_of_kernels = sum(not graph_nodes.is_view(node) for node in piece.nodes)
        if not results or number_of_kernels < 2:
            # There is nothing to fuse.
            continue
        piece_module, inputs = _copy_piece(piece.nodes, results)
        key = (tuple(make_aval(node.meta["val"]) for node in inputs), str(piece_module.graph))
        if key not in compiled:
            compiled[key] = _compat.compile_by_inductor(piece_module, [node.meta["val"] for node in inputs])
        with graph.inserting_before(first_after_piece):
            _call_kernel(graph, compiled[key], inputs, results, inside)
    graph.eliminate_dead_code(graph_nodes.is_impure)


def _call_kernel(
    graph: Graph, compiled: Callable[..., Any], inputs: Sequence[Node], results: Sequence[Node], inside: set[Node]
) -> None:
    """Call a compiled piece at the graph's place, and let all outside of the piece use its results."""
    call = graph.call_function(compiled, tuple(inputs))
    call.meta["val"] = [result.meta["val"] for result in results]
    for n, result in enumerate(results):
        item = graph.call_function(operator.getitem, (call, n))
        item.meta["val"] = result.meta["val"]
        result.replace_all_uses_with(item, lambda user: user not in inside)


def _move_views_out(graph: Graph, piece: GraphPiece, inside: set[Node]) -> Node:
    """Copy views of a piece's results to behind the piece, for those who use them there.

    A compiled piece would return new memory in their place. One of several results stays, because it is memory of its
    own.

    Returns:
        The first node behind the piece.
    """
    first_after = piece.first_after
    for node in reversed(piece.nodes):
        source = node.args[0] if node.target is operator.getitem else node
        if not isinstance(source, Node) or source.target is operator.getitem:
            continue
        if graph_nodes.is_view(source) and not inside.issuperset(node.users):
            with graph.inserting_before(first_after):
                first_after = graph.node_copy(node)
            node.replace_all_uses_with(first_after, lambda user: user not in inside)
    return first_after


def _find_pieces(graph: Graph) -> Iterator[GraphPiece]:
    """Find the longest runs of operators without effects."""
    nodes: dict[Node, None] = {}
    in_pieces: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and _must_stay(node)):
            if nodes:
                yield GraphPiece(list(nodes), node)
            nodes = {}
        elif node.op == "call_function" and node not in in_pieces and not _is_view_from_outside(node, nodes):
            # Several results leave a piece one by one, so all of them come with their operator.
            together = [node] if _is_tensor(node) else [node, *node.users]
            nodes |= dict.fromkeys(together)
            in_pieces.update(together)


def _is_view_from_outside(node: Node, nodes: Container[Node]) -> bool:
    """Whether a node views memory from outside of a piece: Inductor does not know where in it an input begins."""
    return graph_nodes.is_view(node) and not any(source in nodes for source in node.all_input_nodes)


def _must_stay(node: Node) -> bool:
    """Whether Inductor is to leave an operator alone: it has an effect, draws, or is not torch's own arithmetic."""
    if node.target is operator.getitem:
        return False
    target: Any = node.target
    if arguments_of(target) is None or target.namespace not in ("aten", "prims"):
        return True
    # A number that is read while the graph runs, such as a step count, is neither input nor result of a kernel.
    values = [neighbor.meta.get("val") for neighbor in (node, *node.all_input_nodes)]
    has_number = any(isinstance(value, torch.SymFloat | torch.SymInt) for value in values)
    return has_number or graph_nodes.is_impure(node) or graph_nodes.is_random(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _copy_piece(nodes: Sequence[Node], results: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """Copy a piece into a graph of its own, in which equal pieces have equal names; list what its inputs stand for."""
    graph = Graph()
    inputs: list[Node] = []
    copies: dict[Node, Node] = {}

    def find_copy(node: Node) -> Node:
        if node not in copies:
            add_copy(node, graph.placeholder(f"input_{len(inputs)}"))
            inputs.append(node)
        return copies[node]

    def add_copy(node: Node, copy: Node) -> None:
        copy.meta["val"] = node.meta["val"]
        copies[node] = copy

    for node in nodes:
        target: Any = node.target
        add_copy(node, graph.call_function(target, *map_arg((node.args, node.kwargs), find_copy)))
    graph.output([copies[node] for node in results])
    return GraphModule(torch.nn.Module(), graph), inputs
