"""check_adjoint: a transform's scatter is the transpose of its gather."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from fshard import comm
from fshard.checks import NOT_NEGATIVE, check_numbers, check_seed
from fshard.errors import Problem, leaf_error
from fshard.shard import check_transform, shard
from fshard.transforms import ShardTransform
from fshard.tree import Axis, Spec


def check_adjoint(
    transform: ShardTransform,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    error: float = 0.0,
) -> None:
    """Check by random inner products that scatter is gather's transpose, leaf by leaf.

    The sum over ranks of <gather(x), y> must equal that of <x, scatter(y)>, an element that several ranks store counted
    once. Call it on every rank of the transform's mesh. Follows autograd's check_vjp.

    Args:
        transform: A transform that is linear in its leaves, or nearly so; a state begins as its `init` makes it.
        shapes: Global shapes of the leaves to try it on, all at once.
        dtype: Dtype of the leaves; floating.
        seed: Seed of the random values.
        error: For a lossy transform: by how much the products may differ, relative to the sum of their terms'
            magnitudes. 0 allows for rounding alone.

    Raises:
        AssertionError: on every rank, with each leaf whose two products differ by more than rounding, and by how much.
    """
    check_trial("check_adjoint", transform, shapes, dtype, seed, error)
    together, apart = (torch.Generator().manual_seed(seed) for _ in range(2))
    place = 0
    for axis in transform.axes:
        place = place * axis.size + comm.rank(axis)
    apart.manual_seed(seed + 1 + place)
    full = [torch.randn(shape, generator=together, dtype=torch.float64).to(dtype) for shape in shapes]
    shards = shard(full, transform)
    specs = [leaf.spec for leaf in shards]
    stored = [leaf.local for leaf in shards]
    # Copies, so that a transform which writes to what it is given is not taken for a wrong transpose.
    gathered = _gathered([tensor.clone() for tensor in stored], specs)
    cotangents = [torch.randn(x.shape, generator=apart, dtype=torch.float64).to(x.dtype) for x in gathered]
    scattered = _scattered([tensor.clone() for tensor in cotangents], specs)
    problems = []
    for i, spec in enumerate(specs):
        copies = math.prod(axis.size for axis in transform.axes if spec.dim_of(axis) is None)
        left, size = _dot(gathered[i], cotangents[i], transform.axes, 1)
        right, _ = _dot(stored[i], scattered[i], transform.axes, copies)
        # Each product rounds, and each sum over ranks; the roundings of that many terms add up at worst.
        bound = (error + torch.finfo(dtype).eps * (4 + sum(axis.size for axis in transform.axes))) * size
        if not abs(left - right) <= bound:
            found = f"<gather(x), y> = {left!r} and <x, scatter(y)> = {right!r}, apart by {abs(left - right):.3g}"
            problems.append(
                Problem(f"[{i}]", found, f"inner products equal to within {bound:.3g} (shape {spec.shape})")
            )
    if problems:
        remedy = "make scatter the transpose of gather, with the sum over ranks"
        raise AssertionError(leaf_error("check_adjoint: scatter is not gather's transpose", problems, remedy).args[0])


def check_trial(what: str, transform: Any, shapes: Any, dtype: Any, seed: Any, error: Any) -> None:
    """Refuse arguments that no transform can be tried with."""
    check_transform(transform, what)
    if not isinstance(shapes, list | tuple) or not all(
        isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape) for shape in shapes
    ):
        raise ValueError(f"{what}: expected shapes to be a list of tuples of sizes, got {shapes!r:.40}")
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{what}: expected dtype to be a floating torch.dtype, got {dtype!r:.40}")
    check_seed(what, seed)
    check_numbers(what, NOT_NEGATIVE, error=error)


def _gathered(leaves: Sequence[torch.Tensor], specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Gather, leaves of one transform together."""
    out: dict[int, torch.Tensor] = {}
    for transform, group in _by_transform(specs).items():
        parts = transform.gather([leaves[i] for i in group], [specs[i] for i in group])
        out.update(zip(group, parts, strict=True))
    return [out[i] for i in range(len(specs))]


def _scattered(grads: Sequence[torch.Tensor], specs: Sequence[Spec]) -> list[torch.Tensor]:
    """Scatter, leaves of one transform together, each with its first state."""
    out: dict[int, torch.Tensor] = {}
    for transform, group in _by_transform(specs).items():
        states = [transform.init(torch.zeros_like(grads[i])) for i in group]
        parts, _ = transform.scatter_with_state([grads[i] for i in group], [specs[i] for i in group], states)
        out.update(zip(group, parts, strict=True))
    return [out[i] for i in range(len(specs))]


def _by_transform(specs: Sequence[Spec]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, spec in enumerate(specs):
        groups.setdefault(spec.transform, []).append(i)
    return groups


def _dot(a: torch.Tensor, b: torch.Tensor, axes: Sequence[Axis], copies: int) -> tuple[float, float]:
    """The inner product over all ranks, and the same of magnitudes."""
    products = (a.to(torch.float64) * b.to(torch.float64)).reshape(-1) / copies
    sums = torch.stack([products.sum(), products.abs().sum()])
    for axis in axes:
        (sums,) = comm.all_reduce([sums], axis, "check_adjoint")
    return float(sums[0]), float(sums[1])
