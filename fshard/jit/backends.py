"""Backends: what runs a graph."""

from collections.abc import Callable
from typing import Any

from fshard import _compat
from fshard.comm import ops
from fshard.jit.passes import finish_waits, placeholders

Backend = str | Callable[..., Any]
BACKENDS = ("graph", "inductor")


def writes_in_place(backend: Backend) -> bool:
    """Whether a backend keeps the order of what reads and writes an input, so that results may be written there."""
    return backend == "graph"


def ready(module: Any, backend: Backend, what: str) -> Callable[..., Any]:
    """Make a graph ready to run.

    Args:
        module: The torch.fx.GraphModule.
        backend: As for `jit`.
        what: Who asks, for errors.

    Returns:
        A function of its inputs.

    Raises:
        ValueError: if the backend would lose effects that the graph has.
    """
    if backend == "graph":
        finish_waits(module)
        return module
    examples = [node.meta["val"] for node in placeholders(module.graph)]
    if callable(backend):
        return backend(module, examples)
    if any(node.target in ops.EFFECTS for node in module.graph.nodes):
        needed = 'needed backend="graph", which keeps the order of what seeds and what draws'
        raise ValueError(f"{what}: the function draws random numbers, whose order Inductor does not keep; {needed}")
    return _compat.compile_by_inductor(module, examples)
