"""Checks of the laws that your own sharding transform has to keep."""

import math
import operator
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.testing.compare import differing_leaves, refuse_on_all_ranks
from fshard.extend import (
    FLOATING,
    FRACTION,
    Problem,
    all_gather_object,
    check_arguments,
    check_numbers,
    check_results,
    describe,
    expect,
    flatten,
    layout_axes,
    process_rank,
    refuse,
    start_scatter,
    states_of,
    sum_over,
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

    The sum over ranks of <gather(x), y> must equal that of <x, scatter(y)>, where an element that several ranks store
    counts once. Call it on every rank of the transform's mesh. It follows autograd's check_vjp.

    Args:
        transform: A transform that is linear in its leaves, or nearly so. If it has a state, `init` makes it.
        shapes: Global shapes of the leaves to try it on, all at once.
        dtype: Dtype of the leaves; floating.
        seed: Seed of the random values.
        error: By how much the products of a lossy transform may differ, relative to the sum of the magnitudes of
            their terms; below 1. 0 allows for rounding alone.

    Raises:
        AssertionError: on every rank, with each leaf whose two products differ by more than rounding, and by how much.
        ValueError: if an argument makes no sense, or no leaf has an element.

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
    try:
        have_elements = isinstance(shapes, Sequence) and sum(torch.Size(shape).numel() for shape in shapes) > 0
    except TypeError:
        have_elements = False
    expect(have_elements, "check_adjoint", "shapes of leaves with elements, such as [(5, 3)]", f"{shapes!r:.100}")
    check_arguments("check_adjoint", FLOATING, dtype=dtype)
    check_numbers("check_adjoint", FRACTION, error=error)
    params = fs.shard(draw_normal(shapes, dtype, seed), transform)
    products = _inner_products(transform, params, seed + 1 + process_rank())
    # Each product rounds, and each sum over ranks.
    relative = error + tolerance(dtype, terms=1 + sum(axis.size for axis in transform.axes))
    problems = []
    for i, leaf in enumerate(params):
        of_gather, of_scatter, magnitude = products[i]
        distance = abs(of_gather - of_scatter)
        bound = relative * magnitude
        # Written so that NaN is a problem.
        if not distance <= bound:
            got = f"<gather(x), y> = {of_gather!r} and <x, scatter(y)> = {of_scatter!r}, apart by {distance:.3g}"
            expected = f"inner products equal to within {bound:.3g} (shape {leaf.spec.shape})"
            problems.append(Problem(f"[{i}]", got, expected))
    remedy = "make scatter the transpose of gather, with the sum over ranks; error= allows for a lossy one, as 2**-8"
    refuse("check_adjoint: scatter is not gather's transpose", problems, remedy, AssertionError)


def _inner_products(transform: fs.ShardTransform, params: Any, seed: int) -> Any:
    """List for each leaf <gather(x), y>, <x, scatter(y)> and the sum of |gather(x) y|, over all ranks."""
    specs = [leaf.spec for leaf in params]
    # Clones, because a transform that writes to its arguments would look like one with a wrong transpose.
    gathered, _ = _run(transform, "gather", specs, [leaf.local.clone() for leaf in params])
    cotangents = []
    for i, full in enumerate(gathered):
        cotangents += draw_normal([full.shape], full.dtype, seed + i)
    scattered, _ = _run(transform, "scatter", specs, [y.clone() for y in cotangents], _first_states(params))
    rows = []
    for leaf, full, y, grad in zip(params, gathered, cotangents, scattered, strict=True):
        copies = math.prod(axis.size for axis in transform.axes if leaf.spec.dim_of(axis) is None)
        of_gather = _dot(full, y)
        of_scatter = _dot(leaf.local, grad) / copies
        rows.append([of_gather, of_scatter, _dot(full.abs(), y.abs())])
    return sum_over(torch.tensor(rows, dtype=torch.float64), transform.axes).tolist()


def _run(transform: fs.ShardTransform, half: str, specs: Sequence[fs.Spec], tensors: Any, *states: Any) -> Any:
    """Run gather, or with states scatter; return its results, which must be such as a step takes, and new states."""
    new_states: Any = ()
    if states:
        results, new_states = start_scatter(transform, tensors, specs, *states)()
    else:
        results = transform.start_gather(tensors, specs)()
    paths = [f"[{i}]" for i, _ in enumerate(specs)]
    return check_results(transform, half, results, paths, specs, half == "gather"), new_states


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _first_states(params: Any) -> list[Any]:
    return states_of("check_transform", flatten(params), fs.transform_state(params))


class TransformReport(NamedTuple):
    """The measurements of `check_transform`: bytes of all leaves, and the largest error of any leaf on any rank.

    Attributes:
        gather_bytes: Bytes that each rank sends in one gather of all leaves, as a ring would send them.
        scatter_bytes: Bytes that each rank sends in one scatter.
        gather_error: The largest error of a gathered element, relative to the largest magnitude of its leaf.

    >>> import fshard as fs
    >>> def program():
    ...     int8 = fs.quantize(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.testing.check_transform(int8, [(4, 6)], error=1 / 254)
    >>> report = fs.testing.spmd(program, world=2)[0]
    >>> report.gather_bytes, report.scatter_bytes  # of 24 numbers of 8 bytes
    (20.0, 96.0)
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
    """Try your own transform as the library will use it. Call it on every rank of the transform's mesh.

    A copy by pickle must be equal and have the same hash. Bit for bit, unshard must undo shard. Gather must return the
    leaf, and scatter must be its transpose (see `check_adjoint`). Both must give the same bits each time and in both
    forms, must not write to their arguments, and must treat more leaves of the same shapes in another order, and a
    batch of vmap at the end of a leaf's dims, as they treat single calls. New states must be like the old ones.

    Args:
        transform: The transform, alone or in a composition; with a state or without.
        shapes: Global shapes of the leaves to try it on, all at once. A strategy's layout leaves small ones whole: have
            some with more than its `min_shard_elements`.
        dtype: Dtype of the leaves; floating.
        error: By how much gather, and a sum of gradients, may be off in a lossy transform, relative to the largest
            magnitude of a leaf. With 0, gather must be exact, and sums may only round.
        seed: Seed of the random values.

    Returns:
        The measurements, the same on every rank.

    Raises:
        AssertionError: on every rank, with every law that does not hold and by how much.
        ValueError: if leaves stay split over some axis: a computation that uses them has to be parallel too. And as by
            `check_adjoint`.

    >>> import fshard as fs
    >>> def program():
    ...     transform = fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.testing.check_transform(transform, [(4, 6)])  # half of 24 numbers of 8 bytes are sent
    >>> fs.testing.spmd(program, world=2)[0]
    TransformReport(gather_bytes=96.0, scatter_bytes=96.0, gather_error=0.0)
    """
    check_adjoint(transform, shapes, dtype=dtype, seed=seed, error=error)
    split = [axis.name for axis in layout_axes(transform) if axis not in summed_axes(transform)]
    got = f"some split over {split}; check the rest without them"
    expect(not split, "check_transform", "leaves that gather makes whole", got)
    full = draw_normal(shapes, dtype, seed)
    params = fs.shard(full, transform)
    claims = _Claims(transform, [leaf.spec for leaf in params], problems=[])
    pickled = pickle.loads(pickle.dumps(transform))
    differs = pickled != transform or hash(pickled) != hash(transform)
    claims.add("equality of a pickled copy (use a frozen dataclass): differences", differs)
    claims.add("unshard(shard(x)): differing leaves", _count_differing(fs.unshard(params), full))
    gathered, gather_bytes = claims.add_call("gather", [leaf.local for leaf in params])
    grads = [torch.cos(tensor) for tensor in gathered]
    _, scatter_bytes = claims.add_call("scatter", grads, _first_states(params))
    distances = []
    for i, (result, leaf) in enumerate(zip(gathered, full, strict=True)):
        magnitude = _largest(leaf) or 1.0
        distance = _largest(result - leaf.to(result.dtype)) / magnitude
        distances.append(distance)
        claims.add(f"gather of [{i}] of shape {tuple(leaf.shape)}: relative error", distance, error)
    remedy = "mend these in the transform, or state its error where it is lossy"
    refuse_on_all_ranks("check_transform: claims do not hold", claims.problems, remedy, transform.axes)
    gather_error = max(all_gather_object(max(distances), transform.axes, "check_transform"))
    return TransformReport(gather_bytes, scatter_bytes, gather_error)


class _AtOnce(fs.Wrapped):
    """A transform in its other forms, which finish at once."""

    def gather(self, *args: Any) -> Any:
        return self.inner.gather(*args)

    def scatter(self, *args: Any) -> Any:
        return self.inner.scatter(*args)


class _Claims(NamedTuple):
    """Claims about a transform; those that do not hold become problems."""

    transform: fs.ShardTransform
    specs: list[fs.Spec]
    problems: list[Problem]

    def add(self, path: str, value: float, bound: float = 0.0) -> None:
        """Claim that a value is at most a bound; NaN is not."""
        if not value <= bound:
            self.problems.append(Problem(path, f"{value:.4g}", f"at most {bound:.4g}"))

    def add_call(self, name: str, tensors: Any, *states: Any) -> tuple[Any, float]:
        """Call gather or scatter, and claim that it repeats its bits, writes to no input, and takes a batch of vmap.

        It is also called with all leaves twice, from the last to the first: none may change what another one gives.

        Returns:
            The tensors that it returned, and the bytes that it sent.
        """
        run = partial(_run, self.transform, name)
        inputs = [tensors, *states]
        before = fs.tree_map(torch.clone, inputs)
        with fs.comm.record() as record:
            result = run(self.specs, *inputs)
        again = _run(_AtOnce(self.transform), name, self.specs, *inputs)
        self.add(f"{name} and start_{name}, or two calls: differing leaves", _count_differing(again, result))
        self.add(f"{name}'s inputs: leaves it wrote to", _count_differing(before, inputs))
        for new_states, old_states in zip(result[1:], states, strict=False):
            new_kinds = fs.tree_map(describe, new_states)
            old_kinds = fs.tree_map(describe, old_states)
            unlike = sum(map(operator.ne, new_kinds, old_kinds))
            self.add(f"{name}'s new states: leaves whose state has other shapes or dtypes than the old one", unlike)
        doubled = [2 * tensor for tensor in tensors]
        result_doubled = run(self.specs, doubled, *states)
        separate = []
        for of_tensors, of_doubled in zip(result, result_doubled, strict=True):
            separate.append([*of_doubled, *of_tensors][::-1])
        all_tensors = [*doubled, *tensors][::-1]
        all_states = [2 * old[::-1] for old in states]
        together = run(2 * self.specs[::-1], all_tensors, *all_states)
        path = f"{name} of all leaves twice: leaves that differ from single calls"
        # Their sums may round in another way where matrices of one shape are multiplied together.
        self.add(path, len(differing_leaves(list(map(list, together)), separate)))
        if not fs.tree_leaves(states):
            batched, _ = run(self.specs, _stack(tensors, doubled), *states)
            path = f"{name} with a batch of vmap behind the dims: leaves that differ from single calls"
            self.add(path, _count_differing(list(batched), _stack(result[0], result_doubled[0])))
        return result[0], record.bytes_sent()


def _stack(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put the leaves of two calls into a batch, along a new last dim."""
    return [torch.stack(pair, -1) for pair in zip(first, second, strict=True)]


def _count_differing(actual: Any, expected: Any) -> int:
    """Count the leaves that differ in some bit."""
    return len(differing_leaves(actual, expected, exact=True))


def draw_normal(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Draw normal numbers in float64, and round them to a dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().double().amax())
