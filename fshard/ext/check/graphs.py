"""The graph of a step beside those of other ranks and of twice as many, compared operator by operator."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

import fshard as fs
from fshard.extend import is_fake, tensor_of

Pairs = Mapping[Node, Node]
# Operators that fit tensors to shards of equal length, of which another mesh may need more.
_FITTING = (torch.ops.aten.slice, torch.ops.aten.constant_pad_nd, torch.ops.aten.view)


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


class AxisFacts(NamedTuple):
    """What is known of a graph over one axis before its values are typed.

    Attributes:
        axis: The axis.
        inputs: The arguments of the graph.
        rank_constants: Nodes whose constants are others on a neighbour.
        doubled: The nodes of the graph for twice as many ranks; empty if it has other operators.
        varies: Whether batches differ between the ranks.
        are_means: Whether all losses that the step differentiates are means over ranks.
    """

    axis: fs.Axis
    inputs: Mapping[Node, Input]
    rank_constants: Collection[Node]
    doubled: Pairs
    varies: bool
    are_means: bool

    def is_split(self, node: Node) -> bool:
        """Whether a dim of a value is shorter on twice as many ranks."""
        here, there = shape_of(node), shape_of(self.doubled.get(node))
        return any(other < size for size, other in zip(here, there, strict=False))


def shape_of(node: Node | None) -> Sequence[int]:
    """Return the shape of a value; that of a number if it is no tensor."""
    value = None if node is None else node.meta.get("val")
    return value.shape if isinstance(value, torch.Tensor) else ()


def list_inputs(nodes: Sequence[Node], flat: Any, state_leaves: int) -> dict[Node, Input]:
    """List the inputs of a graph: the arguments that hold a tensor, of which the first are leaves of the state."""
    entries = []
    for number, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        if isinstance(tensor_of(leaf), torch.Tensor):
            entries.append(Input(path, leaf, number >= state_leaves))
    return dict(zip(nodes, entries, strict=False))


def find_neighbour(mesh: Mapping[str, int], rank: int, axis: fs.Axis) -> int:
    """Find the number of another rank on an axis."""
    position = list(mesh).index(axis.name)
    stride = math.prod(list(mesh.values())[position + 1 :])
    return rank - stride if rank // stride % axis.size else rank + stride


def pair_nodes(nodes: Sequence[Node], others: Sequence[Node]) -> Pairs | None:
    """Pair the nodes of two graphs; None if they have other operators, so that nothing is known."""
    for left_out in ((), _FITTING[:2], _FITTING):
        pairs = []
        for sequence in (nodes, others):
            pairs.append([node for node in sequence if find_packet(node) not in left_out])
        here, there = pairs
        if list(map(_name_operator, here)) == list(map(_name_operator, there)):
            return dict(zip(here, there, strict=True))
    return None


def find_packet(node: Node) -> Any:
    """Find the operator of a node, without its overload."""
    return getattr(node.target, "overloadpacket", None)


def _name_operator(node: Node) -> Any:
    return node.op if node.op == "get_attr" else node.target


def read_constants(node: Node) -> Any:
    """Read the arguments of an operator that are no nodes, or the number that a constant is; none of a collective."""
    if node.op == "get_attr":
        tensor = getattr(node.graph.owning_module, str(node.target))
        if is_fake(tensor) or tensor.numel() > 1:
            return None
        return tensor.tolist()
    if getattr(node.target, "namespace", "") == "fshard":
        return None
    return map_arg((node.args, node.kwargs), lambda source: None)
