"""Sharded: this rank's shard of a leaf with its spec, a node of pytrees."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE

from fshard import _compat
from fshard.errors import Problem, leaf_error
from fshard.tree.specs import Spec


@dataclass(frozen=True, eq=False, init=False)
class Sharded:
    """This rank's shard of a leaf and the spec that says what it is a shard of.

    A pytree node of optree and torch whose one child is the local tensor, so tree_map, torch.func and optimizers see
    plain tensors and every result keeps its spec. Not a tensor: nothing communicates unless a verb is called.

    Attributes:
        local: This rank's tensor, of shape spec.local_shape.
        spec: The leaf's description, equal on every rank of one mesh row.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     return fs.shard({"w": torch.arange(4.0)}, fs.fully_shard(mesh))
    >>> trees = fs.testing.spmd(program, world=2)
    >>> trees[1]
    {'w': Sharded(float32[4], P('shard'), local [2])}
    >>> [tree["w"].local.tolist() for tree in trees], trees[1]["w"].spec.shape
    ([[0.0, 1.0], [2.0, 3.0]], (4,))
    """

    local: torch.Tensor
    spec: Spec

    def __init__(self, local: torch.Tensor, spec: Spec) -> None:
        """Set both: a step makes thousands, and a frozen dataclass takes twice the time."""
        values = self.__dict__
        values["local"], values["spec"] = local, spec

    def __repr__(self) -> str:
        if not isinstance(self.local, torch.Tensor):
            return f"Sharded({self.local!r}, {self.spec.partition})"
        dtype = str(self.local.dtype).removeprefix("torch.")
        return f"Sharded({dtype}{list(self.spec.shape)}, {self.spec.partition}, local {list(self.local.shape)})"

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        """Called by torch.distributed.checkpoint, which would pickle this and keep what one rank has.

        Raises:
            ValueError: always.
        """
        remedy = "pass fs.to_dtensor(params, mesh), or use fs.checkpoint.save or fs.checkpoint.save_dcp"
        what = "torch.distributed.checkpoint.save: shards of all ranks but one would be lost"
        raise leaf_error(what, [Problem(fqn, repr(self), "tensors or DTensors")], remedy)


# Users' own optree calls must see into Sharded too, hence optree's global namespace.
optree.register_pytree_node(
    Sharded,  # type: ignore[arg-type]
    lambda node: ((node.local,), node.spec, ("local",)),  # type: ignore[attr-defined]
    lambda spec, children: Sharded(children[0], spec),  # type: ignore[arg-type,index,return-value]
    path_entry_type=optree.GetAttrEntry,
    namespace=GLOBAL_NAMESPACE,
)
_compat.register_torch_pytree(
    Sharded, lambda node: ([node.local], node.spec), lambda children, spec: Sharded(next(iter(children)), spec)
)


# Whether a node is a Sharded leaf; as isinstance, without a frame of Python for each node of a tree.
is_sharded: Callable[[Any], bool] = Sharded.__instancecheck__


def is_trained(leaf: Any) -> bool:
    """Tell whether a leaf takes a gradient: it is neither None nor frozen."""
    return leaf is not None and not (isinstance(leaf, Sharded) and leaf.spec.frozen)


def tensor_of(leaf: Any) -> Any:
    """Return the tensor that this rank holds of a leaf: the shard of a Sharded one, else the leaf itself."""
    return leaf.local if isinstance(leaf, Sharded) else leaf


def tensors_of(leaves: Iterable[Any]) -> list[Any]:
    """The `tensor_of` each of thousands of leaves."""
    return [leaf.local if isinstance(leaf, Sharded) else leaf for leaf in leaves]


def like(leaf: Any, tensor: Any) -> Any:
    """Wrap a tensor in the spec of a leaf; one of another shape than the shard belongs to the whole leaf."""
    return Sharded(tensor, leaf.spec) if is_sharded(leaf) and tensor.shape == leaf.local.shape else tensor
