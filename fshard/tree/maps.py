"""Maps over trees: over the plain tensors, over leaves with Sharded ones kept whole, over nodes of a class."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import optree
import torch

from fshard.errors import refuse
from fshard.tree.checks import refuse_donated, same_structure
from fshard.tree.flat import Flat, Misfit, Tree, flatten, unflatten
from fshard.tree.nodes import Sharded, is_sharded, tensor_of
from fshard.tree.specs import describe_difference


def tree_leaves(tree: Tree) -> list[Any]:
    """List the plain tensors of a tree, the local tensors of Sharded leaves included.

    Args:
        tree: Any pytree.

    Returns:
        Its leaves, dict entries in the order of their sorted keys.

    >>> tree_leaves({"b": 2, "a": (1, None)})
    [1, 2]
    """
    return optree.tree_leaves(tree)


def map_nodes(f: Callable[[Any], Any], tree: Tree, cls: type) -> Tree:
    """Map `f` over the nodes of a class; other leaves stay as they are, Sharded and None among them."""

    def is_leaf(value: Any) -> bool:
        return isinstance(value, cls | Sharded)

    def map_leaf(leaf: Any) -> Any:
        return f(leaf) if isinstance(leaf, cls) else leaf

    return optree.tree_map(map_leaf, tree, is_leaf=is_leaf, none_is_leaf=True)


def leaves_like(flat: Flat, tree: Tree) -> list[Any]:
    """List the leaves of a tree of an update by the keys of another one. Refuse a tree of another structure."""
    # This takes a quarter of the time.
    with suppress(ValueError):
        leaves = flat.treedef.flatten_up_to(tree)
        # Others may be trees that the structure does not look into.
        if all(issubclass(kind, Sharded | torch.Tensor | None) for kind in {*map(type, leaves)}):
            return leaves
    other = flatten(tree)
    same_structure("update", other, flat)
    return other.leaves


def map_leaves(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `f` over the leaves that `flatten` finds, Sharded and None kept whole, where `tree_map` sees tensors.

    Args:
        f: Called with one leaf of each tree.
        tree: The tree whose structure the result has.
        *rest: Trees of the same structure.

    Returns:
        A tree of f's results.
    """
    flat = flatten(tree)
    return flat.unflatten(map(f, flat.leaves, *[leaves_like(flat, other) for other in rest]))


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `f` over the plain tensors of a tree, those inside Sharded leaves included; specs are kept.

    Args:
        f: Called with one tensor of each tree.
        tree: The tree whose structure and specs the result has. Where it has None, such as gradients of parameters that
            were not used, so has the result.
        *rest: Trees of the same structure. Beside a leaf they may have None, which `f` is given, and beside a Sharded
            one a tensor of shape (), such as its norm.

    Returns:
        A tree of f's results.

    Raises:
        ValueError: if structures or specs differ, or a leaf was donated.

    >>> tree_map(lambda x: x + 1, {"a": 1, "b": (2, None)})
    {'a': 2, 'b': (3, None)}
    """
    flat = flatten(tree)
    refuse_donated("tree_map", flat)
    rows = [flat.leaves]
    for other in map(flatten, rest):
        _check_beside(flat, other)
        rows.append(other.leaves)

    def map_leaf(leaf: Any, *others: Any) -> Any:
        if leaf is None:
            return None
        result = f(tensor_of(leaf), *map(tensor_of, others))
        return Sharded(result, leaf.spec) if is_sharded(leaf) else result

    return flat.unflatten(map(map_leaf, *rows))


def take_tensors(tree: Tree) -> tuple[list[torch.Tensor], Callable[[Iterable[Any]], Tree]]:
    """List the tensors of a tree, for what carries tensors alone.

    Args:
        tree: Any pytree.

    Returns:
        Its tensors, the local tensors of Sharded leaves included; and a function that makes the tree of other values in
        their places. It does not hold the tensors.

    >>> tensors, put = take_tensors({"a": torch.ones(2), "b": "text"})
    >>> len(tensors), put([3])
    (1, {'a': 3, 'b': 'text'})
    """
    leaves, treedef = optree.tree_flatten(tree)
    tensors = {i: leaf for i, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
    # The positions alone, and None in the place of tensors, so that the function does not hold them.
    positions = list(tensors)
    for i in positions:
        leaves[i] = None

    def put(values: Iterable[Any]) -> Tree:
        new_leaves = list(leaves)
        for i, value in zip(positions, values, strict=True):
            new_leaves[i] = value
        return unflatten(treedef, new_leaves)

    return list(tensors.values()), put


def cast_floating(tree: Tree, dtype: torch.dtype | None) -> Tree:
    """Cast the floating tensors of a tree, and of the dataclasses in it; None casts none."""
    if dtype is None:
        return tree

    def cast(x: Any) -> Any:
        if torch.is_tensor(x) and x.is_floating_point():
            return x.to(dtype)
        if is_dataclass(x) and not isinstance(x, type):
            field_values = {field.name: getattr(x, field.name) for field in fields(x) if field.init}
            return replace(x, **cast_floating(field_values, dtype))
        return x

    return tree_map(cast, tree)


def _check_beside(expected: Flat, flat: Flat) -> None:
    """Refuse a tree of another structure or other specs, and donated leaves."""
    same_structure("tree_map: rest", flat, expected)
    refuse_donated("tree_map: rest", flat)

    def misfit(leaf: Any, expected_leaf: Any) -> Misfit:
        if not is_sharded(expected_leaf):
            return None
        spec = expected_leaf.spec
        if not is_sharded(leaf):
            is_full = torch.is_tensor(leaf) and leaf.shape == spec.shape != spec.local_shape
            return ("a full tensor", f"a Sharded leaf with {spec.partition}") if is_full else None
        return describe_difference(leaf.spec, spec)

    problems = flat.problems(misfit, expected.leaves)
    refuse("tree_map: specs differ", problems, "shard both in the same way, frozen= included")
