"""Leaves and their specs: Sharded, Spec, Axis, P; pytrees of them; shape arithmetic."""

from fshard.tree.abstract import device_of, is_abstract, storage_device
from fshard.tree.exact import Exact
from fshard.tree.flat import Flat, Tree, Treedef, flatten, grouped, has_plain_keys, leaves_of, unflatten
from fshard.tree.maps import cast_floating, leaves_like, map_leaves, map_nodes, take_tensors, tree_leaves, tree_map
from fshard.tree.masks import MASK, Mask, is_mask, matches
from fshard.tree.nodes import (
    Sharded,
    attributes_of,
    is_sharded,
    is_tensor,
    is_trained,
    like,
    register_leaf_class,
    tensor_of,
    tensors_of,
)
from fshard.tree.register import register_dataclass
from fshard.tree.specs import Axis, ModelDtypes, P, ReshardPolicy, Spec
