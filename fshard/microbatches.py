"""Microbatches of a whole job: which of them are a rank's, and sums over them in one binary tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.collectives import reduction_axes
from fshard.errors import expect
from fshard.tree import Axis, ReshardPolicy, Tree, flatten, is_sharded, leaves_of
from fshard.tree.checks import describe


class Share(NamedTuple):
    """One rank's part of the microbatches of a job: every `ranks`-th of them.

    Attributes:
        ranks: How many ranks share them.
        rank: This rank's number, in the order of reduction.
    """

    ranks: int
    rank: int

    def check(self, what: str, own: int) -> None:
        """Refuse numbers of ranks, and of microbatches on each, that make no binary tree."""
        number = own * self.ranks
        found = f"{own} microbatches on each of {self.ranks} ranks"
        needed = 'powers of two of ranks and of microbatches for reduction_order="tree"'
        expect(number & (number - 1) == 0, what, needed, found, 'take others, or leave out reduction_order="tree"')

    def slots(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the values of this rank's microbatches at their places among those of the job, with zeros elsewhere.

        Args:
            values: A tensor for each microbatch of this rank, all of one shape.

        Returns:
            A tensor with a row for each microbatch of the job. Its sum over ranks holds every value: a sum with zeros
            is exact.
        """
        zeros = [torch.zeros_like(values[0])] * self.ranks
        return torch.stack([row for value in values for row in (*zeros[: self.rank], value, *zeros[self.rank + 1 :])])


class TreeSum:
    """Adds up a power of two of parts in one binary tree, and holds the fewest partial sums that this allows.

    A part that is None counts as zeros; so a sum has the same bits whoever holds them.
    """

    def __init__(self) -> None:
        """Nothing is added yet."""
        # By level: a sum of 2**level parts.
        self._sums: dict[int, torch.Tensor | None] = {}

    def add(self, part: torch.Tensor | None) -> None:
        """Add the part that comes next."""
        level = 0
        while level in self._sums:
            before = self._sums.pop(level)
            # Zeros make a positive zero of a negative one.
            if before is not None:
                part = before + (0.0 if part is None else part)
            elif part is not None:
                part = part + 0.0
            level += 1
        self._sums[level] = part

    def total(self) -> torch.Tensor | None:
        """Hand over the sum; None where no part was a tensor."""
        return next(iter(self._sums.values()), None)


def tree_total(rows: torch.Tensor) -> torch.Tensor:
    """Add up the rows of a tensor, a power of two of them, in a binary tree."""
    # A negative zero counts as a zero, as it does where other ranks' zeros are added to it.
    rows = rows + 0.0
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def order_of(what: str, params: Tree, communicate: str | None, reduction_order: str | None) -> str:
    """Choose whether gradients are reduced in each microbatch or once: as a caller says, or the strategy."""
    known = (None, "each") if reduction_order else (None, "each", "once")
    expect(communicate in known, what, f"communicate to be one of {known}", repr(communicate))
    policies = (leaf.spec.reshard or ReshardPolicy() for leaf in leaves_of(params) if is_sharded(leaf))
    return communicate or (
        "each" if reduction_order or all(policy.reduce_each_microbatch for policy in policies) else "once"
    )


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
    needed = f"as many microbatches on each of {share.ranks} ranks"
    found = f"{len(batches)} in the whole job"
    remedy = "cut the batch in a multiple of that many microbatches"
    expect(len(batches) % share.ranks == 0, "microbatches", needed, found, remedy)
    return [batches[i] for i in range(share.rank, len(batches), share.ranks)]


def check_batches(what: str, batches: Any) -> None:
    """Refuse what is no sequence of microbatches."""
    given = isinstance(batches, Sequence)
    found = "none" if given else describe(batches)
    expect(given and len(batches) > 0, what, "batches to be a sequence of one or more microbatches", found)
