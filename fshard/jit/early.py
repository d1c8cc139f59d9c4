"""Early updates: leaves are updated when their gradients are reduced, while the backward of others goes on."""

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from fshard import _compat, comm
from fshard.jit.memory import storages_of
from fshard.jit.passes import COPIES, arguments, is_impure, is_random, sent_by, written


class _Part(NamedTuple):
    """A node, or of an operator on lists the entries of one index.

    Attributes:
        number: The node's place in the graph.
        node: The node.
        entry: Which; None is the whole node.
        given: What it reads, as parts where an operator on lists returns them.
        reads: The storages that it looks at.
        writes: Those that it writes to.
    """

    number: int
    node: Node
    entry: int | None
    given: Sequence["_Key"]
    reads: set[Hashable]
    writes: set[Hashable]

    @property
    def key(self) -> "_Key":
        """Its name among the parts of a graph."""
        return self.node, self.entry


_Key = tuple[Node, int | None]


def update_early(graph: Graph) -> None:
    """Move what follows the objective up to where all that it needs is there, before the last reduction starts.

    An operator that updates all leaves is split by when their gradients come. Gradients are freed as their leaves are
    done, so that few are held at a time, and reductions go on meanwhile. Kernels, bits and the order of collectives
    stay.

    Args:
        graph: The graph, before results are written to donated inputs.
    """
    nodes = list(graph.nodes)
    limits = _limits(nodes)
    if not limits:
        return
    parts = list(_parts(nodes, limits))
    # Twice, because what only feeds results that come late stays where it was.
    ended = _leading_to_results(nodes, parts, _places(nodes, parts, limits))
    places = _places(nodes, parts, {node: limit for node, limit in limits.items() if node in ended})
    if any(places[part.key] != part.number for part in parts):
        parts.sort(key=lambda part: (places[part.key], part.number, part.entry or 0))
        _arrange(graph, parts, places)


def _limits(nodes: Sequence[Node]) -> dict[Node, int]:
    """For the nodes between an objective and the next collective where the last one before the objective starts."""
    limits: dict[Node, int] = {}
    last, limit = -1, None
    for n, node in enumerate(nodes):
        sent = sent_by(node)
        if sent is not None:
            limit, last = (last, last) if sent.about.verb == comm.Verb.OBJECTIVE else (None, n)
        elif limit is not None and limit >= 0 and node.op == "call_function" and not _stays(node):
            limits[node] = limit
    return limits


def _stays(node: Node) -> bool:
    return is_random(node) or (is_impure(node) and not any(argument.written for argument, _ in arguments(node) or ()))


def _parts(nodes: Sequence[Node], limits: dict[Node, int]) -> Iterator[_Part]:
    """Every node, in their order; operators on lists that may move by their indices."""
    found = storages_of(nodes)
    split: set[Node] = set()
    for number, node in enumerate(nodes):
        size = _length(node) if node in limits else None
        if size is not None:
            split.add(node)
        for index in [None] if size is None else range(size):
            given = list(_given(node, index, split))
            writes = {name for target in written(node) if target in _nodes_of(given) for name in found[target]}
            # A copy to write to must come after all that reads what it is of: donation puts it into its place.
            if node.target in COPIES and node.args[0].op == "placeholder":  # type: ignore[union-attr]
                writes |= set(found[node.args[0]])  # type: ignore[index]
            looked = [node] if node.target is operator.getitem else _nodes_of(given)
            reads = {name for target in looked for name in found[target]}
            yield _Part(number, node, index, given, reads - writes, writes)


def _length(node: Node) -> int | None:
    """How many entries the lists of an operator have that does with each the same; None for others."""
    if not _compat.is_entrywise(node.target):
        return None
    sizes = {len(value) for _, value in arguments(node) or () if isinstance(value, list | tuple) and value}
    apart = all(user.target is operator.getitem for user in node.users)
    return sizes.pop() if len(sizes) == 1 and apart else None


def _given(node: Node, index: int | None, split: set[Node]) -> Iterator[_Key]:
    for given in node.args if node.target is operator.getitem else _entries(node, index):
        if isinstance(given, Node):
            yield (given, node.args[1] if given in split else None)  # type: ignore[misc]


def _entries(node: Node, index: int | None) -> list[Any]:
    """The nodes that a node is given; of an operator on lists those at an index."""
    if index is None:
        return list(node.all_input_nodes)
    values = [value for _, value in arguments(node) or ()]
    return [value[index] if isinstance(value, list | tuple) and value else value for value in values]


def _nodes_of(keys: Sequence[_Key]) -> set[Node]:
    return {node for node, _ in keys}


def _places(nodes: Sequence[Node], parts: Sequence[_Part], limits: dict[Node, int]) -> dict[_Key, int]:
    """For each part the number of the node behind which it runs, its own where it stays."""
    first = next(n for n, node in enumerate(nodes) if node.op == "call_function") - 1
    places: dict[_Key, int] = {}
    touched: defaultdict[Hashable, int] = defaultdict(lambda: first)
    changed: defaultdict[Hashable, int] = defaultdict(lambda: first)
    for part in parts:
        place = part.number
        if part.node in limits:
            needed = [*(places[key] for key in part.given), *(changed[name] for name in part.reads)]
            place = max([first, *needed, *(touched[name] for name in part.writes)])
            place = place if place < limits[part.node] else part.number
        places[part.key] = place
        for name in part.writes:
            changed[name] = max(changed[name], place)
        for name in part.reads | part.writes:
            touched[name] = max(touched[name], place)
    _delay(parts, places, first)
    return places


def _leading_to_results(nodes: Sequence[Node], parts: Sequence[_Part], places: dict[_Key, int]) -> set[Node]:
    """The nodes of which parts have moved that are results, write to memory, or lead to such parts."""
    outputs = set(nodes[-1].all_input_nodes)
    leading: set[_Key] = set()
    for part in reversed(parts):
        if places[part.key] < part.number and (part.key in leading or part.node in outputs or written(part.node)):
            leading |= {part.key, *part.given}
    return {node for node, _ in leading}


def _delay(parts: Sequence[_Part], places: dict[_Key, int], first: int) -> None:
    """Put what needs inputs alone, such as copies of them, where it is needed."""
    needed: dict[_Key, int] = {}
    touched: dict[Hashable, int] = {}
    changed: dict[Hashable, int] = {}
    for part in reversed(parts):
        if places[part.key] == first < part.number:
            later = [touched[name] for name in part.writes if name in touched]
            later += [changed[name] for name in part.reads if name in changed]
            places[part.key] = min([part.number, *later, *([needed[part.key]] if part.key in needed else [])])
        place = places[part.key]
        for key in part.given:
            needed[key] = min(needed.get(key, place), place)
        for name in part.writes:
            changed[name] = min(changed.get(name, place), place)
        for name in part.reads | part.writes:
            touched[name] = min(touched.get(name, place), place)


def _arrange(graph: Graph, order: Sequence[_Part], places: dict[_Key, int]) -> None:
    """Bring nodes into an order; parts of one that come one after the other stay one."""
    runs: dict[tuple[Node, int], list[int | None]] = {}
    for part in order:
        runs.setdefault((part.node, places[part.key]), []).append(part.entry)
    pieces: dict[_Key, tuple[Node, int]] = {}
    split: list[Node] = []
    last: Node | None = None
    for (node, _), indices in runs.items():
        moved = node
        if None not in indices and len(indices) != _length(node):
            moved = _piece(graph, node, [index for index in indices if index is not None])
            pieces |= {(node, index): (moved, i) for i, index in enumerate(indices)}
            split.append(node)
        elif node.target is operator.getitem and (node.args[0], node.args[1]) in pieces:
            node.args = pieces[node.args[0], node.args[1]]  # type: ignore[index]
        if last is not None:
            last.append(moved)
        last = moved
    for node in dict.fromkeys(split):
        graph.erase_node(node)


def _piece(graph: Graph, node: Node, indices: Sequence[int]) -> Node:
    """Make a node that does what another one does at some indices."""

    def taken(value: Any) -> Any:
        return [value[i] for i in indices] if isinstance(value, list | tuple) and value else value

    with graph.inserting_before(node):
        kwargs = {name: taken(value) for name, value in node.kwargs.items()}
        piece = graph.call_function(node.target, tuple(map(taken, node.args)), kwargs)  # type: ignore[arg-type]
    piece.meta = {**node.meta, "val": taken(node.meta.get("val"))}
    return piece
