"""Backends: they run a graph operator by operator, or with kernels of Inductor between the collectives."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fshard import _compat, lazy_names
from fshard.comm import ops
from fshard.errors import expect
from fshard.jit.nodes import find_inputs, find_written_reshapes
from fshard.jit.trace import TRACING
from fshard.tree.checks import describe

Backend = str | Callable[..., Any]
BACKENDS = ("graph", "inductor")
# Imports the extension that compiles for Inductor when it is first asked for.
find_in_extensions = lazy_names.make_getattr("fshard.jit")


def prepare(module: Any, backend: Backend) -> Callable[..., Any]:
    """Make a graph ready to run.

    Args:
        module: The torch.fx.GraphModule.
        backend: As for `jit`.

    Returns:
        A function of its inputs.
    """
    if callable(backend):
        run = backend(module, [node.meta["val"] for node in find_inputs(module.graph)])
        expect(callable(run), "jit", "backend to return a function", describe(run))
        return run
    if backend == "inductor":
        compile_pieces = find_in_extensions("compile_pieces")
        with TRACING:
            compile_pieces(module)
    # The module keeps its graph with its metadata. The graph that runs is a copy without it.
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    # A write to a copy that a reshape makes would be lost.
    views = {copies[node] for node in find_written_reshapes(module.graph)}
    for node in graph.nodes:
        if node.target is _compat.WAIT_TENSOR:
            # Eager code calls this function, which also releases the tensors that the process group's backend holds.
            node.target = ops.wait
        function = _compat.python_function(node.target, node.args)
        if function is not None:
            node.target = torch.Tensor.view if node in views else function
        node.meta = {}
    return GraphModule(module, graph)
