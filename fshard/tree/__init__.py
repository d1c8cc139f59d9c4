"""Leaves and their specs: Sharded, Spec, Axis, P; pytrees of them; shape arithmetic."""

from fshard.tree.exact import Exact
from fshard.tree.masks import Mask, is_mask, means
from fshard.tree.nodes import (
    Added,
    Flat,
    Sharded,
    Tree,
    Treedef,
    added,
    dcp_error,
    flatten,
    has_plain_keys,
    is_sharded,
    names_of,
    subtrees,
    tree_leaves,
    tree_map,
    unflatten,
)
from fshard.tree.specs import Axis, P, Residency, Spec, Transform

__all__ = [
    "Added",
    "Axis",
    "Exact",
    "Flat",
    "Mask",
    "P",
    "Residency",
    "Sharded",
    "Spec",
    "Transform",
    "Tree",
    "Treedef",
    "added",
    "dcp_error",
    "flatten",
    "has_plain_keys",
    "is_mask",
    "is_sharded",
    "means",
    "names_of",
    "subtrees",
    "tree_leaves",
    "tree_map",
    "unflatten",
]
