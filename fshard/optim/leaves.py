"""Which leaves an update changes: those that take a gradient, how often each was updated, and how each is split."""

from collections.abc import Callable
from typing import Any

import torch

from fshard.tree import Axis, Tree, is_sharded, is_trained, map_leaves


def partition_axes(leaf: Any) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different elements of a leaf."""
    if not is_sharded(leaf):
        return ()
    return tuple([axis for axis in leaf.spec.partition_axes() if axis.size > 1])


def map_trained_leaves(f: Callable[[Any], Any], params: Tree) -> Tree:
    """Map over the leaves that take a gradient. Others become None."""
    return map_leaves(lambda leaf: f(leaf) if is_trained(leaf) else None, params)


def zero() -> torch.Tensor:
    """Make a count of no updates."""
    return torch.zeros((), dtype=torch.int64)


def no_updates(params: Tree) -> Tree:
    """Make a count of no updates for each leaf that takes a gradient."""
    return map_trained_leaves(lambda leaf: zero(), params)


def count_updates(counts: Tree, grads: Tree) -> Tree:
    """Count an update of each leaf that has a gradient."""

    def count_update(count: torch.Tensor | None, grad: Any) -> torch.Tensor | None:
        if grad is None:
            return count
        # A leaf that was frozen until now has no count.
        return zero() + 1 if count is None else count + 1

    return map_leaves(count_update, counts, grads)
