"""The timeline of a step: the bytes that each operator finds held, by their use, and how long all of them take."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from fshard.ext.plan.report import Bytes, Moment, Rates, count_flops
from fshard.extend import graph_nodes

# Seconds of the host for one message to a rank and one from a rank, which `benchmarks/agreement.py` measures.
ROUND_SECONDS = 2.5e-5


def make_timeline(graph: Any, uses: Mapping[Hashable, str]) -> tuple[Bytes, dict[Node, Moment]]:
    """Count the bytes that are held while each operator of a graph runs.

    Args:
        graph: What `fs.make_graph` made.
        uses: The use of each of its storages.

    Returns:
        The bytes that are held all the time, and the operators in their order.
    """
    memory = graph.memory
    operations = {operation.node: operation for operation in graph.moments}
    started = defaultdict[Node, list[Hashable]](list)
    landed = defaultdict[Node, list[Hashable]](list)
    for pending in memory.pending_buffers:
        storages = [name for name in (pending.buffer, *pending.held_storages) if name not in memory.always_held]
        started[pending.start] += storages
        landed[pending.wait] += storages
    # Several collectives may work on the same storage.
    in_flight = Counter[Hashable]()
    arguments = _add_by_use(Bytes(), memory.always_held, uses, in_flight)
    moments = {}
    for node, held in memory.walk():
        in_flight.update(started[node])
        operation = operations.get(node)
        if operation is not None:
            by_use = _add_by_use(arguments, held, uses, in_flight)
            moments[node] = Moment(node.name, operation.operator, by_use, operation.collective, count_flops(node))
        in_flight.subtract(landed[node])
    return arguments, moments


def _add_by_use(
    sums: Bytes, held: Mapping[Hashable, int], uses: Mapping[Hashable, str], in_flight: Mapping[Hashable, int]
) -> Bytes:
    """Add storages to sums of bytes, each to that of its use."""
    by_use = sums._asdict()
    for storage, nbytes in held.items():
        by_use["in_flight" if in_flight[storage] else uses[storage]] += nbytes
    return Bytes(**by_use)


def estimate_seconds(
    moments: Mapping[Node, Moment], pending_buffers: Iterable[Any], rates: Rates
) -> tuple[float, float]:
    """Play a graph on one device and its links, on each of which collectives follow each other beside the computation.

    Args:
        moments: The operators in their order.
        pending_buffers: The buffers of collectives, from start to wait.
        rates: The speed of the device and its links. Axes share one link if `rates.link` is one number.

    Returns:
        Seconds in all, and those among them in which the device waits for a link.
    """
    start_of = {pending.wait: pending.start for pending in pending_buffers}
    ends: dict[Node, float] = {}
    free_from = defaultdict[str, float](float)
    now = 0.0
    waiting = 0.0
    for node, moment in moments.items():
        if node in start_of:
            landed = max(now, ends.get(start_of[node], 0.0))
            waiting += landed - now
            now = landed
        collective = moment.collective
        if collective is not None:
            link, rate = rates.find_link(collective.axis)
            ends[node] = max(now, free_from[link]) + rates.latency + collective.sent / rate
            free_from[link] = ends[node]
        else:
            now += estimate_operator(node, moment.flops, rates)
    end = max([now, *free_from.values()])
    return end, waiting + end - now


def estimate_agreement(mesh: Mapping[str, int], rates: Rates) -> float:
    """Estimate the seconds of the host in which a call compares with other ranks, in log2 rounds over each axis.

    Args:
        mesh: Ranks on each axis.
        rates: Their latency is that of a message.
    """
    rounds = sum((size - 1).bit_length() for size in mesh.values())
    return rounds * (ROUND_SECONDS + rates.latency)


def estimate_operator(node: Node, flops: int, rates: Rates) -> float:
    """Estimate the seconds of an operator on the device, which are none for a view or a wait."""
    if not hasattr(node.target, "namespace") or graph_nodes.is_view(node) or graph_nodes.is_wait(node):
        return 0.0
    nbytes = sum(map(_count_bytes, (*node.all_input_nodes, node)))
    # An operator that returns nothing, such as a fused optimizer, writes about as much as it reads.
    if node.meta.get("val") is None:
        nbytes *= 2
    return max(flops / rates.flops, nbytes / rates.memory)


def _count_bytes(node: Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return sum(part.nbytes for part in values if isinstance(part, torch.Tensor))
