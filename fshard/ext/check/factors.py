"""Powers of the number of ranks that values of a step have, found by comparing its graph with that of twice as many."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from fshard.comm import Verb
from fshard.ext._compat import origin_of
from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.ext.check.results import Result
from fshard.ext.check.values import (
    USERS_SUMS,
    Agreement,
    AxisFacts,
    ValueTypes,
    find_mean,
    find_packet,
    find_wait_source,
    is_sent_as_rows,
    walk_back,
)
from fshard.extend import graph_nodes

aten = torch.ops.aten
_SUMS = (aten.add, aten.sub, aten.where)
_LINEAR = (aten._to_copy, aten.sum, aten.mean, aten.neg)


def find_wrong_factors(
    results: Sequence[Result], values: ValueTypes, facts: AxisFacts, changes: Mapping[Node, Any] | None
) -> Iterator[StepProblem]:
    """Find results that grow or shrink with the number of ranks, though each rank's batch stays as it is.

    Args:
        results: The results.
        values: The types of the graph's values.
        facts: What is known of the graph.
        changes: Nodes whose constants are others with twice as many ranks; None where nothing is known of these.
    """
    if changes is None:
        return
    degrees = _Degrees(values, facts, changes)
    for result in results:
        degree = degrees.of.get(result.node)
        may_grow = result.is_state or result.node in degrees.extensive
        if not degree or (degree > 0 and may_grow) or not result.node.meta["val"].is_floating_point():
            continue
        verb = "shrinks" if degree < 0 else "grows"
        text = f"{result.path} {verb} with the number of ranks of {facts.axis!r}, by a factor or a sum in this line"
        frames = frames_of(degrees.find_origin(result.node))
        yield StepProblem(Mistake.NUMBER_OF_RANKS, facts.axis, result.path, frames, f"{text}; leave it out.")


class _Degrees:
    """The power of the number of ranks in each value; None where no rule says it.

    Factors of fshard's own, such as those of a mean, are right.

    Attributes:
        of: The power by node.
        extensive: Nodes that depend on sums over a batch.
    """

    def __init__(self, values: ValueTypes, facts: AxisFacts, changes: Mapping[Node, Any]) -> None:
        self.of: dict[Node, float | None] = {}
        self.extensive: set[Node] = set()
        self._values = values
        self._facts = facts
        self._changes = changes
        self._means: set[Node] = set()
        for node in values.types:
            self.of[node] = self._find_degree(node)
            is_sum = find_packet(node) is aten.sum and values.types[node] is Agreement.VARYING
            if is_sum or not self.extensive.isdisjoint(node.all_input_nodes):
                self.extensive.add(node)

    def find_origin(self, result: Node) -> Node:
        """Find the first node that gave a value a power of this sign."""
        degree: Any = self.of[result]
        return walk_back(result, lambda operand: (self.of[operand] or 0) * degree > 0)[-1]

    def _find_degree(self, node: Node) -> float | None:
        if graph_nodes.is_wait(node):
            return self._receive(node)
        degrees = []
        for operand in node.all_input_nodes:
            degree = self.of[operand]
            if degree is None:
                return None
            degrees.append(degree)
        first, *others = degrees or [0.0]
        packet = find_packet(node)
        if packet in (aten.mul, aten.mm):
            return sum(degrees) + self._find_scale(node)
        if packet is aten.div:
            return first - sum(others) - self._find_scale(node)
        if packet in _SUMS:
            return min(degrees[-2:])
        is_linear = packet in _LINEAR or graph_nodes.is_view(node) or graph_nodes.find_collective(node) is not None
        return first if is_linear or not any(degrees) else None

    def _find_scale(self, node: Node) -> float:
        """Find the power in a constant factor of the user's."""
        if node not in self._changes or node in self._means or not origin_of(node).is_users:
            return 0.0
        (here, _), (there, _) = self._changes[node]
        for number, other in zip(here, there, strict=False):
            if isinstance(number, int | float) and number and other in (2 * number, number / 2):
                return 1.0 if other == 2 * number else -1.0
        return 0.0

    def _receive(self, node: Node) -> float | None:
        """Add one for a sum of the user's, but for a mean, or where its terms are parts."""
        collective, source = find_wait_source(node)
        degree = self.of[source]
        is_part = self._values.types[source] in (Agreement.SHARD, Agreement.OWN)
        if degree is None or is_part or self._facts.axis not in collective.axis.split("+"):
            return degree
        if collective.label in USERS_SUMS:
            if is_sent_as_rows(node):
                return None
            mean = find_mean(node, self._facts.size)
            if mean is None:
                return degree + 1
            self._means.add(mean)
            return degree
        if collective.label in (Verb.OBJECTIVE, Verb.SCATTER) and not self._facts.are_means:
            # A sum over ranks is what users have divided for.
            return 0.0 if degree < 0 else None
        return degree
