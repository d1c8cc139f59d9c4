"""Checks of the laws that a sharding transform of one's own owes to the rest."""

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.testing.compare import differing_leaves, refuse_on_all_ranks
from fshard.extend import (
    Problem,
    all_gather_object,
    expect,
    layout_axes,
    process_rank,
    refuse,
    start_scatter,
    summed_axes,
    tolerance,
)

SHAPES = ((5, 3), (7,), (24, 8), (1, 4), (), (0, 3))


def check_adjoint(
    transform: fs.ShardTransform,
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

    >>> import fshard as fs
    >>> class Forgetful(fs.Wrapped):
    ...     def gather(self, leaves, specs):
    ...         return [2 * full for full in self.inner.gather(leaves, specs)]  # and scatter forgets it
    >>> transform = fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu"))
    >>> fs.testing.check_adjoint(transform, [(3, 2), (4,)])
    >>> fs.testing.check_adjoint(Forgetful(transform), [(4,)])
    Traceback (most recent call last):
    AssertionError: check_adjoint: scatter is not gather's transpose
      [0]: expected inner products equal to within ... (shape (4,)), got <gather(x), y> = ... and <x, scatter(y)> = ...
    To fix: make scatter the transpose of gather, with the sum over ranks; error= allows for a lossy one, as 2**-8.
    """
    params = fs.shard(_drawn(shapes, dtype, seed), transform)
    specs = [leaf.spec for leaf in params]
    # Copies, so that a transform which writes to its arguments is not taken for a wrong transpose.
    gathered = transform.gather([leaf.local.clone() for leaf in params], specs)
    drawn = _drawn([tensor.shape for tensor in gathered], torch.float64, seed + 1 + process_rank())
    cotangents = [each.to(tensor.dtype) for each, tensor in zip(drawn, gathered, strict=True)]
    scattered, _ = start_scatter(transform, [y.clone() for y in cotangents], specs, _states(transform, cotangents))()
    rows = []
    for leaf, full, cotangent, grad in zip(params, gathered, cotangents, scattered, strict=True):
        copies = math.prod(axis.size for axis in transform.axes if leaf.spec.dim_of(axis) is None)
        rows.append([_dot(full, cotangent), _dot(leaf.local, grad) / copies, _dot(full.abs(), cotangent.abs())])
    sums = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    for axis in transform.axes:
        (sums,) = fs.comm.all_reduce([sums], axis, "check_adjoint")
    # Each product rounds, and each sum over ranks.
    relative = error + tolerance(dtype, terms=1 + sum(axis.size for axis in transform.axes))
    problems = [
        Problem(
            f"[{i}]",
            f"<gather(x), y> = {left!r} and <x, scatter(y)> = {right!r}, apart by {abs(left - right):.3g}",
            f"inner products equal to within {relative * size:.3g} (shape {spec.shape})",
        )
        for i, (spec, (left, right, size)) in enumerate(zip(specs, sums.tolist(), strict=True))
        if not abs(left - right) <= relative * size
    ]
    remedy = "make scatter the transpose of gather, with the sum over ranks; error= allows for a lossy one, as 2**-8"
    refuse("check_adjoint: scatter is not gather's transpose", problems, remedy, AssertionError)


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _states(transform: fs.ShardTransform, grads: Sequence[torch.Tensor]) -> list[Any]:
    return [transform.init(torch.zeros_like(grad)) for grad in grads]


class TransformReport(NamedTuple):
    """The measurements of `check_transform`, largest over leaves and ranks.

    Attributes:
        gather_bytes: Bytes each rank sent in one gather of all leaves, in nominal ring terms.
        scatter_bytes: Bytes each rank sent in one scatter.
        gather_error: What gather is off by, relative to the leaf's largest magnitude.

    >>> import fshard as fs
    >>> def program():
    ...     int8 = fs.quantize(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.testing.check_transform(int8, [(4, 6)], error=1 / 254)
    >>> report = fs.testing.spmd(program, world=2)[0]
    >>> report.gather_bytes, report.scatter_bytes  # of 24 numbers of 8 bytes
    (16.0, 96.0)
    >>> 0 < report.gather_error < 1 / 254
    True
    """

    gather_bytes: float
    scatter_bytes: float
    gather_error: float


def check_transform(
    transform: fs.ShardTransform,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    dtype: torch.dtype = torch.float64,
    error: float = 0.0,
    seed: int = 0,
) -> TransformReport:
    """Try a transform of one's own as the library will use it. Call it on every rank of the transform's mesh.

    It must be compared by value, hashed and pickled; unshard must undo shard bit for bit; gather must return the leaf,
    and scatter be its transpose (`check_adjoint`), both the same each time, without writes to their arguments, and with
    a batch of vmap at the end of a leaf's dims as in single calls, bit for bit.

    Args:
        transform: The transform, alone or in a composition; with a state or without.
        shapes: Global shapes of the leaves to try it on, all at once. A strategy's layout leaves small ones whole: have
            some above its `min_shard_elements`.
        dtype: Dtype of the leaves; floating.
        error: For a lossy transform: what gather, and a sum of gradients, may be off by, relative to the largest
            magnitude of a leaf. 0 asks for exactness, and for sums for no more than rounding.
        seed: Seed of the random values.

    Returns:
        What was measured, the same on every rank.

    Raises:
        AssertionError: on every rank, with everything that does not hold and by how much.
        ValueError: if leaves stay split over some axis, which asks for a computation of its own.

    >>> import fshard as fs
    >>> def program():
    ...     transform = fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.testing.check_transform(transform, [(4, 6)])  # half of 24 numbers of 8 bytes are sent
    >>> fs.testing.spmd(program, world=2)[0]
    TransformReport(gather_bytes=96.0, scatter_bytes=96.0, gather_error=0.0)
    """
    check_adjoint(transform, shapes, dtype=dtype, seed=seed, error=error)
    kept = [axis.name for axis in layout_axes(transform) if axis not in summed_axes(transform)]
    found, remedy = f"some split over {kept}", "check the rest without them"
    expect(not kept, "check_transform", "leaves that gather makes whole", found, remedy)
    full = _drawn(shapes, dtype, seed)
    params = fs.shard(full, transform)
    specs = [leaf.spec for leaf in params]
    problems: list[Problem] = []

    def claim(path: str, found: float, bound: float = 0.0) -> None:
        if not found <= bound:
            problems.append(Problem(path, f"{found:.4g}", f"at most {bound:.4g}"))

    copied = pickle.loads(pickle.dumps(transform))
    same = copied == transform and hash(copied) == hash(transform)
    claim("equality of a pickled copy (use a frozen dataclass): differences", not same)
    claim("unshard(shard(x)): differing leaves", _count(fs.unshard(params), full))

    def gather(leaves: Any) -> Any:
        return transform.gather(leaves, specs), None

    def scatter(grads: Any, states: Any) -> Any:
        return start_scatter(transform, grads, specs, states)()

    gathered, gather_bytes = _checked_call(claim, "gather", gather, [leaf.local for leaf in params])
    grads = [torch.cos(tensor) for tensor in gathered]
    _, scatter_bytes = _checked_call(claim, "scatter", scatter, grads, _states(transform, grads))
    distances = [_largest(a - b.to(a.dtype)) / (_largest(b) or 1.0) for a, b in zip(gathered, full, strict=True)]
    for i, distance in enumerate(distances):
        claim(f"gather of [{i}] of shape {tuple(full[i].shape)}: relative error", distance, error)
    remedy = "mend these in the transform, or state its error where it is lossy"
    what = "check_transform: claims do not hold"
    refuse_on_all_ranks(what, problems, remedy, transform.axes, AssertionError)
    errors = all_gather_object(max(distances, default=0.0), transform.axes, "check_transform")
    return TransformReport(gather_bytes, scatter_bytes, max(errors))


def _checked_call(
    claim: Callable[..., None], name: str, run: Callable[..., Any], tensors: Any, *states: Any
) -> tuple[Any, float]:
    """Call a half of the pair, which is to do the same each time, write to no input, and take a batch of vmap's."""
    given = [tensors, *states]
    before = fs.tree_map(torch.clone, given)
    with fs.comm.record() as record:
        once = run(*given)
    claim(f"{name} twice: differing leaves", _count(run(*given), once))
    claim(f"{name}'s inputs: leaves it wrote to", _count(before, given))
    if not fs.tree_leaves(states):
        batch = [tensors, [2 * tensor for tensor in tensors]]
        alone = zip(*(run(each, *states)[0] for each in batch), strict=True)
        found, _ = run([torch.stack(pair, -1) for pair in zip(*batch, strict=True)], *states)
        path = f"{name} with a batch of vmap behind the dims: leaves that differ from single calls"
        claim(path, _count(list(found), [torch.stack(pair, -1) for pair in alone]))
    return once[0], record.bytes_sent()


def _count(a: Any, b: Any) -> int:
    """Count the leaves that differ in some bit."""
    return len(differing_leaves(a, b, exact=True))


def _drawn(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Draw normal numbers."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().double().amax()) if tensor.numel() else 0.0
