"""Early updates: leaves are updated as soon as their gradients are reduced, while the backward of others goes on."""

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fshard import _compat, comm
from fshard.jit.nodes import find_collective, find_storages, find_write_targets, is_impure, is_random


class _SplitPart(NamedTuple):
    """An entry of an operator on lists.

    Attributes:
        add: Adds that operator to the graph, for the entries of some numbers.
        number: The number of this entry.
    """

    add: Callable[[Sequence[int]], Node]
    number: int


def schedule_early_updates(graph: Graph) -> None:
    """Move what follows the objective up to where its inputs are ready, before the last reduction starts.

    An operator that updates all leaves is split by when their gradients arrive, so that each gradient is freed as soon
    as its leaf is updated. Few are then held at a time, and reductions go on meanwhile. Kernels, bits and the order of
    collectives do not change.

    Nodes are numbered by their positions. A node's slot is the position of the node behind which it is to run, and its
    own position if it stays. For example, without the waits:

        0  reduce_scatter of A
        1  reduce_scatter of B
        2  objective
        3  foreach_add to A and B

    The last operator is split in two. The part for A needs 0 alone, and the last collective before the objective starts
    at 1, so its slot is 0. The part for B needs 1, so it cannot run before that collective starts, and stays at 3.

    Args:
        graph: The graph with its writes to donated inputs, which is changed.
    """
    part_of_node = _split_list_operators(graph)
    nodes = list(graph.nodes)
    last_collective_before = _find_last_collectives(nodes)
    if not last_collective_before:
        return
    slots = _choose_slots(nodes, last_collective_before)
    order = sorted(range(len(nodes)), key=lambda position: (slots[position], position))
    for position, following in pairwise(order):
        nodes[position].append(nodes[following])
    groups = defaultdict[Any, list[Node]](list)
    for position in order:
        node = nodes[position]
        if node in part_of_node:
            # Parts that stay are joined again.
            slot = None if slots[position] == position else slots[position]
            groups[part_of_node[node].add, slot].append(node)
    for (add, _), parts in groups.items():
        with graph.inserting_before(parts[0]):
            whole = add([part_of_node[part].number for part in parts])
        for i, part in enumerate(parts):
            for user in list(part.users):
                user.args = (whole, i)
            graph.erase_node(part)


def _find_last_collectives(nodes: Sequence[Node]) -> dict[Node, int]:
    """Find the nodes that may move: those between an objective and the next collective.

    Returns:
        For each of them the position of the last collective before the objective. A node that cannot run before that
        one starts has nothing to overlap with, and stays.
    """
    last_collective_before = {}
    last_collective = -1
    last_before_objective = -1
    for position, node in enumerate(nodes):
        collective = find_collective(node)
        if collective is None:
            if last_before_objective >= 0 and _may_move(node):
                last_collective_before[node] = last_before_objective
        elif collective.about.verb == comm.Verb.OBJECTIVE:
            last_before_objective = last_collective
        else:
            last_before_objective = -1
            last_collective = position
    return last_collective_before


def _may_move(node: Node) -> bool:
    """Whether a node is an operator whose only effects, if any, are writes to tensors."""
    if node.op != "call_function" or is_random(node):
        return False
    return not is_impure(node) or bool(find_write_targets(node))


def _split_list_operators(graph: Graph) -> dict[Node, _SplitPart]:
    """Split the operators on lists that may move into one operator for each entry, and list these operators."""
    part_of_node: dict[Node, _SplitPart] = {}
    for node in _find_last_collectives(list(graph.nodes)):
        number_of_entries = _count_entries(node)
        if not number_of_entries:
            continue
        # What the node has, rather than the node: its arguments go when it is erased.
        add = partial(_add_entries, graph, node.target, node.args, node.kwargs, node.meta)
        with graph.inserting_before(node):
            parts = [add([number]) for number in range(number_of_entries)]
        for user in list(node.users):
            number: Any = user.args[1]
            user.args = (parts[number], 0)
        graph.erase_node(node)
        part_of_node |= {part: _SplitPart(add, number) for number, part in enumerate(parts)}
    return part_of_node


def _count_entries(node: Node) -> int:
    """Count the entries of an operator's lists; 0 if it cannot be split by them."""
    values: tuple[Any, ...] = (*node.args, *node.kwargs.values())
    lengths = {len(value) for value in values if _is_filled_list(value)}
    if len(lengths) != 1 or not _compat.is_entrywise(node.target):
        return 0
    if not all(user.target is operator.getitem for user in node.users):
        return 0
    return lengths.pop()


def _add_entries(
    graph: Graph,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    meta: Mapping[str, Any],
    numbers: Sequence[int],
) -> Node:
    """Add an operator on lists to a graph, for some entries of the lists."""

    def take(value: Any) -> Any:
        return [value[number] for number in numbers] if _is_filled_list(value) else value

    part = graph.call_function(target, tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()})
    part.meta = {**meta, "val": take(meta.get("val"))}
    return part


def _is_filled_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value)


def _find_dependencies(nodes: Sequence[Node]) -> list[set[int]]:
    """Find for each node the positions of those that must run before it.

    These are the nodes that it reads from, the last write to a storage that it uses, and before a write all uses of the
    storage since the last write.
    """
    storages = find_storages(nodes)
    position_of = {node: position for position, node in enumerate(nodes)}
    last_write = {}
    uses_since = defaultdict[Hashable, list[int]](list)
    dependencies = []
    for position, node in enumerate(nodes):
        sources = node.all_input_nodes
        required = {position_of[source] for source in sources}
        written = _name_storages(find_write_targets(node), storages)
        # Taking one of several results uses the memory of that one alone.
        for name in _name_storages([node] if node.target is operator.getitem else sources, storages):
            if name in written:
                required.update(uses_since.pop(name, ()))
                last_write[name] = position
            elif name in last_write:
                required.add(last_write[name])
            uses_since[name].append(position)
        dependencies.append(required)
    return dependencies


def _name_storages(nodes: Sequence[Node], storages: Mapping[Node, Mapping[Hashable, int]]) -> set[Hashable]:
    return set[Hashable]().union(*map(storages.__getitem__, nodes))


def _choose_slots(nodes: Sequence[Node], last_collective_before: Mapping[Node, int]) -> list[int]:
    """Choose for each node the slot in which it runs.

    Args:
        nodes: The nodes in their order.
        last_collective_before: For the nodes that may move the position that their slot must come before.
    """
    dependencies = _find_dependencies(nodes)
    last_input = next(position for position, node in enumerate(nodes) if node.op == "call_function") - 1
    results = set(nodes[-1].all_input_nodes)
    earliest: list[int] = []
    slots = []
    for position, node in enumerate(nodes):
        ready = max([last_input, *(earliest[required] for required in dependencies[position])])
        may_move = node in last_collective_before and ready < last_collective_before[node]
        earliest.append(ready if may_move else position)
        # Only results and writes move by themselves, and what they need moves with them. A node that needs inputs alone
        # could run at once, but its result would then stay in memory from the beginning.
        moves_by_itself = node in results or bool(find_write_targets(node))
        slots.append(earliest[position] if moves_by_itself and earliest[position] > last_input else position)
    # Each node runs no later than the nodes that depend on it.
    for position in reversed(range(len(slots))):
        for required in dependencies[position]:
            slots[required] = min(slots[required], slots[position])
    return slots
