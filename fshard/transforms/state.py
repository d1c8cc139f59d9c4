"""transform_state: what stateful transforms remember from step to step, as a tree of its own."""

import enum
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard.errors import Problem, leaf_error, refuse
from fshard.transforms.compose import reduction
from fshard.tree import Flat, P, Sharded, Spec, Tree, flatten, is_sharded, unflatten
from fshard.tree.checks import check_local, describe


class Absent(enum.Enum):
    """Where a verb is called without a state, because None is what transforms without one have."""

    ABSENT = enum.auto()


ABSENT = Absent.ABSENT


def transform_state(params: Tree) -> Tree:
    """Make the state of the parameters' transforms, such as what a lossy scatter left out; `TrainState.create` does.

    It belongs to ranks: each leaf of it is Sharded, of shape (ranks, ...), a row for every rank.

    Args:
        params: Pytree with Sharded leaves.

    Returns:
        A tree in the structure of `params`, with the state of each leaf in its place, None where it has none; None
        where no transform has a state.

    Raises:
        ValueError: if a leaf's shape does not match its spec.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params = fs.shard({"w": torch.ones(4)}, fs.quantize(mesh, scatter=True))
    ...     state, mine = fs.transform_state(params), {"w": torch.tensor([127.0, 0.75, -127.0, 3.25])}
    ...     grads, state = fs.scatter_grads(mine, params, transform_state=state)
    ...     return fs.unshard(grads)["w"].tolist(), state["w"].local.tolist()
    >>> fs.testing.spmd(program, world=2)[0]  # 0.75 went as 1, and 3.25 as 3
    ([127.0, 1.0, -127.0, 3.0], [[[0.0, -0.25], [0.0, 0.25]]])
    """
    flat = flatten(params)
    check_local("transform_state", flat)
    if not any(_has_state(leaf) for leaf in flat.leaves):
        return None
    states = [
        _init(leaf.spec, leaf.local.dtype, leaf.local.device) if _has_state(leaf) else None for leaf in flat.leaves
    ]
    return joined(flat, states)


def states_of(what: str, flat: Flat, state: Tree | Absent) -> list[Tree]:
    """Take a state apart: for each leaf of the parameters its own tensors, or None.

    Args:
        what: The verb that asks, for errors.
        flat: The parameters.
        state: What `transform_state` or the verb returned last.

    Returns:
        One tree for each leaf.

    Raises:
        ValueError: before any collective, if the state is not that of these parameters, or there is none where a
            transform needs one.
    """
    remedy = "pass transform_state=, first as fs.transform_state(params) makes it, then as this verb returns it"
    if state is ABSENT or state is None:
        if any(map(_spec_has_state, flat.specs)):
            pairs = zip(flat.paths, flat.leaves, strict=True)
            problems = [Problem(path, "no state", "that of its transform") for path, leaf in pairs if _has_state(leaf)]
            raise leaf_error(f"{what}: transforms need their state", problems, remedy)
        return [None] * len(flat.leaves)
    try:
        parts = flat.treedef.flatten_up_to(state)
    except ValueError:
        found = flatten(state).paths
        raise ValueError(
            f"{what}: expected transform_state to have the structure of the parameters, got leaves "
            f"{', '.join(found[:4])}{', ...' * (len(found) > 4)}; {remedy}"
        ) from None
    problems = [
        Problem(path, *misfit)
        for path, leaf, part in zip(flat.paths, flat.leaves, parts, strict=True)
        if (misfit := _misfit(leaf, part))
    ]
    refuse(f"{what}: transform_state does not fit the parameters", problems, remedy)
    return [_unwrapped(part) for part in parts]


def joined(flat: Flat, states: Sequence[Tree], like: Tree = ()) -> Tree:
    """Put the leaves' states together as one tree, each rank's tensors as rows of Sharded leaves.

    Args:
        flat: The parameters.
        states: One tree for each leaf, or None.
        like: The state before; None stays None.

    Returns:
        The tree.
    """
    if like is None:
        return None
    rows = [
        None if state is None else _wrapped(state, leaf.spec) for leaf, state in zip(flat.leaves, states, strict=True)
    ]
    return unflatten(flat.treedef, rows)


def _has_state(leaf: Any) -> bool:
    return is_sharded(leaf) and _spec_has_state(leaf.spec)


def _spec_has_state(spec: Spec) -> bool:
    return spec.transform is not None and not spec.frozen and reduction(spec.transform).has_state


def _wrapped(state: Tree, spec: Spec) -> Tree:
    """Each rank's tensors as rows of Sharded leaves."""
    flat = flatten(state)
    leaves = [
        tensor if tensor is None else Sharded(tensor.detach().unsqueeze(0), _row(tensor, spec))
        for tensor in flat.leaves
    ]
    return unflatten(flat.treedef, leaves)


def _row(tensor: torch.Tensor, spec: Spec) -> Spec:
    ranks = math.prod(axis.size for axis in spec.axes)
    names = tuple(axis.name for axis in spec.axes)
    partition = P(names if len(names) > 1 else names[0]) if names else P()
    return Spec((ranks, *tensor.shape), partition, spec.axes)


def _unwrapped(state: Tree) -> Tree:
    flat = flatten(state)
    return unflatten(flat.treedef, [leaf if leaf is None else leaf.local[0] for leaf in flat.leaves])


def _misfit(leaf: Any, part: Tree) -> tuple[str, str] | None:
    """Describe a state that does not fit its leaf, and the one expected."""
    if not _has_state(leaf):
        return None if part is None else (describe(part), "None, because its transform has no state")
    rows, made = flatten(part), _made_by_init(leaf.spec, leaf.local.dtype, leaf.local.device)
    needed = f"leaves that are Sharded over {[axis.name for axis in leaf.spec.axes]}, a row for each rank"
    if rows.treedef != made.treedef:
        return describe(part), needed
    for row, shape in zip(rows.leaves, made.leaves, strict=True):
        if shape is None or row is None:
            if row is not shape:
                return describe(row), "None" if shape is None else needed
        elif not is_sharded(row) or row.spec.axes != leaf.spec.axes:
            return describe(row), needed
        elif tuple(row.local.shape) != (1, *shape):
            return f"rows of shape {tuple(row.local.shape)[1:]}", f"rows of shape {shape}"
    return None


def _init(spec: Spec, dtype: torch.dtype, device: torch.device) -> Tree:
    # Zeros that take no memory.
    grad = torch.zeros((), dtype=dtype, device=device).expand(spec.gathered_shape)
    return spec.transform.init(grad)  # type: ignore[union-attr]


@lru_cache(maxsize=4096)
def _made_by_init(spec: Spec, dtype: torch.dtype, device: torch.device) -> Flat:
    """The state of a leaf of this kind, with shapes in the place of tensors."""
    flat = flatten(_init(spec, dtype, device))
    return flat._replace(leaves=[None if leaf is None else tuple(leaf.shape) for leaf in flat.leaves])
