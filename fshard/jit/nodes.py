"""Nodes of a traced graph: what an operator reads, writes, sends and draws, and in which memory its results lie."""

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fshard import _compat, comm, random
from fshard.comm import ops

__all__ = [
    "find_collective",
    "find_inputs",
    "find_last_uses",
    "find_results",
    "find_storages",
    "find_values",
    "find_write_targets",
    "is_impure",
    "is_random",
    "is_view",
    "is_wait",
]

# Bytes of storages by their names.
Storages = dict[Hashable, int]

aten = torch.ops.aten
COPIES = (aten.clone.default, aten.lift_fresh_copy.default)


def find_inputs(graph: Graph) -> list[Node]:
    """List the inputs in their order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def find_results(graph: Graph) -> list[Any]:
    """List the results in their order; a leaf that is None has None."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def pair_arguments(node: Node) -> list[tuple[_compat.Argument, Any]]:
    """Pair the arguments that an operator declares with their values; an empty list if it is not torch's."""
    arguments = _compat.arguments_of(node.target) or []
    by_name = [node.kwargs.get(argument.name) for argument in arguments[len(node.args) :]]
    return list(zip(arguments, (*node.args, *by_name), strict=False))


def find_values(node: Node) -> tuple[Any, Any]:
    """Return the arguments and the keywords of a node, with the values of other nodes in the place of these."""
    return map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))


def find_write_targets(node: Node) -> list[Node]:
    """List the nodes whose memory a node writes to."""
    targets = []
    arguments = pair_arguments(node)
    # Kernels of batch norm write to running statistics in training, and some of their schemas do not say so.
    is_training = any(argument.name == "training" and value is True for argument, value in arguments)
    for argument, value in arguments:
        if not argument.written and not (is_training and argument.name.startswith("running_")):
            continue
        # Fused optimizers declare that they write to gradients, but they do so only to divide them by a scale.
        if argument.name == "grads" and node.kwargs.get("grad_scale") is None:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        targets += [target for target in values if isinstance(target, Node)]
    return targets


def find_collective(node: Node) -> comm.Collective | None:
    """Return the collective that a node starts, if any."""
    args, _ = find_values(node)
    return ops.collective_of(node.target, args)


def is_view(node: Node) -> bool:
    """Whether a node only looks at memory in another way, or takes one of several results."""
    if node.target is operator.getitem:
        return True
    shares_memory = any(argument.aliased for argument, _ in pair_arguments(node))
    return shares_memory and not find_write_targets(node)


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers. Kernels of layers draw only if they drop something, and in training."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not may_draw or getattr(node.target, "namespace", "") == ops.NAMESPACE:
        return False
    switches = ("dropout_p", "dropout", "training", "train")
    for argument, value in pair_arguments(node):
        # None stands for a default, which is off. Only train has none: native_dropout takes None for True.
        if argument.name in switches and (value == 0.0 or (value is None and argument.name != "train")):
            return False
    return True


def is_impure(node: Node) -> bool:
    """Whether a node must stay even if nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    # Other ranks take part in a collective, and its buffers must not be freed before it has ended. The wait keeps the
    # start alive, because it uses the start's result.
    if is_wait(node) or node.target in random.EFFECTS:
        return True
    if find_write_targets(node):
        return True
    return node.target is not ops.record_facts and _compat.is_effect(node.target)


def is_wait(node: Node) -> bool:
    """Whether a node waits for a buffer of a collective."""
    return node.target in (_compat.WAIT_TENSOR, ops.wait)


def find_storages(nodes: Iterable[Node]) -> dict[Node, Storages]:
    """Find for each node the storages that its results lie in."""
    storages: dict[Node, Storages] = {}
    # Names of storages by their keys: a key of its own, or the name of the storage that it stands for.
    name_of_storage: dict[Hashable, Hashable] = {}
    for node in nodes:
        value = node.meta.get("val")
        source = _find_aliased_source(node)
        storages[node] = {}
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(tensor, torch.Tensor):
                continue
            # Sparse tensors have no storage to ask for, and count as one.
            is_dense = tensor.layout is torch.strided
            key: Hashable = _compat.storage_key(tensor) if is_dense else tensor.layout
            if key not in name_of_storage:
                # The node creates the storage, or it is a wait or a write in the place of a copy. A trace gives the
                # results of these a storage of their own. When it runs, they lie in the memory of the argument.
                name_of_storage[key] = key if source is None else next(iter(storages[source]))
            nbytes = tensor.untyped_storage().nbytes() if is_dense else 0
            storages[node][name_of_storage[key]] = nbytes
    return storages


def _find_aliased_source(node: Node) -> Node | None:
    """Return the argument in whose memory the result lies, if the operator says so."""
    if is_wait(node):
        return node.all_input_nodes[0]
    for number, (argument, value) in enumerate(pair_arguments(node)):
        # No others: a batch norm writes to running statistics, and its results lie elsewhere.
        may_hold_result = number == 0 or argument.name == "out"
        if argument.aliased and may_hold_result and isinstance(value, Node):
            return value
    return None


def find_written_reshapes(graph: Graph) -> set[Node]:
    """Find the reshapes of memory that a later node writes to: they have to be views when the graph runs too.

    The operators alone tell, because a graph that was read from a file has no metadata.
    """
    # For each node the one whose memory it views, or itself.
    roots: dict[Node, Node] = {}
    for node in graph.nodes:
        source = node.args[0] if node.target is operator.getitem else _find_aliased_source(node)
        roots[node] = node if source is None else roots[source]
    written: set[Node] = set()
    reshapes = set()
    for node in reversed(graph.nodes):
        if node.target in _compat.RESHAPES and roots[node] in written:
            reshapes.add(node)
        written.update(roots[target] for target in find_write_targets(node))
    return reshapes


def find_last_uses(
    storages: Mapping[Node, Storages],
    find_sources: Callable[[Node], list[Node]] = attrgetter("all_input_nodes"),
) -> dict[Hashable, Node]:
    """Find for each storage the last node that creates or views it, or that reads or writes something in it.

    Args:
        storages: The storages of each node.
        find_sources: Lists what a node reads and writes.

    Returns:
        The last node by the name of the storage.
    """
    last: dict[Hashable, Node] = {}
    for node, created in storages.items():
        last |= dict.fromkeys(created, node)
        for source in find_sources(node):
            last |= dict.fromkeys(storages[source], node)
    return last
