"""Microbatches of a whole job: which of them are a rank's, and sums over them in one binary tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from fshard import comm
from fshard.collectives import Over, divided, reduction_axes, total
from fshard.errors import Problem, expect, refuse
from fshard.tree import Axis, ReshardPolicy, Tree, flatten, is_sharded, leaves_of, unflatten
from fshard.tree.checks import describe

ORDERS = ("each", "once")


class Share(NamedTuple):
    """One rank's part of the microbatches of a job.

    Attributes:
        total: How many microbatches the job has.
        ranks: How many ranks share them.
        rank: This rank's number, in the order of reduction.
        communicate: "once" gives each rank a contiguous block, "each" every `ranks`-th microbatch.
        uneven: Whether ranks' blocks are no nodes of the tree, so that each sends several partial sums.
    """

    total: int
    ranks: int
    rank: int
    communicate: str
    uneven: bool = False

    @property
    def indices(self) -> range:
        """Numbers of the rank's microbatches among those of the job."""
        return self.of(self.rank)

    def of(self, rank: int) -> range:
        """List the numbers of a rank's microbatches."""
        if self.communicate == "each":
            return range(rank, self.total, self.ranks)
        return range(rank * self.total // self.ranks, (rank + 1) * self.total // self.ranks)

    @property
    def rounds(self) -> int:
        """The most microbatches that any rank has."""
        return -(-self.total // self.ranks)

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


def nodes(indices: range) -> list[tuple[int, int]]:
    """Cut consecutive leaves of a binary tree in the fewest of its nodes: the start and the size of each.

    >>> nodes(range(3, 8))
    [(3, 1), (4, 4)]
    """
    found, start = [], indices.start
    while start < indices.stop:
        size = start & -start or 1 << (indices.stop - start).bit_length()
        while start + size > indices.stop:
            size //= 2
        found.append((start, size))
        start += size
    return found


class TreeSum:
    """Adds up parts in one binary tree over their numbers, and holds the fewest partial sums that this allows.

    A part that is None counts as zeros; so a sum has the same bits whoever holds them.
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        """Nothing is added yet."""
        self._nodes: list[tuple[int, int, torch.Tensor | None, bool]] = []

    def add(self, start: int, part: torch.Tensor | None, size: int = 1, own: bool = False) -> None:
        """Add the part that comes next.

        Args:
            start: Its number, or that of the first leaf below it.
            part: The part.
            size: How many leaves are below it.
            own: Whether it may be written to.
        """
        while self._nodes and self._nodes[-1][1] == size and self._nodes[-1][0] % (2 * size) == 0:
            start, _, left, owned = self._nodes.pop()
            part, own = _plus(left, owned, part, own)
            size *= 2
        self._nodes.append((start, size, part, own))

    def take(self) -> list[torch.Tensor | None]:
        """Hand over the partial sums, in their order, and begin anew."""
        parts = [part for _, _, part, _ in self._nodes]
        self._nodes = []
        return parts

    def total(self) -> torch.Tensor | None:
        """Hand over the sum, and begin anew; leaves behind the last one are absent."""
        if not self._nodes:
            return None
        *others, (_, _, found, own) = self._nodes
        for _, _, left, owned in reversed(others):
            found, own = _plus(left, owned, found, own)
        self._nodes = []
        return found


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
        values: A tensor of shape (number, *shape).

    Returns:
        The sum, of `shape`; the tree is that of the next power of two, with leaves absent.
    """
    # A negative zero counts as a zero, as it does where other ranks' zeros are added to it.
    values = values + torch.zeros((), dtype=values.dtype, device=values.device)
    values = pad(values, (0, 0) * (values.dim() - 1) + (0, (1 << (len(values) - 1).bit_length()) - len(values)))
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def check_order(what: str, communicate: str | None) -> None:
    """Refuse another word than those that `accumulate` takes."""
    expect(communicate in (None, *ORDERS), what, 'communicate to be "each", "once" or None', repr(communicate))


def check_job(what: str, number: Any) -> None:
    """Refuse what is no number of microbatches."""
    whole = isinstance(number, int) and not isinstance(number, bool) and number > 0
    expect(number is None or whole, what, "microbatches to be a number, 1 or more, or None", repr(number))


def reduces_early(params: Tree) -> bool:
    """Tell whether the strategy of parameters reduces each gradient as it appears."""
    return all((leaf.spec.reshard or ReshardPolicy()).early for leaf in leaves_of(params) if is_sharded(leaf))


def share_of(what: str, params: Tree, communicate: str | None, job: int) -> Share:
    """Find which microbatches of a job are this rank's, where sums over them do not depend on the number of ranks.

    Args:
        what: The verb that asks, for errors.
        params: The parameters, whose specs tell the ranks.
        communicate: As for `accumulate`; None leaves it to the strategy.
        job: How many the whole job has.

    Returns:
        The share.

    Raises:
        ValueError: if the ranks cannot share the microbatches in one tree.
    """
    axes = _ordered(what, params)
    sizes = [axis.size for axis in axes]
    ranks, rank = place_of(axes)
    enough, remedy = f"one microbatch or more for each of {ranks} ranks", "cut the batch in more microbatches"
    expect(job >= ranks, what, enough, f"{job} in the whole job", remedy)
    # Where only the outermost sum is over a number of ranks that is no power of two, it is the tree's root.
    powers = all(map(_is_power, sizes[:-1]))
    as_each = job % ranks == 0 and powers and (job == ranks or all(map(_is_power, sizes)))
    as_once = ranks == 1 or (job % ranks == 0 and powers and _is_power(job // ranks))
    if communicate is None:
        communicate = "each" if as_each and (reduces_early(params) or not as_once) else "once"
    names = " by ".join(f"{axis.size} ranks of {axis.name!r}" for axis in axes)
    if communicate == "each":
        needed = "a power of two of ranks that divides the microbatches"
        remedy = 'pass communicate="once", which any number of ranks can'
        expect(as_each, what, f'for communicate="each" {needed}', f"{job} microbatches on {names}", remedy)
    uneven = communicate == "once" and not as_once
    remedy = "reduce over one axis, or over powers of two of ranks with a power of two of microbatches on each"
    expect(not uneven or len(axes) == 1, what, "blocks that are nodes of a tree", f"{job} on {names}", remedy)
    return Share(job, ranks, rank, communicate, uneven)


def own_share(what: str, params: Tree, communicate: str | None, own: int, job: int | None) -> Share:
    """Find the share of a rank that was given some microbatches; ranks hear where one was given another number.

    Args:
        what: The verb that begins, for errors.
        params: As for `share_of`.
        communicate: As for `share_of`.
        own: How many microbatches this rank was given.
        job: How many the whole job has; None means as many on every rank.

    Returns:
        The share.

    Raises:
        ValueError: as for `share_of`, or if this rank was given another number than its share has.
        RuntimeError: if another rank failed.
    """
    axes = _ordered(what, params)
    try:
        share = share_of(what, params, communicate, own * place_of(axes)[0] if job is None else job)
        remedy = "pass fs.microbatches(batches, like=params), and the job's number as microbatches="
        expect(own == len(share.indices), what, f"{len(share.indices)} of {share.total} microbatches", str(own), remedy)
    except ValueError as error:
        comm.same_call(what, axes, error=error)
        raise
    return share


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
        ValueError: if the ranks cannot share the microbatches in one tree.

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


def reduce_microbatches(
    auxes: Sequence[Tree],
    like: Tree,
    *,
    reduce: str = "mean",
    communicate: str | None = None,
    microbatches: int | None = None,
) -> Tree:
    """Reduce what a loss returned besides, over all microbatches of a job, in the tree of `accumulate(sums="tree")`.

    Counts, metrics and the buffers of normalizations have the same bits on any number of ranks. Each tensor is sent
    as often as the job has microbatches.

    Args:
        auxes: The aux of each of this rank's microbatches, as `accumulate` returned them: trees of tensors.
        like: Parameters, whose specs tell the ranks.
        reduce: "mean" or "sum" over the microbatches.
        communicate: As for `accumulate`.
        microbatches: As for `accumulate`.

    Returns:
        A tree in the structure of one aux, equal on every rank; a mean of whole numbers is a float64.

    Raises:
        ValueError: if `reduce` is another word, an aux holds something else than tensors, or as for `accumulate`.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(2)}, fs.zero3(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     mine = fs.microbatches([torch.tensor([n]) for n in (1.0, 2.0, 3.0, 4.0)], like=params)
    ...     auxes = [{"seen": batch.sum(), "largest": batch.max()} for batch in mine]
    ...     return len(mine), fs.reduce_microbatches(auxes, params, reduce="sum")["seen"]
    >>> fs.testing.spmd(program, world=2)[0], fs.testing.spmd(program, world=1)[0]
    ((2, tensor(10.)), (4, tensor(10.)))
    """
    expect(reduce in ("mean", "sum"), "reduce_microbatches", 'reduce to be "mean" or "sum"', repr(reduce))
    check_order("reduce_microbatches", communicate)
    check_job("reduce_microbatches", microbatches)
    known = isinstance(auxes, Sequence) and len(auxes) > 0
    expect(known, "reduce_microbatches", "auxes to be a sequence of one or more", _found(auxes))
    flats = [flatten(aux) for aux in auxes]
    for flat in flats:
        wrong = [leaf for leaf in flat.leaves if not isinstance(leaf, torch.Tensor)]
        expect(not wrong, "reduce_microbatches", "tensors in every aux", describe(wrong[0]) if wrong else "")
    share = own_share("reduce_microbatches", like, communicate, len(auxes), microbatches)
    params = flatten(like)
    axes = reduction_axes(params, "reduce_microbatches")
    comm.same_call("reduce_microbatches", axes, params, reduce=reduce, microbatches=share.total)
    columns = zip(*(flat.leaves for flat in flats), strict=True)
    wide = ([x.long() if x.dtype == torch.bool else x for x in column] for column in columns)
    sums = [tree_total(total(share.slots(column), axes)) for column in wide]
    if reduce == "mean":
        sums = [divided(x if x.is_floating_point() or x.is_complex() else x.double(), share.total) for x in sums]
    return unflatten(flats[0].treedef, sums)
