"""Maps over trees: over the plain tensors, over leaves with Sharded ones kept whole, over nodes of a class."""

from collections.abc import Callable
from typing import Any

import optree

from fshard.errors import Problem, refuse
from fshard.tree.checks import same_structure
from fshard.tree.flat import Tree, flatten, leaves_of, unflatten
from fshard.tree.nodes import Sharded, is_sharded, tensor_of


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
    leaves, treedef = optree.tree_flatten(tree, is_leaf=lambda x: isinstance(x, cls | Sharded), none_is_leaf=True)
    return unflatten(treedef, [f(leaf) if isinstance(leaf, cls) else leaf for leaf in leaves])


def map_leaves(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Map `f` over the leaves that `flatten` finds, Sharded and None kept whole, where `tree_map` sees tensors.

    Args:
        f: Called with one leaf of each tree.
        tree: The tree whose structure the result has.
        *rest: Trees of the same structure.

    Returns:
        A tree of f's results.
    """
    leaves, treedef = optree.tree_flatten(tree, is_leaf=is_sharded, none_is_leaf=True)
    return unflatten(treedef, [f(*row) for row in zip(leaves, *map(leaves_of, rest), strict=True)])


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
        ValueError: if structures or specs differ.

    >>> tree_map(lambda x: x + 1, {"a": 1, "b": (2, None)})
    {'a': 2, 'b': (3, None)}
    """
    for other in rest:
        _check_beside(tree, other)

    def mapped(leaf: Any, *others: Any) -> Any:
        if leaf is None:
            return None
        out = f(tensor_of(leaf), *map(tensor_of, others))
        return Sharded(out, leaf.spec) if is_sharded(leaf) else out

    return map_leaves(mapped, tree, *rest)


def _check_beside(tree: Tree, other: Tree) -> None:
    """Refuse a tree of another structure or other specs."""
    needed, found = flatten(tree), flatten(other)
    same_structure("tree_map: rest", found, needed)
    rows = zip(needed.paths, needed.leaves, found.leaves, strict=True)
    pairs = [(path, a.spec, b.spec) for path, a, b in rows if is_sharded(a) and is_sharded(b)]
    problems = [Problem(path, f"{b}", f"{a}") for path, a, b in pairs if a is not b and a != b]
    refuse("tree_map: specs differ", problems, "shard both in the same way, frozen= included")
