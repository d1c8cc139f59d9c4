"""bucket: leaves of a unit travel in buffers of a size of one's own."""

from fshard.checks import kind
from fshard.transforms.base import ShardTransform


def bucket(transform: ShardTransform, nbytes: int = 25 * 1024 * 1024) -> ShardTransform:
    """Let leaves travel together: those smaller than a bucket share buffers of up to its size.

    Fewer and larger messages, where latency costs more than the copies and the memory of the buffers; follows
    DistributedDataParallel's bucket_cap_mb. Values are the same.

    Args:
        transform: A strategy, or any transform that communicates.
        nbytes: Size of a bucket in bytes of full tensors.

    Returns:
        The transform with buckets.

    Raises:
        ValueError: if the size is no positive number, or nothing in the transform travels in buffers.
    """
    if not isinstance(transform, ShardTransform):
        raise ValueError(
            f"bucket: expected transform to be a ShardTransform such as fs.zero3(mesh), got {kind(transform)}"
        )
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0:
        raise ValueError(f"bucket: expected nbytes to be a positive number of bytes, got {nbytes!r}")
    result = transform.bucketed(nbytes)
    if result == transform and transform.bucket_bytes != nbytes:
        raise ValueError("bucket: nothing in the transform travels in buffers; wrap fully_shard or replicate")
    return result
