"""Verb 1: gather, from stored shards to the full tensors that a model computes with, at once or started ahead."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fshard import _compat, comm
from fshard.collectives import make_derived_leaf_agree, shared_axes
from fshard.collectives.linear import linear_call
from fshard.engine import Started, StartedGather, find_call, take_over
from fshard.transforms import ShardTransform
from fshard.transforms.run import as_linear
from fshard.tree import Flat, Sharded, Tree, attributes_of, flatten, grouped, is_sharded
from fshard.tree.checks import (
    check_local,
    check_tensors,
    check_transforms,
    count_writes,
    is_differentiable,
    is_differentiated,
)


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
    flat = _flatten("gather", tree)
    call = None if _compat.transforms_active() else find_call(flat)
    leaves = list(flat.leaves)
    if call is None:
        started = list(map(take_over, flat.leaves))
        comm.check_same_call("gather", shared_axes(flat, ()), flat)
        for i, finish in enumerate(started):
            if finish is not None:
                (leaves[i],) = finish()
    sharded = [leaf if is_sharded(leaf) else None for leaf in leaves]
    # A call of the engine takes all leaves as one unit, and groups them itself.
    for key, positions in grouped(sharded, _node_of if call is None else lambda _: None).items():
        paths = [flat.paths[i] for i in positions]
        shards = [flat.leaves[i] for i in positions]
        full_tensors = call.gather(paths, shards) if call is not None else _gather_group(key, paths, shards)
        for i, full in zip(positions, full_tensors, strict=True):
            leaves[i] = full
    return flat.unflatten(leaves)


def start_gather(tree: Tree) -> Tree:
    """Start to gather Sharded leaves, so that their full tensors arrive while something else runs.

    The result is the tree with the same leaves, and whatever gathers them takes the full tensors over: `value_and_grad`
    and `accumulate` of it, `apply`, `gather`. They wait for the gather where they use it first. Then all goes on as
    without: the tensors are dropped, and gathered again in the backward, as the strategy says. Leaves of one call
    arrive together, so call it for each unit that is to arrive by itself. Inside the function of `value_and_grad` it
    starts gathers of the function's own parameters, for a schedule of one's own; in a jitted step the graph has the
    start where this was called, and the wait at the first use. Follows FSDP2's unshard(async_op=True).

    A gather serves one use: a second one is refused. A result that is dropped unused is waited for, and a warning names
    it. Values are those at the start: `update` leaves the memory alone that a gather reads, and after another write to
    it the use is refused. Maps over the result, jitted functions and other verbs see plain parameters. A jitted
    function may not return the result.

    Where others differentiate the gather itself, it starts nothing and returns the tree: under torch.func, where
    parameters are part of the caller's graph, and where a checkpoint is computed again.

    Args:
        tree: Pytree with Sharded leaves, such as all parameters or those of one unit; other leaves stay as they are.

    Returns:
        The tree. Its full tensors are held until they are used.

    Raises:
        ValueError: as for `gather`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         started = fs.start_gather(params)
    ...         beside = torch.ones(2) + 1  # is computed while the shards travel
    ...         loss, grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())(started)
    ...     return loss.item(), [entry.op for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]
    (4.0, ['all_gather', 'reduce_scatter'])
    """
    flat = _flatten("start_gather", tree)
    call = None if _compat.transforms_active() else find_call(flat)
    tensors = attributes_of(flat.sharded, "local")
    if is_differentiated(tensors) if call is None else call.is_recomputing:
        return tree
    if call is None:
        comm.check_same_call("start_gather", shared_axes(flat, ()), flat)
    leaves = list(flat.leaves)
    sharded = [leaf if is_sharded(leaf) else None for leaf in flat.leaves]
    for positions in grouped(sharded, lambda leaf: leaf.spec.transform).values():
        started = StartedGather([flat.paths[i] for i in positions], [flat.leaves[i] for i in positions])
        for i in positions:
            leaf = flat.leaves[i]
            leaves[i] = Started(leaf.local, leaf.spec, started, flat.paths[i])
    return flat.unflatten(leaves)


def _flatten(api_name: str, tree: Tree) -> Flat:
    """Take a tree apart, and refuse leaves that cannot be gathered."""
    flat = flatten(tree)
    check_tensors(api_name, flat)
    check_local(api_name, flat)
    check_transforms(api_name, flat)
    return flat


class _Node(NamedTuple):
    """What leaves have in common that share one node of autograd's graph, and are sent together.

    Attributes:
        transform: Their transform.
        is_constant: Whether they take no gradient.
    """

    transform: ShardTransform
    is_constant: bool


def _node_of(leaf: Sharded) -> _Node:
    return _Node(leaf.spec.transform, leaf.spec.frozen or not is_differentiable(leaf.local))


def _gather_group(node: _Node, paths: Sequence[str], shards: Sequence[Sharded]) -> Sequence[Any]:
    """Gather leaves outside of a call of the engine."""
    if node.is_constant:
        tensors = [leaf.local.detach() for leaf in shards]
    else:
        tensors = []
        for path, leaf in zip(paths, shards, strict=True):
            tensors.append(make_derived_leaf_agree(path, leaf.local, leaf.spec))
    with count_writes(), comm.annotate_collectives((), paths):
        return linear_call(as_linear(node.transform, [leaf.spec for leaf in shards], paths), tensors)
