"""layout: a state of one mesh laid out on another, as tensors without values."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from fshard import _compat
from fshard.checks import kind
from fshard.errors import Problem, leaf_error
from fshard.transform_state import transform_state
from fshard.tree import Axis, Flat, Sharded, Spec, Tree, flatten, is_sharded, unflatten


def check_mesh(mesh: Any) -> dict[str, int]:
    """Refuse what is no mapping from names to sizes."""
    if not isinstance(mesh, Mapping) or not mesh:
        found = "empty" if isinstance(mesh, Mapping) else kind(mesh)
        raise ValueError(
            f'plan: expected mesh to be a mapping from names of axes to sizes, as {{"shard": 4096}}, got {found}'
        )
    for name, size in mesh.items():
        if not isinstance(name, str) or type(size) is not int or size < 1:
            raise ValueError(
                f"plan: expected mesh to map names to whole numbers of ranks from 1, got {name!r}: {size!r}"
            )
    return dict(mesh)


def coordinates(mesh: Mapping[str, int], rank: Any) -> dict[str, int]:
    """A rank's place on each axis, the last of which varies fastest, as in a DeviceMesh."""
    ranks = math.prod(mesh.values())
    if type(rank) is not int or not 0 <= rank < ranks:
        raise ValueError(
            f"plan: expected rank to be a whole number from 0 to {ranks - 1} for the mesh {dict(mesh)}, got {rank!r}"
        )
    place = {}
    for name, size in reversed(list(mesh.items())):
        rank, place[name] = divmod(rank, size)
    return place


def check_axes(args: Sequence[Any], mesh: Mapping[str, int]) -> None:
    """Refuse a mesh whose axes are not those that the arguments' leaves live on."""
    leaves = [leaf for leaf in flatten(tuple(args)).leaves if is_sharded(leaf)]
    if not leaves:
        raise ValueError(
            "plan: expected the state of a step, got arguments without a Sharded leaf; make it by fs.shard"
        )
    names = {axis.name for leaf in leaves for axis in (*leaf.spec.axes, *_axes_of(leaf.spec))}
    if names != set(mesh):
        found, needed = ", ".join(map(repr, sorted(mesh))), ", ".join(map(repr, sorted(names))) or "none"
        remedy = "give each a size, or make the state with a strategy of the axes meant"
        raise ValueError(f"plan: expected mesh to have the state's axes, {needed}, got {found}; {remedy}")


def laid_out_on(args: Sequence[Any], axes: Mapping[str, Axis]) -> tuple[Any, ...]:
    """Arguments of a step as they are on another mesh.

    Args:
        args: Trees with Sharded leaves.
        axes: The axes of the other mesh, by their names.

    Returns:
        The arguments with those axes in all specs, and tensors without values on the processor.

    Raises:
        ValueError: if a shard does not have the shape that its spec says, or a transform keeps its axis to itself.
    """
    fake, moved = _compat.fake_maker(symbols=True), _Moving(axes)
    return tuple(_moved_argument(argument, fake, moved) for argument in args)


def _moved_argument(argument: Any, fake: Callable[[torch.Tensor], torch.Tensor], moved: "_Moving") -> Any:
    states = getattr(argument, "transform_state", None)
    if states is not None:
        # A row for each rank: there are others.
        argument = argument._replace(transform_state=None)
    flat = flatten(argument)
    _check_shards(flat)
    leaves = []
    for leaf in flat.leaves:
        if is_sharded(leaf):
            spec = moved.spec(leaf.spec)
            leaf = Sharded(fake(torch.empty(spec.local_shape, dtype=leaf.local.dtype, device="meta")), spec)
        elif isinstance(leaf, torch.Tensor):
            leaf = fake(leaf.detach())
        leaves.append(leaf)
    problems = [
        Problem(
            path, f"a transform that communicates over {axis.name!r} of {axis.size} ranks still", "an axis in a field"
        )
        for path, leaf in zip(flat.paths, leaves, strict=True)
        if is_sharded(leaf)
        for axis in _axes_of(leaf.spec)
        if axis is not moved.axes[axis.name]
    ]
    if problems:
        raise leaf_error("plan: transforms cannot be moved", problems, "keep an Axis as a field of the dataclass")
    argument = unflatten(flat.treedef, leaves)
    return argument if states is None else argument._replace(transform_state=_fake_state(argument.params, fake))


def _fake_state(params: Tree, fake: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
    made = flatten(transform_state(params))
    leaves = [leaf and Sharded(fake(leaf.local), leaf.spec) for leaf in made.leaves]
    return unflatten(made.treedef, leaves)


def _check_shards(flat: Flat) -> None:
    problems = [
        Problem(path, f"a shard of shape {tuple(leaf.local.shape)}", f"{leaf.spec.local_shape} as its spec says")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and tuple(leaf.local.shape) != leaf.spec.local_shape
    ]
    if problems:
        raise leaf_error("plan: leaves do not fit their specs", problems, "pass what fs.shard or a step returned")


def _axes_of(spec: Spec) -> tuple[Axis, ...]:
    return tuple(getattr(spec.transform, "layout_axes", ())) + tuple(getattr(spec.transform, "axes", ()))


class _Moving:
    """Puts axes in the place of others of their names, wherever a spec or what it holds has one as a field."""

    def __init__(self, axes: Mapping[str, Axis]) -> None:
        self.axes = axes
        # By identity, with what is looked up kept alive: leaves share their transforms.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def spec(self, spec: Spec) -> Spec:
        axes = tuple(self.axes[axis.name] for axis in spec.axes)
        return replace(spec, axes=axes, transform=self(spec.transform), call=None)

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._seen:
            self._seen[id(value)] = value, self._moved(value)
        return self._seen[id(value)][1]

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Axis):
            return self.axes.get(value.name, value)
        if is_dataclass(value) and not isinstance(value, type):
            before = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
            after = {name: self(part) for name, part in before.items()}
            changed = {name: part for name, part in after.items() if part is not before[name]}
            return replace(value, **changed) if changed else value
        if type(value) is tuple:
            parts = tuple(map(self, value))
            return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
        return value
