"""timeline: the operators of a graph in their order, with the bytes that are held while each runs, by use."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node

from fshard import _compat, comm
from fshard.jit.graph import operator_name, sent_by
from fshard.jit.memory import Lifetimes
from fshard.jit.passes import is_view
from fshard.plan.rates import Rates, flops_of
from fshard.plan.report import Bytes, Moment, unit_of
from fshard.tree import Tree, flatten

Sent = Mapping[Node, comm.Collective]
# Names of units by the storages.
Units = dict[Hashable, str]

# Uses of the buffers that collectives of these verbs fill.
_VERBS: Mapping[str, str] = MappingProxyType({comm.Verb.GATHER: "gathered", comm.Verb.SCATTER: "gradients"})

aten = torch.ops.aten
# Operators that bring numbers elsewhere, or to another dtype.
_MOVES = (
    *(aten.clone.default, aten.cat.default, _compat.TO_COPY, aten.constant_pad_nd.default, aten.copy_.default),
    *(aten.stack.default, aten.slice_scatter.default),
)


def uses_of(trees: Tree) -> Iterator[tuple[str | None, Any]]:
    """List the leaves of a step's arguments or results, each with its use; None where it is no field of a state."""
    uses = {"params": "parameters", "opt_state": "optimizer_state", "transform_state": "optimizer_state"}
    for tree in trees if type(trees) is tuple else (trees,):
        for name, part in (tree._asdict() if hasattr(tree, "_asdict") else {"": tree}).items():
            for leaf in flatten(part).leaves:
                yield uses.get(name), leaf


def timeline_of(graph: Graph, life: Lifetimes, known: Mapping[Node, str]) -> tuple[Bytes, dict[Node, Moment]]:
    """Walk through a graph.

    Args:
        graph: The graph.
        life: When its memory is taken and freed.
        known: Uses of inputs and results.

    Returns:
        The bytes that are held all the time, and the operators in their order.
    """
    sent = {node: entry for node in graph.nodes if node.op == "call_function" and (entry := sent_by(node))}
    uses, units = _uses(graph, life, known, sent)
    flying: Counter[Hashable] = Counter()
    starts, waits = defaultdict[Node, list[Hashable]](list), defaultdict[Node, list[Hashable]](list)
    for flight in life.flights:
        names = [name for name in (flight.buffer, *flight.source) if name not in life.given]
        starts[flight.start] += names
        waits[flight.wait] += names

    def by_use(held: Mapping[Hashable, int], also: Bytes) -> Bytes:
        found = also._asdict()
        for name, nbytes in held.items():
            # Several collectives may work on the same memory.
            found["in_flight" if flying[name] else uses[name]] += nbytes
        return Bytes(**found)

    arguments = by_use(life.given, Bytes())
    moments: dict[Node, Moment] = {}
    held: dict[Hashable, int] = {}
    for node in graph.nodes:
        held |= life.taken[node]
        flying.update(starts[node])
        if node.op == "call_function":
            there = tuple(dict.fromkeys(units[name] for name in held if name in units))
            about = (node.name, operator_name(node), by_use(held, arguments), there)
            moments[node] = Moment(*about, sent.get(node), flops_of(node))
        flying.subtract(waits[node])
        for name in life.freed.get(node, ()):
            held.pop(name, None)
    return arguments, moments


def step_seconds(moments: Mapping[Node, Moment], life: Lifetimes, rates: Rates) -> tuple[float, float]:
    """Play a graph on one device and one link, on which collectives follow each other beside the computation.

    Args:
        moments: The operators in their order.
        life: Where collectives are waited for.
        rates: The rates.

    Returns:
        Seconds in all, and those among them in which the device waits for the link.
    """
    ends: dict[Node, float] = {}
    now = link = idle = 0.0
    waits: dict[Node, list[Node]] = {}
    for flight in life.flights:
        waits.setdefault(flight.wait, []).append(flight.start)
    for node, moment in moments.items():
        landed = max((ends.get(start, 0.0) for start in waits.get(node, ())), default=0.0)
        idle, now = idle + max(0.0, landed - now), max(now, landed)
        if (sent := moment.collective) is not None:
            rate = rates.link[sent.axis] if isinstance(rates.link, Mapping) else rates.link
            link = ends[node] = max(now, link) + rates.latency + sent.sent / rate
        elif node not in waits and hasattr(node.target, "namespace") and not is_view(node):
            moved = sum(map(_nbytes, (*node.all_input_nodes, node)))
            now += max(moment.flops / rates.flops, moved / rates.memory)
    return max(now, link), idle + max(0.0, link - now)


def _nbytes(node: Node) -> int:
    value = node.meta.get("val")
    return sum(v.nbytes for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor))


def _uses(graph: Graph, life: Lifetimes, known: Mapping[Node, str], sent: Sent) -> tuple[dict[Hashable, str], Units]:
    """Find the use of each storage, and the units of those that collectives fill."""
    uses: dict[Hashable, str] = {}
    units: Units = {}
    known = {**dict.fromkeys(_gradients(graph, sent), "gradients"), **known}
    for node, use in sorted(known.items(), key=lambda item: item[1] == "gradients"):
        for name in life.storages[node]:
            uses.setdefault(name, use)
    for node in graph.nodes:
        given = [name for source in node.all_input_nodes if _numel(source) > 1 for name in life.storages[source]]
        of_given = {uses[name] for name in given}
        use = "inputs" if node.op == "get_attr" else "activations"
        if entry := sent.get(node):
            use = _VERBS.get(entry.label, use)
            units |= dict.fromkeys(life.storages[node], unit_of(entry))
        elif of_given == {"gathered"} or (
            node.target in _MOVES and of_given and of_given <= {"gathered", "parameters"}
        ):
            use = "gathered"
            for unit in [units[name] for name in given if name in units][:1]:
                units |= {name: units.get(name, unit) for name in life.storages[node]}
        elif of_given == {"gradients"} and all(_numel(a) in (1, _numel(node)) for a in node.all_input_nodes):
            use = "gradients"
        for name in (*life.storages[node], *life.taken[node]):
            uses.setdefault(name, use if name in life.storages[node] else "in_flight")
    return uses, units


def _gradients(graph: Graph, sent: Sent) -> set[Node]:
    """Find the gradients that reductions and fused optimizers are given, and those that they are copies of."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        names = [argument.name for argument in _compat.arguments_of(node.target) or ()]
        if node in sent and sent[node].label == comm.Verb.SCATTER:
            found.update(node.all_input_nodes)
        elif "grads" in names:
            found.update(dict(zip(names, node.args, strict=False), **node.kwargs).get("grads", ()))
        elif node in found and (node.target in _MOVES or is_view(node)):
            packs = node.target is aten.cat.default
            found.update(a for a in node.all_input_nodes if packs or _numel(a) == _numel(node))
    return found


def _numel(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0
