"""Verb 1: gather, from stored shards to the full tensors that a model computes with."""

from collections.abc import Sequence
from typing import Any

from fshard import _compat, comm
from fshard.collectives import settle, shared_axes
from fshard.engine import call_of
from fshard.transforms import ShardTransform
from fshard.transforms.compose import gather_by
from fshard.tree import Sharded, Tree, flatten, grouped, is_sharded, unflatten
from fshard.tree.checks import check_local, check_tensors, check_transforms, writes_counted


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
    call = None if _compat.transforms_active() else call_of(flat)
    if call is None:
        comm.same_call("gather", shared_axes(flat, ()), flat)
    leaves = list(flat.leaves)
    sharded = [leaf if is_sharded(leaf) else None for leaf in leaves]
    for key, group in grouped(sharded, _gathered_with if call is None else lambda _: None).items():
        paths, shards = [flat.paths[i] for i in group], [leaves[i] for i in group]
        gathered = _gathered(key, paths, shards) if call is None else call.gather(paths, shards)
        for i, full in zip(group, gathered, strict=True):
            leaves[i] = full
    return unflatten(flat.treedef, leaves)


def _gathered_with(leaf: Sharded) -> tuple[ShardTransform, bool]:
    """Find the transform of a leaf, and whether it takes no gradient: leaves that are equal in both share a node."""
    differentiable = leaf.local.is_floating_point() or leaf.local.is_complex()
    return leaf.spec.transform, leaf.spec.frozen or not differentiable


def _gathered(key: Any, paths: list[str], shards: list[Sharded]) -> Sequence[Any]:
    transform, still = key
    if still:
        tensors = [leaf.local.detach() for leaf in shards]
    else:
        tensors = [settle(path, leaf.local, leaf.spec) for path, leaf in zip(paths, shards, strict=True)]
    with writes_counted(), comm.concerning((), paths):
        return gather_by(transform, paths, tensors, [leaf.spec for leaf in shards])
