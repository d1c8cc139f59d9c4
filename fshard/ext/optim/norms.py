"""Norms and means of sharded trees over ranks: of all leaves together, or of each; and sums that are exact.

Exact sums have the same bits however leaves are split. Terms are cut in two digits: whole numbers of BITS bits, counted
from the largest term, whose sums are exact in whatever order they are added. They have no derivative.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.optim.leaves import elements_of, varying
from fshard.extend import (
    POSITIVE,
    ReductionOrder,
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
)

# Elements that become float64 numbers at a time, in a processor's cache: of a norm, and of an exact sum.
PIECE, EXACT_PIECE = 1 << 16, 1 << 14
# Tensors of so many elements are small, and so many of them are joined.
SMALL, JOINED = 1024, 64
# Elsewhere so many at a time, whose first digits float64 adds exactly.
MOST = 1 << 24

# Bits of a digit: two make up those of a float64.
BITS = 27

Axes = tuple[fs.Axis, ...]
Terms = Callable[[torch.Tensor], torch.Tensor]


def find_norm_order(api_name: str, p: float, reduction_order: str | None) -> ReductionOrder:
    """Return the order that the sums of a norm are in; refuse what is no norm, and one that cannot keep the order."""
    check_numbers(api_name, POSITIVE, p=p)
    order = find_order(api_name, reduction_order)
    order.check_norm(api_name, p)
    return order


def global_norm(tree: Any, p: float = 2.0, *, reduction_order: str | None = None) -> torch.Tensor:
    """Take the p-norm of all elements of a sharded tree together, such as of gradients.

    Each element counts once, however many ranks store it, and padding does not count. Taken in float64, so that for
    lower precisions it is the same number however leaves are split. Costs one collective of a single number over each
    axis that leaves are split over, for each set of axes that some leaf is split over. Follows optax.global_norm and
    torch.nn.utils.get_total_norm.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        The norm, equal on every rank and differentiable: a scalar in the leaves' widest dtype, float32 at least.

    Raises:
        ValueError: if `p` is not positive, `reduction_order` is another word, or a leaf is no tensor, was donated or is
            of another mesh, with its path.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0]), "frozen": None})
    tensor(5.)
    """
    order = find_norm_order("global_norm", p, reduction_order)
    leaves = _checked("global_norm", tree)
    if not leaves:
        return torch.zeros(())
    # The norm of complex numbers is real.
    dtype = reduce(torch.promote_types, {tensor_of(leaf).dtype.to_real() for leaf in leaves}, torch.float32)
    return _rooted(_joined(torch.stack(_powers(leaves, p, order)), p), p).to(dtype)


def leaf_norms(tree: Any, p: float = 2.0, *, reduction_order: str | None = None) -> Any:
    """Take the p-norm of each whole leaf of a sharded tree, where `tensor.norm()` would be of this rank's part.

    For an optimizer or a transformation of one's own: `tree_map` takes these norms beside the leaves. Computed as in
    `global_norm`. Costs one collective for each set of axes that some leaf is split over, however many leaves there
    are.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        reduction_order: As for `clip_by_global_norm`.

    Returns:
        A tree of the same structure: for each leaf a scalar in the leaf's dtype, float32 at least, equal on every rank
        and differentiable by maths on this rank's part of the leaf; None for None.

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
    order = find_norm_order("leaf_norms", p, reduction_order)
    leaves = _checked("leaf_norms", tree)
    norms = iter(_rooted(torch.stack(_powers(leaves, p, order, each=True)), p).unbind() if leaves else ())

    def norm(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype = torch.promote_types(tensor_of(leaf).dtype.to_real(), torch.float32)
        return varying(next(norms).to(dtype), partition_axes(leaf))

    return map_leaves(norm, tree)


def leaf_means(tree: Any, dim: int, reduction_order: str | None = None) -> Any:
    """Take means over a dim of whole leaves, of which a rank has some; one collective for each set of axes.

    Args:
        tree: Pytree of Sharded or full tensors.
        dim: The dim, counted from the back.
        reduction_order: As for `global_norm`.

    Returns:
        A tree of the same structure: the means, of size 1 along the dim and split as far as the leaf is, differentiable
        by maths on this rank's part; None for None and for leaves of fewer than two dims.
    """
    leaves = [leaf for leaf in leaves_of(tree) if leaf is not None and tensor_of(leaf).dim() > 1]
    tensors, over = _along(leaves, dim)
    if find_order("leaf_means", reduction_order).keeps_bits:
        found = element_sums(leaves, torch.Tensor.double, dim)
    else:
        found = _reduced([tensor.sum(dim, keepdim=True) for tensor in tensors], over)
    rows = iter(zip(found, over, strict=True))

    @cache
    def reduced(spec: fs.Spec) -> fs.Spec:
        return spec.reduced([len(spec.storage_shape) + dim])

    def mean(leaf: Any) -> Any:
        if leaf is None or tensor_of(leaf).dim() < 2:
            return None
        value, axes = next(rows)
        count = (leaf.spec.storage_shape if isinstance(leaf, fs.Sharded) else leaf.shape)[dim]
        value = (varying(value, axes) / max(1, count)).to(tensor_of(leaf).dtype)
        return fs.Sharded(value, reduced(leaf.spec)) if isinstance(leaf, fs.Sharded) else value

    return map_leaves(mean, tree)


def _along(leaves: Sequence[Any], dim: int | None) -> tuple[list[torch.Tensor], list[Axes]]:
    """List leaves' elements without padding along a dim, or None for all, and the axes that split them."""
    tensors, over = [], []
    for leaf in leaves:
        tensor, axes = tensor_of(leaf), []
        for i in range(tensor.dim()) if dim is None else [tensor.dim() + dim]:
            if isinstance(leaf, fs.Sharded):
                tensor = tensor.narrow(i, 0, local_ranges(leaf.spec)[i][1])
                axes += [axis for axis in leaf.spec.split_axes(i) if axis.size > 1]
        tensors.append(tensor)
        over.append(tuple(axes))
    return tensors, over


def _checked(what: str, tree: Any) -> list[Any]:
    flat = flatten(tree)
    check_tensors(what, flat)
    check_local(what, flat)
    return [leaf for leaf in flat.leaves if leaf is not None]


def _powers(leaves: Sequence[Any], p: float, order: ReductionOrder, *, each: bool = False) -> list[torch.Tensor]:
    """Sum p-th powers of elements over ranks, or find the largest: of each leaf, or of leaves split alike."""
    if order.keeps_bits and not math.isinf(p):
        # By products alone: powers of vectors are rounded otherwise than those of the last few elements.
        return element_sums(leaves, lambda piece: piece.double() * piece.double())
    groups = [[i] for i in range(len(leaves))] if each else list(grouped(leaves, partition_axes).values())
    values = [_local_power([leaves[i] for i in group], p) for group in groups]
    return _reduced(values, [partition_axes(leaves[group[0]]) for group in groups], p)


def _local_power(leaves: Sequence[Any], p: float) -> torch.Tensor:
    """Sum p-th powers of this rank's elements of some leaves, piece by piece, or find the largest magnitude."""
    tensors = [elements_of(leaf).reshape(-1) for leaf in leaves]
    # Thousands of small ones take an operator each.
    small, large = ([tensor for tensor in tensors if (tensor.numel() <= SMALL) is yes] for yes in (True, False))
    joined = [torch.cat(small[i : i + JOINED]) for i in range(0, len(small), JOINED)]
    # A CPU is nine times faster at it by pieces whose float64 copies stay in its cache.
    pieces = [piece for tensor in (*joined, *large) for piece in (tensor.split(PIECE) if tensor.is_cpu else [tensor])]
    if math.isinf(p):
        # A zero in front, because no elements have no largest one.
        powers = [torch.cat([piece.new_zeros(1), piece]).abs().amax().double() for piece in pieces]
    else:
        # A complex number counts by its magnitude, whose square is a product.
        doubles = [piece.to(torch.complex128).abs() if piece.is_complex() else piece.double() for piece in pieces]
        powers = [piece.dot(piece) if p == 2 else (piece.abs() ** p).sum() for piece in doubles]
    return _joined(torch.stack(powers), p) if len(powers) > 1 else powers[0]


def _joined(powers: torch.Tensor, p: float) -> torch.Tensor:
    return powers.amax() if math.isinf(p) else powers.sum()


def _rooted(power: torch.Tensor, p: float) -> torch.Tensor:
    # The root of zero has no finite derivative.
    zero = power == 0
    return power if math.isinf(p) else torch.where(zero, 0.0, torch.where(zero, 1.0, power) ** (1 / p))


def _reduced(values: Sequence[torch.Tensor], over: Sequence[Axes], p: float = 1.0) -> list[torch.Tensor]:
    """Sum values over axes, each over its own, or find the largest: one collective for each set of axes and axis."""
    found = list(values)
    for axes, group in grouped(over, tuple).items():
        part = [found[i] for i in group]
        if not math.isinf(p):
            part, axes = sum_over(part, axes), ()
        for axis in axes:
            part = [rows.amax(0) for rows in fs.all_gather_invariant([value[None] for value in part], axis)]
        for i, value in zip(group, part, strict=True):
            found[i] = value
    return found


def element_sums(leaves: Sequence[Any], terms: Terms, dim: int | None = None) -> list[torch.Tensor]:
    """Sum terms of the elements of leaves exactly, by two collectives over each axis for each set of axes.

    Args:
        leaves: Sharded or full tensors.
        terms: Maps a piece of a tensor to float64 numbers, element by element: 0 or more, 0 for 0, and no less for a
            number of larger magnitude.
        dim: The dim to sum over, counted from the back; None sums over all of them.

    Returns:
        The sums in float64, equal on the ranks that split the elements: of shape (), or of size 1 along the dim.

    Raises:
        ValueError: if a tensor is differentiated.
    """
    tensors, over = _along(leaves, dim)
    differentiated = any(map(is_differentiated, tensors)) or _compat.any_dual(tensors)
    remedy = "leave out reduction_order where updates are differentiated"
    expect(
        not differentiated,
        'reduction_order="tree"',
        "tensors without derivatives",
        "one that is differentiated",
        remedy,
    )
    # A complex number counts as two real ones.
    parts = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
    rows = [part.reshape(-1) if dim is None else part.movedim(dim, 0) for part in parts]
    bounds = _reduced([_bound(row, terms) for row in rows], over, math.inf)
    # Powers of two above the bounds, within what their inverses can be.
    powers = [torch.frexp(bound).exponent.clamp(-1000, 1022).long() for bound in bounds]
    digits = [_digits(row, _power_of_two(-power), terms) for row, power in zip(rows, powers, strict=True)]
    sums = []
    for digit, power, bound in zip(_reduced(digits, over), powers, bounds, strict=True):
        high, low = digit.double() * 2.0**-BITS
        # Not a number, or infinity, is the bound itself.
        exact = torch.where(bound.isfinite(), (high + low * 2.0**-BITS) * _power_of_two(power), bound)
        sums.append(exact if dim is None else exact.unsqueeze(dim))
    return sums


def _bound(rows: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Find the largest term along dim 0."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1:], dtype=torch.float64)
    return terms(torch.maximum(rows.amax(0), -rows.amin(0)))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Make float64 numbers of their exponents alone, exact wherever an element stands."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _digits(rows: torch.Tensor, scale: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Sum both digits of the terms along dim 0."""
    size, found = EXACT_PIECE if rows.is_cpu else MOST, []
    for piece in rows.split(max(1, size // max(1, rows[:1].numel()))):
        left = terms(piece) * (scale * 2.0**BITS)
        high = left.floor()
        low = left.sub_(high).mul_(2.0**BITS).floor()
        found.append(torch.stack([high.sum(0), low.sum(0)]).long())
    return torch.stack(found).sum(0)
