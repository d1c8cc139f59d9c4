"""Sums over ranks in one binary tree over microbatches, in the place of a strategy's own sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from fshard import comm
from fshard.microbatches import Share, TreeSum, nodes
from fshard.transforms.axis import _FullyShard, _Replicate, _SplitDim
from fshard.transforms.base import Finish, LayoutError, ShardTransform, Tensors
from fshard.transforms.compose import _Composed, parts
from fshard.transforms.local import _Cast, _Offload
from fshard.tree import Axis, Spec

# A gradient that is several partial sums has them along its last dim.
NODES = -1


@dataclass(frozen=True)
class _ShardOfNodes(_FullyShard):
    """Sums the partial sums of ranks whose microbatches are no nodes of one size."""

    microbatches: int = field(kw_only=True)

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        return self.start_scatter(grads, specs)()

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        dims = self.split_dims(specs)
        whole = [i for i in range(len(grads)) if i not in dims]
        rows = [self.stack(grads[i], specs[i], dim) for i, dim in dims.items()]
        scattering = _start_sums(rows, self.axis, self.microbatches)
        summing = _start_whole_sums([grads[i] for i in whole], self.axis, self.microbatches)

        def finish() -> Tensors:
            out = dict(zip((*dims, *whole), (*scattering(), *summing()), strict=True))
            return [out[i] for i in range(len(out))]

        return finish


@dataclass(frozen=True)
class _ReplicateOfNodes(_Replicate):
    microbatches: int = field(kw_only=True)

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        return self.start_scatter(grads, specs)()

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        return _start_whole_sums(grads, self.axis, self.microbatches)


def _start_sums(stacks: Tensors, axis: Axis, microbatches: int) -> Finish:
    """Start sending each rank its row of partial sums.

    Args:
        stacks: Tensors of shape (ranks, *shape, nodes of this rank).
        axis: The mesh axis.
        microbatches: How many the job has.

    Returns:
        A function that finishes and returns sums of `shape` over all nodes.
    """
    if not stacks:
        return list
    share = Share(microbatches, axis.size, comm.rank(axis), "once")
    own = nodes(share.indices)
    rows = [[part for stack in stacks for part in stack[rank].unbind(NODES)] for rank in range(share.ranks)]
    theirs = [nodes(share.of(rank)) for rank in range(share.ranks)]
    kinds = [[(stack.shape[1:NODES], stack.dtype) for stack in stacks for _ in found] for found in theirs]
    assert all(stack.shape[NODES] == len(own) for stack in stacks)
    exchanging = comm.start_all_to_all(rows, kinds, axis, "scatter")

    def finish() -> Tensors:
        received = exchanging()
        sums = []
        for n in range(len(stacks)):
            tree = TreeSum()
            for found, row in zip(theirs, received, strict=True):
                for (start, size), part in zip(found, row[n * len(found) : (n + 1) * len(found)], strict=True):
                    tree.add(start, part, size, own=True)
            total = tree.total()
            assert total is not None
            sums.append(total)
        return sums

    return finish


def _start_whole_sums(grads: Tensors, axis: Axis, microbatches: int) -> Finish:
    """Start summing partial sums into values that every rank holds: each sums a row and sends it to the others."""
    shapes = [grad.shape[:NODES] for grad in grads]
    flat = [grad.reshape(-1, grad.shape[NODES]) for grad in grads]
    padded = [torch.nn.functional.pad(grad, (0, 0, 0, -len(grad) % axis.size)) for grad in flat]
    summing = _start_sums([grad.unflatten(0, (axis.size, -1)) for grad in padded], axis, microbatches)

    def finish() -> Tensors:
        gathered = comm.all_gather(summing(), axis, "scatter") if shapes else []
        return [rows.reshape(-1)[: shape.numel()].view(shape) for rows, shape in zip(gathered, shapes, strict=True)]

    return finish


@lru_cache(maxsize=4096)
def in_tree(spec: Spec, uneven: int = 0) -> Spec:
    """Let a leaf's transform sum gradients in the tree of a job's microbatches.

    Args:
        spec: The leaf's spec.
        uneven: How many microbatches the job has, where ranks' blocks are uneven: gradients are then given as several
            partial sums. 0 where each rank has one sum.

    Returns:
        The spec with a transform that stores and gathers in the same way.

    Raises:
        LayoutError: if the transform does something whose bits depend on how many ranks there are.
    """
    transform: Any = spec.transform
    return spec if transform is None else replace(spec, transform=_in_tree(transform, uneven))


@lru_cache(maxsize=64)
def _in_tree(transform: ShardTransform, uneven: int) -> ShardTransform:
    if isinstance(transform, _Composed):
        return replace(transform, stages=tuple(_in_tree(stage, uneven) for stage in transform.stages))
    if isinstance(transform, _SplitDim) and transform.brings_data:
        raise LayoutError(f"own_dim over {transform.axis.name!r}", "gradients that are sums of ranks' microbatches")
    if type(transform) in (_Cast, _Offload, _SplitDim) or type(transform) is ShardTransform:
        return transform
    found: dict[type, Callable[..., ShardTransform]] = {_FullyShard: _ShardOfNodes, _Replicate: _ReplicateOfNodes}
    if type(transform) in found and transform.axes[0].size == 1:
        return transform
    if type(transform) in found and not uneven:
        return replace(transform, algorithm="tree")  # type: ignore[call-arg]
    if type(transform) in found:
        values = {name: getattr(transform, name) for name in transform.__dataclass_fields__}
        return found[type(transform)](**values, microbatches=uneven)
    name = " of ".join(type(node).__name__.strip("_") for node in (transform, *parts(transform)))
    raise LayoutError(name, "fully_shard, replicate, split_dim, casts and offload alone")
