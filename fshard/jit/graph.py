"""make_graph: a function's graph to read, with what it sends and what memory it takes."""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fshard import _compat, comm
from fshard.jit.jit import Jitted
from fshard.jit.memory import lifetimes
from fshard.jit.passes import clean, placeholders, results, sent_by
from fshard.jit.signature import aval, flat_arguments
from fshard.jit.trace import Traced, trace
from fshard.tree import unflatten
from fshard.tree.checks import check_function


class Moment(NamedTuple):
    """One operator of a graph, when it runs.

    Attributes:
        node: Its node in the graph.
        name: The node's name.
        operator: What it runs.
        bytes: Bytes that are held while it runs, beyond the arguments.
        collective: What it sends, if anything.
    """

    node: Node
    name: str
    operator: str
    bytes: int
    collective: comm.Collective | None


class StepGraph:
    """A traced function, as `make_graph` returns it.

    Attributes:
        module: The torch.fx.GraphModule, each of whose inputs is a tensor of the arguments, in their order.
        results: What the function returns, with nodes of the graph in the place of tensors.
        memory: When each storage is taken and freed.
        moments: Its operators in their order.
    """

    def __init__(self, traced: Traced) -> None:
        """Look at what was traced."""
        self.module = traced.graph
        self.memory = lifetimes(self.module.graph)
        self._paths = dict(zip(placeholders(self.module.graph), traced.paths, strict=True))
        rest = iter(results(self.module.graph))
        nodes = [None if out is None else next(rest) for out in traced.outputs]
        self.results = unflatten(traced.treedef, nodes)
        self._results = dict(zip(nodes, traced.out_paths, strict=True))
        self.moments = list(self._run())

    def collectives(self) -> comm.Record:
        """List the collectives of the function in the order of their start, as `fs.comm.record` does."""
        return comm.Record(moment.collective for moment in self.moments if moment.collective is not None)

    def bytes_sent(self) -> float:
        """Bytes each rank sends, in nominal ring terms, scalars left out."""
        return self.collectives().bytes_sent()

    def peak_bytes(self) -> int:
        """The most bytes that are held at a time, beyond the arguments.

        That is where operators run one by one. What kernels and the process group's backend take for themselves is not
        among it: little but for convolutions, which lay their arguments out anew, and other collectives than direct.
        """
        return max((moment.bytes for moment in self.moments), default=0)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _run(self) -> Iterator[Moment]:
        held: dict[Hashable, int] = {}
        total = 0
        for node in self.module.graph.nodes:
            for name, nbytes in self.memory.taken[node].items():
                total += nbytes - held.get(name, 0)
                held[name] = nbytes
            if node.op == "call_function":
                yield Moment(node, node.name, operator_name(node), total, sent_by(node))
            for name in self.memory.freed.get(node, ()):
                total -= held.pop(name, 0)

    def _lines(self) -> Iterator[str]:
        sent = f"{len(self.collectives())} collectives, {self.bytes_sent():.0f} bytes sent"
        yield f"{len(self.moments)} operators, {sent}, {self.peak_bytes()} bytes at most"
        for node in self.module.graph.nodes:
            path = f"  -> {self._results[node]}" if node in self._results else ""
            if node.op == "placeholder":
                yield f"  {node.name}: {_shape(node)} = {self._paths[node]}{path}"
            elif node.op == "call_function":
                arguments = ", ".join(_written(argument) for argument in _readable(node))
                yield f"  {node.name}: {_shape(node)} = {operator_name(node)}({arguments}){path}"


def make_graph(f: Callable[..., Any]) -> Callable[..., StepGraph]:
    """Make a function that traces `f` for its arguments rather than run it, as jax.make_jaxpr does.

    Args:
        f: As for `jit`; or what `jit` returned, whose graph is the one that its backend is given, with results written
            to donated arguments where the backend does not copy them there at the end.

    Returns:
        A function of f's arguments that returns the graph: it prints readably, and tells collectives, bytes sent and
        peak bytes. Nothing is computed or sent, and nothing that `jit` returned is traced for later calls.

    Raises:
        ValueError: if `f` is no function; by the function returned, as by what `jit` returns.

    >>> print(make_graph(lambda x: x.sin() + 1)(torch.zeros(2)))
    2 operators, 0 collectives, 0 bytes sent, 16 bytes at most
      arg0_1: float32[2] = [0][0]
      sin: float32[2] = aten.sin(arg0_1)
      add: float32[2] = aten.add(sin, 1)  -> (root)
    """
    check_function("make_graph", f)

    def run(*args: Any, **kwargs: Any) -> StepGraph:
        if isinstance(f, Jitted):
            return StepGraph(f.graph_for(args, kwargs))
        traced = trace(flat_arguments(args, kwargs, ()), lambda tree: f(*tree[0], **tree[1]), "make_graph")
        clean(traced.graph)
        return StepGraph(traced)

    return run


def operator_name(node: Node) -> str:
    """Name the operator that a node of a graph runs."""
    if _compat.arguments_of(node.target) is None:
        return getattr(node.target, "__name__", str(node.target))
    return str(node.target).removesuffix(".default").removesuffix(".Tensor")


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(str(aval(v)).split(" on ")[0] if isinstance(v, torch.Tensor) else str(v) for v in values)


def _readable(node: Node) -> list[Any]:
    """The arguments of a node, with labels of collectives as text."""
    arguments = list(node.args)
    if sent_by(node):
        # The last one of each collective.
        arguments[-1] = str(comm.decoded(str(arguments[-1])))
    return arguments


def _written(argument: Any) -> str:
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_written, argument))}]"
    return str(argument)
