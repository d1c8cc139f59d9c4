"""Donation: which result takes the memory of which donated argument, and where in the graph it is written there."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fshard.jit.nodes import COPIES, find_inputs, find_last_uses, find_results, find_storages, find_write_targets
from fshard.jit.passes import replace_nodes
from fshard.jit.trace import Traced
from fshard.tree import Flat, Treedef, tensor_of

aten = torch.ops.aten


class DonatedInputs(NamedTuple):
    """What becomes of the inputs that hold donated tensors.

    Attributes:
        result_number_of_input: For each input whose memory a result takes, the number of that result.
        unchanged_leaves: The indices of the arguments' leaves that the function returns as they are, so that nothing is
            written to them.
    """

    result_number_of_input: dict[Node, int]
    unchanged_leaves: set[int]


def match_donated_outputs(flat: Flat, result: Treedef, argnums: Collection[int]) -> dict[int, int]:
    """Find for each donated argument the part of the result that takes its place.

    It is the first part with the argument's structure that no other donated argument has taken: the result itself, or
    one of its children.

    Args:
        flat: The arguments.
        result: The structure of the result.
        argnums: The numbers of the arguments that are donated.

    Returns:
        For the index of each leaf of the donated arguments the index of the result's leaf that takes its place.

    Raises:
        ValueError: if the result has no such part.
    """
    arguments = list(_number_leaves(flat.treedef.children()[0]).children)
    whole_result = _number_leaves(result)
    candidates = [whole_result, *whole_result.children]
    result_of_donated_leaf: dict[int, int] = {}
    # Large arguments first, so that a state is matched before a part of it: gradients look like its parameters.
    for number in sorted(argnums, key=lambda number: -len(arguments[number].leaves)):
        argument = arguments[number]
        taken = set(result_of_donated_leaf.values())
        alike = [part for part in candidates if part.treedef == argument.treedef]
        free = [part for part in alike if taken.isdisjoint(part.leaves)]
        if not free:
            raise ValueError(
                f"jit: argument {number} is donated, but no part of the result has its structure (or another donated "
                "argument took that part). Return the new value of the argument, or do not donate it."
            )
        result_of_donated_leaf |= zip(argument.leaves, free[0].leaves, strict=True)
    return result_of_donated_leaf


def _number_leaves(treedef: Treedef) -> Flat:
    """Make a tree of a structure whose leaves are their own numbers."""
    return Flat(list(range(treedef.num_leaves)), treedef)


def pair_inputs_with_results(traced: Traced, flat: Flat, result_of_donated_leaf: Mapping[int, int]) -> DonatedInputs:
    """Decide for each donated leaf whether its result can be written to its memory.

    Args:
        traced: The graph.
        flat: The arguments.
        result_of_donated_leaf: For the index of each leaf of the donated arguments the index of the result's leaf that
            takes its place.

    Returns:
        The inputs that are written to, with their results, and the leaves that stay as they are. A leaf whose result
        differs in shape, dtype, device or spec is in neither: its result gets memory of its own.
    """
    results = find_results(traced.module.graph)
    node_of_leaf = dict(zip(traced.input_leaves, find_inputs(traced.module.graph), strict=True))
    # A tensor that is given twice is two inputs.
    tensors = {node: tensor_of(flat.leaves[leaf_index]) for leaf_index, node in node_of_leaf.items()}
    donated = DonatedInputs({}, set())
    for leaf_index, node in node_of_leaf.items():
        if leaf_index not in result_of_donated_leaf:
            continue
        number = result_of_donated_leaf[leaf_index]
        result = results[number]
        if not _can_take_memory(result, traced.specs[number], flat.leaves[leaf_index]):
            continue
        if tensors.get(result) is tensors[node]:
            donated.unchanged_leaves.add(leaf_index)
        else:
            donated.result_number_of_input[node] = number
    return donated


def _can_take_memory(result: Node | None, spec: Any, leaf: Any) -> bool:
    """Whether a result looks like a leaf, and no two elements of the leaf share memory, as those of expand do."""
    if result is None or spec != getattr(leaf, "spec", None):
        return False
    value = result.meta["val"]
    tensor = tensor_of(leaf)
    if (value.shape, value.dtype, value.device) != (tensor.shape, tensor.dtype, tensor.device):
        return False
    return all(step or size == 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def assign_donated_outputs(graph: Graph, pairs: Mapping[Node, int]) -> None:
    """Write results to donated inputs, each as soon as it is there and nothing reads what the input held.

    Args:
        graph: The graph, which is changed: its results become the inputs that they are written to.
        pairs: For each donated input the number of the result that takes its memory.
    """
    _drop_copies(graph, pairs)
    results = find_results(graph)
    to_write = {}
    for source, number in pairs.items():
        if _find_written_root(results[number]) is source:
            # In-place operators have written there already.
            results[number] = source
        else:
            to_write[source] = number
    storages = find_storages(graph.nodes)
    last_uses = find_last_uses(storages)
    last_writes = find_last_uses(storages, find_sources=find_write_targets)
    memory = {source: next(iter(storages[source])) for source in to_write}
    overwritten = set(memory.values())
    output = graph.output_node()
    for number, result in enumerate(results):
        if result is not None and not overwritten.isdisjoint(storages[result]):
            # It lies in memory which another result is about to take.
            with graph.inserting_before(output):
                results[number] = graph.call_function(aten.clone.default, (result,))
            results[number].meta["val"] = result.meta["val"].clone()
    for source, number in to_write.items():
        # Views may write to a result behind its node. Nodes compare by their positions in the graph.
        writes = map(last_writes.__getitem__, storages.get(results[number], ()))
        last = max(results[number], last_uses[memory[source]], *writes)
        with graph.inserting_after(output.prev if last is output else last):
            write = graph.call_function(aten.copy_.default, (source, results[number]))
        write.meta["val"] = source.meta["val"]
        results[number] = source
    output.args = (results,)


def _drop_copies(graph: Graph, inputs: Collection[Node]) -> None:
    """Use an input itself in the place of its copy, if nothing reads the input afterwards.

    An optimizer copies its state and then updates the copy in place. With a donated state the copy is not needed.
    """
    storages = find_storages(graph.nodes)
    last_uses = find_last_uses(storages)
    stands_for = {}
    for source in inputs:
        last = last_uses[next(iter(storages[source]))]
        is_copy = last.target in COPIES and last.args[0] is source
        if is_copy and last.meta["val"].stride() == source.meta["val"].stride():
            stands_for[last] = source
    replace_nodes(graph, stands_for)


def _find_written_root(result: Node) -> Node:
    """Follow in-place operators from a result back to the tensor that the first of them writes to."""
    root = result
    while targets := find_write_targets(root):
        root = targets[0]
    return root
