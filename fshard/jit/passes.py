"""Passes over a traced graph: what its operators do, what it may not do, and what it need not do."""

import json
import operator
from collections.abc import Hashable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fshard import _compat, comm, random
from fshard.comm import ops
from fshard.errors import expect
from fshard.tree import Axis

# Bytes of storages by their names.
Storages = dict[Hashable, int]

aten = torch.ops.aten
COPIES = (aten.clone.default, aten.lift_fresh_copy.default)


def placeholders(graph: Graph) -> list[Node]:
    """The inputs, in their order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(graph: Graph) -> list[Any]:
    """The results, in their order; None for leaves that are None."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def arguments(node: Node) -> list[tuple[_compat.Argument, Any]]:
    """The arguments of an operator with what is given for them; none of what is no operator of torch's."""
    found = _compat.arguments_of(node.target) or []
    given = (node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(found))
    return list(zip(found, given, strict=True))


def written(node: Node) -> list[Node]:
    """The nodes that a node writes to."""
    found: list[Node] = []
    for argument, value in arguments(node):
        # Fused optimizers declare that they write to gradients, and do where there is a scale for them.
        if argument.written and not (argument.name == "grads" and node.kwargs.get("grad_scale") is None):
            several = value if isinstance(value, list | tuple) else [value]
            found += [given for given in several if isinstance(given, Node)]
    return found


def sent_by(node: Node) -> comm.Collective | None:
    """Return the collective that an operator of a graph starts, if any."""
    return ops.collective_of(node.target, map_arg(node.args, lambda given: given.meta.get("val")))


def is_view(node: Node) -> bool:
    """Whether a node does no more than look at memory in another way, or take one of several results."""
    aliased = any(argument.aliased for argument, _ in arguments(node))
    return node.target is operator.getitem or (aliased and not written(node))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers; kernels of attention may, and do not where they drop nothing."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not tagged or getattr(node.target, "namespace", "") == ops.NAMESPACE:
        return False
    return not any(argument.name == "dropout_p" and value in (None, 0.0) for argument, value in arguments(node))


def is_impure(node: Node) -> bool:
    """Whether a node must stay though nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    # A collective is there for the other ranks too, and must have ended before its buffers go.
    if is_wait(node) or node.target in random.EFFECTS:
        return True
    return bool(written(node)) or (node.target is not ops.told and _compat.is_effect(node.target))


def is_wait(node: Node) -> bool:
    """Whether a node waits for a buffer of a collective."""
    return node.target in (_compat.WAIT_TENSOR, ops.wait)


def storages_of(nodes: Iterable[Node]) -> dict[Node, Storages]:
    """For each node the storages that its results lie in."""
    found: dict[Node, Storages] = {}
    names: dict[int, Hashable] = {}
    for node in nodes:
        value = node.meta.get("val")
        # The argument in whose memory the result lies, where the operator says so.
        arguments = _compat.arguments_of(node.target)
        aliases = is_wait(node) or (arguments and arguments[0].aliased)
        source = node.args[0] if aliases and isinstance(node.args[0], Node) else None
        found[node] = {}
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                # Traces give what a wait returns, and what is written in the place of a copy, other storages.
                key = _compat.storage_key(tensor)
                name = names.setdefault(key, key if source is None else next(iter(found[source])))
                found[node][name] = tensor.untyped_storage().nbytes()
    return found


def last_uses(storages: Mapping[Node, Storages], besides: Mapping[Node, Storages]) -> dict[Hashable, Node]:
    """Find for each storage the last node that makes it, or is given something that lies in it.

    Args:
        storages: Those of each node.
        besides: What nodes use besides.
    """
    last: dict[Hashable, Node] = {}
    for node, made in storages.items():
        used = [storages[given] for given in node.all_input_nodes]
        last |= dict.fromkeys(chain(made, *used, besides.get(node, ())), node)
    return last


def clean(graph: Graph) -> None:
    """Take out views that look at memory as something before them does, views of views, and what nobody uses."""
    stands_for: dict[Node, Node] = {}
    # For each tensor what looks at its memory on the way to it, by how it does.
    known: dict[Node, dict[Any, Node]] = {}
    for node in () if any(_compat.changes_geometry(node.target) for node in graph.nodes) else graph.nodes:
        how = _looks(node)
        if how is None:
            continue
        given = node.all_input_nodes
        before = known.get(given[0], {}) if is_view(node) and len(given) == 1 else {}
        if how in before:
            stands_for[node] = before[how]
        elif node.target in _compat.RESHAPES and given[0].target in _compat.RESHAPES:
            source = given[0].all_input_nodes[0]
            if source.meta["val"].is_contiguous():
                node.args = (source, *node.args[1:])
        known[node] = {how: node} | before
    replace(graph, stands_for)
    graph.eliminate_dead_code(is_impure)


def _looks(node: Node) -> Any:
    """How a tensor looks at its memory; None of others, and of sizes that are known when it runs."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    known = all(isinstance(number, int) for number in numbers)
    return (numbers, value.dtype, value.is_conj(), value.is_neg()) if known else None


def replace(graph: Graph, stands_for: Mapping[Node, Node]) -> None:
    """Let nodes take the place of others, all at once: a fused optimizer takes every leaf, and is written once."""
    for user in dict.fromkeys(user for node in stands_for for user in node.users):
        user.args = map_arg(user.args, lambda node: stands_for.get(node, node))
        user.kwargs = map_arg(user.kwargs, lambda node: stands_for.get(node, node))
    for node in stands_for:
        graph.erase_node(node)


def told_in(graph: Graph) -> tuple[dict[str, str], dict[Axis, list[str]]]:
    """Find the facts that decide the collectives of a graph, before it is cleaned.

    Args:
        graph: As it was traced.

    Returns:
        What its verbs were told, by name, and which leaves they used; and for each axis the texts of its collectives.

    Raises:
        ValueError: if there are collectives of torch's own, which have no transpose, and whose group a graph cannot
            hold.
    """
    told: dict[str, dict[str, None]] = {comm.VERB: {"jit": None}}
    sent: dict[Axis, list[str]] = {}
    for node in graph.nodes:
        if node.target is ops.told:
            for name, value in json.loads(node.args[0]).items():
                told.setdefault(name, {})[value] = None
        elif (collective := sent_by(node)) is not None:
            name, size, group = node.args[-4:-1]
            # Each rank has its own part of an exchange.
            is_exchange = collective.op == "all_to_all"
            what = "" if is_exchange else f" of {collective.tensors} tensors, {collective.bytes} bytes"
            text = f"{collective.op} ({collective.label} {collective.unit}) over {name!r}{what}"
            sent.setdefault(Axis(name, size, group), []).append(text)
        elif node.target is not _compat.WAIT_TENSOR:
            own = "fs.psum, fs.pmean, fs.all_gather or fs.reduce_scatter"
            remedy = f"call {own} over an axis of the mesh, or call it outside"
            foreign = getattr(node.target, "namespace", "") in ("c10d", "_c10d_functional")
            expect(not foreign, "jit", "collectives of fshard alone", f"{node.target} of torch.distributed", remedy)
    return {name: "\n".join(values) for name, values in told.items()}, sent


def refuse_writes(graph: Graph, inputs: Mapping[Node, str]) -> None:
    """Refuse a graph that writes to what the function closes over, or to some inputs, whose paths are given."""
    storages = storages_of(graph.nodes)
    kept = [*inputs.items(), *((node, "(closure)") for node in graph.nodes if node.op == "get_attr")]
    owners = {name: path for node, path in kept for name in storages[node]}
    for node in graph.nodes:
        for target in written(node):
            for name in owners.keys() & storages[target]:
                found = f"one to {owners[name]} by {node.target}"
                expect(False, "jit", "no writes but to donated arguments", found, "return what is new")


def refuse_ambient_random(graph: Graph) -> None:
    """Refuse random numbers of no key, which a graph would draw from wherever torch's generator happens to be."""
    keyed, at = False, {}
    # The branches of torch.cond come first, where no key holds.
    branches = [*graph.owning_module.modules()][1:]  # type: ignore[union-attr]
    for node in chain(*(branch.graph.nodes for branch in branches if isinstance(branch, GraphModule)), graph.nodes):
        if node.target is random.random_state:
            at[node] = keyed
        elif node.target is random.seed:
            keyed = True
        elif node.target is random.set_random_state:
            keyed = at.get(node.args[0], False)
        elif is_random(node):
            remedy = "pass model.apply(..., key=...) a key of each step by fs.fold_in(state.key, state.step)"
            expect(keyed, "jit", "random numbers with a key", f"{node.target} without one", remedy)
