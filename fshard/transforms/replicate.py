"""replicate: every rank of an axis holds the whole leaf."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fshard import comm
from fshard.mesh import Mesh, axis_of
from fshard.transforms.base import Finish, ShardTransform, Tensors
from fshard.tree import Axis, Spec


@dataclass(frozen=True)
class _Replicate(ShardTransform):
    axis: Axis
    algorithm: comm.Algorithm
    bucket_bytes: int | None = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    @property
    def new_gradients(self) -> bool | None:
        return True if self.axis.size > 1 else None

    def bucketed(self, nbytes: int) -> ShardTransform:
        return replace(self, bucket_bytes=nbytes)

    def layout(self, spec: Spec) -> Spec:
        return spec.on(self.axis)

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        return self.start_scatter(grads, specs)()

    def start_scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Finish:
        return comm.start_all_reduce(grads, self.axis, "scatter", self.algorithm, self.bucket_bytes)


def replicate(mesh: Mesh | Axis, *, algorithm: comm.Algorithm = "auto") -> ShardTransform:
    """Keep each leaf the same on every rank of a mesh axis: gather communicates nothing, scatter sums.

    Args:
        mesh: A mesh of one axis, such as mesh["replicate"], or an Axis.
        algorithm: How collectives run; "auto" chooses by backend. See `fshard.comm.ops`.

    Returns:
        The transform.

    Raises:
        ValueError: if the mesh has several axes, or the algorithm is unknown.
    """
    if algorithm not in comm.ALGORITHMS:
        raise ValueError(f"replicate: expected algorithm to be one of {comm.ALGORITHMS}, got {algorithm!r}")
    return _Replicate(axis_of(mesh), algorithm)
