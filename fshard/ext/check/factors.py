"""Powers of the number of ranks that values of a step have, found by comparing its graph with that of twice as many."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Node

from fshard.comm import Verb
from fshard.ext._compat import frames_of, origin_of
from fshard.ext.check.graphs import name_of, shape_of
from fshard.ext.check.report import StepProblem
from fshard.ext.check.results import Result
from fshard.ext.check.values import (
    USERS_SUMS,
    Agreement,
    ValueTypes,
    find_mean,
    find_wait_source,
    walk_back,
)
from fshard.extend import graph_nodes

_LINEAR = ("_to_copy", "sum", "mean", "neg")


def find_wrong_factors(results: Sequence[Result], values: ValueTypes) -> Iterator[StepProblem]:
    """Find results that grow or shrink with the number of ranks, though each rank's batch stays as it is.

    Args:
        results: The results.
        values: The types of the graph's values.
    """
    if not values.varies or not values.doubled:
        return
    powers = _Powers(values)
    axis = values.axis.name
    for result in results:
        power = powers.of[result.node]
        grows = power > 0 and not result.is_state and not powers.items[result.node]
        if (grows or power < 0) and result.node.meta["val"].is_floating_point():
            verb = "grows" if grows else "shrinks"
            text = f"{result.path} {verb} with the number of ranks of {axis!r}, by a factor or a sum in this line"
            frames = frames_of(powers.find_origin(result.node))
            yield StepProblem("number of ranks", axis, result.path, frames, f"{text}; leave it out.")


class _Powers:
    """The power of the number of ranks in each value; NaN where no rule says it.

    Factors of fshard's own, such as those of a mean, are right.

    Attributes:
        of: The power by node.
        items: By node how many items of a batch it adds up, unless it is divided by their number.
    """

    def __init__(self, values: ValueTypes) -> None:
        self.of: dict[Node, float] = {}
        self.items: dict[Node, int] = {}
        self._values = values
        for node in values.types:
            self.of[node] = self._find_power(node, [self.of[operand] for operand in node.all_input_nodes])
            self.items[node] = self._count_items(node)

    def find_origin(self, result: Node) -> Node:
        """Find the first node that gave a value a power of its sign."""
        power = self.of[result]
        return walk_back(result, lambda operand: self.of[operand] * power > 0)[-1]

    def _count_items(self, node: Node) -> int:
        sources = node.all_input_nodes
        count = max([self.items[source] for source in sources], default=0)
        name = name_of(node)
        # Losses whose third or fourth argument is 2 add up rows. The delta of a mean may be 2.0.
        adds_up = name == "sum" or ("loss" in name and "2" in map(str, node.args[2:4]))
        if adds_up and self._values.types[node] >= Agreement.VARYING:
            count = math.prod(shape_of(sources[0])) // max(1, math.prod(shape_of(node)))
        return 0 if name == "div" and node.args[1] == count else count

    def _find_power(self, node: Node, powers: Sequence[float]) -> float:
        if math.nan in powers:
            return math.nan
        first, *others = powers or [0.0]
        name = name_of(node)
        if graph_nodes.is_wait(node):
            return self._receive(node, first)
        if name in ("mul", "mm"):
            return sum(powers) + self._find_scale(node)
        if name == "div":
            return first - sum(others) - self._find_scale(node)
        if name in ("add", "sub", "where"):
            return min(powers[-2:], default=0.0)
        is_linear = name in _LINEAR or graph_nodes.is_view(node) or graph_nodes.find_collective(node) is not None
        return first if is_linear or not any(powers) else math.nan

    def _find_scale(self, node: Node) -> float:
        """Find the power in a constant factor of the user's."""
        number: Any
        other: Any
        number, other = node.args[-1], self._values.doubled[node].args[-1]
        if not origin_of(node).is_users or isinstance(number, Node) or not number:
            return 0.0
        return {2.0: 1.0, 0.5: -1.0}.get(other / number, 0.0)

    def _receive(self, node: Node, power: float) -> float:
        """Add one for a sum of the user's, but for a mean of fshard's, or where its terms are parts."""
        collective, source, _ = find_wait_source(node, self._values.axis)
        if collective is None or self._values.types[source] in (Agreement.SHARD, Agreement.TERM):
            return power
        if collective.label in USERS_SUMS:
            mean = find_mean(node, self._values.axis.size)
            return power + (mean is None or origin_of(mean).is_users)
        if collective.label in (Verb.OBJECTIVE, Verb.SCATTER) and not self._values.are_means:
            # A sum over ranks may be what users have divided for, or what is to grow.
            return math.nan
        return power
