"""Estimates of time: how long an operator, all of a step's operators, and the agreement between ranks take."""

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch.fx import Node

from fshard.ext.plan.report import Rates, count_flops
from fshard.extend import StepGraph, flatten, graph_nodes

# Seconds of the host for one message to a rank and one from a rank, which `benchmarks/agreement.py` measures.
ROUND_SECONDS = 2.5e-5


def estimate_seconds(graph: StepGraph, rates: Rates) -> tuple[float, float]:
    """Play a graph on one device and its links, on each of which collectives follow each other beside the computation.

    Args:
        graph: The graph.
        rates: The speed of the device and its links. Axes share one link if `rates.link` is one number.

    Returns:
        Seconds in all, and those among them in which the device waits for a link.
    """
    start_of = {pending.wait: pending.start for pending in graph.memory.pending_buffers}
    ends: dict[Node, float] = {}
    free_from = defaultdict[str, float](float)
    now = 0.0
    waiting = 0.0
    for moment in graph.moments:
        node = moment.node
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
            now += estimate_operator(node, rates)
    # Each message has a wait, also where nobody uses its result, so that the last one has landed by now.
    return now, waiting


def estimate_agreement(mesh: Mapping[str, int], rates: Rates) -> float:
    """Estimate the seconds of the host in which a call compares with other ranks, in log2 rounds over each axis.

    Args:
        mesh: Ranks on each axis.
        rates: Their latency is that of a message.
    """
    rounds = sum((size - 1).bit_length() for size in mesh.values())
    return rounds * (ROUND_SECONDS + rates.latency)


def estimate_operator(node: Node, rates: Rates) -> float:
    """Estimate the seconds of an operator on the device, which are none for a view or a wait."""
    if not hasattr(node.target, "namespace") or graph_nodes.is_view(node) or graph_nodes.is_wait(node):
        return 0.0
    nbytes = sum(map(_count_bytes, (*node.all_input_nodes, node)))
    # An operator that returns nothing, such as a fused optimizer, writes about as much as it reads.
    if node.meta.get("val") is None:
        nbytes *= 2
    return max(count_flops(node) / rates.flops, nbytes / rates.memory)


def _count_bytes(node: Node) -> int:
    values = flatten(node.meta.get("val")).leaves
    return sum(part.nbytes for part in values if isinstance(part, torch.Tensor))
