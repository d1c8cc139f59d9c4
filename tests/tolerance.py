"""How close tests ask for: the one tolerance of sums in another order, from the values that are expected."""

from typing import Any

import torch

import fshard as fs
from fshard.rounding import tolerance


def within(expected: Any, terms: int, steps: float = 1, dtype: torch.dtype | None = None) -> dict[str, float]:
    """What `assert_trees_close` is to allow where sums have another order than in the expected tree.

    Args:
        expected: A tree of values, whose largest magnitude is the scale.
        terms: How many terms a sum has.
        steps: How many sums one after another hand on the difference, times by how much.
        dtype: The dtype that sums are rounded to; by default the narrowest in the tree.

    Returns:
        The options, which are those of torch.testing.assert_close too.
    """
    leaves = floating(expected)
    dtypes = [dtype] if dtype else [leaf.dtype for leaf in leaves]
    scale = largest(leaves)
    return {"rtol": 0.0, "atol": max((tolerance(each, terms, scale, steps) for each in dtypes), default=0.0)}


def largest(tree: Any) -> float:
    """The largest magnitude in a tree."""
    return max((float(leaf.abs().max()) for leaf in floating(tree)), default=0.0)


def step_at_one(dtype: torch.dtype) -> float:
    """The distance from 1 to the next number of a dtype."""
    return torch.finfo(dtype).eps


def floating(tree: Any) -> list[torch.Tensor]:
    """The leaves of a tree that are rounded, unsharded and detached; a number of Python is a float64."""
    leaves = []
    for leaf in fs.tree_leaves(fs.unshard(tree)):
        tensor = torch.tensor(leaf, dtype=torch.float64) if type(leaf) is float else leaf
        rounded = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())
        if rounded and tensor.numel():
            leaves.append(tensor.detach())
    return leaves
