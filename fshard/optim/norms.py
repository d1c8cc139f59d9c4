"""Norms of sharded trees over ranks: of all leaves together, or of each."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from fshard.collectives import all_gather_invariant, total
from fshard.optim.element_sums import Request, element_sums
from fshard.optim.leaves import elements_of, partition_axes, varying
from fshard.shard import local_ranges
from fshard.tree import Axis, Spec, Tree, flatten, grouped, is_sharded, leaves_of, tensor_of, unflatten
from fshard.tree.checks import POSITIVE, Range, check_local, check_numbers, check_sums, check_tensors

# Elements of a gradient that are squared at a time.
PIECE = 1 << 16


def check_order(what: str, p: float, sums: str | None) -> None:
    """Refuse the order of a norm, and an unknown order of its sums."""
    check_numbers(what, POSITIVE, p=p)
    check_sums(what, sums)
    if sums is not None:
        # Other powers are rounded by what stands beside an element.
        check_numbers(what, Range('2 or inf with sums="tree"', lambda number: number in (2, math.inf)), p=p)


def global_norm(tree: Tree, p: float = 2.0, *, sums: str | None = None) -> torch.Tensor:
    """Take the p-norm of all elements of a sharded tree together, such as of gradients.

    Each element counts once, however many ranks store it, and padding does not count. Taken in float64, so that for
    lower precisions it is the same number however leaves are split. Costs one collective of a single number over each
    axis that leaves are split over, for each set of axes that some leaf is split over. Follows optax.global_norm and
    torch.nn.utils.get_total_norm.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        sums: As for `clip_by_global_norm`.

    Returns:
        The norm, equal on every rank and differentiable: a scalar in the leaves' widest dtype, float32 at least.

    Raises:
        ValueError: if `p` is not positive, `sums` is another word, or a leaf is no tensor, was donated or is of
            another mesh, with its path.

    >>> global_norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0]), "frozen": None})
    tensor(5.)
    """
    check_order("global_norm", p, sums)
    flat = flatten(tree)
    check_tensors("global_norm", flat)
    check_local("global_norm", flat)
    leaves = [leaf for leaf in leaves_of(tree) if leaf is not None]
    if not leaves:
        return torch.zeros(())
    # The norm of complex numbers is real.
    dtype = reduce(torch.promote_types, (tensor_of(leaf).dtype.to_real() for leaf in leaves), torch.float32)
    if sums is not None and not math.isinf(p):
        return _rooted(torch.stack(_exact_squares(leaves)).sum(), p).to(dtype)
    groups = grouped(leaves, partition_axes).items()
    parts = torch.stack([_reduced([leaves[i] for i in group], axes, p, each=False) for axes, group in groups])
    return (parts.amax() if math.isinf(p) else _rooted(parts.sum(), p)).to(dtype)


def leaf_norms(tree: Tree, p: float = 2.0, *, sums: str | None = None) -> Tree:
    """Take the p-norm of each whole leaf of a sharded tree, where `tensor.norm()` would be of this rank's part.

    For an optimizer or a transformation of one's own: `tree_map` takes these norms beside the leaves. Computed as in
    `global_norm`. Costs one collective for each set of axes that some leaf is split over, however many leaves there
    are.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        sums: As for `clip_by_global_norm`.

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
    check_order("leaf_norms", p, sums)
    flat = flatten(tree)
    check_tensors("leaf_norms", flat)
    check_local("leaf_norms", flat)

    def scalar(leaf: Any, norm: torch.Tensor | None) -> torch.Tensor | None:
        dtype = None if leaf is None else torch.promote_types(tensor_of(leaf).dtype.to_real(), torch.float32)
        return None if norm is None else varying(norm.to(dtype), partition_axes(leaf))

    norms = map(scalar, flat.leaves, norms_of(flat.leaves, p, sums))
    return unflatten(flat.treedef, list(norms))


def norms_of(tree: Tree, p: float = 2.0, sums: str | None = None) -> list[torch.Tensor | None]:
    """Take the norms of `leaf_norms` as a list, in float64 and not yet handed to each rank's own maths."""
    leaves = leaves_of(tree)
    norms: list[torch.Tensor | None] = [None] * len(leaves)
    if sums is not None and not math.isinf(p):
        chosen = [i for i, leaf in enumerate(leaves) if leaf is not None]
        for i, power in zip(chosen, _exact_squares([leaves[i] for i in chosen]), strict=True):
            norms[i] = _rooted(power, p)
        return norms
    for axes, group in grouped(leaves, partition_axes).items():
        found = _reduced([leaves[i] for i in group], axes, p, each=True)
        for i, norm in zip(group, (found if math.isinf(p) else _rooted(found, p)).unbind(), strict=True):
            norms[i] = norm
    return norms


def leaf_means(
    leaves: Sequence[Any], tensors: Sequence[torch.Tensor], dim: int, sums: str | None
) -> list[torch.Tensor]:
    """Take means over a dim of whole leaves, of which a rank has some; one collective for each set of axes.

    Args:
        leaves: Leaves, which say how each tensor is split.
        tensors: The elements that this rank has, in the shapes of its shards.
        dim: The dim, counted from the back.
        sums: As for `global_norm`.

    Returns:
        The means, of size 1 along the dim, differentiable by maths on this rank's part.
    """
    specs = [leaf.spec if is_sharded(leaf) else Spec(tuple(leaf.shape)) for leaf in leaves]
    dims = [tensor.dim() + dim for tensor in tensors]
    over = [tuple(a for a in spec.split_axes(n) if a.size > 1) for spec, n in zip(specs, dims, strict=True)]
    if sums is None:
        rows = zip(specs, tensors, dims, strict=True)
        found = [tensor.narrow(n, 0, local_ranges(spec)[n][1]).sum(n, keepdim=True) for spec, tensor, n in rows]
        for axes, group in grouped(over, tuple).items():
            for i, summed in zip(group, total([found[i] for i in group], axes), strict=True):
                found[i] = summed
    else:
        asked = [Request(leaf, tensor, [n]) for leaf, tensor, n in zip(leaves, tensors, dims, strict=True)]
        found = element_sums(asked, torch.Tensor.double)
    each = zip(found, over, specs, dims, tensors, strict=True)
    return [(varying(x, axes) / max(1, spec.full_shape[n])).to(t.dtype) for x, axes, spec, n, t in each]


def _reduced(leaves: Sequence[Any], axes: tuple[Axis, ...], p: float, *, each: bool) -> torch.Tensor:
    """Reduce p-th powers, or largest magnitudes, over ranks: of each leaf, or of all together."""
    tensors = [elements_of(leaf) for leaf in leaves]
    if math.isinf(p):
        largest = torch.stack([_largest(tensor) for tensor in tensors])
        return _agreed(largest if each else largest.amax(), axes)
    powers = [_powers(tensor, p) for tensor in tensors]
    if each:
        return total(torch.stack([torch.stack(part).sum() for part in powers]), axes)
    return total(torch.stack([power for part in powers for power in part]).sum(), axes)


def _exact_squares(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """Sum the squares of each leaf's magnitudes exactly."""

    def squares(piece: torch.Tensor) -> torch.Tensor:
        # By products alone: powers of vectors are rounded otherwise than those of the last few elements.
        if not piece.is_complex():
            return piece.double() * piece.double()
        real, imaginary = torch.view_as_real(piece.resolve_conj()).double().unbind(-1)
        return real * real + imaginary * imaginary

    requests = [Request(leaf, tensor_of(leaf), range(tensor_of(leaf).dim())) for leaf in leaves]
    return [power.reshape(()) for power in element_sums(requests, squares)]


def _rooted(power: torch.Tensor, p: float) -> torch.Tensor:
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
        norms = all_gather_invariant(norms[None], axis).amax(0)
    return norms
