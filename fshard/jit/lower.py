"""Lower: a graph of operators as Python runs it in the least time, with the same kernels and bits."""

from collections.abc import Iterator
from types import MethodDescriptorType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fshard import _compat
from fshard.jit.passes import is_impure, replace

aten = torch.ops.aten
# They look at the memory of their first argument, and do nothing else.
_VIEWS = (
    *_compat.RESHAPES,
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.as_strided.default, aten.squeeze.dim),
    *(aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor, aten.select.int),
)


def lowered(module: GraphModule) -> GraphModule:
    """Copy a graph, as it runs: with fewer views, and operators that torch has functions for called by these."""
    graph = Graph()
    out = graph.graph_copy(module.graph, {})
    graph.output(out)
    if not any(_compat.changes_geometry(node.target) for node in graph.nodes):
        _fold_views(graph)
        graph.eliminate_dead_code(is_impure)
    for node in graph.nodes:
        _call_by_python(node)
        # The first graph keeps what is known of results.
        node.meta = {}
    return GraphModule(module, graph)


def _fold_views(graph: Graph) -> None:
    """Take out views that end where they began, views of views, and copies that a reshape makes by itself."""
    stands_for: dict[Node, Node] = {}
    returned = set(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if node.target not in _VIEWS:
            continue
        node.args = (stands_for.get(node.args[0], node.args[0]), *node.args[1:])
        looks = _geometry(node.meta["val"])
        if node.all_input_nodes != [node.args[0]] or looks is None:
            # Of a size that is known when it runs.
            continue
        same = next((base for base in _bases(node) if _geometry(base.meta["val"]) == looks), None)
        if same is not None and node not in returned:
            stands_for[node] = same
            continue
        if node.target not in _compat.RESHAPES:
            continue
        base, shape = node.args
        if base.target in _compat.RESHAPES and _viewed(base.args[0], shape) == looks:
            node.args = (base.args[0], shape)
        elif _is_contiguous_copy(base) and len(base.users) == 1 and _viewed(base.args[0], shape) is None:
            node.target, node.args = torch.reshape, (base.args[0], shape)
    replace(graph, stands_for)


def _bases(node: Node) -> Iterator[Node]:
    """The nodes whose memory a view looks at, the nearest one first."""
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
        yield node


def _geometry(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """How a tensor looks at its memory, if that is known."""
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return numbers if all(isinstance(number, int) for number in numbers) else None


def _viewed(base: Node, shape: Any) -> tuple[int, ...] | None:
    """How a tensor looks at its memory in another shape; None where that takes a copy."""
    given = base.meta["val"]
    try:
        # Not of the tensor itself, which has no values and takes its time.
        viewed = torch.empty_strided(given.shape, given.stride(), device="meta").view(shape)
    except RuntimeError:
        return None
    return (*viewed.shape, *viewed.stride(), given.storage_offset())


def _is_contiguous_copy(node: Node) -> bool:
    known = node.target is aten.clone.default and _geometry(node.args[0].meta["val"]) is not None  # type: ignore[union-attr]
    return known and node.kwargs.get("memory_format") is torch.contiguous_format


def _call_by_python(node: Node) -> None:
    """Call torch's own function for an operator, if there is one."""
    function = _compat.python_function(node.target, node.args)
    if function is None:
        return
    # Python makes tuples of numbers once, and lists in each call.
    node.args = tuple(tuple(a) if isinstance(a, list) and not any(map(_is_node, a)) else a for a in node.args)
    if isinstance(function, MethodDescriptorType):
        node.op, node.target = "call_method", function.__name__
    else:
        node.target = function


def _is_node(given: Any) -> bool:
    return isinstance(given, Node)
