"""Powers of the number of ranks that values of a step have, found by comparing its graph with that of twice as many."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from fshard.comm import Verb
from fshard.ext._compat import origin_of
from fshard.ext.check.graphs import find_packet, read_constants, shape_of
from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.ext.check.results import Result
from fshard.ext.check.values import (
    USERS_SUMS,
    Agreement,
    ValueTypes,
    find_mean,
    find_wait_source,
    is_direct,
    is_over,
    walk_back,
)
from fshard.extend import graph_nodes

aten = torch.ops.aten
_SUMS = (aten.add, aten.sub, aten.where)
_LINEAR = (aten._to_copy, aten.sum, aten.mean, aten.neg)
# Losses whose third or fourth argument is 2 if they add up rows.
_LOSSES = (aten.nll_loss_forward, aten.nll_loss2d_forward, aten.mse_loss)


def find_wrong_factors(results: Sequence[Result], values: ValueTypes) -> Iterator[StepProblem]:
    """Find results that grow or shrink with the number of ranks, though each rank's batch stays as it is.

    Args:
        results: The results.
        values: The types of the graph's values.
    """
    if not values.facts.varies or not values.facts.doubled:
        return
    degrees = _Degrees(values)
    axis = values.facts.axis.name
    for result in results:
        degree = degrees.of[result.node]
        may_grow = result.is_state or result.node in degrees.extensive
        if not degree or (degree > 0 and may_grow) or not result.node.meta["val"].is_floating_point():
            continue
        verb = "shrinks" if degree < 0 else "grows"
        text = f"{result.path} {verb} with the number of ranks of {axis!r}, by a factor or a sum in this line"
        frames = frames_of(degrees.find_origin(result.node, degree))
        yield StepProblem(Mistake.NUMBER_OF_RANKS, axis, result.path, frames, f"{text}; leave it out.")


class _Degrees:
    """The power of the number of ranks in each value; None where no rule says it.

    Factors of fshard's own, such as those of a mean, are right.

    Attributes:
        of: The power by node.
        extensive: How many items are added up, by the nodes that depend on sums over a batch.
    """

    def __init__(self, values: ValueTypes) -> None:
        self.of: dict[Node, float | None] = {}
        self.extensive: dict[Node, int] = {}
        self._values = values
        self._means: set[Node | None] = set()
        for node in values.types:
            operands = [self.of[operand] for operand in node.all_input_nodes]
            degrees = [degree for degree in operands if degree is not None]
            self.of[node] = self._find_degree(node, degrees) if len(degrees) == len(operands) else None
            self._follow_sums(node)

    def find_origin(self, result: Node, degree: float) -> Node:
        """Find the first node that gave a value a power of this sign."""
        return walk_back(result, lambda operand: (self.of[operand] or 0) * degree > 0)[-1]

    def _follow_sums(self, node: Node) -> None:
        """Note that a node depends on a sum over a batch, unless it divides the sum by the number of its items."""
        for source in node.all_input_nodes:
            count = self.extensive.get(source, 0)
            if _adds_up(node) and self._values.types[node] is Agreement.VARYING:
                count = math.prod(shape_of(source)) // max(1, math.prod(shape_of(node)))
            if count and (find_packet(node) is not aten.div or count not in node.args):
                self.extensive[node] = count

    def _find_degree(self, node: Node, degrees: Sequence[float]) -> float | None:
        first, *others = degrees or [0.0]
        packet = find_packet(node)
        if graph_nodes.is_wait(node):
            return self._receive(node, first)
        if packet in (aten.mul, aten.mm):
            return first + sum(others) + self._find_scale(node)
        if packet is aten.div:
            return first - sum(others) - self._find_scale(node)
        if packet in _SUMS:
            return min(degrees[-2:], default=0.0)
        is_linear = packet in _LINEAR or graph_nodes.is_view(node) or graph_nodes.find_collective(node) is not None
        return first if is_linear or not any(degrees) else None

    def _find_scale(self, node: Node) -> float:
        """Find the power in a constant factor of the user's."""
        if node in self._means or not origin_of(node).is_users:
            return 0.0
        numbers, _ = read_constants(node)
        others, _ = read_constants(self._values.facts.doubled[node])
        for number, other in zip(numbers, others, strict=True):
            if isinstance(number, int | float) and number and other in (2 * number, number / 2):
                return 1.0 if other == 2 * number else -1.0
        return 0.0

    def _receive(self, node: Node, degree: float) -> float | None:
        """Add one for a sum of the user's, but for a mean, or where its terms are parts."""
        collective, source = find_wait_source(node)
        is_part = self._values.types[source] is Agreement.SHARD
        if is_part or not is_over(collective, self._values.facts.axis):
            return degree
        if collective.label in USERS_SUMS:
            mean = find_mean(node, self._values.facts.axis.size)
            self._means.add(mean)
            return None if is_direct(node) else degree + (mean is None)
        if collective.label in (Verb.OBJECTIVE, Verb.SCATTER) and not self._values.facts.are_means:
            # A sum over ranks is what users have divided for.
            return 0.0 if degree < 0 else None
        return degree


def _adds_up(node: Node) -> bool:
    """Whether an operator is a sum over a batch, or a loss that is one."""
    packet = find_packet(node)
    return packet is aten.sum or (packet in _LOSSES and 2 in node.args[2:4])
