"""make_graph: a function's graph to read, with the collectives that it starts and the memory that it takes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fshard import comm
from fshard.ext._compat import name_operator
from fshard.ext.jit.uses import find_uses
from fshard.extend import (
    Jitted,
    Traced,
    flatten,
    fold_views_and_remove_dead_nodes,
    graph_nodes,
    held_in_flight,
    trace,
    unflatten,
)

# Bytes of storages by their names.
Storages = dict[Hashable, int]


class PendingBuffer(NamedTuple):
    """A buffer of a collective, from its start until somebody has waited for it.

    Attributes:
        start: The node that starts the collective.
        source: The tensor that is sent.
        taken: The node that takes the buffer out of what the start returns; the start if none does.
        wait: The node that waits for the buffer; the start if none does.
        buffer: The name of the buffer's storage.
        held_storages: The storages that the collective holds of the tensor that is sent: its own, or a copy of it.
    """

    start: Node
    source: Node
    taken: Node
    wait: Node
    buffer: Hashable
    held_storages: Storages


class Lifetimes(NamedTuple):
    """When a graph's memory is taken and freed.

    Attributes:
        storages: For each node the storages that its results lie in.
        always_held: The storages of inputs and constants, which are there all the time.
        taken: For each node the storages that its results lie in, those of `always_held` left out. Until somebody has
            waited for a message, what is held of the tensor that is sent is among them.
        last_uses: For each storage the last node that needs it, or waits for the collective that holds it.
        pending_buffers: The buffers of collectives.
    """

    storages: dict[Node, Storages]
    always_held: Storages
    taken: dict[Node, Storages]
    last_uses: dict[Hashable, Node]
    pending_buffers: list[PendingBuffer]

    def walk(self) -> Iterator[tuple[Node, Storages]]:
        """Walk through the nodes in their order, each with the storages that are held while it runs."""
        freed = defaultdict[Node, list[Hashable]](list)
        for storage, node in self.last_uses.items():
            freed[node].append(storage)
        held: Storages = {}
        for node, taken in self.taken.items():
            held |= taken
            yield node, held
            for storage in freed[node]:
                held.pop(storage, None)


class Operation(NamedTuple):
    """One operator of a graph, when it runs.

    Attributes:
        node: Its node in the graph.
        operator: Its name.
        bytes: Bytes that are held while it runs, beyond the arguments.
        collective: The collective that it starts, if any.
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
        at_peak: The one at which most bytes are held, the first of several; None if there are no operators.
    """

    def __init__(self, traced: Traced) -> None:
        """Read the graph of what was traced."""
        graph = traced.module.graph
        self.module = traced.module
        self.memory = find_lifetimes(graph)
        self.results = unflatten(traced.treedef, graph_nodes.find_results(graph))
        self.moments = list(self._list_operations())
        self.at_peak = max(self.moments, key=lambda moment: moment.bytes, default=None)

    def collectives(self) -> comm.Record:
        """List the collectives of the function in the order of their start, as `fs.comm.record` does."""
        return comm.Record(moment.collective for moment in self.moments if moment.collective is not None)

    def bytes_sent(self) -> float:
        """Bytes each rank sends, in nominal ring terms, scalars left out."""
        return self.collectives().bytes_sent()

    def peak_bytes(self) -> int:
        """The most bytes that are held at a time, beyond the arguments.

        The operators run one by one. What kernels and the process group's backend allocate for themselves is not
        counted. It is little, except for convolutions, which lay their arguments out anew, and for collectives of the
        backend.
        """
        return 0 if self.at_peak is None else self.at_peak.bytes

    def find_uses(self, args: Any) -> dict[Hashable, str]:
        """Find what each storage of a train step is for.

        Args:
            args: The arguments that the function was traced with.

        Returns:
            By the name of the storage one of the fields of `fs.plan`'s bytes: "parameters", "gradients",
            "optimizer_state", "gathered", "activations", "in_flight" or "inputs".
        """
        return find_uses(self, args)

    def sum_by_use(self, uses: Mapping[Hashable, str], moment: Operation | None = None) -> Counter[str]:
        """Sum up the bytes that are held while an operator runs, arguments included.

        Args:
            uses: The use of each storage, as `find_uses` finds it. What a collective sends or receives is "in_flight"
                until somebody has waited for it, unless it is an argument.
            moment: The operator; None for what is held all the time.

        Returns:
            The sums by use.
        """
        sums = Counter[str]()
        for storage, nbytes in self.memory.always_held.items():
            sums[uses[storage]] += nbytes
        if moment is None:
            return sums
        in_flight = set[Hashable]()
        for pending in self.memory.pending_buffers:
            if pending.start <= moment.node <= pending.wait:
                in_flight.update([pending.buffer, *pending.held_storages])
        held_then = next(held for node, held in self.memory.walk() if node is moment.node)
        for storage, nbytes in held_then.items():
            sums["in_flight" if storage in in_flight else uses[storage]] += nbytes
        return sums

    def __str__(self) -> str:
        sent = f"{len(self.collectives())} collectives, {self.bytes_sent():.0f} bytes sent"
        summary = f"{len(self.moments)} operators, {sent}, {self.peak_bytes()} bytes at most"
        return f"{summary}\n{self.module.print_readable(print_output=False)}"

    __repr__ = __str__

    def _list_operations(self) -> Iterator[Operation]:
        for node, held in self.memory.walk():
            if node.op == "call_function":
                nbytes = sum(held.values())
                yield Operation(node, name_operator(node), nbytes, graph_nodes.find_collective(node))


def make_graph(f: Callable[..., Any]) -> Callable[..., StepGraph]:
    """Make a function that traces `f` for its arguments instead of running it, as jax.make_jaxpr does.

    Args:
        f: As for `jit`, or a function that `jit` returned: then the graph is the one that its backend is given.

    Returns:
        A function of f's arguments that returns the graph. Print it to read the operators; its methods count
        collectives, bytes sent and peak bytes. Nothing is computed or sent, and a function of `jit` keeps no trace of
        it.

    Raises:
        ValueError: by the function returned, as by a function that `jit` returns.

    >>> import torch
    >>> graph = make_graph(lambda x: x.sin() + 1)(torch.zeros(2))
    >>> graph.peak_bytes(), [moment.operator for moment in graph.moments]
    (16, ['aten.sin', 'aten.add'])
    """

    def run(*args: Any, **kwargs: Any) -> StepGraph:
        if isinstance(f, Jitted):
            return StepGraph(f.trace_call(args, kwargs))
        traced = trace(flatten((args, kwargs)), f)
        fold_views_and_remove_dead_nodes(traced.module.graph)
        return StepGraph(traced)

    return run


def find_lifetimes(graph: Graph) -> Lifetimes:
    """Find out when a graph's memory is taken and freed: each result is held until nobody needs it or a view of it.

    Args:
        graph: The graph. Its nodes hold fake tensors.
    """
    storages = graph_nodes.find_storages(graph.nodes)
    pending_buffers = list(_find_pending_buffers(storages))
    in_use = {node: dict(created) for node, created in storages.items()}
    for pending in pending_buffers:
        for node in (pending.start, pending.taken):
            in_use[node] |= pending.held_storages
    always_held: Storages = {}
    taken: dict[Node, Storages] = {}
    for node, used in in_use.items():
        if node.op in ("placeholder", "get_attr"):
            always_held |= used
        taken[node] = {name: nbytes for name, nbytes in used.items() if name not in always_held}
    return Lifetimes(storages, always_held, taken, graph_nodes.find_last_uses(in_use), pending_buffers)


def _find_pending_buffers(storages: Mapping[Node, Storages]) -> Iterator[PendingBuffer]:
    """List every buffer of every collective."""
    waits: dict[Hashable, Node] = {}
    for node, waited in storages.items():
        if graph_nodes.is_wait(node):
            waits |= dict.fromkeys(waited, node)
    for node in storages:
        args, _ = graph_nodes.find_values(node)
        for i, bytes_copied in enumerate(held_in_flight(node.target, args)):
            tensors: Any = node.args[0]
            taken = next((user for user in node.users if user.args[1] == i), node)
            buffer = list(storages[node])[i]
            held_storages: Storages = {}
            if bytes_copied == 0:
                held_storages = storages[tensors[i]]
            elif bytes_copied is not None:
                held_storages = {(node, i): bytes_copied}
            yield PendingBuffer(node, tensors[i], taken, waits.get(buffer, node), buffer, held_storages)
