"""Norms of trees and of leaves whose elements are spread over ranks, and clipping of gradients."""

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from fshard import comm
from fshard.checks import NOT_NEGATIVE, POSITIVE, check_numbers
from fshard.collectives import linear_call, total
from fshard.optim.leaves import elements_of, map_gradients, partition_axes, scaled, stateless
from fshard.tree import Axis, Tree, grouped, leaves_of, map_leaves, tensor_of
from fshard.update import GradientTransformation

# Elements of a gradient that are squared at a time.
PIECE = 1 << 16


def clip_by_global_norm(max_norm: float, p: float = 2.0) -> GradientTransformation:
    """Scale gradients down so that the norm of all of them together is at most `max_norm`.

    Follows torch.nn.utils.clip_grad_norm_ on full gradients, with the norm taken in float64: each element counts
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
    _check_norm("clip_by_global_norm", max_norm, p)

    def clip(grads: Tree, params: Tree) -> Tree:
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6, and multiplies by 1 where nothing is to be clipped.
        scale = (max_norm / (global_norm(grads, p) + 1e-6)).clamp(max=1.0)
        return map_gradients(lambda grad, scale: grad * scale.to(grad.dtype), grads, numbers=(scale,))

    return stateless(clip)


def clip_by_norm(max_norm: float, p: float = 2.0) -> GradientTransformation:
    """Scale each leaf's gradient down so that its own norm is at most `max_norm`; see `clip_by_global_norm`.

    Follows torch.nn.utils.clip_grad_norm_, called for each parameter by itself. Costs one collective for
    each set of axes that some leaf is split over, of one number for each leaf.

    Args:
        max_norm: The largest norm to let through, 0 or more.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_norm` is negative or not finite, or `p` is not positive.
    """
    _check_norm("clip_by_norm", max_norm, p)

    def clip(leaf: Any, norm: Any) -> Any:
        return leaf if norm is None else scaled(leaf, (max_norm / (norm + 1e-6)).clamp(max=1.0))

    return stateless(lambda grads, params: map_leaves(clip, grads, leaf_norms(grads, p)))


def clip_by_value(max_value: float) -> GradientTransformation:
    """Clamp each element of a gradient between -max_value and max_value.

    Follows torch.nn.utils.clip_grad_value_.

    Args:
        max_value: The largest magnitude to let through, 0 or more.

    Returns:
        The transformation; its state is empty.

    Raises:
        ValueError: if `max_value` is negative or not finite.
    """
    check_numbers("clip_by_value", NOT_NEGATIVE, max_value=max_value)
    return stateless(lambda grads, params: map_gradients(lambda grad: grad.clamp(-max_value, max_value), grads))


def _check_norm(what: str, max_norm: float, p: float) -> None:
    check_numbers(what, NOT_NEGATIVE, max_norm=max_norm)
    check_numbers(what, POSITIVE, p=p)


def global_norm(grads: Tree, p: float = 2.0) -> torch.Tensor:
    """Take the p-norm of all elements of a tree together.

    Taken in float64, so that for lower precisions it is the same number however leaves are split: strategies clip
    to the same bits.

    Args:
        grads: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        The norm, equal on every rank: a scalar in the leaves' widest dtype, float32 at least.
    """
    leaves = [leaf for leaf in leaves_of(grads) if leaf is not None]
    if not leaves:
        return torch.zeros(())
    # The norm of complex numbers is real.
    dtype = reduce(torch.promote_types, (tensor_of(leaf).dtype.to_real() for leaf in leaves), torch.float32)
    groups = grouped(leaves, partition_axes).items()
    parts = torch.stack([_reduced([leaves[i] for i in group], axes, p, each=False) for axes, group in groups])
    return (parts.amax() if math.isinf(p) else _root(parts.sum(), p)).to(dtype)


def leaf_norms(tree: Tree, p: float = 2.0) -> list[torch.Tensor | None]:
    """Take the p-norm of each leaf of a tree in float64; see `global_norm`.

    Costs one collective for each set of axes that some leaf is split over, however many leaves there are.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.

    Returns:
        For each leaf a float64 scalar, equal on every rank; None for None.
    """
    leaves = leaves_of(tree)
    norms: list[torch.Tensor | None] = [None] * len(leaves)
    for axes, group in grouped(leaves, partition_axes).items():
        found = _reduced([leaves[i] for i in group], axes, p, each=True)
        for i, norm in zip(group, (found if math.isinf(p) else _root(found, p)).unbind(), strict=True):
            norms[i] = norm
    return norms


def _reduced(leaves: Sequence[Any], axes: tuple[Axis, ...], p: float, *, each: bool) -> torch.Tensor:
    """Reduce p-th powers, or largest magnitudes, over ranks: of each leaf, or of all together."""
    comm.same_call("update", axes)
    tensors = [elements_of(leaf) for leaf in leaves]
    if math.isinf(p):
        largest = torch.stack([_largest(tensor) for tensor in tensors])
        return _agreed(largest if each else largest.amax(), axes)
    powers = [_powers(tensor, p) for tensor in tensors]
    if each:
        return total(torch.stack([torch.stack(part).sum() for part in powers]), axes)
    return total(torch.stack([power for part in powers for power in part]).sum(), axes)


def _root(power: torch.Tensor, p: float) -> torch.Tensor:
    # The root of zero has no finite derivative.
    return torch.where(power == 0, 0.0, torch.where(power == 0, 1.0, power) ** (1 / p))


def _powers(tensor: torch.Tensor, p: float) -> list[torch.Tensor]:
    # A CPU is nine times faster at it by pieces whose float64 copies stay in its cache.
    pieces = tensor.reshape(-1).split(PIECE if tensor.is_cpu else max(1, tensor.numel()))
    # A complex number counts by its magnitude, whose square is a product.
    doubles = [piece.to(torch.complex128).abs() if piece.is_complex() else piece.double() for piece in pieces]
    return [piece.dot(piece) if p == 2 else (piece.abs() ** p).sum() for piece in doubles]


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    # A zero in front, because no elements have no largest one.
    magnitudes = tensor.reshape(-1).abs()
    return torch.cat([magnitudes.new_zeros(1), magnitudes]).amax().double()


def _agreed(norms: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Take the largest of every rank's norms."""
    for axis in axes:
        # The result agrees between ranks, so each rank's norm gets its own cotangent as it is, without a sum.
        gather, own = partial(comm.all_gather, axis=axis, label="clip"), partial(_own_rows, axis=axis)
        (rows,) = linear_call(gather, own, [norms])
        norms = rows.amax(0)
    return norms


def _own_rows(stacks: Sequence[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    return [stack[comm.rank(axis)] for stack in stacks]
