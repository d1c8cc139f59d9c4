"""Backends: what runs a graph."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fshard import _compat
from fshard.comm import ops
from fshard.jit.nodes import find_inputs, is_impure, is_random, is_view
from fshard.jit.signature import aval
from fshard.jit.trace import TRACING

Backend = str | Callable[..., Any]
BACKENDS = ("graph", "inductor")


def ready(module: Any, backend: Backend) -> Callable[..., Any]:
    """Make a graph ready to run.

    Args:
        module: The torch.fx.GraphModule.
        backend: As for `jit`.

    Returns:
        A function of its inputs.
    """
    if callable(backend):
        return backend(module, [node.meta["val"] for node in find_inputs(module.graph)])
    if backend == "inductor":
        with TRACING:
            compile_pieces(module)
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        # As eager code does, for the backend to let go of its tensors too.
        node.target = ops.wait if node.target is _compat.WAIT_TENSOR else node.target
        node.target = _compat.python_function(node.target, node.args) or node.target
        # The first graph keeps what is known of results.
        node.meta = {}
    return GraphModule(module, graph)


def compile_pieces(module: GraphModule) -> None:
    """Let Inductor compile what lies between collectives, and leave these, and whatever else has an effect, in place.

    A whole graph it would put in an order of its own: it waits for a unit early to fuse it with the one before, starts
    reductions late, and keeps gathered leaves to compute again what was made of them. Equal pieces, as those of a
    model's layers, are compiled once.
    """
    graph = module.graph
    compiled: dict[Any, Callable[..., Any]] = {}
    for piece, stop in list(_pieces(graph)):
        inside = set(piece)
        spot = _views_outside(graph, piece, inside, stop)
        outs = [node for node in piece if _is_tensor(node) and not inside.issuperset(node.users)]
        if not outs or sum(not is_view(node) for node in piece) < 2:
            # There is nothing to fuse.
            continue
        inputs = list(dict.fromkeys(given for node in piece for given in node.all_input_nodes if given not in inside))
        cut = _cut(piece, inputs, outs)
        key = tuple(aval(node.meta["val"]) for node in inputs), str(cut.graph)
        if key not in compiled:
            compiled[key] = _compat.compile_by_inductor(cut, [node.meta["val"] for node in inputs])
        with graph.inserting_before(spot):
            call = graph.call_function(compiled[key], tuple(inputs))
            call.meta["val"] = [out.meta["val"] for out in outs]
            for n, out in enumerate(outs):
                result = graph.call_function(operator.getitem, (call, n))
                result.meta["val"] = out.meta["val"]
                out.replace_all_uses_with(result, lambda user, inside=inside: user not in inside)  # type: ignore[misc]
    graph.eliminate_dead_code(is_impure)


def _views_outside(graph: Graph, piece: Sequence[Node], inside: set[Node], stop: Node) -> Node:
    """Make views of a piece's results outside of it, where they are used there; return what follows the piece."""
    for node in reversed(piece):
        # Rather than new memory, as one of several results may be.
        given = node.args[0] if node.target is operator.getitem else node
        is_memory = isinstance(given, Node) and given.target is not operator.getitem and is_view(given)
        if is_memory and not inside.issuperset(node.users):
            with graph.inserting_before(stop):
                stop = graph.node_copy(node)
            node.replace_all_uses_with(stop, lambda user: user not in inside)
    return stop


def _pieces(graph: Graph) -> Iterator[tuple[list[Node], Node]]:
    """The longest runs of operators without effects, each with the node that ends it."""
    piece: dict[Node, None] = {}
    taken: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and _stays(node)):
            if piece:
                yield list(piece), node
            piece = {}
        elif node.op == "call_function" and node not in taken:
            # A view of what comes from outside stays there: Inductor does not know where in its memory an input begins.
            if is_view(node) and not any(given in piece for given in node.all_input_nodes):
                continue
            # Several results leave one by one, also those that are taken later.
            for taking in (node,) if _is_tensor(node) else (node, *node.users):
                piece[taking] = None
                taken.add(taking)


def _stays(node: Node) -> bool:
    """Whether Inductor is to leave an operator alone: what has an effect, draws, or is not torch's own arithmetic."""
    if node.target is operator.getitem:
        return False
    target: Any = node.target
    own = _compat.arguments_of(target) is not None and target.namespace in ("aten", "prims")
    return not own or is_impure(node) or is_random(node)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)


def _cut(piece: Sequence[Node], inputs: Sequence[Node], outs: Sequence[Node]) -> GraphModule:
    """Make a graph of a piece; equal pieces get equal names."""
    graph, copies = Graph(), dict[Node, Node]()
    for n, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{n}")
        copies[node].meta["val"] = node.meta["val"]
    for node in piece:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copies[node].meta["val"] = node.meta["val"]
    graph.output([copies[node] for node in outs])
    return GraphModule(torch.nn.Module(), graph)
