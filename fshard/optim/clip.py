"""Clipping by norms that span ranks."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fshard import comm
from fshard.collectives import linear_call, pvary, total
from fshard.shard import without_padding
from fshard.tree import Axis, Tree, flatten, is_sharded, tree_map, unflatten
from fshard.update import GradientTransformation

# Elements of a gradient that are squared at a time.
PIECE = 1 << 16


def clip_by_global_norm(max_norm: float, p: float = 2.0) -> GradientTransformation:
    """Scale gradients down so that the norm of all of them together is at most `max_norm`.

    What torch.nn.utils.clip_grad_norm_ does to full gradients, with the norm taken in float64: each element counts
    once, however many ranks store it, and padding does not count. Costs one collective of a single number over each
    axis that gradients are split over, for each set of axes that some leaf is split over.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, or `p` is not positive.
    """
    if not (math.isfinite(max_norm) and max_norm >= 0):
        raise ValueError(f"clip_by_global_norm: max_norm is {max_norm}, needed a finite number, 0 or more")
    if not p > 0:
        raise ValueError(f"clip_by_global_norm: p is {p}, needed a number above 0")

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6, and multiplies by 1 where nothing is to be clipped.
        scale = (max_norm / (global_norm(grads, p) + 1e-6)).clamp(max=1.0)
        flat = flatten(grads)
        # The scale agrees between ranks; each rank's shards use it on their own, so its cotangents need a sum.
        scales = {axes: _varying(scale, axes) for axes in dict.fromkeys(map(_axes, flat.leaves))}
        return unflatten(flat.treedef, [_scaled(leaf, scales[_axes(leaf)]) for leaf in flat.leaves]), state

    return GradientTransformation(lambda params: (), update)


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
            tensors.setdefault(_axes(leaf), []).append(tensor)
            dtype = torch.promote_types(dtype, tensor.dtype)
    join = _largest if math.isinf(p) else partial(_sum_of_powers, p=p)
    parts = [join(part, axes) for axes, part in tensors.items()]
    if not parts:
        return torch.zeros(())
    if math.isinf(p):
        return torch.stack(parts).amax().to(dtype)
    power = torch.stack(parts).sum()
    # The root of zero has no finite derivative.
    return torch.where(power == 0, 0.0, torch.where(power == 0, 1.0, power) ** (1 / p)).to(dtype)


def _axes(leaf: Any) -> tuple[Axis, ...]:
    """The axes whose ranks hold different elements of a leaf."""
    return tuple(axis for axis in leaf.spec.partition_axes() if axis.size > 1) if is_sharded(leaf) else ()


def _sum_of_powers(tensors: list[torch.Tensor], axes: tuple[Axis, ...], p: float) -> torch.Tensor:
    # A CPU is nine times faster at it by pieces whose float64 copies stay in its cache.
    pieces = [
        piece.double()
        for tensor in tensors
        for piece in tensor.reshape(-1).split(PIECE if tensor.is_cpu else max(1, tensor.numel()))
    ]
    powers = [piece.dot(piece) if p == 2 else (piece.abs() ** p).sum() for piece in pieces]
    return total(torch.stack(powers).sum(), axes)


def _largest(tensors: list[torch.Tensor], axes: tuple[Axis, ...]) -> torch.Tensor:
    # A zero in front, because no elements have no largest one.
    norms = [torch.cat([tensor.new_zeros(1), tensor.reshape(-1).abs()]).amax().double() for tensor in tensors]
    norm = torch.stack(norms).amax()
    for axis in axes:
        # What follows agrees between ranks, so each one's norm gets its own cotangent as it is, without a sum.
        gather, own = partial(comm.all_gather, axis=axis, label="clip"), partial(_own_rows, axis=axis)
        (rows,) = linear_call(gather, own, [norm])
        norm = rows.amax(0)
    return norm


def _own_rows(stacks: Sequence[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    return [stack[comm.rank(axis)] for stack in stacks]


def _scaled(leaf: Any, scale: torch.Tensor) -> Any:
    return tree_map(lambda grad: grad * scale.to(grad.dtype), leaf)


def _varying(scale: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    for axis in axes:
        scale = pvary(scale, axis)
    return scale
