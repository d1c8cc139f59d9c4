"""split_dim: each rank of an axis computes with its own piece of a leaf, as in tensor parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass

from fshard.checks import check_dim
from fshard.mesh import Mesh, axis_of
from fshard.transforms.base import LayoutError, ShardTransform
from fshard.tree import Axis, Spec


@dataclass(frozen=True)
class _SplitDim(ShardTransform):
    axis: Axis
    dim: int

    @property
    def layout_axes(self) -> tuple[Axis, ...]:
        return (self.axis,)

    @property
    def new_gradients(self) -> bool | None:
        return None

    def misplaced(self, before: Sequence[ShardTransform], behind: Sequence[ShardTransform]) -> str | None:
        gathered = [axis.name for stage in behind for axis in stage.axes]
        if not gathered:
            return None
        return f"expected split_dim over {self.axis.name!r} behind what gathers over {gathered}, got it before"

    def layout(self, spec: Spec) -> Spec:
        dims = len(spec.shape)
        if not -dims <= self.dim < dims:
            raise LayoutError(f"shape {spec.shape}", f"a dim {self.dim} to split over {self.axis.name!r}")
        dim = self.dim % dims
        size = spec.local_shape[dim]
        if size % self.axis.size:
            needed = f"a multiple of {self.axis.size}, the size of {self.axis.name!r}"
            raise LayoutError(f"size {size} of dim {dim}", needed)
        return spec.split(self.axis, dim)


def split_dim(mesh: Mesh | Axis, *, dim: int) -> ShardTransform:
    """Split a dim over a mesh axis for good: gather and scatter leave it alone, each rank computes with its own piece.

    Tensor parallelism in a composition: `compose(fully_shard(mesh["shard"]), split_dim(mesh["tp"], dim=0))` stores
    a leaf over both axes and gathers the first. The loss must agree between the ranks of the axis: partial results are
    summed by `psum_invariant`, and what agrees is handed to each rank's own piece by `pvary`, as Megatron's g and f.

    Args:
        mesh: A mesh of one axis, such as mesh["tp"], or an Axis.
        dim: The dim to split, which must be a multiple of the axis's size; may count from the end.

    Returns:
        The transform.

    Raises:
        ValueError: if the mesh has several axes; from shard, if a leaf's dim does not divide.
    """
    check_dim("split_dim", dim)
    return _SplitDim(axis_of(mesh), dim)
