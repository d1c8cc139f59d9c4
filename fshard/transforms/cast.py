"""cast: compute and reduce in other dtypes than leaves are stored in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fshard.transforms.base import ShardTransform, Tensors
from fshard.tree import Spec


@dataclass(frozen=True)
class _Cast(ShardTransform):
    gather_dtype: torch.dtype | None
    scatter_dtype: torch.dtype | None

    @property
    def new_gradients(self) -> bool | None:
        return None if self.scatter_dtype is None else False

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        return self.scatter_dtype

    def gather(self, leaves: Tensors, specs: Sequence[Spec]) -> Tensors:
        return _to(leaves, self.gather_dtype)

    def scatter(self, grads: Tensors, specs: Sequence[Spec]) -> Tensors:
        return _to(grads, self.scatter_dtype)


def _to(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    return [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in tensors]


def cast(*, gather: torch.dtype | None = None, scatter: torch.dtype | None = None) -> ShardTransform:
    """Change the dtype of floating leaves on their way in, and of gradients on their way out.

    Left of `fully_shard` it changes what travels, right of it what is computed with. Finished gradients have the dtype
    their leaf is stored in, whatever the casts.

    Args:
        gather: Dtype for leaves, or None to leave them.
        scatter: Dtype for gradients, or None to leave them.

    Returns:
        The transform.

    Raises:
        ValueError: if a dtype is not floating.

    >>> mixed = cast(gather=torch.bfloat16)
    >>> mixed == cast(gather=torch.bfloat16)
    True
    """
    for name, dtype in (("gather", gather), ("scatter", scatter)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"cast: expected {name}= to be a floating torch.dtype such as torch.bfloat16, got {dtype!r:.40}"
            )
    return _Cast(gather, scatter)
