"""transform_state: what stateful transforms remember from step to step, as a tree of its own."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard.errors import Problem, refuse
from fshard.transforms.compose import reduction
from fshard.tree import Flat, Sharded, Spec, Tree, flatten, is_sharded, map_leaves, unflatten
from fshard.tree.checks import check_local, describe

# Where a verb is called without a state, because None is what transforms without one have.
ABSENT: Any = ...


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
    states = [_init(leaf.spec, leaf.local.detach().new_zeros(())) if is_sharded(leaf) else None for leaf in flat.leaves]
    return joined(flat, states)


def states_of(what: str, flat: Flat, state: Tree) -> list[Tree]:
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
        if not any(map(_has_state, flat.specs)):
            return [None] * len(flat.leaves)
        state = flat.unflatten([None] * len(flat.leaves))
    check_local(f"{what} with transform_state", flatten(state))
    parts = flat.treedef.flatten_up_to(state)
    kinds = [_needed(leaf.spec, leaf.local.dtype) if is_sharded(leaf) else "None" for leaf in flat.leaves]
    rows = zip(flat.paths, map(_kind, parts), kinds, strict=True)
    problems = [Problem(path, found, needed) for path, found, needed in rows if found != needed]
    refuse(f"{what}: transform_state does not fit the parameters", problems, remedy)
    return [map_leaves(lambda row: row and row.local[0], part) for part in parts]


def joined(flat: Flat, states: Sequence[Tree]) -> Tree:
    """Put the leaves' states together as one tree, each rank's tensors as rows of Sharded leaves.

    Args:
        flat: The parameters.
        states: One tree for each leaf, or None.

    Returns:
        The tree; None where no transform has a state.
    """
    if not any(map(_has_state, flat.specs)):
        return None
    rows = [None if state is None else _rows(leaf.spec, state) for leaf, state in zip(flat.leaves, states, strict=True)]
    return unflatten(flat.treedef, rows)


def _rows(spec: Spec, state: Tree) -> Tree:
    """Make the tensors of a leaf's state this rank's rows."""

    def row(x: torch.Tensor | None) -> Sharded | None:
        return None if x is None else Sharded(x.detach()[None], _spec_of_rows(spec, x.shape))

    return map_leaves(row, state)


@lru_cache(maxsize=4096)
def _spec_of_rows(spec: Spec, shape: tuple[int, ...]) -> Spec:
    found = Spec((math.prod(axis.size for axis in spec.axes), *shape))
    for axis in spec.axes:
        found = found.split(axis, 0)
    return found


def _has_state(spec: Spec) -> bool:
    return spec.transform is not None and not spec.frozen and reduction(spec.transform).has_state


def _init(spec: Spec, zero: torch.Tensor) -> Tree:
    # Zeros that take no memory.
    return spec.transform.init(zero.expand(spec.gathered_shape)) if _has_state(spec) else None


@lru_cache(maxsize=4096)
def _needed(spec: Spec, dtype: torch.dtype) -> str:
    """The kind of state that the transform of a leaf needs."""
    return _kind(_rows(spec, _init(spec, torch.zeros((), dtype=dtype))))


def _kind(state: Tree) -> str:
    """Describe the state of a leaf, without values."""

    def said(leaf: Any) -> str:
        return f"rows of {leaf.spec.shape} split by {leaf.spec.partition!r}" if is_sharded(leaf) else describe(leaf)

    return f"{map_leaves(said, state)}"
