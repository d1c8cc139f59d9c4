"""Maths leaf by leaf on the tensors of trees that share the structure of the parameters; norms over ranks."""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from fshard import comm
from fshard._compat import is_tracing
from fshard.checks import POSITIVE, Range, check_floating, check_leaves, check_numbers, check_sums, describe
from fshard.collectives import pvary, total
from fshard.errors import expect
from fshard.optim.element_sums import Request, added, element_sums, gathered
from fshard.shard import without_padding
from fshard.tree import (
    Axis,
    Flat,
    Tree,
    flatten,
    grouped,
    is_sharded,
    is_trained,
    leaves_of,
    like,
    map_leaves,
    tensor_of,
    unflatten,
)
from fshard.update import GradientTransformation, Optimizer

# Elements of a gradient that are squared at a time.
PIECE = 1 << 16


def partition_axes(leaf: Any) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different elements of a leaf."""
    return tuple(axis for axis in leaf.spec.partition_axes() if axis.size > 1) if is_sharded(leaf) else ()


def elements_of(leaf: Any) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding."""
    return without_padding(leaf) if is_sharded(leaf) else leaf


def size_of(leaf: Any) -> int:
    """Count the elements of a leaf on all ranks together."""
    return math.prod(leaf.spec.shape if is_sharded(leaf) else leaf.shape)


def varying(number: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Hand a number that agrees between ranks to each rank's own shards, so that its cotangents are summed."""
    for axis in axes:
        number = pvary(number, axis)
    return number


def scaled(leaf: Any, number: torch.Tensor) -> Any:
    """Scale a leaf by a number that agrees between ranks."""
    tensor = tensor_of(leaf)
    return like(leaf, tensor * varying(number, partition_axes(leaf)).to(tensor.dtype))


def leafwise(
    f: Callable[..., tuple[torch.Tensor, ...]],
    grads: Tree,
    old: Sequence[Tree],
    given: Sequence[Tree] = (),
    numbers: Sequence[Any] = (),
) -> tuple[Tree, ...]:
    """Make new trees of old ones, by maths on the tensors of each leaf that has a gradient.

    Args:
        f: Called with a leaf's tensors in `grads`, the old trees and the given ones, and then the numbers; returns the
            tensors of the new trees.
        grads: The tree that says where; other leaves stay as they are.
        old: The trees that the new ones replace: they decide their dtypes, because a number of another dtype would
            widen tensors of shape ().
        given: Trees that are only read.
        numbers: Those that are tensors agree between ranks; their cotangents are summed where ranks use them on shards.

    Returns:
        As many trees as there are old ones.
    """
    by_axes: dict[tuple[Axis, ...], list[Any]] = {}

    def new(grad: Any, *leaves: Any) -> tuple[Any, ...]:
        kept = leaves[: len(old)]
        if grad is None:
            return kept
        axes = partition_axes(grad)
        if axes not in by_axes:
            by_axes[axes] = [varying(n, axes) if isinstance(n, torch.Tensor) else n for n in numbers]
        made = f(*map(tensor_of, (grad, *leaves)), *by_axes[axes])
        return tuple(like(leaf, x.to(tensor_of(leaf).dtype)) for leaf, x in zip(kept, made, strict=True))

    flats = [flatten(tree) for tree in old]
    others = [leaves_of(tree) for tree in given]
    rows = [new(*row) for row in zip(leaves_of(grads), *(flat.leaves for flat in flats), *others, strict=True)]
    return tuple(unflatten(flat.treedef, [row[k] for row in rows]) for k, flat in enumerate(flats))


def map_gradients(f: Callable[..., torch.Tensor], grads: Tree, *given: Tree, numbers: Sequence[Any] = ()) -> Tree:
    """Make new gradients of gradients and of given trees; see `leafwise`."""
    (new,) = leafwise(lambda grad, _, *rest: (f(grad, *rest),), grads, [grads], given, numbers)
    return new


def stateless(f: Callable[[Tree, Tree], Tree]) -> GradientTransformation:
    """Make a transformation without a state of a function from gradients and parameters to gradients."""
    return GradientTransformation(lambda params: (), lambda grads, state, params: (f(grads, params), state))


def for_trained(f: Callable[[Any], Any], params: Tree) -> Tree:
    """Map over the leaves that take a gradient; None in the place of others."""
    return map_leaves(lambda leaf: f(leaf) if is_trained(leaf) else None, params)


def zeros(params: Tree) -> Tree:
    """Make zeros for every leaf that takes a gradient, with its spec."""
    return for_trained(lambda leaf: like(leaf, torch.zeros_like(tensor_of(leaf), requires_grad=False)), params)


def none_missed(params: Tree) -> Tree:
    """Start the counts of updates in which each leaf had no gradient."""
    return for_trained(lambda _: torch.zeros((), dtype=torch.int64), params)


def missing(missed: Tree, grads: Tree) -> Tree:
    """Count one more update for leaves without a gradient."""

    def count(before: Any, grad: Any) -> Any:
        if before is None or grad is None:
            return before if before is None else before + 1
        # A graph says by itself whose memory its results have.
        return before if is_tracing() else before.clone()

    return map_leaves(count, missed, grads)


def check_real(what: str, flat: Flat) -> None:
    """Refuse leaves that take a gradient and are no real floating tensors."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        tensor = tensor_of(leaf)
        return (describe(tensor), "a real tensor") if is_trained(leaf) and tensor.is_complex() else None

    check_floating(what, flat)
    remedy = "keep torch.view_as_real of them as parameters, or step them by fs.sgd"
    check_leaves(f"{what}: leaves are complex", flat, misfit, remedy)


def check_state(what: str, state: Any, needed: type) -> None:
    """Refuse a state that another optimizer has made."""
    remedy = "update with the optimizer that made the state"
    expect(isinstance(state, needed), what, f"the state to be a {needed.__name__}", describe(state), remedy)


def check_optimizer(what: str, tx: Any, such_as: str = "fs.from_torch or an fs.chain with one") -> None:
    """Refuse a transformation to wrap that is no optimizer."""
    expect(isinstance(tx, Optimizer), what, f"tx to be an Optimizer, such as {such_as}", describe(tx))


def check_order(what: str, p: float, sums: str | None) -> None:
    """Refuse the order of a norm, and an unknown order of its sums."""
    check_numbers(what, POSITIVE, p=p)
    check_sums(what, sums)
    if sums is not None:
        # Other powers are rounded by what stands beside an element.
        whole = Range('a whole number or inf with sums="tree"', lambda number: math.isinf(number) or number % 1 == 0)
        check_numbers(what, whole, p=p)


def global_norm(grads: Tree, p: float = 2.0, sums: str | None = None) -> torch.Tensor:
    """Take the p-norm of all elements of a tree together.

    Taken in float64, so that for lower precisions it is the same number however leaves are split: strategies clip
    to the same bits.

    Args:
        grads: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        sums: "tree" adds up in one fixed binary tree, the same bits in every precision; see `element_sums`.

    Returns:
        The norm, equal on every rank: a scalar in the leaves' widest dtype, float32 at least.
    """
    leaves = [leaf for leaf in leaves_of(grads) if leaf is not None]
    if not leaves:
        return torch.zeros(())
    # The norm of complex numbers is real.
    dtype = reduce(torch.promote_types, (tensor_of(leaf).dtype.to_real() for leaf in leaves), torch.float32)
    if sums is not None and not math.isinf(p):
        return _rooted(added(_tree_powers([leaf for leaf in leaves if size_of(leaf)], p)), p).to(dtype)
    groups = grouped(leaves, partition_axes).items()
    parts = torch.stack([_reduced([leaves[i] for i in group], axes, p, each=False) for axes, group in groups])
    return (parts.amax() if math.isinf(p) else _rooted(parts.sum(), p)).to(dtype)


def leaf_norms(tree: Tree, p: float = 2.0, sums: str | None = None) -> list[torch.Tensor | None]:
    """Take the p-norm of each leaf of a tree in float64; see `global_norm`.

    Costs one collective for each set of axes that some leaf is split over, however many leaves there are.

    Args:
        tree: Pytree of Sharded or full tensors; None leaves are passed over.
        p: The order of the norm, above 0; float("inf") for the largest magnitude.
        sums: As for `global_norm`.

    Returns:
        For each leaf a float64 scalar, equal on every rank; None for None.
    """
    leaves = leaves_of(tree)
    norms: list[torch.Tensor | None] = [None] * len(leaves)
    if sums is not None and not math.isinf(p):
        chosen = [i for i, leaf in enumerate(leaves) if leaf is not None]
        for i, power in zip(chosen, _tree_powers([leaves[i] for i in chosen], p), strict=True):
            norms[i] = _rooted(power, p)
        return norms
    for axes, group in grouped(leaves, partition_axes).items():
        found = _reduced([leaves[i] for i in group], axes, p, each=True)
        for i, norm in zip(group, (found if math.isinf(p) else _rooted(found, p)).unbind(), strict=True):
            norms[i] = norm
    return norms


def norms_of_both(steps: Tree, params: Tree, sums: str | None = None) -> tuple[list[Any], list[Any]]:
    """Take the norms of leaves and of their steps; None where there is no step."""
    rows = zip(leaves_of(params), leaves_of(steps), strict=True)
    pairs = [(None if step is None else leaf, step) for leaf, step in rows]
    # Both in one collective.
    norms = leaf_norms([*(leaf for leaf, _ in pairs), *(step for _, step in pairs)], sums=sums)
    return norms[: len(pairs)], norms[len(pairs) :]


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


def _tree_powers(leaves: Sequence[Any], p: float) -> list[torch.Tensor]:
    """Sum the p-th powers of each leaf's magnitudes in a tree, for a whole number p."""

    def powers(piece: torch.Tensor) -> torch.Tensor:
        if piece.is_complex():
            parts = torch.view_as_real(piece.resolve_conj()).double()
            squares = parts[..., 0] * parts[..., 0] + parts[..., 1] * parts[..., 1]
            base, left = (squares, p / 2) if p % 2 == 0 else (_rooted(squares, 2), p)
        else:
            double = piece.double()
            base, left = (double * double, p / 2) if p % 2 == 0 else (double.abs(), p)
        # By products alone: powers of vectors are rounded otherwise than those of the last few elements.
        found = None
        while left:
            found = (base if found is None else found * base) if left % 2 else found
            left //= 2
            base = base * base if left else base
        assert found is not None
        return found

    requests = [Request(leaf, tensor_of(leaf), range(tensor_of(leaf).dim())) for leaf in leaves]
    return [power.reshape(()) for power in element_sums(requests, powers)]


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
        norms = gathered(norms, axis, "clip").amax(0)
    return norms
