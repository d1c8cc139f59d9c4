"""Memory: the bytes that a graph holds while each of its operators runs."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard import _compat
from fshard.comm import ops

# Bytes of storages by their names.
Storages = dict[Hashable, int]


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


def lifetimes(graph: Graph) -> Lifetimes:
    """Find out when a graph's memory is taken and freed, each result held until nobody needs it or a view of it.

    Args:
        graph: The graph, with results that have no values.
    """
    nodes = list(graph.nodes)
    order = {node: n for n, node in enumerate(nodes)}
    storages = storages_of(nodes)
    given: Storages = {}
    last: dict[Hashable, int] = {}
    for node, found in storages.items():
        if node.op in ("placeholder", "get_attr"):
            given |= found
        for name in found:
            last[name] = max(last.get(name, 0), order[node], *(order[user] for user in node.users))
    taken = {node: dict(found) for node, found in storages.items()}
    flights = list(_flights(nodes, storages))
    for flight in flights:
        taken[flight.start] |= flight.source
        last |= {name: max(last.get(name, 0), order[flight.wait]) for name in flight.source}
    freed: dict[Node, list[Hashable]] = {}
    for name, n in last.items():
        if name not in given:
            freed.setdefault(nodes[n], []).append(name)
    for node, found in taken.items():
        taken[node] = {name: nbytes for name, nbytes in found.items() if name not in given}
    return Lifetimes(storages, given, taken, freed, flights)


def storages_of(nodes: Sequence[Node]) -> dict[Node, Storages]:
    """For each node the storages that its results lie in."""
    found: dict[Node, Storages] = {}
    names: dict[int, Hashable] = {}
    for node in nodes:
        value = node.meta.get("val")
        lender = _lender(node)
        found[node] = {}
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(tensor, torch.Tensor):
                continue
            key = _compat.storage_key(tensor)
            if node.target is torch.ops.aten.clone.default and key in names:
                # Donation gives its copies the values that they are copies of.
                found[node][node] = tensor.nbytes
                continue
            # Traces give what a wait returns another storage, and what is written in the place of a copy that one's.
            name = names.setdefault(key, key if lender is None else next(iter(found[lender])))
            found[node][name] = tensor.untyped_storage().nbytes()
    return found


def _lender(node: Node) -> Node | None:
    """The argument in whose memory an operator's result lies; None where it does not say so."""
    arguments = _compat.arguments_of(node.target)
    lends = _waits(node) or (arguments and arguments[0].aliased)
    return node.args[0] if lends and isinstance(node.args[0], Node) else None


def _waits(node: Node) -> bool:
    return node.target in (_compat.WAIT_TENSOR, ops.wait)


def _flights(nodes: list[Node], storages: dict[Node, Storages]) -> Iterator[Flight]:
    """Every buffer of a collective."""
    waits = {name: node for node in nodes if _waits(node) for name in storages[node]}
    for node in nodes:
        values = map_arg(node.args, lambda given: given.meta.get("val"))
        for i, copied in enumerate(ops.held_in_flight(node.target, values)):
            source: Storages = {(node, i): copied} if copied else {}
            if copied == 0:
                given: Any = node.args[0]
                source = storages[given[i]]
            buffer = list(storages[node])[i]
            yield Flight(node, waits.get(buffer, node), buffer, source)
