"""Sums over the elements of leaves in one fixed binary tree: the same bits however leaves are split.

Along a dim of n elements neighbours are added, elements 2i and 2i + 1, then their sums in the same way, as if absent
elements filled it up to a power of two. Dims are summed from the last to the first, so the tree depends on the full
shape of a leaf alone. Of a split dim each rank sums the largest subtrees inside its range, at most two of each height,
sends their sums, and finishes the tree with those of the other ranks.
"""

import math
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from fshard import comm
from fshard.collectives import all_gather_invariant
from fshard.microbatches import TreeSum, nodes, place_of
from fshard.shard import local_ranges
from fshard.tree import Axis, Spec, grouped, is_sharded

# So many elements become float64 numbers and sums of LANES neighbours at a time, in a processor's cache.
PIECE, LANES = 1 << 17, 16

# Leaves of up to so many elements are summed together: each operator takes as long as thousands of elements.
SMALL = 1 << 14

Terms = Callable[[torch.Tensor], torch.Tensor]


class Request(NamedTuple):
    """Elements to be summed over some dims.

    Attributes:
        leaf: A leaf, which says how the tensor is split.
        tensor: The elements that this rank has, in the shape of its shard.
        dims: The dims to sum over, counted from the front.
    """

    leaf: Any
    tensor: torch.Tensor
    dims: Sequence[int]


class _Ask(NamedTuple):
    """A tensor of shape (lead, elements of this rank, trail), to be summed over n elements.

    Attributes:
        axes: The axes that split the n elements, perhaps none.
        n: How many elements all their ranks have.
        tensor: The tensor.
        terms: Makes of it the float64 numbers to be summed, if it is too large to hold them; else None.
    """

    axes: tuple[Axis, ...]
    n: int
    tensor: torch.Tensor
    terms: Terms | None


def element_sums(requests: Sequence[Request], terms: Terms) -> list[torch.Tensor]:
    """Sum terms of elements over dims, by one collective over each axis for each set of axes that splits such dims.

    Args:
        requests: Tensors and their dims.
        terms: Maps a piece of a tensor to float64 numbers, element by element: 0 or more, and 0 for 0.

    Returns:
        The sums in float64, of size 1 along their dims, equal on the ranks that split these dims.
    """
    running = [_steps(request, terms) for request in requests]
    sums: dict[int, torch.Tensor] = {}

    def resumed(values: dict[int, Any]) -> dict[int, _Ask]:
        asks = {}
        for i, value in values.items():
            try:
                asks[i] = running[i].send(value)
            except StopIteration as end:
                sums[i] = end.value
        return asks

    asks = resumed(dict.fromkeys(range(len(running))))
    while asks:
        # What needs no other rank comes first, so that all leaves that axes split are sent together.
        numbers = [i for i, ask in asks.items() if not ask.axes] or list(asks)
        found: dict[int, torch.Tensor] = {}
        for axes, group in grouped([asks[i] for i in numbers], lambda ask: ask.axes).items():
            comm.same_call('update by sums="tree"', axes)
            totals = _summed_over(axes, [asks.pop(numbers[k]) for k in group])
            found.update(zip([numbers[k] for k in group], totals, strict=True))
        asks |= resumed(found)
    return [sums[i] for i in range(len(running))]


def added(numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up n float64 numbers of shape () in the tree of a dim of n elements."""
    return _halved(torch.stack([*numbers]).reshape(1, -1, 1)).reshape(()) if numbers else torch.zeros(())


def _steps(request: Request, terms: Terms) -> Generator[_Ask, torch.Tensor, torch.Tensor]:
    """Sum over one dim after another; yields where other ranks have a part of it, or other leaves go along."""
    leaf, tensor, dims = request
    spec = leaf.spec if is_sharded(leaf) else Spec(tuple(leaf.shape))
    ranges = local_ranges(spec)
    for dim in dims:
        tensor = tensor.narrow(dim, 0, ranges[dim][1])
    shape = list(tensor.shape)
    # Ranks decide alike, whatever is left to them of a dim.
    left = terms if math.prod(spec.local_shape) > SMALL else None
    tensor = tensor if left and dims else terms(tensor)
    for dim in sorted(dims, reverse=True):
        part = tensor.reshape(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
        axes = tuple(axis for axis in spec.split_axes(dim) if axis.size > 1)
        shape[dim] = 1
        if 0 in spec.full_shape:
            tensor = part.new_zeros(shape, dtype=torch.float64)
        elif axes or left is None:
            tensor = yield _Ask(axes, spec.full_shape[dim], part, left)
        else:
            tensor = _summed(part, left)
        left = None
    return tensor.reshape(shape)


def _summed(part: torch.Tensor, terms: Terms | None) -> torch.Tensor:
    """Sum a subtree of the middle dim of a tensor of shape (lead, n, trail) to (lead, 1, trail)."""
    lead, n, trail = part.shape
    if terms is None:
        return _halved(part)
    lanes = min(LANES, 1 << (n - 1).bit_length())
    filled = pad(part, (0, 0, 0, -n % lanes)) if n % lanes else part
    rows = filled.reshape(lead * (filled.shape[1] // lanes), lanes, trail)
    # The pieces do not change the tree.
    pieces = rows.split(max(1, PIECE // (lanes * max(1, trail)) if part.is_cpu else len(rows)))
    sums = torch.cat([_halved(terms(piece)) for piece in pieces])
    return _halved(sums.reshape(lead, filled.shape[1] // lanes, trail))


def _halved(sums: torch.Tensor) -> torch.Tensor:
    """Add neighbours along the middle dim until one is left."""
    while (n := sums.shape[1]) > 1:
        pairs = sums[:, 0:-1:2] + sums[:, 1::2]
        sums = torch.cat([pairs, sums[:, -1:]], 1) if n % 2 else pairs
    return sums


@lru_cache(maxsize=4096)
def subtrees(n: int, sizes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Find the largest subtrees inside the range of each rank, where axes of some sizes split n elements.

    Args:
        n: How many elements the dim has.
        sizes: Of the axes that split it, major first.

    Returns:
        For each rank where each subtree starts, and its size; absent elements behind the last one are in its subtree.

    >>> subtrees(10, (2,))
    [[(0, 4), (4, 1)], [(5, 1), (6, 2), (8, 8)]]
    """
    nominal, ranges = n, [(0, n)]
    for size in sizes:
        nominal = -(-nominal // size)
        ranges = [
            (min(start + rank * nominal, end), min(start + (rank + 1) * nominal, end))
            for start, end in ranges
            for rank in range(size)
        ]
    full = 1 << (n - 1).bit_length()
    found = [nodes(range(start, full if start < end == n else end)) for start, end in ranges]
    return [[(start, size) for start, size in parts if start < n] for parts in found]


def _summed_over(axes: tuple[Axis, ...], asks: Sequence[_Ask]) -> list[torch.Tensor]:
    """Sum tensors over the ranks of axes, by one message over each; those with equal trees go through them together."""
    trees = grouped(range(len(asks)), lambda i: (asks[i].n, asks[i].tensor.shape[2], i if asks[i].terms else None))
    sizes = tuple(axis.size for axis in axes)
    ranks, own = place_of(axes[::-1])
    sent = []
    for (n, trail, _), group in trees.items():
        part = torch.cat([asks[i].tensor for i in group]) if len(group) > 1 else asks[group[0]].tensor
        found = subtrees(n, sizes)
        first = found[own][0][0] if found[own] else 0
        sums = [_summed(part[:, at - first : at - first + size], asks[group[0]].terms) for at, size in found[own]]
        missing = max(map(len, found)) - len(sums)
        sums.append(part.new_zeros((len(part), missing, trail), dtype=torch.float64))
        sent.append(torch.cat(sums, 1))
    message = torch.cat([sums.reshape(-1) for sums in sent])
    for axis in reversed(axes):
        message = all_gather_invariant(message[None], axis)
    counts = [sums.numel() for sums in sent]
    rows = message.reshape(ranks, sum(counts)).split(counts, 1)
    out: dict[int, torch.Tensor] = {}
    for ((n, _, _), group), row, part in zip(trees.items(), rows, sent, strict=True):
        tree, columns = TreeSum(), row.reshape(ranks, *part.shape)
        for rank, places in enumerate(subtrees(n, sizes)):
            for k, (at, size) in enumerate(places):
                tree.add(at, columns[rank, :, k : k + 1], size)
        total = tree.total()
        assert total is not None
        out.update(zip(group, total.split([len(asks[i].tensor) for i in group]), strict=True))
    return [out[i] for i in range(len(asks))]
