"""Types of a step's values over one axis, found from its graph: which agree between ranks, and where they stop."""

import operator
from collections.abc import Callable, Collection, Hashable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fshard.comm import Collective, Verb
from fshard.ext._compat import origin_of
from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.extend import generators, graph_nodes

aten = torch.ops.aten
# Where an operator that starts a collective says whether ranks send each other rows, counted from its last argument.
_IS_DIRECT = -5
# Sums that users ask for. A sum that fshard makes of equal terms is divided by their number.
USERS_SUMS = ("psum", "psum_invariant")
_PRODUCTS = (aten.mul, aten.div, aten.where, aten.native_dropout)
# The mean of one of these is not that of the mean.
_NONLINEAR = (aten.exp, aten.log, aten.sqrt, aten.rsqrt)
# These write to their running mean and variance, which their schemas deny.
_BATCH_NORMS = (aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm)
_ADDITIONS = (aten.add, aten.add_)
# What reads no values of its operands.
_CONSTANTS = (
    *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full),
)


class Agreement(IntEnum):
    """How values of ranks of an axis are related; what is computed from several has the largest of theirs.

    Attributes:
        CONSTANT: They are equal, and depend on no input.
        INVARIANT: They are equal.
        DRAWN: They are equal random numbers.
        SHARD: Each is a part of one leaf, or of its reduced gradient.
        OWN: Each is a number that is computed from a shard alone, such as a term of a sum.
        OTHER: They differ, or may do so, as ranks mean it: what is exchanged, or owned.
        VARYING: They differ as batches of ranks do, or by the number of the rank.
    """

    CONSTANT = 0
    INVARIANT = 1
    DRAWN = 2
    SHARD = 3
    OWN = 4
    OTHER = 5
    VARYING = 6


class AxisFacts(NamedTuple):
    """What is known of a graph over one axis before its values are typed.

    Attributes:
        axis: The name of the axis.
        size: Its number of ranks.
        inputs: The types of inputs.
        rank_constants: Nodes whose constants differ between ranks.
        of_state: Nodes that depend on Sharded leaves.
        varies: Whether batches differ between the ranks.
        are_means: Whether all losses that the step differentiates are means over ranks.
    """

    axis: str
    size: int
    inputs: Mapping[Node, Agreement]
    rank_constants: Collection[Node]
    of_state: Collection[Node]
    varies: bool
    are_means: bool


class ValueTypes:
    """A walk through a graph in the order of its nodes.

    Attributes:
        types: The type of each node's result.
        problems: Mistakes in collectives and operators.
    """

    def __init__(self, graph: Graph, facts: AxisFacts) -> None:
        """Type all nodes."""
        self.types: dict[Node, Agreement] = {}
        self.problems: list[StepProblem] = []
        self._facts = facts
        self._storages = graph_nodes.find_storages(graph.nodes)
        self._written: dict[Hashable, Agreement] = {}
        # The rank's own term of sums over ranks, where the graph may have to add it.
        self._sum_of: dict[Node, Node] = {}
        self._items: dict[Node, list[Agreement]] = {}
        # What the generators of ranks draw from.
        self._draws = Agreement.VARYING
        for node in graph.nodes:
            self.types[node] = self._visit(node)

    def type_of(self, node: Node) -> Agreement:
        """Find the type of what a node holds now."""
        writes = [self._written.get(storage, Agreement.CONSTANT) for storage in self._storages[node]]
        return max([self.types[node], *writes])

    def _visit(self, node: Node) -> Agreement:
        if graph_nodes.is_wait(node):
            return self._receive(node)
        operands = {operand: self.type_of(operand) for operand in self._list_operands(node)}
        result = max([Agreement.CONSTANT, *operands.values()])
        if node.target is operator.getitem and node.args[0] in self._items:
            items: Any = self._items[node.args[0]]  # type: ignore[index]
            return items[node.args[1]]
        if node.op != "call_function":
            constant = Agreement.VARYING if node in self._facts.rank_constants else Agreement.CONSTANT
            return self._facts.inputs.get(node, constant)
        if graph_nodes.find_collective(node) is not None:
            return result
        if node.target in generators.EFFECTS:
            self._draws = result if node.target is generators.seed else Agreement.VARYING
        elif graph_nodes.is_random(node):
            result = self._draw(node, operands)
        elif node in self._facts.rank_constants:
            is_piece = graph_nodes.is_view(node) and result <= Agreement.INVARIANT
            result = Agreement.OTHER if is_piece else Agreement.VARYING
        else:
            result = self._compute(node, operands, result)
        targets = _find_write_targets(node)
        for number, target in enumerate(targets):
            written = result
            if _is_by_item(node):
                written = self._type_item(node, number % len(node.args[0]))  # type: ignore[arg-type]
            self._written |= dict.fromkeys(self._storages[target], written)
        if not targets and _is_by_item(node):
            self._items[node] = [self._type_item(node, number) for number in range(len(node.args[0]))]  # type: ignore[arg-type]
        return result

    def _type_item(self, node: Node, number: int) -> Agreement:
        """Type an item of an operator that maps over lists: from the items of this number, and from single operands."""
        types = [Agreement.CONSTANT]
        for argument in (*node.args, *node.kwargs.values()):
            item = argument[number : number + 1] if isinstance(argument, list | tuple) else [argument]
            types += [self.type_of(each) for each in item if isinstance(each, Node)]
        return max(types)

    def _list_operands(self, node: Node) -> list[Node]:
        """List the operands, but for this rank's own term of a sum that the graph adds up."""
        operands = node.all_input_nodes
        sums = [self._sum_of[operand] for operand in operands if operand in self._sum_of]
        if sums and (graph_nodes.is_view(node) or find_packet(node) in _ADDITIONS):
            self._sum_of[node] = sums[0]
            return [operand for operand in operands if not _views(operand, sums[0])]
        return operands

    def _report(self, kind: Mistake, node: Node, text: str) -> None:
        self.problems.append(StepProblem(kind, self._facts.axis, "", frames_of(node), text))

    def _receive(self, node: Node) -> Agreement:
        """Type what a collective has brought, and refuse a sum of what is equal already."""
        collective, source = find_wait_source(node)
        sent = self.type_of(source)
        if self._facts.axis not in collective.axis.split("+"):
            return sent
        self._sum_of[node] = source
        if collective.op in ("all_reduce", "reduce_scatter") and collective.label in USERS_SUMS:
            self._check_sum(node, source, sent)
        if collective.op == "reduce_scatter" and collective.label == Verb.SCATTER:
            return Agreement.SHARD
        return Agreement.INVARIANT if collective.op in ("all_reduce", "all_gather") else Agreement.OTHER

    def _check_sum(self, node: Node, source: Node, sent: Agreement) -> None:
        if origin_of(node).phase != "forward":
            return
        averages = find_mean(node, self._facts.size) is not None
        if sent is Agreement.INVARIANT and not averages:
            text = f"ranks agree on this value already, so that its sum is {self._facts.size} times too large"
            # Where an objective sums it again, the sum inside of the loss is wrong.
            inner = max(node, _skip_views(source), key=lambda each: len(frames_of(each)))
            self._report(Mistake.DOUBLED_SUM, inner, f"{text}; leave the sum out.")
        elif sent is Agreement.SHARD and _count_elements(source) > 1:
            text = "ranks hold other elements of this leaf, so that their sum mixes elements"
            self._report(Mistake.DOUBLED_SUM, node, f"{text}; leave the sum out.")
        elif averages and _count_elements(source) == 1 and find_packet(_skip_views(source)) in _NONLINEAR:
            text = "the mean over ranks of a function that is not linear is not that of their mean"
            self._report(Mistake.MEAN_OF_MEANS, node, f"{text}; take the mean over ranks first.")

    def _draw(self, node: Node, operands: Mapping[Node, Agreement]) -> Agreement:
        """Type random numbers, and refuse equal ones for batches that differ."""
        varies = Agreement.VARYING in operands.values()
        if find_packet(node) is aten.native_dropout:
            self._check_draws(node, [self._draws, *operands.values()])
            return Agreement.VARYING if varies else max(self._draws, *operands.values())
        return Agreement.DRAWN if self._draws <= Agreement.INVARIANT else self._draws

    def _check_draws(self, node: Node, types: Collection[Agreement]) -> None:
        is_drawn = Agreement.DRAWN in types or (graph_nodes.is_random(node) and Agreement.INVARIANT in types)
        if is_drawn and Agreement.VARYING in types:
            text = "ranks draw equal random numbers for different batches; fold the axis into the key by fs.fold_in"
            self._report(Mistake.SAME_DRAWS, node, f"{text}(key, axis).")

    def _compute(self, node: Node, operands: Mapping[Node, Agreement], result: Agreement) -> Agreement:
        types = operands.values()
        if find_packet(node) in _CONSTANTS:
            return Agreement.CONSTANT
        if graph_nodes.is_view(node):
            return result
        packet = find_packet(node)
        is_number = _count_dims(node) == 0
        if packet in _PRODUCTS:
            self._check_draws(node, types)
            self._check_count(node, operands)
        if result is Agreement.SHARD and is_number and any(map(_count_dims, operands)):
            return Agreement.OWN
        if Agreement.OWN in types and Agreement.VARYING in types and packet in _ADDITIONS and self._facts.are_means:
            text = "a number of this rank's shards is added to one of its batch, and the mean over ranks divides it"
            self._report(Mistake.MISSING_SUM, node, f"{text}; compute it of leaves that are gathered.")
        if Agreement.OWN in types and Agreement.SHARD in types and not is_number:
            text = "a number that this rank computes of its own shards changes them"
            self._report(Mistake.MISSING_SUM, node, f"{text}; sum it over ranks first, as fs.global_norm does.")
        return result

    def _check_count(self, node: Node, operands: Mapping[Node, Agreement]) -> None:
        """Refuse a sum that is divided by the count of this rank's batch."""
        if find_packet(node) is not aten.div or len(operands) < 2 or not _is_users_forward(node):
            return
        total, count = node.all_input_nodes
        are_numbers = _count_dims(total) == _count_dims(count) == 0
        varies = operands[total] is operands[count] is Agreement.VARYING
        if are_numbers and varies and total in self._facts.of_state and count not in self._facts.of_state:
            text = "this mean has the count of this rank's batch, so that the mean over ranks gives items other weights"
            self._report(Mistake.MEAN_OF_MEANS, node, f'{text}; return (sum, count) with reduce="weighted".')


def find_wait_source(node: Node) -> tuple[Collective, Node]:
    """Find the collective that a node waits for, and the operand of it."""
    buffer: Any = node.args[0]
    start, index = buffer.args
    collective = graph_nodes.find_collective(start)
    assert collective is not None
    return collective, start.args[0][index]


def _skip_views(node: Node) -> Node:
    """Find the node whose values a view, or a cast, shows."""
    while graph_nodes.is_view(node) or find_packet(node) is aten._to_copy:
        node = node.all_input_nodes[0]
    return node


def _views(node: Node, source: Node) -> bool:
    """Whether a node is another, or a view of it."""
    while node is not source and graph_nodes.is_view(node):
        node = node.all_input_nodes[0]
    return node is source


def _is_users_forward(node: Node) -> bool:
    origin = origin_of(node)
    return origin.is_users and origin.phase == "forward"


def _is_by_item(node: Node) -> bool:
    """Whether an operator maps over lists, whose items have nothing to do with each other."""
    return getattr(node.target, "__name__", "").startswith(("_foreach", "_fused"))


def _find_write_targets(node: Node) -> list[Node]:
    """List the nodes whose memory a node writes to, also where its schema does not say so."""
    targets = graph_nodes.find_write_targets(node)
    if find_packet(node) in _BATCH_NORMS:
        targets += [source for source in node.args[3:5] if isinstance(source, Node)]
    return targets


def walk_back(result: Node, is_followed: Callable[[Node], bool]) -> list[Node]:
    """List a node, and the nodes that it is computed from, nearest first, as far as they are to be followed."""
    nodes = [result]
    for node in nodes:
        nodes += [operand for operand in node.all_input_nodes if operand not in nodes and is_followed(operand)]
    return nodes


def find_packet(node: Node) -> Any:
    """Find the operator of a node, without its overload."""
    return getattr(node.target, "overloadpacket", None)


def is_sent_as_rows(wait: Node) -> bool:
    """Whether ranks have sent each other rows, which the graph adds up itself."""
    start: Any = wait.args[0]
    return bool(start.args[0].args[_IS_DIRECT]) or find_wait_source(wait)[0].op not in ("all_reduce", "reduce_scatter")


def find_mean(wait: Node, size: int) -> Node | None:
    """Find the division of a sum by the number of ranks, behind views, casts and further sums of the same label."""
    label = find_wait_source(wait)[0].label
    pending = [wait]
    while pending:
        for user in pending.pop().users:
            if find_packet(user) is aten.div and user.args[1] == size:
                return user
            collective = graph_nodes.find_collective(user)
            is_sent = graph_nodes.is_wait(user) or (collective is not None and collective.label == label)
            if is_sent or graph_nodes.is_view(user) or find_packet(user) is aten._to_copy:
                pending.append(user)
    return None


def _count_elements(node: Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return max((each.numel() for each in values if isinstance(each, torch.Tensor)), default=0)


def _count_dims(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else None
