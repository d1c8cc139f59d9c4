"""Strategies: compositions of transforms under the field's names, with no mechanism of their own."""

from fshard.mesh import Mesh, axis_of
from fshard.transforms import ShardTransform, fully_shard, replicate

# Leaves below this stay whole: a bias or a norm costs more to gather than to keep.
MIN_SHARD_ELEMENTS = 1024


def ddp(mesh: Mesh, axis: str = "shard") -> ShardTransform:
    """Distributed data parallelism: everything whole on every rank, gradients summed.

    Args:
        mesh: The device mesh.
        axis: The mesh axis that batches are split over.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    return replicate(axis_of(mesh, axis))


def zero1(mesh: Mesh, axis: str = "shard", *, min_shard_elements: int = MIN_SHARD_ELEMENTS) -> ShardTransform:
    """ZeRO-1: optimizer state and stored parameters sharded, gathered once a step; gradients reduced once.

    Follows Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).

    Args:
        mesh: The device mesh.
        axis: The mesh axis to shard over.
        min_shard_elements: Leaves of fewer elements stay whole on every rank.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    return fully_shard(axis_of(mesh, axis), min_shard_elements=min_shard_elements)


def zero2(mesh: Mesh, axis: str = "shard", *, min_shard_elements: int = MIN_SHARD_ELEMENTS) -> ShardTransform:
    """ZeRO-2: as ZeRO-1, and accumulated gradients sharded too.

    Where the whole model is gathered at once, as by the four verbs, gradients of both are reduced in one go and the two
    are the same. Follows Rajbhandari et al. (2020).

    Args:
        mesh: The device mesh.
        axis: The mesh axis to shard over.
        min_shard_elements: Leaves of fewer elements stay whole on every rank.

    Returns:
        The transform to `shard` parameters with.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    return zero1(mesh, axis, min_shard_elements=min_shard_elements)
