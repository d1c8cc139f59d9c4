"""Leaves and their specs: Sharded, Spec, Axis, P; pytrees of them; shape arithmetic."""

from fshard.tree.exact import Exact
from fshard.tree.masks import MASK, Mask, TreeMask, as_mask, is_mask, matches, reads_leaves
from fshard.tree.nodes import (
    Flat,
    Sharded,
    Tree,
    Treedef,
    dcp_error,
    flatten,
    grouped,
    has_plain_keys,
    is_sharded,
    is_trained,
    leaves_of,
    like,
    map_leaves,
    map_nodes,
    names_of,
    subtrees,
    tensor_of,
    tensors_of,
    tree_leaves,
    tree_map,
    unflatten,
)
from fshard.tree.specs import Axis, ModelDtypes, P, ReshardPolicy, Spec, rebuilt
