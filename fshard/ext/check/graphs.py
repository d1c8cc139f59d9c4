"""The graph of a step beside those of other ranks and of twice as many, compared operator by operator."""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

import fshard as fs
from fshard.extend import Traced, flatten, is_fake, leaves_of

# Operators that fit tensors to shards of equal length, of which another mesh may need more.
_FITTING = ("slice", "constant_pad_nd", "view")


class Input(NamedTuple):
    """An argument of a graph.

    Attributes:
        path: The path of its leaf among the arguments of the step.
        leaf: The leaf.
        is_batch: Whether it is none of the state, which is the first argument, and those with Sharded leaves.
    """

    path: str
    leaf: Any
    is_batch: bool


@dataclass(eq=False)
class AxisGraph:
    """The graph of a step, and what is known of it over one axis before its values are typed.

    Attributes:
        nodes: The nodes.
        axis: The axis.
        inputs: The arguments of the graph.
        rank_constants: Nodes whose constants are others on a neighbour.
        doubled: The nodes of the graph for twice as many ranks; empty if it has other operators.
        varies: Whether batches differ between the ranks.
        are_means: Whether all losses that the step differentiates are means over ranks.
    """

    nodes: Sequence[Node]
    axis: fs.Axis
    inputs: Mapping[Node, Input]
    rank_constants: Collection[Node]
    doubled: Mapping[Node, Node]
    varies: bool
    are_means: bool

    def is_split(self, node: Node) -> bool:
        """Whether a dim of a value is shorter on twice as many ranks."""
        there = shape_of(self.doubled.get(node, node))
        return any(map(operator.lt, there, shape_of(node)))


def shape_of(node: Node) -> Sequence[int]:
    """Return the shape of a value; of what is no tensor, such as a list, one without elements."""
    return getattr(node.meta.get("val"), "shape", (0,))


def is_number(node: Node) -> bool:
    """Whether a value has one element."""
    return math.prod(shape_of(node)) == 1


def name_of(node: Node) -> str:
    """Return the name of a node's operator without its overload, such as "mul"; that of another node is empty."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def list_inputs(nodes: Sequence[Node], traced: Traced, args: Sequence[Any]) -> dict[Node, Input]:
    """List the inputs of a graph: the leaves of arguments that are tensors."""
    flat = flatten(args)
    are_batch: list[bool] = []
    for place, argument in enumerate(args):
        leaves = leaves_of(argument)
        # An optimizer's state may be an argument of its own, as in Optax. Its counts are no batch.
        is_state = place == 0 or any(isinstance(leaf, fs.Sharded) for leaf in leaves)
        are_batch += [not is_state] * len(leaves)
    inputs = {}
    for node, number in zip(nodes, traced.input_leaves, strict=False):
        inputs[node] = Input(flat.paths[number], flat.leaves[number], are_batch[number])
    return inputs


def find_neighbour(mesh: Mapping[str, int], rank: int, axis: fs.Axis) -> int:
    """Find the number of another rank on an axis."""
    ranks = torch.arange(math.prod(mesh.values())).view(*mesh.values())
    neighbours = ranks.roll(-1, list(mesh).index(axis.name))
    return int(neighbours.flatten()[rank])


def pair_nodes(nodes: Sequence[Node], others: Sequence[Node]) -> dict[Node, Node]:
    """Pair the nodes of two graphs; none if they have other operators, so that nothing is known."""
    for left_out in ((), _FITTING):
        here = [node for node in nodes if name_of(node) not in left_out]
        there = [node for node in others if name_of(node) not in left_out]
        if [node.target for node in here] == [node.target for node in there]:
            return dict(zip(here, there, strict=True))
    return {}


def list_other_constants(pairs: Mapping[Node, Node]) -> set[Node]:
    """List the nodes whose constants are others in the graph that they are paired with."""
    return {node for node, other in pairs.items() if _read_constants(node) != _read_constants(other)}


def _read_constants(node: Node) -> str:
    """Write the arguments of an operator that are no nodes, or the number that a constant is; none of a collective.

    Texts tell 1 from 1.0, and NaN is equal to itself.
    """
    constants: Any = map_arg((node.args, node.kwargs), lambda source: None)
    if node.op == "get_attr":
        tensor = getattr(node.graph.owning_module, str(node.target))
        constants = None if is_fake(tensor) or tensor.numel() > 1 else tensor.tolist()
    if getattr(node.target, "namespace", "") == "fshard":
        constants = None
    return repr(constants)
