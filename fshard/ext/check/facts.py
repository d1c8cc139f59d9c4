"""Facts of a graph: constants that differ between meshes, what depends on the state, and the types of its inputs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

import fshard as fs
from fshard.ext.check.values import Agreement, AxisFacts
from fshard.extend import graph_nodes, is_fake, tensor_of


class Objectives(NamedTuple):
    """The losses that a step differentiates.

    Attributes:
        axes: The names of the axes that they are reduced over.
        reduces: How they are: "mean", "sum" or "weighted".
    """

    axes: set[str]
    reduces: set[str]


class Input(NamedTuple):
    """An argument of a graph.

    Attributes:
        path: The path of its leaf among the arguments of the step.
        leaf: The leaf.
        is_batch: Whether it is none of the state.
    """

    path: str
    leaf: Any
    is_batch: bool


def list_inputs(nodes: Sequence[Node], flat: Any, state_leaves: int) -> dict[Node, Input]:
    """List the inputs of a graph: the arguments that hold a tensor, of which the first are leaves of the state."""
    entries = []
    for number, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        if isinstance(tensor_of(leaf), torch.Tensor):
            entries.append(Input(path, leaf, number >= state_leaves))
    return dict(zip(nodes, entries, strict=False))


def list_neighbours(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """List for each axis of several ranks the number of another rank on it."""
    neighbours = {}
    stride = 1
    for name, size in reversed(list(mesh.items())):
        if size > 1:
            is_last = rank // stride % size == size - 1
            neighbours[name] = rank - stride if is_last else rank + stride
        stride *= size
    return neighbours


def list_constants(module: Any) -> list[tuple[Any, Any]]:
    """List the operators of a graph, each with its arguments that are no nodes."""
    constants: list[tuple[Any, Any]] = []
    for node in module.graph.nodes:
        value: Any = map_arg((node.args, node.kwargs), lambda source: None)
        if node.op == "get_attr":
            tensor = getattr(module, node.target)
            value = None if is_fake(tensor) or tensor.numel() > 1 else tensor.tolist()
            constants.append((node.op, value))
            continue
        sends = node.op == "call_function" and graph_nodes.find_collective(node) is not None
        constants.append((node.target, None if sends else value))
    return constants


def find_changes(
    nodes: Sequence[Node], constants: Sequence[Any], others: Sequence[Any] | None
) -> dict[Node, tuple[Any, Any]] | None:
    """Find the nodes whose constants are others in a graph of another rank or mesh.

    Args:
        nodes: The nodes.
        constants: What `list_constants` says of them.
        others: What it says of the other graph; None if there is none.

    Returns:
        The constants here and there, by node; None where the other graph has other operators, so that nothing is known.
    """
    if others is None or [operator for operator, _ in constants] != [operator for operator, _ in others]:
        return None
    changes = {}
    for node, (_, here), (_, there) in zip(nodes, constants, others, strict=True):
        if repr(here) != repr(there):
            changes[node] = here, there
    return changes


def make_facts(
    nodes: Sequence[Node],
    inputs: Mapping[Node, Input],
    changes: Collection[Node],
    axis: fs.Axis,
    objectives: Objectives,
) -> AxisFacts:
    """Type the inputs of a graph over an axis.

    Args:
        nodes: The nodes.
        inputs: The inputs.
        changes: Nodes whose constants differ between ranks of the axis.
        axis: The axis.
        objectives: The losses.
    """
    leaves = {node: entry.leaf for node, entry in inputs.items() if isinstance(entry.leaf, fs.Sharded)}
    varies = axis.name in objectives.axes
    if not objectives.axes:
        varies = any(axis in leaf.spec.scattered_axes for leaf in leaves.values())
    types = {node: _type_input(node, entry, axis, varies) for node, entry in inputs.items()}
    of_state = set(leaves)
    for node in nodes:
        if not of_state.isdisjoint(node.all_input_nodes):
            of_state.add(node)
    return AxisFacts(axis.name, axis.size, types, changes, of_state, varies, objectives.reduces == {"mean"})


def _type_input(node: Node, entry: Input, axis: fs.Axis, varies: bool) -> Agreement:
    leaf = entry.leaf
    if isinstance(leaf, fs.Sharded) and leaf.spec.dim_of(axis) is not None:
        return Agreement.OTHER if leaf.spec.roles[axis] == "owned" else Agreement.SHARD
    if isinstance(leaf, fs.Sharded) or not entry.is_batch or not varies:
        return Agreement.INVARIANT
    # A number may count batches, or say how they are mixed.
    return Agreement.VARYING if node.meta["val"].dim() else Agreement.OTHER
