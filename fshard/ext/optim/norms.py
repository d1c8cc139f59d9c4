"""Norms and means of sharded trees, for all leaves together or for each leaf; and exact sums.

Exact sums have the same bits however leaves are split. Each term is cut into two digits: integers of BITS bits,
relative to the largest term. Sums of such integers are exact in any order. They have no derivative.
"""

import math
from collections.abc import Sequence
from functools import cache, partial, reduce
from typing import Any

import torch

import fshard as fs
from fshard.ext.optim.block_sums import BITS, sum_digits, sum_powers
from fshard.ext.optim.leaves import elements_of, make_varying, share_out
from fshard.extend import (
    POSITIVE,
    ReductionOrder,
    annotate_collectives,
    any_dual,
    check_local,
    check_numbers,
    check_tensors,
    expect,
    find_order,
    flatten,
    grouped,
    is_differentiated,
    leaves_of,
    local_ranges,
    map_leaves,
    partition_axes,
    sum_over,
    tensor_of,
    transforms_active,
)

Axes = tuple[fs.Axis, ...]


def find_norm_order(api_name: str, p: float, reduction_order: str | None) -> ReductionOrder:
    """Return the order of the sums of a norm. Refuse a `p` that is not a norm, or whose sums cannot keep the order."""
    check_numbers(api_name, POSITIVE, p=p)
    order = find_order(api_name, reduction_order)
    # Other powers are rounded by what stands beside an element.
    is_exact = p in (2, math.inf)
    expect(is_exact or not order.keeps_bits, api_name, 'p to be 2 or inf with reduction_order="tree"', f"{p}")
    return order


def global_norm(
    tree: Any,
    p: float = 2.0,
    *,
    reduction_order: str | None = None,
) -> torch.Tensor:
    """Compute the p-norm of all elements of a sharded tree together, such as of gradients.

    Each element counts once, however many ranks store it, and padding does not count. The norm is computed in float64,
    so that for lower precisions it is the same number however leaves are split. For each set of axes that some leaf is
    split over, it costs one collective of a single number over each of these axes. Follows optax.global_norm and
    torch.nn.utils.get_total_norm.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are skipped.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        The norm, equal on every rank and differentiable: a scalar in the leaves' widest dtype, float32 at least.

    Raises:
        ValueError: if `p` is not positive, if `reduction_order` is unknown, or if a leaf is not a tensor, was donated
            or is on another mesh, with its path.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0]), "frozen": None})
    tensor(5.)
    """
    leaves, powers = _sum_powers("global_norm", tree, p, reduction_order)
    if not leaves:
        return torch.zeros(())
    # The norm of complex numbers is real.
    dtypes = {leaf.dtype.to_real() for leaf in leaves}
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    power = powers.amax() if math.isinf(p) else powers.sum()
    return take_root(power, p).to(dtype)


def leaf_norms(
    tree: Any,
    p: float = 2.0,
    *,
    reduction_order: str | None = None,
) -> Any:
    """Compute the p-norm of each whole leaf of a sharded tree. `tensor.norm()` would be the norm of this rank's part.

    Use it in your own optimizer or transformation: `tree_map` takes these norms together with the leaves. They are
    computed as in `global_norm`. It costs one collective for each set of axes that some leaf is split over, however
    many leaves there are.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are skipped.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        A tree of the same structure, with a scalar for each leaf in the leaf's dtype, float32 at least. It is equal on
        every rank, and differentiable by math on this rank's part of the leaf. None for None.

    Raises:
        ValueError: as `global_norm`.

    >>> import torch, fshard as fs
    >>> grads = {"w": torch.tensor([3.0, 4.0]), "frozen": None}
    >>> norms = fs.leaf_norms(grads)
    >>> norms
    {'w': tensor(5.), 'frozen': None}
    >>> fs.tree_map(lambda grad, norm: grad / norm, grads, norms)
    {'w': tensor([0.6000, 0.8000]), 'frozen': None}
    """
    return share_out(stack_norms(tree, p, reduction_order), tree)


def stack_norms(tree: Any, p: float, reduction_order: str | None) -> torch.Tensor:
    """Compute the norms of `leaf_norms` as one vector in float64, without the leaves that are None."""
    _, powers = _sum_powers("leaf_norms", tree, p, reduction_order, by_leaf=True)
    return take_root(powers, p)


def leaf_means(tree: Any, dim: int, reduction_order: str | None = None) -> Any:
    """Compute means over a dim of whole leaves, by one collective for each set of axes.

    Args:
        tree: Pytree of Sharded or full tensors.
        dim: The dim, counted from the back.
        reduction_order: As for `global_norm`.

    Returns:
        A tree of the same structure with the means: of size 1 along the dim, split as far as the leaf is, and
        differentiable by math on this rank's part. A leaf of fewer than two dims is its own mean over the last dim, and
        has none over the one before. None for None.
    """
    leaves = [leaf for leaf in leaves_of(tree) if _has_rows(leaf)]
    axes = [_axes_along(leaf, dim) for leaf in leaves]
    if find_order("leaf_means", reduction_order).keeps_bits:
        sums = element_sums(leaves, dim)
    else:
        sums = _reduce([_elements_along(leaf, dim).sum(dim, keepdim=True) for leaf in leaves], axes)
    rows = iter(zip(sums, axes, strict=True))

    @cache
    def reduce_spec(spec: fs.Spec) -> fs.Spec:
        return spec.reduced([len(spec.storage_shape) + dim])

    def take_mean(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf if dim == -1 else None
        total, total_axes = next(rows)
        mean = make_varying(total, total_axes) / max(1, leaf.shape[dim])
        mean = mean.to(leaf.dtype)
        return fs.Sharded(mean, reduce_spec(leaf.spec)) if isinstance(leaf, fs.Sharded) else mean

    return map_leaves(take_mean, tree)


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and tensor_of(leaf).dim() > 1


def _elements_along(leaf: Any, dim: int | None) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding along a dim, or along all for None."""
    if dim is None or not isinstance(leaf, fs.Sharded):
        return elements_of(leaf)
    _, size = local_ranges(leaf.spec)[dim]
    return leaf.local.narrow(dim, 0, size)


def _axes_along(leaf: Any, dim: int | None) -> Axes:
    """Return the axes whose ranks hold different elements along a dim, or along any for None."""
    axes = partition_axes(leaf)
    if dim is None:
        return axes
    return tuple([axis for axis in axes if leaf.spec.dim_of(axis) == leaf.local.dim() + dim])


def _sum_powers(
    api_name: str,
    tree: Any,
    p: float,
    reduction_order: str | None,
    *,
    by_leaf: bool = False,
) -> tuple[list[Any], torch.Tensor]:
    """Sum p-th powers of elements over ranks, or find the largest: of each leaf, or of leaves that are split alike.

    Returns:
        The leaves that are not None, and a vector of the sums.
    """
    order = find_norm_order(api_name, p, reduction_order)
    flat = flatten(tree)
    check_tensors(api_name, flat)
    check_local(api_name, flat)
    leaves = [leaf for leaf in flat.leaves if leaf is not None]
    if not leaves:
        return leaves, torch.zeros(0)
    # Numbers of other leaves have the same shape, so the messages have to say whose they are.
    described = [f"norm p={float(p)}", *flat.paths]
    with annotate_collectives((), described):
        if order.keeps_bits and not math.isinf(p):
            return leaves, torch.stack(element_sums(leaves, squares=True))
        if by_leaf:
            groups = [[i] for i in range(len(leaves))]
        else:
            groups = list(grouped(leaves, partition_axes).values())
        values = [sum_powers([elements_of(leaves[i]) for i in group], p) for group in groups]
        axes = [partition_axes(leaves[group[0]]) for group in groups]
        return leaves, torch.stack(_reduce(values, axes, largest=math.isinf(p)))


def take_root(power: torch.Tensor, p: float) -> torch.Tensor:
    """Take the root of sums of p-th powers. At zero, it has a derivative of zero instead of none."""
    if math.isinf(p):
        return power
    # The second derivative of a power of 1/2 overflows where that of a root does not.
    root = torch.sqrt if p == 2 else partial(torch.pow, exponent=1 / p)
    if not (transforms_active() or power.requires_grad or any_dual([power])):
        return root(power)
    is_zero = power == 0
    return root(power.masked_fill(is_zero, 1)).masked_fill(is_zero, 0)


def _reduce(
    values: Sequence[torch.Tensor],
    axes: Sequence[Axes],
    *,
    largest: bool = False,
) -> list[torch.Tensor]:
    """Sum each value over its axes, or find the largest, by one collective over each axis for each set of axes."""
    results = list(values)
    for group_axes, positions in grouped(axes, tuple).items():
        group = [results[i] for i in positions]
        if not largest:
            group = sum_over(group, group_axes)
        else:
            for axis in group_axes:
                rows = fs.all_gather_invariant([value[None] for value in group], axis)
                group = [row.amax(0) for row in rows]
        for i, value in zip(positions, group, strict=True):
            results[i] = value
    return results


def element_sums(leaves: Sequence[Any], dim: int | None = None, *, squares: bool = False) -> list[torch.Tensor]:
    """Sum the elements of leaves, or their squares, exactly, by two collectives over each axis for each set of axes.

    Args:
        leaves: Sharded or full tensors, without negative numbers unless squares are summed.
        dim: The dim to sum over, counted from the back; None sums over all of them.
        squares: Whether to sum squares. A complex number counts as two real ones.

    Returns:
        The sums in float64, equal on the ranks that split the elements: of shape (), or of size 1 along the dim.

    Raises:
        ValueError: if a tensor is differentiated.
    """
    tensors = [_elements_along(leaf, dim) for leaf in leaves]
    if any(map(is_differentiated, tensors)) or any_dual(tensors):
        raise ValueError(
            'reduction_order="tree": exact sums have no derivative, but a tensor is differentiated. Leave out '
            "reduction_order if you differentiate updates."
        )
    tensors = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in tensors]
    axes = [_axes_along(leaf, dim) for leaf in leaves]
    bounds = _reduce([_find_bound(tensor, dim, squares) for tensor in tensors], axes, largest=True)
    # Powers of two above the bounds, limited so that their inverses are finite.
    exponents = [torch.frexp(bound).exponent.clamp(-1000, 1022).long() for bound in bounds]
    digits = []
    for tensor, exponent in zip(tensors, exponents, strict=True):
        digits.append(sum_digits(tensor, _power_of_two(-exponent), dim, squares))
    sums = []
    for pair, exponent, bound in zip(_reduce(digits, axes), exponents, bounds, strict=True):
        high, low = pair.double() * 2.0**-BITS
        total = (high + low * 2.0**-BITS) * _power_of_two(exponent)
        # With an infinity or NaN among the terms, the bound is the sum.
        total = torch.where(bound.isfinite(), total, bound)
        sums.append(total if dim is None else total.unsqueeze(dim))
    return sums


def _find_bound(tensor: torch.Tensor, dim: int | None, squares: bool) -> torch.Tensor:
    """Find the largest term along a dim, or along all of them."""
    if tensor.numel():
        dims = () if dim is None else dim
        bound = torch.maximum(tensor.amax(dims).double(), -tensor.amin(dims).double())
    else:
        # Torch has no largest one of no elements.
        bound = tensor.sum(dim).double()
    return bound * bound if squares else bound


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Make float64 powers of two from their bits, which is exact at any place in a tensor."""
    return ((exponent + 1023) << 52).view(torch.float64)
