"""Norms of trees and of leaves whose elements are spread over ranks."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from fshard import comm
from fshard.collectives import linear_call
from fshard.objective import total
from fshard.optim.leaves import partition_axes
from fshard.shard import without_padding
from fshard.tree import Axis, Tree, flatten, is_sharded

# Elements of a gradient that are squared at a time.
PIECE = 1 << 16


def global_norm(grads: Tree, p: float = 2.0) -> torch.Tensor:
    """The p-norm of all elements of a tree taken together.

    Taken in float64, so that for lower precisions it is the same number however leaves are split: strategies clip alike
    to the bit.

    Args:
        grads: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        The norm, equal on every rank: a scalar in the leaves' widest dtype, float32 at least.
    """
    dtype = torch.float32
    tensors: dict[tuple[Axis, ...], list[torch.Tensor]] = {}
    for leaf in flatten(grads).leaves:
        if leaf is not None:
            tensor = without_padding(leaf) if is_sharded(leaf) else leaf
            tensors.setdefault(partition_axes(leaf), []).append(tensor)
            # The norm of complex numbers is real.
            dtype = torch.promote_types(dtype, tensor.dtype.to_real())
    join = _largest if math.isinf(p) else partial(_sum_of_powers, p=p)
    parts = [join(part, axes) for axes, part in tensors.items()]
    if not parts:
        return torch.zeros(())
    if math.isinf(p):
        return torch.stack(parts).amax().to(dtype)
    power = torch.stack(parts).sum()
    return _root(power, p).to(dtype)


def leaf_norms(tree: Tree, p: float = 2.0) -> list[torch.Tensor | None]:
    """The p-norm of each leaf of a tree, taken in float64; see `global_norm`.

    Costs one collective for each set of axes that some leaf is split over, however many leaves there are.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        For each leaf a float64 scalar, equal on every rank; None for None.
    """
    leaves = flatten(tree).leaves
    groups: dict[tuple[Axis, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf is not None:
            groups.setdefault(partition_axes(leaf), []).append(i)
    norms: list[torch.Tensor | None] = [None] * len(leaves)
    for axes, group in groups.items():
        comm.same_call("update", axes)
        tensors = [without_padding(leaves[i]) if is_sharded(leaves[i]) else leaves[i] for i in group]
        if math.isinf(p):
            found = _agreed(torch.stack([_largest_of(tensor) for tensor in tensors]), axes)
        else:
            found = _root(total(torch.stack([torch.stack(_powers(tensor, p)).sum() for tensor in tensors]), axes), p)
        for i, norm in zip(group, found.unbind(), strict=True):
            norms[i] = norm
    return norms


def _root(power: torch.Tensor, p: float) -> torch.Tensor:
    # The root of zero has no finite derivative.
    return torch.where(power == 0, 0.0, torch.where(power == 0, 1.0, power) ** (1 / p))


def _powers(tensor: torch.Tensor, p: float) -> list[torch.Tensor]:
    # A CPU is nine times faster at it by pieces whose float64 copies stay in its cache.
    pieces = tensor.reshape(-1).split(PIECE if tensor.is_cpu else max(1, tensor.numel()))
    # A complex number counts by its magnitude, whose square is a product.
    doubles = [piece.to(torch.complex128).abs() if piece.is_complex() else piece.double() for piece in pieces]
    return [piece.dot(piece) if p == 2 else (piece.abs() ** p).sum() for piece in doubles]


def _sum_of_powers(tensors: list[torch.Tensor], axes: tuple[Axis, ...], p: float) -> torch.Tensor:
    comm.same_call("update", axes)
    return total(torch.stack([power for tensor in tensors for power in _powers(tensor, p)]).sum(), axes)


def _largest(tensors: list[torch.Tensor], axes: tuple[Axis, ...]) -> torch.Tensor:
    comm.same_call("update", axes)
    return _agreed(torch.stack([_largest_of(tensor) for tensor in tensors]).amax(), axes)


def _largest_of(tensor: torch.Tensor) -> torch.Tensor:
    # A zero in front, because no elements have no largest one.
    magnitudes = tensor.reshape(-1).abs()
    return torch.cat([magnitudes.new_zeros(1), magnitudes]).amax().double()


def _agreed(norms: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """The largest of every rank's norms."""
    for axis in axes:
        # What follows agrees between ranks, so each one's norm gets its own cotangent as it is, without a sum.
        gather, own = partial(comm.all_gather, axis=axis, label="clip"), partial(_own_rows, axis=axis)
        (rows,) = linear_call(gather, own, [norms])
        norms = rows.amax(0)
    return norms


def _own_rows(stacks: Sequence[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    return [stack[comm.rank(axis)] for stack in stacks]
