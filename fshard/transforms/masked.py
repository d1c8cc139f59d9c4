"""masked: a transform for some leaves, chosen by their names."""

from collections.abc import Sequence
from dataclasses import dataclass

from fshard.checks import kind
from fshard.transforms.base import ShardTransform, Tensors
from fshard.tree import Axis, Mask, Spec, is_mask, matches


@dataclass(frozen=True)
class _Masked(ShardTransform):
    transform: ShardTransform
    mask: Mask
    otherwise: ShardTransform

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.transform.axes

    @property
    def layout_axes(self) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys((*self.transform.layout_axes, *self.otherwise.layout_axes)))

    @property
    def bucket_bytes(self) -> int | None:
        sizes = (self.transform.bucket_bytes, self.otherwise.bucket_bytes)
        return max((size for size in sizes if size is not None), default=None)

    @property
    def masks(self) -> tuple[Mask, ...]:
        return (self.mask, *self.transform.masks, *self.otherwise.masks)

    def misplaced(self, before: Sequence[ShardTransform], behind: Sequence[ShardTransform]) -> str | None:
        return self.transform.misplaced(before, behind) or self.otherwise.misplaced(before, behind)

    def at(self, name: str) -> ShardTransform:
        return self.transform.at(name) if matches(self.mask, name) else self.otherwise.at(name)

    def bucketed(self, nbytes: int) -> ShardTransform:
        return _Masked(self.transform.bucketed(nbytes), self.mask, self.otherwise.bucketed(nbytes))

    def layout(self, spec: Spec) -> Spec:
        raise self._nameless()

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        raise self._nameless()

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        raise self._nameless()

    def _nameless(self) -> ValueError:
        return ValueError(
            "masked: leaves are meant by their names, which only fs.shard, fs.reshard and model.init know; each leaf's "
            "spec has its own transform"
        )


def masked_transform(transform: ShardTransform, mask: Mask, otherwise: ShardTransform | None = None) -> ShardTransform:
    """Use a transform for some leaves; `fs.masked` is its public name.

    Args:
        transform: The transform of the leaves that are meant.
        mask: Which leaves: glob patterns of their names, or a function of the name.
        otherwise: The transform of the others; None changes nothing in them.

    Returns:
        The transform, which `shard` resolves leaf by leaf.

    Raises:
        ValueError: if `mask` is no mask, or the two transforms sum gradients over different axes.
    """
    otherwise = ShardTransform() if otherwise is None else otherwise
    if not isinstance(otherwise, ShardTransform):
        raise ValueError(f"masked: expected otherwise to be a ShardTransform, got {kind(otherwise)}")
    if not is_mask(mask):
        needed = "a glob pattern of leaves' names, several, or a function of the name"
        raise ValueError(f"masked: expected the mask to be {needed}, got {kind(mask)}")
    if set(transform.axes) != set(otherwise.axes):
        other, axes = ([axis.name for axis in t.axes] for t in (otherwise, transform))
        raise ValueError(
            f"masked: expected other leaves to be reduced over the axes {axes}, got {other}; "
            "give otherwise= a transform over these, such as fs.replicate"
        )
    return _Masked(transform, mask, otherwise)
