"""Facts about a transform, read off the transforms that it is made of."""

from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from fshard.errors import expect
from fshard.transforms.axis import _SplitDim
from fshard.transforms.base import (
    BuiltIn,
    Container,
    ShardTransform,
    Wrapped,
    expect_transform,
    field_values,
    foreign_names,
    is_default,
    walk_parts,
)
from fshard.transforms.local import _Cast
from fshard.tree import Axis, Spec
from fshard.tree.checks import describe


def layout_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that leaves are placed on: those of `axes`, and those that leaves stay split over.

    Raises:
        ValueError: if a part of the transform is a user's, and a member of it is not what the package asks of it.
    """
    axes = []
    for part in walk_parts(transform):
        if not isinstance(part, BuiltIn):
            _check_part(part)
        axes += [value for value in field_values(part) if isinstance(value, Axis)]
        axes += part.axes
    return tuple(dict.fromkeys(axes))


def _check_part(part: ShardTransform) -> None:
    """Refuse a user's transform of which a member is not what the package asks of it."""
    name = type(part).__name__
    expect_transform(name, "inner", part.inner if isinstance(part, Wrapped) else part)
    axes = part.axes
    are_axes = isinstance(axes, list | tuple) and all(isinstance(axis, Axis) for axis in axes)
    expect(are_axes, name, "axes to be a property, a tuple of Axis", describe(axes))
    # Transforms that differ in other attributes would be equal, and two with equal tensors would not.
    of_class = {*dir(type(part)), *part.__dataclass_fields__}
    odd = [key for key in vars(part) if key not in of_class]
    odd += [field.name for field in fields(part) if isinstance(getattr(part, field.name), torch.Tensor)]
    expect(not odd, name, "a frozen dataclass, whose fields are numbers, names and tuples of these", f"{odd}")


def summed_axes(transform: ShardTransform) -> tuple[Axis, ...]:
    """List the mesh axes that scatter sums over: those of `axes` that no part of the transform leaves alone."""
    left_alone = [part.axis for part in walk_parts(transform) if isinstance(part, _SplitDim)]
    return tuple(axis for axis in transform.axes if axis not in left_alone)


def sends(stage: ShardTransform) -> bool:
    """Tell whether a stage communicates when it scatters."""
    return any(axis.size > 1 for axis in summed_axes(stage))


class Reduction(NamedTuple):
    """The facts about a transform's scatter that the engine asks for each gradient.

    Attributes:
        dtype: The dtype that gradients are reduced in; None leaves them in theirs.
        has_state: Whether scatter takes and returns states.
        is_new: Whether scatter returns tensors that nobody else holds, which may be written to.
        halves: Of a composition whose stages sum over several axes, the stages up to the one that sums over the
            outermost axis, and those behind it, which scatter runs first; None if only one stage sums.
        sends_twice: Whether both halves communicate.
    """

    dtype: torch.dtype | None = None
    has_state: bool = False
    is_new: bool = False
    halves: tuple[ShardTransform, ShardTransform] | None = None
    sends_twice: bool = False


def reduction(transform: Any) -> Reduction:
    """Read the facts about a transform's scatter off its structure, once: they stay with it.

    Args:
        transform: The transform of a spec; None has the default.

    Returns:
        The facts.
    """
    if transform is None:
        return Reduction()
    facts: Reduction | None = transform._reduction
    if facts is None:
        facts = _read_reduction(transform)
        transform.__dict__["_reduction"] = facts
    return facts


def _read_reduction(transform: ShardTransform) -> Reduction:
    parts = list(walk_parts(transform))
    # No transform of this package keeps a tensor that it returns. Others may, which nobody can see from here.
    is_new = not foreign_names(transform) and sends(transform)
    halves = _find_halves(transform)
    return Reduction(
        dtype=_reduction_dtype(parts),
        has_state=any(_defines_state(part) for part in parts),
        is_new=is_new,
        halves=halves,
        sends_twice=halves is not None and all(map(sends, halves)),
    )


def _find_halves(transform: Any) -> tuple[ShardTransform, ShardTransform] | None:
    # A class that leaves both forms of scatter to the transform that it wraps.
    forms = ("scatter", "start_scatter")
    while isinstance(transform, Wrapped) and all(is_default(type(transform), form) for form in forms):
        transform = transform.inner
    stages = transform.stages if isinstance(transform, Container) else ()
    summing = [number for number, stage in enumerate(stages) if summed_axes(stage)]
    return split_stages(transform, summing[0] + 1) if len(summing) > 1 else None


def split_stages(transform: Any, number: int) -> tuple[ShardTransform, ShardTransform]:
    """Split a composition: into its first stages, of which there is a number, and the others.

    In the place of a stage that it leaves out, each half has one that changes nothing, so that states fit both.
    """
    nothing = (BuiltIn(),)
    before = transform.stages[:number]
    after = transform.stages[number:]
    return (
        replace(transform, stages=before + nothing * len(after)),
        replace(transform, stages=nothing * number + after),
    )


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
        elif summed_axes(part) and next(walk_parts(part)) is part:
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
