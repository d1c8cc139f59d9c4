"""Memory: the bytes that a graph holds while each of its operators runs."""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard import _compat
from fshard.comm import ops

# Bytes of storages by their names.
Storages = dict[Hashable, int]


def held_bytes(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Walk through a graph, holding each result until nobody needs it or a view of it any more.

    Args:
        graph: The graph, with results that have no values.

    Yields:
        Each operator with the bytes that are held while it runs, beyond inputs and constants.
    """
    nodes = list(graph.nodes)
    order = {node: n for n, node in enumerate(nodes)}
    storages = _storages(nodes)
    given = {name for node in nodes if node.op in ("placeholder", "get_attr") for name in storages[node]}
    last: dict[Hashable, int] = {}
    for node, found in storages.items():
        for name in found:
            last[name] = max(last.get(name, 0), order[node], *(order[user] for user in node.users))
    taken = {node: dict(found) for node, found in storages.items()}
    for start, wait, flying in _in_flight(nodes, storages):
        taken[start] |= flying
        last |= {name: max(last.get(name, 0), order[wait]) for name in flying}
    held: Storages = {}
    for n, node in enumerate(nodes):
        held |= {name: nbytes for name, nbytes in taken[node].items() if name not in given}
        if node.op == "call_function":
            yield node, sum(held.values())
        held = {name: nbytes for name, nbytes in held.items() if last[name] > n}


def _storages(nodes: list[Node]) -> dict[Node, Storages]:
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


def _in_flight(nodes: list[Node], storages: dict[Node, Storages]) -> Iterator[tuple[Node, Node, Storages]]:
    """For each buffer of a collective its start, the wait for it, and what is held in between besides the buffer."""
    waits = {name: node for node in nodes if _waits(node) for name in storages[node]}
    for node in nodes:
        values = map_arg(node.args, lambda given: given.meta.get("val"))
        for i, copied in enumerate(ops.held_in_flight(node.target, values)):
            if copied is not None:
                given: Any = node.args[0]
                source = storages[given[i] if isinstance(given, list | tuple) else given]
                yield node, waits.get(list(storages[node])[i], node), {(node, i): copied} if copied else source
