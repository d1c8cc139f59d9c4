"""Buffers: make those that `apply` returned agree between ranks."""

import torch

from fshard import comm
from fshard.checks import check_operands
from fshard.objective import reduction_axes
from fshard.tree import Tree, tree_leaves, tree_map


def sync_buffers(buffers: Tree, like: Tree, by: str = "rank0") -> Tree:
    """Make buffers agree between ranks, as DDP does before each forward.

    Args:
        buffers: Any tree of tensors, such as the buffers that `apply` returned.
        like: Sharded parameters, whose specs tell the ranks.
        by: "rank0" takes the first rank's; "mean" averages the floating ones and takes the first rank's of others.

    Returns:
        The tree with the same values on every rank.

    Raises:
        ValueError: if `by` is another word.
    """
    if by not in ("rank0", "mean"):
        raise ValueError(f'sync_buffers: expected by to be "rank0" or "mean", got {by!r}')
    for axis in reduction_axes(like, "sync_buffers"):
        check_operands("sync_buffers", buffers, axis)
        rows = iter(comm.all_gather(tree_leaves(buffers), axis, "sync_buffers"))
        buffers = tree_map(lambda _, rows=rows: _merged(next(rows), by), buffers)
    return buffers


def _merged(rows: torch.Tensor, by: str) -> torch.Tensor:
    return rows.mean(0) if by == "mean" and rows.is_floating_point() else rows[0].clone()
