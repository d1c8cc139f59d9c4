"""Types of a step's values over one axis, found from its graph: which agree between ranks, and where they stop."""

import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

import fshard as fs
from fshard.comm import Collective
from fshard.ext._compat import find_start, frames_of, origin_of
from fshard.ext.check.graphs import Input, name_of, shape_of
from fshard.ext.check.report import StepProblem
from fshard.extend import generators, graph_nodes, walk_graph

# Sums that users ask for. A sum that fshard makes of equal terms is divided by their number.
USERS_SUMS = ("psum", "psum_invariant")
# Of a dim that is split, these make a term of a sum over ranks. Of a product the mean over ranks is never meant.
_MATRIX_PRODUCTS = ("mm", "bmm")
_REDUCTIONS = ("sum", "mean", "linalg_vector_norm", *_MATRIX_PRODUCTS)
# The mean of one of these is not that of the mean.
_NONLINEAR = (
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt", "sigmoid", "sqrt"),
    *("std", "tanh"),
)
_LINEAR = ("add", "div", "mul", "neg", "rsub", "sub")
# Numbers of one element, and norms, which may be squared.
_NO_SUMS = ("linalg_vector_norm", "select")
# The beginnings of names of operators that map over lists, whose items have nothing to do with each other.
_BY_ITEM = ("_foreach_", "_fused_ad", "_fused_sgd")


class Agreement(IntEnum):
    """How values of ranks of an axis are related; what is computed from several has the largest of theirs.

    Attributes:
        CONSTANT: They are equal, and depend on no input.
        INVARIANT: They are equal.
        DRAWN: They are equal random numbers.
        SHARD: Each is a part of one leaf, or of its reduced gradient.
        OTHER: They differ, or may do so, as ranks mean it: what is exchanged, or owned.
        TERM: Each is computed of all of a rank's part, and is a term of a sum over ranks.
        VARYING: They differ as batches of ranks do.
        NUMBERED: They differ by the number of the rank.
    """

    CONSTANT = 0
    INVARIANT = 1
    DRAWN = 2
    SHARD = 3
    OTHER = 4
    TERM = 5
    VARYING = 6
    NUMBERED = 7


@dataclass(eq=False)
class ValueTypes:
    """The types of the values of a graph over one axis, found by a walk in the order of its nodes.

    Attributes:
        nodes: The nodes.
        axis: The axis.
        inputs: The arguments of the graph.
        rank_constants: Nodes whose constants are others on a neighbour.
        doubled: The nodes of the graph for twice as many ranks; empty if it has other operators.
        varies: Whether batches differ between the ranks.
        are_means: Whether all losses that the step differentiates are means over ranks.
        types: The type of each node's result.
        problems: Mistakes in collectives and operators.
    """

    nodes: Sequence[Node]
    axis: fs.Axis
    inputs: Mapping[Node, Input]
    rank_constants: Collection[Node]
    doubled: Mapping[Node, Node]
    varies: bool
    are_means: bool

    def __post_init__(self) -> None:
        """Type all nodes."""
        self.types: dict[Node, Agreement] = {}
        self.problems: list[StepProblem] = []
        # Numbers that are computed from sums, means and counts of a batch, and those that are not linear in these.
        self._sums: set[Node] = set()
        self._nonlinear: set[Node] = set()
        # Means over the count of this rank's batch, and what is wrong with these.
        self._own_means: dict[Node, str] = {}
        # An operator of the backward has the very lines of its forward, and not only equal ones.
        self._differentiated = {id(origin_of(node).forward) for node in self.nodes}
        # A cross entropy of smoothed labels divides by the count of those that it does not ignore, as others do.
        self._lines_of_means = {frames_of(node) for node in self.nodes if _is_cross_entropy_mean(node)}
        self._storages = graph_nodes.find_storages(self.nodes)
        self._written: dict[Hashable, Agreement] = {}
        # What the generators of ranks draw from, which nobody knows without a key.
        self._draws = Agreement.OTHER
        for node in self.nodes:
            self.types[node] = self._visit(node)
            self._follow_sums(node)
            self._follow_writes(node)
        for node, text in self._own_means.items():
            self._report("mean of means", node, text)

    def is_split(self, node: Node) -> bool:
        """Whether a dim of a value is shorter on twice as many ranks."""
        there = shape_of(self.doubled.get(node, node))
        return any(map(operator.lt, there, shape_of(node)))

    def type_of(self, node: Node) -> Agreement:
        """Find the type of what a node holds now."""
        written = [self._written.get(storage, Agreement.CONSTANT) for storage in self._storages[node]]
        return max([self.types[node], *written])

    def _visit(self, node: Node) -> Agreement:
        """Type a result."""
        entry = self.inputs.get(node)
        if entry is not None:
            return self._type_input(node, entry)
        if graph_nodes.is_wait(node):
            return self._receive(node)
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if _count_items(source):
                return max(self._list_types(source, node.args[1]))
        return self._compute(node)

    def _type_input(self, node: Node, entry: Input) -> Agreement:
        if isinstance(entry.leaf, fs.Sharded):
            role: Any = entry.leaf.spec.roles.get(self.axis)
            return {"gathered": Agreement.SHARD, "owned": Agreement.OTHER}.get(role, Agreement.INVARIANT)
        if not entry.is_batch or not self.varies:
            return Agreement.INVARIANT
        # A number may count batches, or say how they are mixed.
        return Agreement.VARYING if shape_of(node) else Agreement.OTHER

    def _list_types(self, node: Node, item: Any = None) -> list[Agreement]:
        """List the types of operands; of an operator that maps over lists those of one item."""
        types = [Agreement.CONSTANT]
        name = name_of(node)
        if name.endswith("_like") or name.startswith("new_"):
            # It reads no values, but a shape.
            return types
        arguments: list[Any] = [*node.args, *node.kwargs.values()]
        if item is not None:
            for number, argument in enumerate(arguments):
                if isinstance(argument, list | tuple):
                    arguments[number] = argument[item : item + 1]
        map_arg(arguments, lambda operand: types.append(self.type_of(operand)))
        return types

    def _follow_writes(self, node: Node) -> None:
        """Note the types of what an operator writes to memory that other nodes show."""
        count = _count_items(node)
        for number, target in enumerate(graph_nodes.find_write_targets(node)):
            written = max(self._list_types(node, number % count)) if count else self.types[node]
            self._written |= dict.fromkeys(self._storages[target], written)

    def _follow_sums(self, node: Node) -> None:
        """Note whether a number is computed from sums over the rank's batch, and whether it is linear in these."""
        name = name_of(node)
        origin = origin_of(node)
        is_passed_over = origin.phase != "forward" or name in _NO_SUMS
        if is_passed_over or shape_of(node) or self.types[node] < Agreement.VARYING:
            return
        sources: list[Any] = [source for source in node.args if source in self._sums]
        if not sources and not any(map(shape_of, node.all_input_nodes)):
            return
        self._sums.add(node)
        if name == "mul" and len(sources) > 1:
            for source in sources:
                # The mean of a rank that is multiplied by a count, or a share of one, is weighted again.
                self._own_means.pop(skip_views(source), None)
        has_own_count = name == "div" and list(map(self._reads_state, sources)) == [True, False]
        if has_own_count and origin.is_users and origin.frames not in self._lines_of_means:
            text = "this mean has the count of this rank's batch, so that the mean over ranks gives items other weights"
            remedy = 'return (sum, count) with reduce="weighted"'
            self._own_means[node] = f"{text}; {remedy}"
            return
        # The mean of squares may be that of the deviations of ranks from their mean.
        bends = name in _NONLINEAR and 2 not in node.args
        is_quotient = name == "div" and node.args[1] in sources
        # What is differentiated is a term of a loss, of which the mean over ranks is meant.
        is_term = id(origin.frames) in self._differentiated
        is_found = (bends or is_quotient) and not is_term
        # So may be a sum of several numbers of the batch. Products of these are sums again, as of a mean and a count.
        is_linear = name in _LINEAR or _shows_values(node)
        keeps = is_linear and len(sources) == 1
        if is_found or (keeps and sources[0] in self._nonlinear):
            self._nonlinear.add(node)

    def _report(self, kind: str, node: Node, text: str) -> None:
        problem = StepProblem(kind, self.axis.name, "", frames_of(node), f"{text}.")
        self.problems.append(problem)

    def _receive(self, node: Node) -> Agreement:
        """Type what a collective has brought, and refuse a sum of what is equal already."""
        collective, source, is_direct = find_wait_source(node, self.axis)
        sent = self.type_of(source)
        if collective is None:
            return sent
        if collective.label in USERS_SUMS and origin_of(node).phase == "forward":
            self._check_sum(node, source, sent)
        exchanged = {"reduce_scatter": Agreement.SHARD, "all_to_all": Agreement.OTHER}
        received = exchanged.get(collective.op, Agreement.INVARIANT)
        if is_direct:
            # Ranks have sent each other rows, to which the graph adds this rank's own.
            self.types[source] = received
        return received

    def _check_sum(self, node: Node, source: Node, sent: Agreement) -> None:
        size = self.axis.size
        averages = find_mean(node, size) is not None
        shown = skip_views(source)
        name = name_of(shown)
        if sent is Agreement.INVARIANT and not averages:
            text = f"ranks agree on this value already, so that its sum is {size} times too large; leave the sum out"
            # Where an objective sums it again, the sum inside of the loss is wrong.
            inner = max(node, shown, key=lambda each: len(frames_of(each)))
            self._report("doubled sum", inner, text)
        elif sent is Agreement.SHARD:
            text = "ranks hold other elements of this leaf, so that their sum mixes elements; leave the sum out"
            self._report("doubled sum", node, text)
        elif averages and name in _MATRIX_PRODUCTS and self._makes_term(shown, max(self._list_types(shown))):
            text = f"each rank has a part of this product, so that their mean is {size} times too small; take their sum"
            self._report("number of ranks", node, text)
        elif averages and source in self._nonlinear:
            text = "the mean over ranks of a function that is not linear is not that of their mean"
            self._report("mean of means", node, f"{text}; take the mean, or the sums of a quotient, over ranks first")

    def _compute(self, node: Node) -> Agreement:
        types = self._list_types(node)
        result = max(types)
        if node.target in generators.EFFECTS:
            drawn = max(result, Agreement.DRAWN)
            self._draws = drawn if node.target is generators.seed else Agreement.OTHER
        if node in self.rank_constants:
            # A view is the piece of a value that a rank takes.
            return max(result, Agreement.OTHER) if graph_nodes.is_view(node) else Agreement.NUMBERED
        sends = graph_nodes.find_collective(node) is not None
        if node.op != "call_function" or graph_nodes.is_view(node) or sends:
            return result
        if graph_nodes.is_random(node):
            # Batches that differ are meant to have draws that differ.
            types.append(min(self._draws, Agreement.VARYING) if self.varies else self._draws)
        self._check_draws(node, types)
        result = max(types)
        if origin_of(node).phase == "backward":
            # It makes terms of gradients, which are summed at its end.
            return Agreement.OTHER if result is Agreement.TERM else result
        if Agreement.TERM in types:
            return self._use_term(node, types)
        return Agreement.TERM if self._makes_term(node, result) else result

    def _makes_term(self, node: Node, result: Agreement) -> bool:
        """Whether an operator makes one value of all of a rank's part of a leaf, or of features."""
        if result > Agreement.OTHER:
            return False
        if name_of(node) in _REDUCTIONS and any(map(self.is_split, node.all_input_nodes)):
            return not self.is_split(node)
        return result is Agreement.SHARD and not shape_of(node)

    def _use_term(self, node: Node, types: Sequence[Agreement]) -> Agreement:
        """Refuse to compute parts, or means over ranks, from terms that are not summed."""
        if Agreement.SHARD in types or any(map(self.is_split, node.all_input_nodes)):
            text = "what a rank computes of its own part of a leaf, or of features, changes this part"
            self._report("missing sum", node, f"{text}; sum it over ranks first, as fs.global_norm does")
            return max(each for each in types if each is not Agreement.TERM)
        if self.are_means and Agreement.VARYING in types:
            text = "a number of this rank's shards meets one of its batch, and the mean over ranks divides both"
            self._report("missing sum", node, f"{text}; compute it of leaves that are gathered")
        return max(types)

    def _check_draws(self, node: Node, types: Sequence[Agreement]) -> None:
        """Refuse equal random numbers for batches that differ."""
        may_mix = name_of(node) in ("mul", "div", "where") or graph_nodes.is_random(node)
        if may_mix and Agreement.DRAWN in types and max(types) >= Agreement.VARYING:
            text = "ranks draw equal random numbers for different batches; fold the axis into the key by fs.fold_in"
            self._report("same random numbers", node, f"{text}(key, axis)")

    def _reads_state(self, node: Node) -> bool:
        """Whether a value is computed from the state, and not from the batch alone."""
        sources = walk_back(node, lambda operand: True)
        return any(source in self.inputs and not self.inputs[source].is_batch for source in sources)


def _is_cross_entropy_mean(node: Node) -> bool:
    """Whether a node is torch's mean of negative log likelihoods."""
    return name_of(node).startswith("nll_loss") and 1 in node.args[3:4]


def _count_items(node: Node) -> int:
    """Count the items of an operator that maps over lists; 0 of others."""
    items: Any = node.args[0] if name_of(node).startswith(_BY_ITEM) else ()
    return len(items)


def find_wait_source(node: Node, axis: fs.Axis) -> tuple[Collective | None, Node, bool]:
    """Find what a node waits for.

    Args:
        node: The node.
        axis: An axis.

    Returns:
        The collective if it is over the axis, alone or with others; its operand; and whether ranks send each other
        rows, which the graph adds up itself.
    """
    start, index = find_start(node)
    tensors, *_, is_direct, axes, _, _, _ = start.args
    collective = graph_nodes.find_collective(start) if axis.name in axes.split("+") else None
    return collective, tensors[index], is_direct


def find_mean(wait: Node, size: int) -> Node | None:
    """Find the division of a sum of the user's by the number of ranks, behind views, casts and further such sums."""
    for node in walk_graph([wait], lambda node: filter(_passes_on, node.users)):
        for user in node.users:
            divisor = user.args[-1]
            # fshard divides by the ranks of several axes at once.
            is_mean = divisor == size or not (origin_of(user).is_users or isinstance(divisor, Node))
            if name_of(user) == "div" and is_mean:
                return user
    return None


def _passes_on(node: Node) -> bool:
    """Whether a node shows the values of another, or sends and receives them for a sum of the user's."""
    collective = graph_nodes.find_collective(node)
    is_sent = graph_nodes.is_wait(node) or (collective is not None and collective.label in USERS_SUMS)
    return is_sent or _shows_values(node)


def _shows_values(node: Node) -> bool:
    """Whether a node shows the values of another: a view of it, or a cast."""
    return graph_nodes.is_view(node) or name_of(node) == "_to_copy"


def skip_views(node: Node) -> Node:
    """Find the node whose values a view, or a cast, shows."""
    while _shows_values(node):
        node = node.all_input_nodes[0]
    return node


def walk_back(result: Node, is_followed: Callable[[Node], bool]) -> list[Node]:
    """List a node, and the nodes that it is computed from, nearest first, as far as they are to be followed."""
    return list(walk_graph([result], lambda node: filter(is_followed, node.all_input_nodes)))
