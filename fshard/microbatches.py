"""Microbatches of a whole job: which of them are a rank's, and sums over them in one binary tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.collectives import reduction_axes
from fshard.errors import Problem, expect, refuse
from fshard.tree import Axis, ReshardPolicy, Tree, flatten, is_sharded, leaves_of
from fshard.tree.checks import describe


class Share(NamedTuple):
    """One rank's part of the microbatches of a job.

    Attributes:
        total: How many microbatches the job has.
        ranks: How many ranks share them.
        rank: This rank's number, in the order of reduction.
        communicate: "once" gives each rank a contiguous block, "each" every `ranks`-th microbatch.
    """

    total: int
    ranks: int
    rank: int
    communicate: str

    @property
    def indices(self) -> range:
        """Numbers of the rank's microbatches among those of the job."""
        if self.communicate == "each":
            return range(self.rank, self.total, self.ranks)
        own = self.total // self.ranks
        return range(self.rank * own, (self.rank + 1) * own)

    def slots(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the values of this rank's microbatches at their places among those of the job, with zeros elsewhere.

        Args:
            values: A tensor for each microbatch of this rank, all of one shape.

        Returns:
            A tensor of shape (total, *shape), whose sum over ranks holds every value: a sum with zeros is exact.
        """
        own = dict(zip(self.indices, values, strict=True))
        zero = torch.zeros_like(values[0])
        return torch.stack([own.get(i, zero) for i in range(self.total)])


class TreeSum:
    """Adds up a power of two of parts in one binary tree, and holds the fewest partial sums that this allows.

    A part that is None counts as zeros; so a sum has the same bits whoever holds them.
    """

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        """Nothing is added yet."""
        self._sums: list[tuple[int, torch.Tensor | None]] = []

    def add(self, part: torch.Tensor | None) -> None:
        """Add the part that comes next."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            part, size = _plus(self._sums.pop()[1], part), 2 * size
        self._sums.append((size, part))

    def total(self) -> torch.Tensor | None:
        """Hand over the sum; None where no part was a tensor."""
        return self._sums[-1][1] if self._sums else None


def _plus(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is not None and b is not None:
        return a + b
    one = b if a is None else a
    # Zeros make a positive zero of a negative one.
    return None if one is None else one + 0.0


def tree_total(values: torch.Tensor) -> torch.Tensor:
    """Add up what a tensor holds along its first dim, in a binary tree.

    Args:
        values: A tensor of shape (number, *shape), where number is a power of two.

    Returns:
        The sum, of `shape`.
    """
    # A negative zero counts as a zero, as it does where other ranks' zeros are added to it.
    values = values + torch.zeros((), dtype=values.dtype, device=values.device)
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def reduces_early(params: Tree) -> bool:
    """Tell whether the strategy of parameters reduces each gradient as it appears."""
    return all((leaf.spec.reshard or ReshardPolicy()).early for leaf in leaves_of(params) if is_sharded(leaf))


def share_of(what: str, params: Tree, communicate: str | None, job: int) -> Share:
    """Find which microbatches of a job are this rank's, where sums over them are one tree at any world size.

    Args:
        what: The verb that asks, for errors.
        params: The parameters, whose specs tell the ranks.
        communicate: As for `accumulate`; None leaves it to the strategy.
        job: How many the whole job has.

    Returns:
        The share.

    Raises:
        ValueError: if ranks do not get as many each.
    """
    ranks, rank = place_of(ordered_axes(what, params))
    remedy = "cut the batch in a multiple of that many microbatches"
    expect(job % ranks == 0, what, f"as many microbatches on each of {ranks} ranks", f"{job} in the whole job", remedy)
    return Share(job, ranks, rank, communicate or ("each" if reduces_early(params) else "once"))


def own_share(what: str, params: Tree, communicate: str | None, own: int) -> Share:
    """Find the share of a rank that was given some microbatches.

    Args:
        what: The verb that begins, for errors.
        params: As for `share_of`.
        communicate: As for `share_of`.
        own: How many microbatches this rank was given, and each of the others.

    Returns:
        The share.

    Raises:
        ValueError: as for `share_of`, or if the ranks or their microbatches are no power of two.
    """
    axes = ordered_axes(what, params)
    names = " by ".join(f"{axis.size} ranks of {axis.name!r}" for axis in axes) or "1 rank"
    powers = all(number & (number - 1) == 0 for number in (own, *(axis.size for axis in axes)))
    needed = 'powers of two of ranks and of microbatches for sums="tree"'
    expect(powers, what, needed, f"{own} microbatches on each of {names}", 'take others, or leave out sums="tree"')
    return share_of(what, params, communicate, own * place_of(axes)[0])


def place_of(axes: Sequence[Axis]) -> tuple[int, int]:
    """Count the ranks of some axes, and find this one's number among them, the first axis fastest."""
    rank, ranks = 0, 1
    for axis in axes:
        rank, ranks = rank + comm.rank(axis) * ranks, ranks * axis.size
    return ranks, rank


def ordered_axes(what: str, params: Tree) -> Sequence[Axis]:
    """Find the axes that gradients are summed over, in the order of the sums, which all leaves must share."""
    flat = flatten(params)

    def shared(axes: Sequence[Axis]) -> list[Axis]:
        return [axis for axis in reversed(axes) if axis.size > 1]

    wanted = shared(reduction_axes(flat, what))
    problems = [
        Problem(path, f"axes in the order {[a.name for a in found]}", f"{[a.name for a in wanted]}")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and (found := shared(leaf.spec.transform.axes)) != wanted
    ]
    refuse(f"{what}: leaves are summed in several orders", problems, "compose the axes in one order")
    return wanted


def microbatches(batches: Sequence[Any], like: Tree, communicate: str | None = None) -> list[Any]:
    """Choose this rank's microbatches of a job's, so that sums over them do not depend on the number of ranks.

    Ranks are numbered in the order of reduction, the axis that is summed first fastest. "once" gives each rank a
    contiguous block, "each" every W-th microbatch of W ranks, as `accumulate(..., sums="tree")` expects them.

    Args:
        batches: All microbatches of the job, the same on every rank; range(M) gives their numbers.
        like: Parameters, whose specs tell the ranks.
        communicate: As for `accumulate`; None leaves it to the strategy.

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
    check_batches("microbatches", batches, communicate)
    return [batches[i] for i in share_of("microbatches", like, communicate, len(batches)).indices]


def check_batches(what: str, batches: Any, communicate: str | None) -> None:
    """Refuse what is no sequence of microbatches, and another order than those that `accumulate` knows."""
    expect(communicate in (None, "each", "once"), what, 'communicate to be "each", "once" or None', repr(communicate))
    given = isinstance(batches, Sequence)
    found = "none" if given else describe(batches)
    expect(given and len(batches) > 0, what, "the microbatches to be a sequence of one or more", found)
