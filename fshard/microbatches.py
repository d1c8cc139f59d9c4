"""Microbatches of a whole job: which of them are a rank's."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from fshard import comm
from fshard.collectives import reduction_axes
from fshard.tree import Axis, Tree, flatten
from fshard.tree.checks import describe


class Share(NamedTuple):
    """One rank's part of the microbatches of a job: every `ranks`-th of them.

    Attributes:
        ranks: How many ranks share them.
        rank: This rank's number, in the order of reduction.
    """

    ranks: int
    rank: int


def share_of(axes: Sequence[Axis]) -> Share:
    """Find which microbatches of a job are this rank's, by the axes that gradients are summed over."""
    rank, ranks = 0, 1
    for axis in reversed(axes):
        rank += comm.rank(axis) * ranks
        ranks *= axis.size
    return Share(ranks, rank)


def microbatches(batches: Sequence[Any], like: Tree) -> list[Any]:
    """Choose this rank's microbatches of a job's, so that sums over them do not depend on the number of ranks.

    Ranks are numbered in the order of reduction, the axis that is summed first fastest. Each of W ranks gets every W-th
    microbatch, as `accumulate(..., reduction_order="tree")` expects them.

    Args:
        batches: All microbatches of the job, the same on every rank; `list(enumerate(batches))` numbers them, such as
            for keys of dropout by `fold_in`.
        like: Parameters, whose specs tell the ranks.

    Returns:
        This rank's microbatches.

    Raises:
        ValueError: if ranks would not get as many each.

    >>> import torch
    >>> import fshard as fs
    >>> params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    >>> fs.microbatches(range(4), like=params)
    [0, 1, 2, 3]
    """
    check_batches("microbatches", batches)
    share = share_of(reduction_axes(flatten(like), "microbatches"))
    if len(batches) % share.ranks:
        raise ValueError(
            f"microbatches: {len(batches)} microbatches cannot be shared equally by {share.ranks} ranks. Cut the batch "
            f"into a multiple of {share.ranks} microbatches."
        )
    return [batches[i] for i in range(share.rank, len(batches), share.ranks)]


def check_batches(api_name: str, batches: Any) -> None:
    """Refuse what is no sequence of microbatches."""
    is_sequence = isinstance(batches, Sequence)
    if not is_sequence or not batches:
        got = "an empty one" if is_sequence else describe(batches)
        raise ValueError(f"{api_name}: batches must be a sequence of one or more microbatches, got {got}.")
