"""Powers of the number of ranks that values of a step have, found by comparing its graph with that of twice as many."""

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from fshard.comm import Verb
from fshard.ext._compat import origin_of
from fshard.ext.check.graphs import AxisFacts, find_packet, read_constants
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


def find_wrong_factors(results: Sequence[Result], values: ValueTypes, facts: AxisFacts) -> Iterator[StepProblem]:
    """Find results that grow or shrink with the number of ranks, though each rank's batch stays as it is.

    Args:
        results: The results.
        values: The types of the graph's values.
        facts: What is known of the graph.
    """
    if not facts.varies or not facts.doubled:
        return
    degrees = _Degrees(values, facts)
    for result in results:
        degree = degrees.of[result.node]
        may_grow = result.is_state or result.node in degrees.extensive
        if not degree or (degree > 0 and may_grow) or not result.node.meta["val"].is_floating_point():
            continue
        verb = "shrinks" if degree < 0 else "grows"
        axis = facts.axis.name
        text = f"{result.path} {verb} with the number of ranks of {axis!r}, by a factor or a sum in this line"
        frames = frames_of(degrees.find_origin(result.node, degree))
        yield StepProblem(Mistake.NUMBER_OF_RANKS, axis, result.path, frames, f"{text}; leave it out.")


class _Degrees:
    """The power of the number of ranks in each value; None where no rule says it.

    Factors of fshard's own, such as those of a mean, are right.

    Attributes:
        of: The power by node.
        extensive: Nodes that depend on sums over a batch.
    """

    def __init__(self, values: ValueTypes, facts: AxisFacts) -> None:
        self.of: dict[Node, float | None] = {}
        self.extensive: set[Node] = set()
        self._values = values
        self._facts = facts
        self._means: set[Node | None] = set()
        for node, agreement in values.types.items():
            operands = [self.of[operand] for operand in node.all_input_nodes]
            degrees = [degree for degree in operands if degree is not None]
            self.of[node] = self._find_degree(node, degrees) if len(degrees) == len(operands) else None
            is_sum = find_packet(node) is aten.sum and agreement is Agreement.VARYING
            if is_sum or not self.extensive.isdisjoint(node.all_input_nodes):
                self.extensive.add(node)

    def find_origin(self, result: Node, degree: float) -> Node:
        """Find the first node that gave a value a power of this sign."""
        return walk_back(result, lambda operand: (self.of[operand] or 0) * degree > 0)[-1]

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
        others, _ = read_constants(self._facts.doubled[node])
        for number, other in zip(numbers, others, strict=True):
            if isinstance(number, int | float) and number and other in (2 * number, number / 2):
                return 1.0 if other == 2 * number else -1.0
        return 0.0

    def _receive(self, node: Node, degree: float) -> float | None:
        """Add one for a sum of the user's, but for a mean, or where its terms are parts."""
        collective, source = find_wait_source(node)
        is_part = self._values.types[source] is Agreement.SHARD
        if is_part or not is_over(collective, self._facts.axis):
            return degree
        if collective.label in USERS_SUMS:
            mean = find_mean(node, self._facts.axis.size)
            self._means.add(mean)
            return None if is_direct(node) else degree + (mean is None)
        if collective.label in (Verb.OBJECTIVE, Verb.SCATTER) and not self._facts.are_means:
            # A sum over ranks is what users have divided for.
            return 0.0 if degree < 0 else None
        return degree
