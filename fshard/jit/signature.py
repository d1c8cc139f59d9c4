"""Signatures: what a graph was traced for, so that it serves equal calls and others are traced anew."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.checks import kind
from fshard.errors import Problem, leaf_error
from fshard.tree import Flat, Spec, Tree, Treedef, flatten, is_sharded


class Aval(NamedTuple):
    """What is known of a tensor without its values; JAX's abstract value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class Signature(NamedTuple):
    """Everything that a graph depends on.

    Attributes:
        treedef: Structure of the arguments.
        entries: For each leaf its aval, and its spec where it is Sharded; or the value of a leaf that is no tensor.
        static: Values of static arguments.
        ranks: This rank's coordinates on the axes of the leaves.
        modes: Whether gradients are recorded, the default dtype, and autocast's dtype.
    """

    treedef: Treedef
    entries: tuple[Any, ...]
    static: tuple[Any, ...]
    ranks: tuple[int, ...]
    modes: tuple[Any, ...]


def signature(flat: Flat, static: Sequence[tuple[Any, Any]]) -> Signature:
    """The signature of one call.

    Args:
        flat: Its arguments.
        static: Names and values of its static ones, which must be hashable.
    """
    entries = tuple(_entry(leaf) for leaf in flat.leaves)
    # By identity: leaves share their axes, which are slow to hash.
    axes = {id(axis): axis for leaf in flat.leaves if is_sharded(leaf) for axis in leaf.spec.axes}
    ranks = tuple(comm.rank(axis) for axis in dict.fromkeys(axes.values()))
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    modes = (torch.is_grad_enabled(), torch.get_default_dtype(), autocast)
    return Signature(flat.treedef, entries, tuple(static), ranks, modes)


def aval(tensor: torch.Tensor) -> Aval:
    """What is known of a tensor without its values."""
    return Aval(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def changes(before: Signature, after: Signature, paths: Sequence[str]) -> list[str]:
    """Say what differs between two signatures.

    Args:
        before: The one that there is a graph for.
        after: The one of a call.
        paths: Paths of the call's leaves.
    """
    if before.treedef != after.treedef:
        return [f"the structure of the arguments was {before.treedef} and is {after.treedef}"]
    found = [
        f"{path} was {_said(a)} and is {_said(b)}"
        for path, a, b in zip(paths, before.entries, after.entries, strict=True)
        if a != b
    ]
    found += [
        f"static argument {name} was {a!r} and is {b!r}"
        for (_, a), (name, b) in zip(before.static, after.static, strict=True)
        if a != b
    ]
    if before.ranks != after.ranks:
        found.append(f"this rank was at {before.ranks} and is at {after.ranks}")
    if before.modes != after.modes:
        found.append(f"(gradients, default dtype, autocast) was {before.modes} and is {after.modes}")
    return found


def changed_values(before: Signature, after: Signature, flat: Flat) -> list[tuple[str, Any, Any]]:
    """Leaves that are no tensors and have other values than in another signature of this structure."""
    if before.treedef != after.treedef:
        return []
    return [
        (path, a, b)
        for path, a, b in zip(flat.paths, before.entries, after.entries, strict=True)
        if not isinstance(a, tuple) and not isinstance(b, tuple) and a != b
    ]


def _entry(leaf: Any) -> Any:
    if is_sharded(leaf):
        return aval(leaf.local), leaf.spec
    return (aval(leaf), None) if isinstance(leaf, torch.Tensor) else leaf


def _said(entry: Any) -> str:
    if not isinstance(entry, tuple):
        return repr(entry)
    found, spec = entry
    return f"{found}" if spec is None else f"{found}, {_described(spec)}"


def _described(spec: Spec) -> str:
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in spec.axes)
    return f"a shard of {list(spec.shape)} by {spec.partition!r} over {axes}{', frozen' * spec.frozen}"


def arguments(args: Sequence[Any], static: Sequence[int]) -> Tree:
    """The arguments that are traced; None in the place of static ones."""
    return tuple(None if i in static else arg for i, arg in enumerate(args))


def flat_arguments(args: Sequence[Any], kwargs: dict[str, Any], static: Sequence[int]) -> Flat:
    """All traced arguments, taken apart."""
    return flatten((arguments(args, static), kwargs))


def unhashable(static: Sequence[tuple[str, Any]], flat: Flat) -> ValueError:
    """What to say where a graph cannot be found again by the arguments."""
    named = [(f"static argument {name}", value) for name, value in static]
    problems = []
    for path, value in (*named, *zip(flat.paths, flat.leaves, strict=True)):
        try:
            hash(value.spec if is_sharded(value) else value)
        except TypeError:
            problems.append(Problem(path, f"{kind(value)}, which cannot be hashed", "a tensor, or what can"))
    remedy = "pass tensors in dicts, lists, tuples or NamedTuples"
    return leaf_error("jit: arguments are no pytrees of tensors", problems, remedy)
