"""Maths leaf by leaf on the tensors of trees that share the structure of the parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._compat import is_tracing
from fshard.checks import check_floating, kind
from fshard.collectives import pvary
from fshard.errors import Problem, leaf_error
from fshard.tree import Axis, Flat, Sharded, Tree, flatten, is_sharded, unflatten
from fshard.update import Optimizer


def tensor_of(leaf: Any) -> Any:
    """The tensor that a rank holds of a leaf."""
    return leaf.local if is_sharded(leaf) else leaf


def like(leaf: Any, tensor: Any) -> Any:
    """Wrap a tensor as a leaf is wrapped; one of another shape belongs to the whole leaf."""
    return Sharded(tensor, leaf.spec) if is_sharded(leaf) and tensor.shape == leaf.local.shape else tensor


def trained(flat: Flat) -> list[int]:
    """Positions of the leaves that take a gradient."""
    return [i for i, leaf in enumerate(flat.leaves) if leaf is not None and not (is_sharded(leaf) and leaf.spec.frozen)]


def partition_axes(leaf: Any) -> tuple[Axis, ...]:
    """The axes whose ranks hold different elements of a leaf."""
    return tuple(axis for axis in leaf.spec.partition_axes() if axis.size > 1) if is_sharded(leaf) else ()


def varying(number: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Hand a number that agrees between ranks to each rank's own shards, so that its cotangents are summed."""
    for axis in axes:
        number = pvary(number, axis)
    return number


def leafwise(
    f: Callable[..., Any], grads: Tree, *trees: Tree, numbers: Sequence[Any] = (), first: int = 0
) -> tuple[Tree, ...]:
    """Map tensors of several trees to tensors of several new ones, where there is a gradient.

    Args:
        f: Called with the local tensors of one leaf of each tree and then the numbers; returns a tuple of as many
            tensors each time.
        grads: The tree that says where; None elsewhere.
        *trees: Trees of its structure.
        numbers: Those that are tensors agree between ranks; their cotangents are summed where ranks use them on shards.
        first: Which tree gives the first new one its dtypes; the next one gives them to the second, and so on.

    Returns:
        As many trees as f returns tensors, with the leaves' specs, and None where there is no gradient.
    """
    flats = [flatten(tree) for tree in (grads, *trees)]
    by_axes: dict[tuple[Axis, ...], list[Any]] = {}
    rows = []
    for leaves in zip(*(flat.leaves for flat in flats), strict=True):
        axes = partition_axes(leaves[0])
        if axes not in by_axes:
            by_axes[axes] = [varying(n, axes) if isinstance(n, torch.Tensor) else n for n in numbers]
        rows.append(None if leaves[0] is None else f(*map(tensor_of, leaves), *by_axes[axes]))
    width = next((len(row) for row in rows if row is not None), 0)
    outs = []
    for k in range(width):
        pairs = zip(flats[0].leaves, rows, strict=True)
        # Among tensors of shape () a number of another dtype would decide theirs.
        dtypes = [getattr(tensor_of(leaf), "dtype", None) for leaf in flats[first + k].leaves]
        wrapped = [
            None if row is None else like(leaf, row[k].to(dtype))
            for (leaf, row), dtype in zip(pairs, dtypes, strict=True)
        ]
        outs.append(unflatten(flats[0].treedef, wrapped))
    return tuple(outs)


def joined(new: Tree, old: Tree) -> Tree:
    """The leaves of a tree, and where it has none those of another."""
    flat, others = flatten(new), flatten(old).leaves
    return unflatten(flat.treedef, [b if a is None else a for a, b in zip(flat.leaves, others, strict=True)])


def zeros(params: Tree) -> Tree:
    """Zeros in the place of every leaf that takes a gradient, with its spec; None elsewhere."""
    flat = flatten(params)
    leaves: list[Any] = [None] * len(flat.leaves)
    for i in trained(flat):
        leaves[i] = like(flat.leaves[i], torch.zeros_like(tensor_of(flat.leaves[i]), requires_grad=False))
    return unflatten(flat.treedef, leaves)


def where_trained(params: Tree) -> Tree:
    """The leaves that take a gradient; None in the place of others."""
    flat = flatten(params)
    chosen = set(trained(flat))
    return unflatten(flat.treedef, [leaf if i in chosen else None for i, leaf in enumerate(flat.leaves)])


def none_missed(params: Tree) -> Tree:
    """Say of every leaf that takes a gradient that it has had one in each update: a count of 0 that had none."""
    flat = flatten(params)
    leaves: list[Any] = [None] * len(flat.leaves)
    for i in trained(flat):
        leaves[i] = torch.zeros((), dtype=torch.int64)
    return unflatten(flat.treedef, leaves)


def missing(missed: Tree, grads: Tree) -> Tree:
    """Count one more update for leaves without a gradient."""
    flat = flatten(missed)
    leaves = list(flat.leaves)
    for i, grad in enumerate(flatten(grads).leaves):
        if leaves[i] is not None:
            # A graph says by itself whose memory its results have.
            leaves[i] = leaves[i] + 1 if grad is None else leaves[i] if is_tracing() else leaves[i].clone()
    return unflatten(flat.treedef, leaves)


def check_real(what: str, flat: Flat) -> None:
    """Refuse leaves that take a gradient and are no real floating tensors."""
    check_floating(what, flat)
    problems = [
        Problem(flat.paths[i], kind(tensor_of(flat.leaves[i])), "a real tensor")
        for i in trained(flat)
        if tensor_of(flat.leaves[i]).is_complex()
    ]
    if problems:
        remedy = "keep torch.view_as_real of them as parameters, or step them by fs.sgd"
        raise leaf_error(f"{what}: leaves are complex", problems, remedy)


def check_state(what: str, state: Any, needed: type) -> None:
    """Refuse a state that another optimizer has made."""
    if not isinstance(state, needed):
        remedy = "update with the optimizer that made the state"
        raise ValueError(f"{what}: expected the state to be a {needed.__name__}, got {kind(state)}; {remedy}")


def check_optimizer(what: str, tx: Any, such_as: str = "fs.from_torch or an fs.chain with one") -> None:
    """Refuse a transformation to wrap that is no optimizer."""
    if not isinstance(tx, Optimizer):
        raise ValueError(f"{what}: expected tx to be an Optimizer, such as {such_as}, got {kind(tx)}")
