"""transform_state: what stateful transforms remember from step to step, as a tree of its own."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard.errors import expect, refuse
from fshard.transforms.base import foreign_names
from fshard.transforms.structure import reduction
from fshard.tree import Flat, Sharded, Spec, Tree, flatten, is_sharded, map_leaves
from fshard.tree.checks import check_local, describe
from fshard.tree.flat import Misfit

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
    check_local("transform_state", flat, needs_values=False)
    states: list[Tree] = []
    for leaf in flat.leaves:
        states.append(_init(leaf.spec, leaf.local.detach().new_zeros(())) if is_sharded(leaf) else None)
    return join_states(flat, states)


def states_of(api_name: str, flat: Flat, state: Tree) -> list[Tree]:
    """Take a state apart: for each leaf of the parameters its own tensors, or None.

    Args:
        api_name: The verb that asks, for errors.
        flat: The parameters.
        state: What `transform_state` or the verb returned last.

    Returns:
        One tree for each leaf.

    Raises:
        ValueError: before any collective, if the state is not that of these parameters, or there is none where a
            transform needs one.
    """
    if state is ABSENT or state is None:
        if not any(map(_has_state, flat.specs)):
            return [None] * len(flat.leaves)
        state = flat.unflatten([None] * len(flat.leaves))
    check_local(f"{api_name} with transform_state", flatten(state))
    rows = flat.treedef.flatten_up_to(state)

    def misfit(leaf: Any, row: Tree) -> Misfit:
        expected = _expected_kind(leaf.spec, leaf.local.dtype) if is_sharded(leaf) else "None"
        kind = _kind(row)
        return None if kind == expected else (kind, expected)

    remedy = (
        "pass transform_state=fs.transform_state(params) in the first step, and the state that the previous call "
        "returned afterwards"
    )
    refuse(f"{api_name}: transform_state does not fit the parameters", flat.problems(misfit, rows), remedy)
    return [map_leaves(lambda leaf: leaf and leaf.local[0], row) for row in rows]


def join_states(flat: Flat, states: Sequence[Tree]) -> Tree:
    """Put the leaves' states together as one tree, each rank's tensors as rows of Sharded leaves.

    Args:
        flat: The parameters.
        states: One tree for each leaf, or None.

    Returns:
        The tree; None where no transform has a state.
    """
    if not any(map(_has_state, flat.specs)):
        return None
    return flat.unflatten(
        None if state is None else _rows(leaf.spec, state) for leaf, state in zip(flat.leaves, states, strict=True)
    )


def _rows(spec: Spec, state: Tree) -> Tree:
    """Make the tensors of a leaf's state this rank's rows."""

    def row(tensor: torch.Tensor | None) -> Sharded | None:
        if tensor is None:
            return None
        names = " or ".join(foreign_names(spec.transform))
        expect(isinstance(tensor, torch.Tensor), names, "tensors in the states of init and scatter", describe(tensor))
        return Sharded(tensor.detach()[None], _spec_of_rows(spec, tensor.shape))

    return map_leaves(row, state)


@lru_cache(maxsize=4096)
def _spec_of_rows(spec: Spec, shape: tuple[int, ...]) -> Spec:
    """Describe a tensor with a row for each rank of a leaf."""
    ranks = math.prod(axis.size for axis in spec.axes)
    rows = Spec((ranks, *shape))
    for axis in spec.axes:
        rows = rows.split(axis, dim=0)
    return rows


def _has_state(spec: Spec) -> bool:
    return not spec.frozen and reduction(spec.transform).has_state


def _init(spec: Spec, zero: torch.Tensor) -> Tree:
    """Make the first state of a leaf, from a zero of its dtype on its device."""
    if not _has_state(spec):
        return None
    # Zeros that take no memory.
    return spec.transform.init(zero.expand(spec.gathered_shape))


@lru_cache(maxsize=4096)
def _expected_kind(spec: Spec, dtype: torch.dtype) -> str:
    """Describe the state that the transform of a leaf needs, without values."""
    return _kind(_rows(spec, _init(spec, torch.zeros((), dtype=dtype))))


def _kind(state: Tree) -> str:
    """Describe the state of a leaf, without values."""

    def describe_row(leaf: Any) -> str:
        if is_sharded(leaf):
            return f"rows of {leaf.spec.shape} split by {leaf.spec.partition!r}"
        return describe(leaf)

    return f"{map_leaves(describe_row, state)}"
