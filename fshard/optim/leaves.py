"""What updates share: the leaves that take a gradient, how often each was updated, how it is split, and schedules."""

from collections.abc import Callable
from typing import Any

import torch

from fshard.tree import Axis, Tree, is_sharded, is_trained, map_leaves
from fshard.tree.checks import FINITE, check_numbers


def partition_axes(leaf: Any) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different elements of a leaf."""
    if not is_sharded(leaf):
        return ()
    return tuple([axis for axis in leaf.spec.partition_axes() if axis.size > 1])


def map_trained_leaves(f: Callable[[Any], Any], params: Tree) -> Tree:
    """Map over the leaves that take a gradient. Others become None."""
    return map_leaves(lambda leaf: f(leaf) if is_trained(leaf) else None, params)


def call_schedule(schedule: Callable[..., Any], name: str, count: torch.Tensor, *, allow_pairs: bool = False) -> Any:
    """Return the value of a hyperparameter in an update.

    Args:
        schedule: The function that the user passed.
        name: The hyperparameter, for an error.
        count: The number of updates made.
        allow_pairs: Whether to return a tuple or a list as it is, such as betas.

    Raises:
        ValueError: if the function returns something else than a number or a tensor of one element.
    """
    value = schedule(count)
    # Such as of `lambda count: count >= 10`. NumPy's arrays of shape () count as numbers.
    is_flag = getattr(value, "dtype", type(value)) in (bool, torch.bool)
    if is_flag or hasattr(value, "__array_interface__"):
        value = value + 0
    # Broadcast against shards, a tensor of several elements would give each rank other rates.
    is_pair = allow_pairs and isinstance(value, tuple | list)
    if not is_pair:
        check_numbers("update", FINITE, **{f"the value of the schedule of {name}": value})
    return value


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
