"""Writes: whose memory a result takes, and when leaves are updated."""

import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from fshard import _compat, comm
from fshard.errors import expect
from fshard.jit.passes import (
    COPIES,
    is_impure,
    is_random,
    last_uses,
    placeholders,
    replace,
    results,
    sent_by,
    storages_of,
    written,
)
from fshard.jit.trace import Traced
from fshard.tree import Flat, Treedef, tensor_of

aten = torch.ops.aten


def _parts(treedef: Treedef) -> list[tuple[range, Treedef]]:
    """The children of a structure, each with the numbers of its leaves."""
    children = treedef.children()
    ends = accumulate(child.num_leaves for child in children)
    return [(range(end - child.num_leaves, end), child) for end, child in zip(ends, children, strict=True)]


def twins_of(flat: Flat, result: Treedef, argnums: Collection[int]) -> dict[int, int]:
    """Find for each donated argument a part of the result of its own that has its structure.

    Args:
        flat: The arguments.
        result: The structure of the result.
        argnums: The numbers of the arguments that are donated.

    Returns:
        For each leaf of them the leaf of the result that takes its place.

    Raises:
        ValueError: if the result has no such part.
    """
    given = _parts(flat.treedef.children()[0])
    candidates = [(range(result.num_leaves), result), *_parts(result)]
    twins: dict[int, int] = {}
    # A state before a part of it: the gradients look like the state's parameters.
    for n in sorted(argnums, key=lambda n: -len(given[n][0])):
        leaves, structure = given[n]
        free = [span for span, part in candidates if part == structure and set(span).isdisjoint(twins.values())]
        needed = f"the result to have a part of its own with the structure of donated argument {n}"
        expect(free, "jit", needed, "none", "return its successor, such as the new state, or do not donate it")
        twins |= zip(leaves, free[0], strict=True)
    return twins


def pairs_of(traced: Traced, flat: Flat, twins: Mapping[int, int]) -> tuple[dict[Node, int], set[int]]:
    """Find the results that are to be written in the place of inputs, and the leaves that are results themselves."""
    outs, pairs, passed = results(traced.graph.graph), dict[Node, int](), set[int]()
    nodes = dict(zip(traced.inputs, placeholders(traced.graph.graph), strict=True))
    ids = {node: id(tensor_of(flat.leaves[i])) for i, node in nodes.items()}
    for i, node in nodes.items():
        k = twins.get(i)
        if k is not None and _fits(outs[k], traced.specs[k], flat.leaves[i]):
            if ids.get(outs[k]) == ids[node]:
                passed.add(i)
            else:
                pairs[node] = k
    return pairs, passed


def _fits(out: Any, spec: Any, leaf: Any) -> bool:
    """Whether a result may be written in the place of a leaf, none of whose elements share their memory."""
    if out is None or spec != getattr(leaf, "spec", None):
        return False
    value, given = out.meta["val"], tensor_of(leaf)
    alone = not given.numel() or all(step or n == 1 for n, step in zip(given.shape, given.stride(), strict=True))
    return alone and (value.shape, value.dtype, value.device) == (given.shape, given.dtype, given.device)


def donate(graph: Graph, pairs: Mapping[Node, int]) -> None:
    """Let results be written to inputs, each as soon as nothing needs what was there.

    Args:
        graph: The graph.
        pairs: For donated inputs the numbers of the results that take their place.
    """
    storages = storages_of(graph.nodes)
    last = last_uses(storages, {})
    names = {given: next(iter(storages[given])) for given in pairs}
    stands_for: dict[Node, Node] = {}
    for given, name in names.items():
        copy = last[name]
        is_copy = copy.target in COPIES and copy.args[0] is given
        # A copy of an input that nothing reads afterwards may be the input itself.
        if is_copy and copy.meta["val"].stride() == given.meta["val"].stride():
            stands_for[copy] = given
    replace(graph, stands_for)
    storages = storages_of(graph.nodes)
    last = last_uses(storages, {})
    outs, output = results(graph), graph.output_node()
    late: dict[Node, int] = {}
    for given, k in pairs.items():
        root = outs[k]
        while into := written(root):
            root = into[0]
        if root is given:
            outs[k] = given
        else:
            late[given] = k
    overwritten = {names[given] for given in late}
    for k, out in enumerate(outs):
        if out is not None and not overwritten.isdisjoint(storages[out]):
            with graph.inserting_before(output):
                outs[k] = graph.call_function(aten.clone.default, (out,))
            outs[k].meta["val"] = out.meta["val"].clone()
    for given, k in late.items():
        place = max(outs[k], last[names[given]])
        with graph.inserting_after(output.prev if place is output else place):
            graph.call_function(aten.copy_.default, (given, outs[k])).meta["val"] = given.meta["val"]
        outs[k] = given
    output.args = (outs,)


def schedule(graph: Graph) -> None:
    """Move what follows the objective up to where all that it needs is there, before the last reduction starts.

    An operator that updates all leaves is split by when their gradients come. Gradients are freed as their leaves are
    done, so that few are held at a time, and reductions go on meanwhile. Kernels, bits and the order of collectives
    stay.

    Args:
        graph: The graph, with its writes to donated inputs.
    """
    whole: dict[Node, Node] = {}
    for node in _limits(list(graph.nodes)):
        whole |= dict.fromkeys(_split(graph, node), node)
    nodes = list(graph.nodes)
    limits = _limits(nodes)
    if not limits:
        return
    firsts: dict[Node, int] = {}
    numbers = [firsts.setdefault(whole.get(node, node), n) for n, node in enumerate(nodes)]
    times = _times(nodes, numbers, limits)
    order = sorted(range(len(nodes)), key=lambda n: (times[n], n))
    for a, b in pairwise(order):
        nodes[a].append(nodes[b])
    runs = defaultdict[Any, list[Node]](list)
    for n in order:
        if nodes[n] in whole:
            runs[whole[nodes[n]], times[n]].append(nodes[n])
    for parts in runs.values():
        _join(graph, parts)


def _limits(nodes: Sequence[Node]) -> dict[Node, int]:
    """For the nodes between an objective and the next collective where the last one before the objective starts."""
    limits: dict[Node, int] = {}
    last, limit = -1, -1
    for n, node in enumerate(nodes):
        stays = node.op != "call_function" or is_random(node) or (is_impure(node) and not written(node))
        if (sent := sent_by(node)) is not None:
            limit, last = (last, last) if sent.about.verb == comm.Verb.OBJECTIVE else (-1, n)
        elif limit >= 0 and not stays:
            limits[node] = limit
    return limits


def _split(graph: Graph, node: Node) -> list[Node]:
    """Put in the place of an operator on lists one for each entry, where it does with each the same."""
    lists = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, list | tuple) and value]
    apart = all(user.target is operator.getitem for user in node.users)
    if not (_compat.is_entrywise(node.target) and apart and len(set(map(len, lists))) == 1):
        return []

    def at(i: int, value: Any) -> Any:
        return [value[i]] if isinstance(value, list | tuple) and value else value

    target: Any = node.target
    parts: list[Node] = []
    for i in range(len(lists[0])):
        kwargs = {name: at(i, value) for name, value in node.kwargs.items()}
        with graph.inserting_before(node):
            parts.append(graph.call_function(target, tuple(at(i, value) for value in node.args), kwargs))
        parts[-1].meta = {**node.meta, "val": at(i, node.meta.get("val"))}
    for user in list(node.users):
        user.args = (parts[user.args[1]], 0)  # type: ignore[index]
    graph.erase_node(node)
    return parts


def _join(graph: Graph, parts: Sequence[Node]) -> None:
    """Make one operator of some that do the same, each with other entries."""

    def joined(*values: Any) -> Any:
        several = isinstance(values[0], list | tuple) and values[0]
        return [entry for value in values for entry in value] if several else values[0]

    first, target = parts[0], parts[0].target
    kwargs = {name: joined(*(part.kwargs[name] for part in parts)) for name in first.kwargs}
    with graph.inserting_before(first):
        whole = graph.call_function(target, tuple(map(joined, *(part.args for part in parts))), kwargs)  # type: ignore[arg-type]
    whole.meta = {**first.meta, "val": joined(*(part.meta["val"] for part in parts))}
    for i, part in enumerate(parts):
        for user in list(part.users):
            user.args = (whole, i)
        graph.erase_node(part)


def _before(nodes: Sequence[Node]) -> list[set[int]]:
    """For each node the numbers of those that must come before it."""
    storages = storages_of(nodes)
    numbers = {node: n for n, node in enumerate(nodes)}
    # For each storage what wrote to it last, and what has used it since.
    changed: dict[Hashable, int] = {}
    used = defaultdict[Hashable, list[int]](list)
    found: list[set[int]] = []
    for n, node in enumerate(nodes):
        given = node.all_input_nodes
        before = {numbers[source] for source in given}
        writes = {name for target in written(node) for name in storages[target]}
        looked = [node] if node.target is operator.getitem else given
        for name in {name for source in looked for name in storages[source]}:
            if name in writes:
                before.update(used.pop(name, ()))
                changed[name] = n
            elif name in changed:
                before.add(changed[name])
            used[name].append(n)
        found.append(before)
    return found


def _times(nodes: Sequence[Node], numbers: Sequence[int], limits: Mapping[Node, int]) -> list[int]:
    """For each node the number of the one with which it runs: its own where it stays."""
    first = next(n for n, node in enumerate(nodes) if node.op == "call_function") - 1
    before, results = _before(nodes), set(nodes[-1].all_input_nodes)
    earliest: list[int] = []
    times: list[int] = []
    for n, (node, number) in enumerate(zip(nodes, numbers, strict=True)):
        ready = max([first, *(earliest[m] for m in before[n])])
        earliest.append(ready if ready < limits.get(node, first) else number)
        # What needs inputs alone waits until it is needed, and so does what no early write or result needs.
        ends = earliest[n] > first and (node in results or written(node))
        times.append(earliest[n] if ends else number)
    for n in reversed(range(len(nodes))):
        for m in before[n]:
            times[m] = min(times[m], times[n])
    return times
