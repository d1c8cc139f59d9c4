"""Backends: what runs a graph."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fshard import _compat
from fshard.jit.lower import lowered
from fshard.jit.passes import finish_waits, is_impure, is_random, is_view, placeholders, replace
from fshard.jit.signature import aval
from fshard.jit.trace import TRACING

Backend = str | Callable[..., Any]
BACKENDS = ("graph", "inductor")

# glibc's DEFAULT_MMAP_THRESHOLD_MAX, less what a block takes beyond its bytes.
MAPPED_BYTES = 2**25 - 2**16


def writes_in_place(backend: Backend) -> bool:
    """Whether a backend keeps the order of what reads and writes an input, so that results may be written there."""
    return not callable(backend)


def ready(module: Any, backend: Backend) -> Callable[..., Any]:
    """Make a graph ready to run.

    Args:
        module: The torch.fx.GraphModule.
        backend: As for `jit`.

    Returns:
        A function of its inputs.
    """
    _let_freed_memory_stay()
    if callable(backend):
        return backend(module, [node.meta["val"] for node in placeholders(module.graph)])
    if backend == "inductor":
        with TRACING:
            compile_pieces(module)
    finish_waits(module)
    return lowered(module)


def _let_freed_memory_stay() -> None:
    """Keep glibc from giving the memory of a step back to the system, which is slow to hand it out again in the next.

    It keeps twice the largest block that it has given back, up to this size. A model of small tensors has no such
    block. The one made here is never touched, and so takes no memory.
    """
    torch.empty(MAPPED_BYTES, dtype=torch.uint8, device="cpu")


def compile_pieces(module: GraphModule) -> None:
    """Let Inductor compile what lies between collectives, and leave these, and whatever else has an effect, in place.

    A whole graph it would put in an order of its own: it waits for a unit early to fuse it with the one before, starts
    reductions late, and keeps gathered leaves to compute again what was made of them. Equal pieces, as those of a
    model's layers, are compiled once.
    """
    graph = module.graph
    compiled: dict[Any, Callable[..., Any]] = {}
    stands_for: dict[Node, Node] = {}
    inner: list[Node] = []
    for piece, stop in list(_pieces(graph)):
        inside = set(piece)
        inputs = list(dict.fromkeys(given for node in piece for given in node.all_input_nodes if given not in inside))
        outs, views = _results(piece, inside)
        if not outs or sum(not is_view(node) for node in piece) < 2:
            # There is nothing to fuse.
            continue
        cut = _cut(piece, inputs, outs)
        key = _key(cut.graph)
        if key not in compiled:
            compiled[key] = _compat.compile_by_inductor(cut, [node.meta["val"] for node in inputs])
        with graph.inserting_before(stop):
            call = graph.call_function(compiled[key], tuple(inputs))
            for n, out in enumerate(outs):
                stands_for[out] = graph.call_function(operator.getitem, (call, n))
            for view in views:
                stands_for[view] = graph.node_copy(view, lambda given: stands_for.get(given, given))
        for node in (*outs, *views):
            stands_for[node].meta["val"] = node.meta["val"]
        call.meta["val"] = [out.meta["val"] for out in outs]
        inner += inside.difference(outs, views)
    replace(graph, stands_for)
    for node in sorted(inner, reverse=True):
        graph.erase_node(node)


def _results(piece: Sequence[Node], inside: set[Node]) -> tuple[list[Node], list[Node]]:
    """Find the results of a piece that are used outside, and such views of them, which are made outside."""
    wanted = {node for node in piece if not inside.issuperset(node.users)}
    outs, views = [], []
    for node in reversed(piece):
        if node in wanted:
            if _is_view(node):
                wanted.update(inside.intersection(node.all_input_nodes))
                views.append(node)
            elif _is_tensor(node):
                outs.append(node)
    return outs[::-1], views[::-1]


def _is_view(node: Node) -> bool:
    """Whether a node's result is memory of what it is given, rather than new, as one of several results may be."""
    given = node.args[0] if node.target is operator.getitem else node
    return isinstance(given, Node) and given.target is not operator.getitem and is_view(given)


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
    if _compat.arguments_of(node.target) is None or node.target.namespace not in ("aten", "prims"):  # type: ignore[union-attr]
        return True
    return is_impure(node) or is_random(node)


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


def _key(graph: Graph) -> Any:
    """Return a key that is equal for pieces that compute the same of equal inputs."""
    avals = tuple(aval(node.meta["val"]) for node in placeholders(graph))
    return avals, tuple((str(node.target), repr(node.args), repr(node.kwargs)) for node in graph.nodes)
