"""Sums over ranks in one binary tree over microbatches, in the place of a strategy's own sums."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from fshard.transforms.axis import _FullyShard, _Replicate, _SplitDim
from fshard.transforms.base import LayoutError, ShardTransform
from fshard.transforms.compose import _Composed, parts
from fshard.transforms.local import _Cast, _Offload
from fshard.tree import Spec


@lru_cache(maxsize=4096)
def in_tree(spec: Spec) -> Spec:
    """Let a leaf's transform sum gradients in the tree of a job's microbatches.

    Args:
        spec: The leaf's spec.

    Returns:
        The spec with a transform that stores and gathers in the same way.

    Raises:
        LayoutError: if the transform does something whose bits depend on how many ranks there are.
    """
    transform: Any = spec.transform
    return spec if transform is None else replace(spec, transform=_in_tree(transform))


@lru_cache(maxsize=64)
def _in_tree(transform: ShardTransform) -> ShardTransform:
    if isinstance(transform, _Composed):
        return replace(transform, stages=tuple(_in_tree(stage) for stage in transform.stages))
    if isinstance(transform, _SplitDim) and transform.brings_data:
        raise LayoutError(f"own_dim over {transform.axis.name!r}", "gradients that are sums of ranks' microbatches")
    if type(transform) in (_Cast, _Offload, _SplitDim) or type(transform) is ShardTransform:
        return transform
    if type(transform) in (_FullyShard, _Replicate):
        if transform.axes[0].size == 1:
            return transform
        assert isinstance(transform, _FullyShard | _Replicate)
        return replace(transform, tree=True)
    name = " of ".join(type(node).__name__.strip("_") for node in (transform, *parts(transform)))
    raise LayoutError(name, "fully_shard, replicate, split_dim, casts and offload alone")
