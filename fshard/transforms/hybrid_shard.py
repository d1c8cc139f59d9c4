"""hybrid_shard: sharded inside a node, replicated across nodes."""

from fshard import comm
from fshard.mesh import Mesh, axis_given
from fshard.transforms.base import ShardTransform
from fshard.transforms.compose import compose
from fshard.transforms.fully_shard import fully_shard
from fshard.transforms.replicate import replicate as replicated


def hybrid_shard(
    mesh: Mesh,
    axis: str = "shard",
    replicate: str = "replicate",
    *,
    dim: int = 0,
    min_shard_elements: int = 0,
    algorithm: comm.Algorithm = "auto",
) -> ShardTransform:
    """Split each leaf over one mesh axis and keep the pieces the same over another (HSDP).

    Gather is an all-gather inside the node alone; scatter a reduce-scatter inside it, then a sum of the pieces across
    nodes, which sends a fraction of what a sum of full gradients would.

    Args:
        mesh: The device mesh.
        axis: Name of the axis to split over, whose ranks are near each other.
        replicate: Name of the axis whose ranks hold the same pieces.
        dim: As for `fully_shard`.
        min_shard_elements: As for `fully_shard`.
        algorithm: As for `fully_shard`.

    Returns:
        compose(replicate(...), fully_shard(...)).

    Raises:
        ValueError: if the mesh lacks an axis, or an argument is out of range.
    """
    inner = fully_shard(
        axis_given(mesh, axis, "axis"), dim=dim, min_shard_elements=min_shard_elements, algorithm=algorithm
    )
    return compose(replicated(axis_given(mesh, replicate, "replicate"), algorithm=algorithm), inner)
