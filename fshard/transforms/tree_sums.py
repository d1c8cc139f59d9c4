"""Sums over ranks in one binary tree over microbatches, in the place of a strategy's own sums."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from fshard.errors import expect
from fshard.transforms.axis import _FullyShard, _Replicate, _SplitDim
from fshard.transforms.base import ShardTransform
from fshard.transforms.compose import _Composed, parts
from fshard.transforms.local import _Cast, _Offload
from fshard.tree import Axis, Spec

WHAT, REMEDY = 'sums="tree"', 'take a strategy without it, or leave out sums="tree"'


@lru_cache(maxsize=4096)
def in_tree(spec: Spec, axes: tuple[Axis, ...]) -> Spec:
    """Let a leaf's transform sum gradients in the tree of a job's microbatches.

    Args:
        spec: The leaf's spec.
        axes: The axes that it sums over, in the order of all leaves.

    Returns:
        The spec with a transform that stores and gathers in the same way.

    Raises:
        ValueError: if the transform does something whose bits depend on how many ranks there are.
    """
    transform: Any = spec.transform
    needed, found = ([axis.name for axis in order if axis.size > 1] for order in (axes, transform.axes))
    expect(found == needed, WHAT, f"transforms that sum over {needed} in this order", f"{found}", REMEDY)
    return replace(spec, transform=_in_tree(transform))


@lru_cache(maxsize=64)
def _in_tree(transform: ShardTransform) -> ShardTransform:
    if isinstance(transform, _Composed):
        return replace(transform, stages=tuple(_in_tree(stage) for stage in transform.stages))
    owns = isinstance(transform, _SplitDim) and transform.brings_data
    if type(transform) in (_Cast, _Offload, _SplitDim, ShardTransform) and not owns:
        return transform
    if type(transform) in (_FullyShard, _Replicate):
        return transform if transform.axes[0].size == 1 else replace(transform, tree=True)  # type: ignore[call-arg]
    names = [type(node).__name__.strip("_") for node in (transform, *parts(transform))]
    found = "own_dim" if owns else " of ".join(names)
    raise ValueError(f"{WHAT}: expected fully_shard, replicate, split_dim, casts and offload, got {found}; {REMEDY}")
