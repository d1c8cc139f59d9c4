"""Facts about a transform, read off the transforms that it is made of."""

from typing import Any, NamedTuple

import torch

from fshard.transforms.axis import _SplitDim
from fshard.transforms.base import Container, ShardTransform, Wrapped, field_values, foreign_names, walk_parts
from fshard.transforms.local import _Cast
from fshard.tree import Axis, Spec


def layout_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that leaves are placed on: those of `axes`, and those that leaves stay split over."""
    axes = []
    for part in walk_parts(transform):
        axes += [value for value in field_values(part) if isinstance(value, Axis)]
        axes += part.axes
    return tuple(dict.fromkeys(axes))


def summed_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that scatter sums over: those of `axes` that no part of the transform leaves alone."""
    left_alone = [part.axis for part in walk_parts(transform) if isinstance(part, _SplitDim)]
    return tuple(axis for axis in transform.axes if axis not in left_alone)


def sums_gradients(part: ShardTransform) -> bool:
    """Whether the scatter of a part of a transform sums over ranks."""
    return bool(part.axes) and not isinstance(part, _SplitDim)


class Reduction(NamedTuple):
    """The facts about a transform's scatter that the engine asks for each gradient.

    Attributes:
        dtype: The dtype that gradients are reduced in; None leaves them in theirs.
        has_state: Whether scatter takes and returns states.
        is_new: Whether scatter returns tensors that nobody else holds, which may be written to.
        is_foreign: Whether a part of it is not of this package, and may return anything.
        num_outer_stages: Of a composition whose stages sum over several axes, the number of stages up to the one that
            sums over the outermost axis, which scatter runs last; 0 if only one stage sums.
    """

    dtype: torch.dtype | None = None
    has_state: bool = False
    is_new: bool = False
    is_foreign: bool = False
    num_outer_stages: int = 0


def reduction(transform: Any) -> Reduction:
    """Read the facts about a transform's scatter off its structure, once: they stay with it.

    Args:
        transform: The transform of a spec; None has the default.

    Returns:
        The facts.
    """
    if transform is None:
        return Reduction()
    facts: Reduction | None = transform.__dict__.get("_reduction")
    if facts is None:
        facts = _read_reduction(transform)
        transform.__dict__["_reduction"] = facts
    return facts


def _read_reduction(transform: ShardTransform) -> Reduction:
    parts = list(walk_parts(transform))
    is_foreign = bool(foreign_names(transform))
    # No transform of this package keeps a tensor that it returns. Others may, which nobody can see from here.
    is_new = not is_foreign and any(axis.size > 1 for axis in summed_axes(transform))
    return Reduction(
        dtype=_reduction_dtype(parts),
        has_state=any(_defines_state(part) for part in parts),
        is_new=is_new,
        is_foreign=is_foreign,
        num_outer_stages=_count_outer_stages(transform),
    )


def _count_outer_stages(transform: Any) -> int:
    stages = transform.stages if isinstance(transform, Container) else ()
    summing = [number for number, stage in enumerate(stages) if sums_gradients(stage)]
    return summing[0] + 1 if len(summing) > 1 else 0


def _defines_state(part: ShardTransform) -> bool:
    """Whether a part of a transform has a state itself, rather than those of its own parts."""
    init = type(part).init
    return init is not ShardTransform.init and init is not Wrapped.init and not isinstance(part, Container)


def _reduction_dtype(parts: list[ShardTransform]) -> torch.dtype | None:
    """Choose the last dtype that gradients are cast to before they are summed."""
    dtype = None
    # Scatter runs from the last part to the first.
    for part in reversed(parts):
        if isinstance(part, _Cast):
            dtype = part.scatter_dtype or dtype
        elif sums_gradients(part) and next(walk_parts(part)) is part:
            # A cast behind the sum does not change its dtype.
            break
    return dtype


def sum_dtype(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype that gradients are added up in over microbatches: at least that of the reduction.

    Args:
        spec: The leaf's spec.
        dtype: The gradients' dtype.

    Returns:
        The dtype.
    """
    reduction_dtype = reduction(spec.transform).dtype
    if reduction_dtype is None or not dtype.is_floating_point:
        return dtype
    return torch.promote_types(dtype, reduction_dtype)
