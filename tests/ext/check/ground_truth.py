"""Planted mistakes run on simulated ranks: what each changes in the next state and the metrics of a step."""

import math
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch

import fshard as fs
from fshard.extend import flatten
from fshard.testing import spmd
from tests.ext.check.mistakes import Mistake
from tests.ext.check.programs import BATCH, CLASSES, HIDDEN, Make
from tests.tolerance import within

# Of sums of a batch on eight ranks, forward and backward.
TERMS = 8 * BATCH * HIDDEN
# Axes whose ranks share a batch.
SHARED = ("tp",)
# Some mistakes change numbers only if gradients are large enough to be clipped, or overflow.
SCALES = (1.0, 100.0, 3e38)
REFUSED, EQUAL, CHANGED, DIFFERENT = "an error", "equal numbers", "other numbers", "ranks disagree"

# Tensors by path, each with whether it is whole on every rank.
Values = Mapping[str, tuple[torch.Tensor, bool]]


def run_both(row: Mistake, mended: Make) -> str:
    """Run a step and the one without its mistake on simulated ranks, and name what differs.

    Args:
        row: The mistake.
        mended: Makes the step without it.

    Returns:
        REFUSED if fshard refuses the step, EQUAL, CHANGED, or DIFFERENT if ranks differ in whole leaves or numbers.
    """
    for scale in SCALES:
        right = _run(mended, row.mesh, scale)
        try:
            wrong = _run(row.make, row.mesh, scale)
        except fs.testing.RankError as error:
            if isinstance(error.__cause__, ValueError):
                return REFUSED
            raise
        if not _are_close(wrong, right):
            return _compare(wrong, right)
    return EQUAL


def _compare(wrong: list[Values], right: list[Values]) -> str:
    """Name how results differ that are not equal."""
    agreeing = [_list_whole(values) for values in wrong]
    is_right = all(_are_close(_list_whole(values), _list_whole(right[0])) for values in right)
    disagrees = is_right and any(not _are_close(values, agreeing[0]) for values in agreeing)
    return DIFFERENT if disagrees else CHANGED


def _run(make: Make, sizes: Mapping[str, int], scale: float) -> list[Values]:
    """Return for each rank the tensors that the step returns by path, each with whether it is whole."""
    return spmd(lambda: _run_rank(make, sizes, scale), math.prod(sizes.values()))


def _run_rank(make: Make, sizes: Mapping[str, int], scale: float) -> Values:
    mesh = fs.init_mesh(sizes, device="cpu")
    step, state, *batch = make(mesh)
    positions = {axis: fs.axis_index(fs.axis_of(mesh[axis])) for axis in sizes}
    arguments = flatten((state._replace(params=_draw_shards(state.params, positions)), *batch))
    first = len(flatten(state).leaves)
    leaves = list(arguments.leaves)
    for number in range(first, len(leaves)):
        leaves[number] = _draw_batch(leaves[number], number, positions, scale)
    result = flatten(step(*arguments.unflatten(leaves)))
    values = {}
    for path, leaf in zip(result.paths, result.leaves, strict=True):
        is_sharded = isinstance(leaf, fs.Sharded)
        tensor = leaf.local if is_sharded else leaf
        if isinstance(tensor, torch.Tensor):
            is_whole = all(leaf.spec.dim_of(axis) is None for axis in leaf.spec.axes) if is_sharded else True
            values[path] = tensor.detach().clone(), is_whole
    return values


def _draw_shards(params: Any, positions: Mapping[str, int]) -> Any:
    """Draw a value of each leaf, equal on the ranks that hold the same part of it."""

    def draw(path: str, leaf: fs.Sharded) -> fs.Sharded:
        part = [positions[axis.name] for axis in leaf.spec.axes if leaf.spec.dim_of(axis) is not None]
        return fs.Sharded(torch.randn(leaf.local.shape, generator=_seed((path, *part))), leaf.spec)

    flat = flatten(params)
    return flat.unflatten([draw(path, leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True)])


def _draw_batch(leaf: Any, number: int, positions: Mapping[str, int], scale: float) -> Any:
    """Draw a tensor of a batch, which differs between the ranks of all axes that split batches."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    seed = (number, *(index for axis, index in positions.items() if axis not in SHARED))
    if not leaf.is_floating_point():
        return torch.randint(CLASSES, leaf.shape, generator=_seed(seed))
    return scale * (torch.rand(leaf.shape, generator=_seed(seed)) + 0.1)


def _seed(words: tuple[Any, ...]) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(repr(words).encode()))


def _list_whole(values: Values) -> Values:
    return {path: pair for path, pair in values.items() if pair[1]}


def _are_close(values: Any, others: Any) -> bool:
    if isinstance(values, list):
        return all(_are_close(each, other) for each, other in zip(values, others, strict=True))
    if values.keys() != others.keys():
        return False
    pairs = [(values[path][0], others[path][0]) for path in values]
    return all(a.shape == b.shape and _is_close(a, b) for a, b in pairs)


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the finite numbers are those of sums in another order, and the others are in the same places."""
    is_finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), is_finite):
        return False
    return torch.allclose(
        actual[is_finite].double(), expected[is_finite].double(), **within(expected[is_finite], TERMS)
    )
