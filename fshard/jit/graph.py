"""make_graph: a function's graph to read, with what it sends and what memory it takes."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard import _compat, comm
from fshard.comm import ops
from fshard.jit.jit import Jitted
from fshard.jit.nodes import Storages, find_collective, find_last_uses, find_results, find_storages, is_wait
from fshard.jit.passes import remove_dead_views
from fshard.jit.trace import Traced, trace
from fshard.tree import flatten, unflatten


class Flight(NamedTuple):
    """One buffer of a collective under way.

    Attributes:
        start: The collective.
        wait: What waits for the buffer.
        buffer: The buffer's name.
        source: What is held of the tensor that was sent.
    """

    start: Node
    wait: Node
    buffer: Hashable
    source: Storages


class Lifetimes(NamedTuple):
    """When a graph's memory is taken and freed.

    Attributes:
        storages: For each node the storages that its results lie in.
        given: Those of inputs and constants, which are there all the time.
        taken: For each node what is held from when it runs.
        freed: For each node what nobody needs once it has run.
        flights: Buffers of collectives.
    """

    storages: dict[Node, Storages]
    given: Storages
    taken: dict[Node, Storages]
    freed: dict[Node, list[Hashable]]
    flights: list[Flight]


class Operation(NamedTuple):
    """One operator of a graph, when it runs.

    Attributes:
        node: Its node in the graph.
        operator: What it runs.
        bytes: Bytes that are held while it runs, beyond the arguments.
        collective: What it sends, if anything.
    """

    node: Node
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
        self.results = unflatten(traced.treedef, find_results(self.module.graph))
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
        sent = f"{len(self.collectives())} collectives, {self.bytes_sent():.0f} bytes sent"
        first = f"{len(self.moments)} operators, {sent}, {self.peak_bytes()} bytes at most"
        return f"{first}\n{self.module.print_readable(print_output=False)}"

    __repr__ = __str__

    def _run(self) -> Iterator[Operation]:
        held: dict[Hashable, int] = {}
        total = 0
        for node in self.module.graph.nodes:
            for storage, nbytes in self.memory.taken[node].items():
                total += nbytes - held.get(storage, 0)
                held[storage] = nbytes
            if node.op == "call_function":
                name = str(node.target) if _compat.arguments_of(node.target) else node.target.__name__
                name = name.removesuffix(".default").removesuffix(".Tensor")
                yield Operation(node, name, total, find_collective(node))
            for storage in self.memory.freed.get(node, ()):
                total -= held.pop(storage, 0)


def make_graph(f: Callable[..., Any]) -> Callable[..., StepGraph]:
    """Make a function that traces `f` for its arguments rather than run it, as jax.make_jaxpr does.

    Args:
        f: As for `jit`; or what `jit` returned, whose graph is the one that its backend is given.

    Returns:
        A function of f's arguments that returns the graph: it prints readably, and tells collectives, bytes sent and
        peak bytes. Nothing is computed or sent, and nothing that `jit` returned is traced for later calls.

    Raises:
        ValueError: by the function returned, as by what `jit` returns.

    >>> import torch
    >>> graph = make_graph(lambda x: x.sin() + 1)(torch.zeros(2))
    >>> graph.peak_bytes(), [moment.operator for moment in graph.moments]
    (16, ['aten.sin', 'aten.add'])
    """

    def run(*args: Any, **kwargs: Any) -> StepGraph:
        if isinstance(f, Jitted):
            return StepGraph(f.graph_for(args, kwargs))
        traced = trace(flatten((args, kwargs)), f)
        remove_dead_views(traced.graph.graph)
        return StepGraph(traced)

    return run


def lifetimes(graph: Graph) -> Lifetimes:
    """Find out when a graph's memory is taken and freed, each result held until nobody needs it or a view of it.

    Args:
        graph: The graph, with results that have no values.
    """
    storages = find_storages(graph.nodes)
    flights = list(_flights(storages))
    given: Storages = {}
    taken: dict[Node, Storages] = {node: {} for node in storages}
    for node, found in storages.items():
        part = given if node.op in ("placeholder", "get_attr") else taken[node]
        part |= {name: nbytes for name, nbytes in found.items() if name not in given}
    sources = defaultdict[Node, Storages](dict)
    for flight in flights:
        sources[flight.wait] |= flight.source
        taken[flight.start] |= {name: nbytes for name, nbytes in flight.source.items() if name not in given}
    freed = defaultdict[Node, list[Hashable]](list)
    for name, node in find_last_uses(storages, sources).items():
        if name not in given:
            freed[node].append(name)
    return Lifetimes(storages, given, taken, freed, flights)


def _flights(storages: Mapping[Node, Storages]) -> Iterator[Flight]:
    """Every buffer of a collective."""
    waits = {name: node for node in storages if is_wait(node) for name in storages[node]}
    for node in storages:
        values = map_arg(node.args, lambda given: given.meta.get("val"))
        for i, copied in enumerate(ops.held_in_flight(node.target, values)):
            source: Storages = {(node, i): copied} if copied else {}
            if copied == 0:
                given: Any = node.args[0]
                source = storages[given[i]]
            buffer = list(storages[node])[i]
            yield Flight(node, waits.get(buffer, node), buffer, source)
