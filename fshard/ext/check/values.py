"""Types of a step's values over one axis, found from its graph: which agree between ranks, and where they stop."""

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch.fx import Node

import fshard as fs
from fshard.comm import Collective, Verb
from fshard.ext._compat import origin_of
from fshard.ext.check.graphs import AxisFacts, Input, find_packet, shape_of
from fshard.ext.check.report import Mistake, StepProblem, frames_of
from fshard.extend import generators, graph_nodes

aten = torch.ops.aten
# Where an operator that starts a collective says whether ranks send each other rows, counted from its last argument.
_IS_DIRECT = -5
# Sums that users ask for. A sum that fshard makes of equal terms is divided by their number.
USERS_SUMS = ("psum", "psum_invariant")
_PRODUCTS = (aten.mul, aten.div, aten.where)
_ADDITIONS = (aten.add, aten.add_)
# Of a dim that is split, these make a term of a sum over ranks. Of a product the mean over ranks is never meant.
_MATRIX_PRODUCTS = (aten.mm, aten.bmm)
_REDUCTIONS = (aten.sum, aten.mean, *_MATRIX_PRODUCTS, aten.linalg_vector_norm)
# The mean of one of these is not that of the mean.
_NONLINEAR = (aten.exp, aten.log, aten.sqrt, aten.rsqrt)
# These write to their running mean and variance, which their schemas deny.
_BATCH_NORMS = (aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm)
# The beginnings of names of operators that map over lists, whose items have nothing to do with each other.
_BY_ITEM = ("_foreach", "_fused")


class Agreement(IntEnum):
    """How values of ranks of an axis are related; what is computed from several has the largest of theirs.

    Attributes:
        CONSTANT: They are equal, and depend on no input.
        INVARIANT: They are equal.
        DRAWN: They are equal random numbers.
        SHARD: Each is a part of one leaf, or of its reduced gradient.
        OTHER: They differ, or may do so, as ranks mean it: what is exchanged, or owned.
        VARYING: They differ as batches of ranks do, or by the number of the rank.
    """

    CONSTANT = 0
    INVARIANT = 1
    DRAWN = 2
    SHARD = 3
    OTHER = 4
    VARYING = 5


class ValueTypes:
    """A walk through a graph in the order of its nodes.

    Attributes:
        facts: What is known of the graph.
        types: The type of each node's result.
        problems: Mistakes in collectives and operators.
        terms: Nodes that are computed from all of a rank's part, such as a term of a sum over ranks.
        blamed: The terms that problems name, so that what they make of results is no problem of its own.
        own_numbers: Nodes whose values are others on each rank because of its number.
    """

    def __init__(self, nodes: Sequence[Node], facts: AxisFacts) -> None:
        """Type all nodes."""
        self.types: dict[Node, Agreement] = {}
        self.problems: list[StepProblem] = []
        self.terms: set[Node] = set()
        self.blamed: set[Node] = set()
        self.own_numbers = set(facts.rank_constants)
        self.facts = facts
        self._storages = graph_nodes.find_storages(nodes)
        self._written: dict[Hashable, Agreement] = {}
        # Sums of rows that ranks have sent, to which the graph adds the rank's own.
        self._rows: set[Node] = set()
        self._of_state: set[Node] = set()
        # What the generators of ranks draw from, which nobody knows without a key.
        self._draws = Agreement.OTHER
        for node in nodes:
            self.types[node] = self._visit(node)
            targets = _find_write_targets(node)
            count = _count_items(node)
            for number, target in enumerate(targets):
                written = self._type_item(node, number % count) if count else self.types[node]
                self._written |= dict.fromkeys(self._storages[target], written)
            reads_state = not self._of_state.isdisjoint(node.all_input_nodes)
            if reads_state:
                self._of_state.add(node)

    def type_of(self, node: Node) -> Agreement:
        """Find the type of what a node holds now."""
        agreement = self.types[node]
        for storage in self._storages[node]:
            written = self._written.get(storage, Agreement.CONSTANT)
            agreement = max(agreement, written)
        return agreement

    def _visit(self, node: Node) -> Agreement:
        """Type a result."""
        entry = self.facts.inputs.get(node)
        if entry is not None:
            return self._type_input(node, entry)
        if graph_nodes.is_wait(node):
            return self._receive(node)
        if node.target is operator.getitem:
            source: Any
            number: Any
            source, number = node.args
            if _count_items(source):
                return self._type_item(source, number)
        types = [Agreement.CONSTANT]
        if not _reads_no_values(node):
            types += map(self.type_of, self._list_operands(node))
        return self._compute(node, types)

    def _type_input(self, node: Node, entry: Input) -> Agreement:
        leaf, axis = entry.leaf, self.facts.axis
        if isinstance(leaf, fs.Sharded):
            self._of_state.add(node)
            if leaf.spec.dim_of(axis) is None:
                return Agreement.INVARIANT
            is_owned = leaf.spec.roles[axis] == "owned"
            return Agreement.OTHER if is_owned else Agreement.SHARD
        if not entry.is_batch or not self.facts.varies:
            return Agreement.INVARIANT
        # A number may count batches, or say how they are mixed.
        return Agreement.VARYING if shape_of(node) else Agreement.OTHER

    def _type_item(self, node: Node, number: int) -> Agreement:
        """Type an item of an operator that maps over lists: from the items of this number, and from single operands."""
        types = [Agreement.CONSTANT]
        for argument in (*node.args, *node.kwargs.values()):
            is_list = isinstance(argument, list | tuple)
            items: Any = argument[number : number + 1] if is_list else [argument]  # type: ignore[index]
            operands = [item for item in items if isinstance(item, Node)]
            types += map(self.type_of, operands)
        return max(types)

    def _list_operands(self, node: Node) -> list[Node]:
        """List the operands, but for this rank's own term of a sum that the graph adds up."""
        rows = [operand for operand in node.all_input_nodes if operand in self._rows]
        if rows and (graph_nodes.is_view(node) or find_packet(node) in _ADDITIONS):
            self._rows.add(node)
            return rows
        return node.all_input_nodes

    def _report(self, kind: Mistake, node: Node, text: str) -> None:
        frames = frames_of(node)
        problem = StepProblem(kind, self.facts.axis.name, "", frames, f"{text}.")
        self.problems.append(problem)

    def _receive(self, node: Node) -> Agreement:
        """Type what a collective has brought, and refuse a sum of what is equal already."""
        collective, source = find_wait_source(node)
        sent = self.type_of(source)
        if not is_over(collective, self.facts.axis):
            return sent
        if is_direct(node):
            self._rows.add(node)
        if collective.label in USERS_SUMS and origin_of(node).phase == "forward":
            self._check_sum(node, source, sent)
        if collective.op == "reduce_scatter" and collective.label == Verb.SCATTER:
            return Agreement.SHARD
        agrees = collective.op in ("all_reduce", "all_gather")
        return Agreement.INVARIANT if agrees else Agreement.OTHER

    def _check_sum(self, node: Node, source: Node, sent: Agreement) -> None:
        size = self.facts.axis.size
        averages = find_mean(node, size) is not None
        shown = skip_views(source)
        packet = find_packet(shown)
        if sent is Agreement.INVARIANT and not averages:
            text = f"ranks agree on this value already, so that its sum is {size} times too large; leave the sum out"
            # Where an objective sums it again, the sum inside of the loss is wrong.
            inner = max(node, shown, key=lambda each: len(frames_of(each)))
            self._report(Mistake.DOUBLED_SUM, inner, text)
        elif sent is Agreement.SHARD and source not in self.terms:
            text = "ranks hold other elements of this leaf, so that their sum mixes elements; leave the sum out"
            self._report(Mistake.DOUBLED_SUM, node, text)
        elif averages and packet in _MATRIX_PRODUCTS and self._reduces(shown, sent):
            text = f"each rank has a part of this product, so that their mean is {size} times too small; take their sum"
            self._report(Mistake.NUMBER_OF_RANKS, node, text)
        elif averages and packet in _NONLINEAR and math.prod(shape_of(source)) == 1:
            text = "the mean over ranks of a function that is not linear is not that of their mean"
            self._report(Mistake.MEAN_OF_MEANS, node, f"{text}; take the mean over ranks first")

    def _compute(self, node: Node, types: list[Agreement]) -> Agreement:
        result = max(types)
        if node.target in generators.EFFECTS:
            self._draws = result if node.target is generators.seed else Agreement.OTHER
        if node in self.facts.rank_constants:
            agrees = result <= Agreement.INVARIANT
            is_piece = agrees and graph_nodes.is_view(node)
            return Agreement.OTHER if is_piece else Agreement.VARYING
        sends = graph_nodes.find_collective(node) is not None
        if node.op != "call_function" or graph_nodes.is_view(node) or sends:
            self._follow_terms(node)
            return result
        if graph_nodes.is_random(node):
            if self._draws is Agreement.VARYING and not self.facts.varies:
                self.own_numbers.add(node)
            are_equal = self._draws <= Agreement.INVARIANT
            types.append(Agreement.DRAWN if are_equal else self._draws)
            result = max(types)
        if find_packet(node) in _PRODUCTS or graph_nodes.is_random(node):
            self._check_product(node, types)
        # A backward makes terms of gradients, which are summed at its end.
        if origin_of(node).phase != "backward":
            if self._reduces(node, result):
                self.terms.add(node)
            elif not self._refuse_own(node):
                self._follow_terms(node)
        return result

    def _follow_terms(self, node: Node) -> None:
        """Note that a node is computed from terms, if it is."""
        if not self.terms.isdisjoint(node.all_input_nodes):
            self.terms.add(node)

    def _reduces(self, node: Node, result: Agreement) -> bool:
        """Whether an operator makes one value of all of a rank's part of a leaf, or of features."""
        sources = node.all_input_nodes
        reduces_dim = find_packet(node) in _REDUCTIONS
        if reduces_dim and any(map(self.facts.is_split, sources)):
            return result < Agreement.VARYING and not self.facts.is_split(node)
        if result is not Agreement.SHARD or shape_of(node):
            return False
        return any(map(shape_of, sources))

    def _refuse_own(self, node: Node) -> bool:
        """Refuse to compute parts, or means over ranks, from terms that are not summed; tell whether it does."""
        others = set(node.all_input_nodes) - self.terms
        if len(others) == len(node.all_input_nodes):
            return False
        if any(self.types[other] is Agreement.SHARD or self.facts.is_split(other) for other in others):
            text = "what a rank computes of its own part of a leaf, or of features, changes this part"
            self._report(Mistake.MISSING_SUM, node, f"{text}; sum it over ranks first, as fs.global_norm does")
            self.blamed.update(walk_back(node, self.terms.__contains__))
            return True
        types = map(self.type_of, others)
        is_addition = find_packet(node) in _ADDITIONS
        if is_addition and self.facts.are_means and Agreement.VARYING in types:
            text = "a number of this rank's shards is added to one of its batch, and the mean over ranks divides it"
            self._report(Mistake.MISSING_SUM, node, f"{text}; compute it of leaves that are gathered")
        return False

    def _check_product(self, node: Node, types: Sequence[Agreement]) -> None:
        """Refuse equal random numbers for batches that differ, and a sum that is divided by this rank's count."""
        if Agreement.DRAWN in types and Agreement.VARYING in types:
            text = "ranks draw equal random numbers for different batches; fold the axis into the key by fs.fold_in"
            self._report(Mistake.SAME_DRAWS, node, f"{text}(key, axis)")
        origin = origin_of(node)
        if find_packet(node) is not aten.div or not origin.is_users or origin.phase != "forward":
            return
        total, *counts = node.all_input_nodes
        are_numbers = not any(map(shape_of, node.all_input_nodes))
        varies = {self.type_of(each) for each in node.all_input_nodes} == {Agreement.VARYING}
        if counts and are_numbers and varies and total in self._of_state and counts[0] not in self._of_state:
            text = "this mean has the count of this rank's batch, so that the mean over ranks gives items other weights"
            self._report(Mistake.MEAN_OF_MEANS, node, f'{text}; return (sum, count) with reduce="weighted"')


def _reads_no_values(node: Node) -> bool:
    """Whether an operator makes a tensor in the shape of another."""
    name = getattr(find_packet(node), "__name__", "")
    return name.endswith("_like") or name.startswith("new_")


def _count_items(node: Node) -> int:
    """Count the items of an operator that maps over lists; 0 of others."""
    maps = getattr(node.target, "__name__", "").startswith(_BY_ITEM)
    return len(node.args[0]) if maps and isinstance(node.args[0], list | tuple) else 0


def _find_write_targets(node: Node) -> list[Node]:
    """List the nodes whose memory a node writes to, also where its schema does not say so."""
    targets = graph_nodes.find_write_targets(node)
    if find_packet(node) in _BATCH_NORMS:
        targets += [source for source in node.args[3:5] if isinstance(source, Node)]
    return targets


def find_wait_source(node: Node) -> tuple[Collective, Node]:
    """Find the collective that a node waits for, and the operand of it."""
    buffer: Any = node.args[0]
    start, index = buffer.args
    collective = graph_nodes.find_collective(start)
    assert collective is not None
    return collective, start.args[0][index]


def is_direct(wait: Node) -> bool:
    """Whether ranks have sent each other rows, which the graph adds up itself."""
    start: Any = wait.args[0]
    return bool(start.args[0].args[_IS_DIRECT])


def is_over(collective: Collective, axis: fs.Axis) -> bool:
    """Whether a collective is over an axis, alone or with others."""
    return axis.name in collective.axis.split("+")


def find_mean(wait: Node, size: int) -> Node | None:
    """Find the division of a sum by the number of ranks, behind views, casts and further sums of the same label."""
    label = find_wait_source(wait)[0].label
    pending = [wait]
    for node in pending:
        for user in node.users:
            if find_packet(user) is aten.div:
                divisor = user.args[1]
                # fshard divides by the ranks of several axes at once.
                is_users = origin_of(user).is_users or isinstance(divisor, Node)
                if divisor == size or not is_users:
                    return user
            collective = graph_nodes.find_collective(user)
            is_sent = graph_nodes.is_wait(user) or (collective is not None and collective.label == label)
            if is_sent or _shows_values(user):
                pending.append(user)
    return None


def _shows_values(node: Node) -> bool:
    """Whether a node shows the values of another: a view of it, or a cast."""
    return graph_nodes.is_view(node) or find_packet(node) is aten._to_copy


def skip_views(node: Node) -> Node:
    """Find the node whose values a view, or a cast, shows."""
    while _shows_values(node):
        node = node.all_input_nodes[0]
    return node


def walk_back(result: Node, is_followed: Callable[[Node], bool]) -> list[Node]:
    """List a node, and the nodes that it is computed from, nearest first, as far as they are to be followed."""
    nodes = [result]
    for node in nodes:
        nodes += [operand for operand in node.all_input_nodes if operand not in nodes and is_followed(operand)]
    return nodes
