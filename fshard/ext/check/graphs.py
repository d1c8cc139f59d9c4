"""The graph of a step beside those of other ranks and of twice as many, compared operator by operator."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

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


def shape_of(node: Node) -> Sequence[int]:
    """Return the shape of a value; of what is no tensor, such as a list, one without elements."""
    value = node.meta.get("val")
    return getattr(value, "shape", (0,))


def is_number(node: Node) -> bool:
    """Whether a value has one element."""
    return math.prod(shape_of(node)) == 1


def name_of(node: Node) -> str:
    """Return the name of a node's operator without its overload, such as "mul"; that of another node is empty."""
    operator = getattr(node.target, "overloadpacket", None)
    return getattr(operator, "__name__", "")


def list_inputs(nodes: Sequence[Node], traced: Traced, args: Sequence[Any]) -> dict[Node, Input]:
    """List the inputs of a graph: the leaves of arguments that are tensors."""
    flat = flatten(args)
    are_batch: list[bool] = []
    for place, argument in enumerate(args):
        leaves = leaves_of(argument)
        # An optimizer's state may be an argument of its own, as in Optax. Its counts are no batch.
        has_shards = any(isinstance(leaf, fs.Sharded) for leaf in leaves)
        is_state = place == 0 or has_shards
        are_batch += [not is_state] * len(leaves)
    inputs = {}
    for node, number in zip(nodes, traced.input_leaves, strict=False):
        leaf = flat.leaves[number]
        inputs[node] = Input(flat.paths[number], leaf, are_batch[number])
    return inputs


def find_neighbour(mesh: Mapping[str, int], rank: int, axis: fs.Axis) -> int:
    """Find the number of another rank on an axis."""
    names = list(mesh)
    inner = names[names.index(axis.name) + 1 :]
    stride = math.prod(mesh[name] for name in inner)
    is_first = rank // stride % axis.size == 0
    return rank + stride if is_first else rank - stride


def pair_nodes(nodes: Sequence[Node], others: Sequence[Node]) -> dict[Node, Node]:
    """Pair the nodes of two graphs; none if they have other operators, so that nothing is known."""
    for left_out in ((), _FITTING):
        here = _leave_out(nodes, left_out)
        there = _leave_out(others, left_out)
        if list(here.values()) == list(there.values()):
            return dict(zip(here, there, strict=True))
    return {}


def _leave_out(nodes: Sequence[Node], names: Collection[str]) -> dict[Node, Any]:
    """Find the targets of nodes but those of some operators."""
    return {node: node.target for node in nodes if name_of(node) not in names}


def list_other_constants(pairs: Mapping[Node, Node]) -> set[Node]:
    """List the nodes whose constants are others in the graph that they are paired with."""
    differing = set()
    for node, other in pairs.items():
        if _read_constants(node) != _read_constants(other):
            differing.add(node)
    return differing


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
