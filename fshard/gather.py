"""Verb 1: gather, from stored shards to the full tensors that a model computes with."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fshard import _compat, comm
from fshard.collectives import make_derived_leaf_agree, shared_axes
from fshard.engine import find_call
from fshard.transforms import ShardTransform
from fshard.transforms.run import gather_by
from fshard.tree import Sharded, Tree, flatten, grouped, is_sharded, unflatten
from fshard.tree.checks import check_local, check_tensors, check_transforms, count_writes


def gather(tree: Tree) -> Tree:
    """Turn Sharded leaves into full tensors, differentiably and with their transform's casts.

    Its transpose is `scatter_grads`: under autograd and torch.func, gradients arrive sharded and summed over ranks.
    Leaves that travel together share one autograd node; frozen and integer ones take no gradient. Inside
    `value_and_grad` the leaves of one call are one unit: what autograd saves of them is dropped and gathered again in
    the backward, as their strategy says.

    Args:
        tree: Pytree with Sharded leaves; full tensors stay as they are, so it may be gathered already.

    Returns:
        The tree with full tensors of the leaves' global shapes.

    Raises:
        ValueError: if a leaf is no tensor, or its shape does not match its spec; on every rank, if other ranks make
            another call or gather other leaves.

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.shard({"w": torch.eye(2)}, fs.ddp(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> fs.gather(params)["w"].shape
    torch.Size([2, 2])
    """
    flat = flatten(tree)
    check_tensors("gather", flat)
    check_local("gather", flat)
    check_transforms("gather", flat)
    call = None if _compat.transforms_active() else find_call(flat)
    if call is None:
        comm.check_same_call("gather", shared_axes(flat, ()), flat)
    sharded = [leaf if is_sharded(leaf) else None for leaf in flat.leaves]
    leaves = list(flat.leaves)
    # A call of the engine takes all leaves as one unit, and groups them itself.
    for key, positions in grouped(sharded, _node_of if call is None else lambda _: None).items():
        paths = [flat.paths[i] for i in positions]
        shards = [flat.leaves[i] for i in positions]
        full_tensors = call.gather(paths, shards) if call is not None else _gather_group(key, paths, shards)
        for i, full in zip(positions, full_tensors, strict=True):
            leaves[i] = full
    return unflatten(flat.treedef, leaves)


class _Node(NamedTuple):
    """What leaves have in common that share one node of autograd's graph, and are sent together.

    Attributes:
        transform: Their transform.
        is_constant: Whether they take no gradient.
    """

    transform: ShardTransform
    is_constant: bool


def _node_of(leaf: Sharded) -> _Node:
    is_differentiable = leaf.local.is_floating_point() or leaf.local.is_complex()
    return _Node(leaf.spec.transform, leaf.spec.frozen or not is_differentiable)


def _gather_group(node: _Node, paths: Sequence[str], shards: Sequence[Sharded]) -> Sequence[Any]:
    """Gather leaves outside of a call of the engine."""
    if node.is_constant:
        tensors = [leaf.local.detach() for leaf in shards]
    else:
        tensors = []
        for path, leaf in zip(paths, shards, strict=True):
            tensors.append(make_derived_leaf_agree(path, leaf.local, leaf.spec))
    with count_writes(), comm.annotate_collectives((), paths):
        return gather_by(node.transform, paths, tensors, [leaf.spec for leaf in shards])
