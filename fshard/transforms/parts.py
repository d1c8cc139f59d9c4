"""The transforms that a transform is made of, and what built-in ones accept from those of users."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from fshard.errors import Problem, refuse
from fshard.transforms.base import BuiltIn, ShardTransform, Specs
from fshard.tree import Axis
from fshard.tree.checks import describe


def field_values(transform: ShardTransform) -> Iterator[Any]:
    """List the values in a transform's fields, and in tuples there."""
    for field in fields(transform):
        value = getattr(transform, field.name)
        if type(value) is tuple:
            yield from value
        else:
            yield value


def walk_parts(transform: ShardTransform) -> Iterator[ShardTransform]:
    """List all transforms in a transform, the one next to storage first, and the transform itself last."""
    for value in field_values(transform):
        if isinstance(value, ShardTransform):
            yield from walk_parts(value)
    yield transform


def foreign_names(transform: Any) -> Sequence[str]:
    """List the classes of a transform's parts that are not of this package, read off its structure once.

    Args:
        transform: The transform of a spec; None has no parts.

    Returns:
        The names of the classes, each once.
    """
    if transform is None:
        return ()
    names: Sequence[str] | None = transform.__dict__.get("_foreign_names")
    if names is None:
        foreign = [type(part).__name__ for part in walk_parts(transform) if not isinstance(part, BuiltIn)]
        names = tuple(dict.fromkeys(foreign))
        transform.__dict__["_foreign_names"] = names
    return names


def check_inputs(
    half: str,
    axis: Axis,
    tensors: Sequence[Any],
    specs: Specs,
    sizes: Mapping[int, tuple[int, int]],
) -> None:
    """Refuse what a user's transform hands to one that sends it over an axis, if that would lose or miss elements.

    Without this check, ranks would send each other other sizes, or elements too many would be cut off unseen.

    Args:
        half: "gather" or "scatter".
        axis: The axis.
        tensors: One for each leaf.
        specs: The leaves' specs, of which there is at least one.
        sizes: For leaves that are split over the axis, by their indices, the dim and its size in `tensors`.

    Raises:
        ValueError: with every leaf whose tensor is wrong.
    """
    problems = []
    for index, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
        dim, size = sizes.get(index, (0, None))
        if not isinstance(tensor, torch.Tensor):
            expected = "a tensor"
        elif size is not None and (tensor.dim() <= dim or tensor.shape[dim] != size):
            expected = f"a tensor with size {size} in dim {dim}"
        else:
            continue
        problems.append(Problem(f"leaf {index} of shape {spec.shape}", describe(tensor), expected))
    api_name = f"{' or '.join(foreign_names(specs[0].transform))}.{half}"
    shape = "shard" if half == "gather" else "full leaf"
    remedy = f"let {half} return a tensor for each leaf, shaped as the {shape} that the next transform sends"
    refuse(f"{api_name}: results cannot be sent over {axis.name!r}", problems, remedy)
