"""Microbatches of a whole job: which of them are a rank's, and sums over them in one binary tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.collectives import Over, reduction_axes
from fshard.errors import Problem, expect, refuse
from fshard.tree import Axis, ReshardPolicy, Tree, flatten, is_sharded, leaves_of
from fshard.tree.checks import describe

ORDERS = ("each", "once")


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
        self._sums: list[tuple[int, torch.Tensor | None, bool]] = []

    def add(self, part: torch.Tensor | None, own: bool = False) -> None:
        """Add the part that comes next.

        Args:
            part: The part.
            own: Whether it may be written to.
        """
        size = 1
        while self._sums and self._sums[-1][0] == size:
            _, left, owned = self._sums.pop()
            part, own = _plus(left, owned, part, own)
            size *= 2
        self._sums.append((size, part, own))

    def total(self) -> torch.Tensor | None:
        """Hand over the sum; None where no part was a tensor."""
        return self._sums[-1][1] if self._sums else None


def _plus(a: torch.Tensor | None, own_a: bool, b: torch.Tensor | None, own_b: bool) -> tuple[torch.Tensor | None, bool]:
    if a is None or b is None:
        # Zeros make a positive zero of a negative one.
        one = b if a is None else a
        return (None, False) if one is None else (one + 0.0, True)
    if own_a or own_b:
        return (a.add_(b) if own_a else b.add_(a)), True
    return a + b, True


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


def check_order(what: str, communicate: str | None) -> None:
    """Refuse another word than those that `accumulate` takes."""
    expect(communicate in (None, *ORDERS), what, 'communicate to be "each", "once" or None', repr(communicate))


def reduces_early(params: Tree) -> bool:
    """Tell whether the strategy of parameters reduces each gradient as it appears."""
    return all((leaf.spec.reshard or ReshardPolicy()).early for leaf in leaves_of(params) if is_sharded(leaf))


def share_of(what: str, params: Tree, communicate: str | None, job: int) -> Share:
    """Find which microbatches of a job are this rank's.

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
    ranks, rank = place_of(_ordered(what, params))
    remedy = "cut the batch in a multiple of that many microbatches"
    expect(job % ranks == 0, what, f"as many microbatches on each of {ranks} ranks", f"{job} in the whole job", remedy)
    order = communicate or ("each" if reduces_early(params) else "once")
    return Share(job, ranks, rank, order)


def own_share(what: str, params: Tree, communicate: str | None, own: int) -> Share:
    """Find the share of a rank that was given some microbatches, where sums over them are one tree at any world size.

    Args:
        what: The verb that begins, for errors.
        params: As for `share_of`.
        communicate: As for `share_of`.
        own: How many microbatches this rank was given, and each of the others.

    Returns:
        The share.

    Raises:
        ValueError: as for `share_of`, or if the ranks or their microbatches are no power of two.
        RuntimeError: if another rank failed.
    """
    axes = _ordered(what, params)
    names = " by ".join(f"{axis.size} ranks of {axis.name!r}" for axis in axes) or "1 rank"
    needed = 'powers of two of ranks and of microbatches for sums="tree"'
    powers = all(map(_is_power, (own, *(axis.size for axis in axes))))
    expect(powers, what, needed, f"{own} microbatches on each of {names}", 'take others, or leave out sums="tree"')
    return share_of(what, params, communicate, own * place_of(axes)[0])


def numbered_in_turn(what: str, params: Tree, own: int, once: bool, over: Over = None) -> Share:
    """Number as many microbatches on every rank, where sums are no tree."""
    ranks, rank = place_of([axis for axis in reversed(reduction_axes(flatten(params), what, over)) if axis.size > 1])
    return Share(own * ranks, ranks, rank, "once" if once else "each")


def place_of(axes: Sequence[Axis]) -> tuple[int, int]:
    """Count the ranks of some axes, and find this one's number among them, the first axis fastest."""
    rank, ranks = 0, 1
    for axis in axes:
        rank, ranks = rank + comm.rank(axis) * ranks, ranks * axis.size
    return ranks, rank


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _ordered(what: str, params: Tree) -> Sequence[Axis]:
    """Find the axes that gradients are summed over, in the order of the sums, which all leaves must share."""
    flat = flatten(params)

    def order(leaf: Any) -> list[Axis]:
        return [axis for axis in reversed(leaf.spec.transform.axes) if axis.size > 1]

    reduced = reduction_axes(flat, what)
    wanted = [axis for axis in reversed(reduced) if axis.size > 1]

    problems = [
        Problem(path, f"axes in the order {[a.name for a in order(leaf)]}", f"{[a.name for a in wanted]}")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and order(leaf) != wanted
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
    check_order("microbatches", communicate)
    known = isinstance(batches, Sequence) and len(batches) > 0
    expect(known, "microbatches", "the job's microbatches as a sequence of one or more", _found(batches))
    share = share_of("microbatches", like, communicate, len(batches))
    return [batches[i] for i in share.indices]


def _found(batches: Any) -> str:
    return "none" if isinstance(batches, Sequence) else describe(batches)
