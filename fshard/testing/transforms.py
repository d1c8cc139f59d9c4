"""Checks of sharding transforms: the transpose alone, and all that a transform owes to the rest."""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.collectives import objective
from fshard.errors import Problem, expect, refuse
from fshard.gather import gather
from fshard.microbatches import place_of
from fshard.optim.native import sgd
from fshard.scatter_grads import scatter_grads
from fshard.shard import check_transform as check_argument
from fshard.shard import shard, unshard
from fshard.transforms import ShardTransform
from fshard.transforms.compose import layout_axes, reduction, start_scatter, summed_axes
from fshard.tree import Axis, Spec, Tree, flatten, grouped, tree_map
from fshard.tree.checks import NOT_NEGATIVE, SEED, check_arguments, check_numbers, describe
from fshard.update import TrainState, update
from fshard.value_and_grad import value_and_grad

SHAPES = ((5, 3), (7,), (24, 8), (1, 4), (), (0, 3))
STEPS, RATE = 3, 0.25


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
    _check_trial("check_adjoint", transform, shapes, dtype, seed, error)
    shards = shard(_drawn(shapes, [dtype] * len(shapes), seed), transform)
    specs = [leaf.spec for leaf in shards]
    # Copies, so that a transform which writes to its arguments is not taken for a wrong transpose.
    given = [leaf.local.clone() for leaf in shards]
    gathered = _by_transform(specs, lambda transform, of, specs: transform.gather(of(given), specs))
    _, place = place_of(transform.axes)
    cotangents = _drawn([x.shape for x in gathered], [x.dtype for x in gathered], seed + 1 + place)
    grads = [tensor.clone() for tensor in cotangents]

    def scattered_by(transform: Any, of: Callable[..., Any], specs: Sequence[Spec]) -> Any:
        states = [transform.init(torch.zeros_like(grad)) for grad in of(grads)]
        return start_scatter(transform, of(grads), specs, states)()[0]

    scattered = _by_transform(specs, scattered_by)
    problems = []
    for i, (stored, grad) in enumerate(zip(shards, scattered, strict=True)):
        spec = stored.spec
        copies = math.prod(axis.size for axis in transform.axes if spec.dim_of(axis) is None)
        left, size = _dot(gathered[i], cotangents[i], transform.axes, 1)
        right, _ = _dot(stored.local, grad, transform.axes, copies)
        # Each product rounds, and each sum over ranks; the roundings of that many terms add up at worst.
        bound = (error + torch.finfo(dtype).eps * (4 + sum(axis.size for axis in transform.axes))) * size
        if not abs(left - right) <= bound:
            found = f"<gather(x), y> = {left!r} and <x, scatter(y)> = {right!r}, apart by {abs(left - right):.3g}"
            problems.append(
                Problem(f"[{i}]", found, f"inner products equal to within {bound:.3g} (shape {spec.shape})")
            )
    remedy = "make scatter the transpose of gather, with the sum over ranks; error= allows for a lossy one, as 2**-8"
    refuse("check_adjoint: scatter is not gather's transpose", problems, remedy, AssertionError)


class TransformReport(NamedTuple):
    """The measurements of `check_transform`, largest over leaves and ranks.

    Attributes:
        gather_bytes: Bytes each rank sent in one gather of all leaves, in nominal ring terms.
        scatter_bytes: Bytes each rank sent in one scatter.
        gather_error: What gather is off by, relative to the leaf's largest magnitude.
        training_error: What parameters are off by after three steps, relative to how far they went.

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
    training_error: float


def check_transform(
    transform: ShardTransform,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    dtype: torch.dtype = torch.float64,
    error: float = 0.0,
    bytes_sent: tuple[float, float] | None = None,
    seed: int = 0,
) -> TransformReport:
    """Try a transform of one's own as the library will use it. Call it on every rank of the transform's mesh.

    It must be compared by value, hashed and pickled; unshard must undo shard bit for bit; gather must return the leaf,
    and scatter be its transpose (`check_adjoint`), both the same each time, without writes to their arguments, and with
    a batch of vmap at the end of a leaf's dims as in single calls, bit for bit; states of a lossy scatter must change;
    and three steps of gradient descent with it in place, by the four verbs and by `value_and_grad`, must end where one
    process does.

    Args:
        transform: The transform, alone or in a composition; with a state or without.
        shapes: Global shapes of the leaves to try it on, all at once. A strategy's layout leaves small ones whole: have
            some above its `min_shard_elements`.
        dtype: Dtype of the leaves; floating.
        error: For a lossy transform: what gather, and a sum of gradients, may be off by, relative to the largest
            magnitude of a leaf. 0 asks for exactness, and for sums for no more than rounding.
        bytes_sent: What each rank must send in one gather and in one scatter of all leaves, in nominal ring terms.
        seed: Seed of the random values.

    Returns:
        What was measured, the same on every rank.

    Raises:
        AssertionError: on every rank, with everything that does not hold and by how much.
        ValueError: if leaves stay split over some axis, which asks for a computation of its own.

    >>> import fshard as fs
    >>> def program():
    ...     transform = fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.testing.check_transform(transform, [(4, 6)], bytes_sent=(96, 96))  # half of 24 numbers of 8 bytes
    >>> fs.testing.spmd(program, world=2)[0].gather_error
    0.0
    """
    _check_trial("check_transform", transform, shapes, dtype, seed, error)
    pair = bytes_sent is None or (isinstance(bytes_sent, tuple) and len(bytes_sent) == 2)
    expect(pair, "check_transform", "bytes_sent to be the pair of a gather's and a scatter's", describe(bytes_sent))
    kept = [axis.name for axis in layout_axes(transform) if axis not in summed_axes(transform)]
    found, remedy = f"some split over {kept}", "check the rest without them"
    expect(not kept, "check_transform", "leaves that gather makes whole", found, remedy)
    check_adjoint(transform, shapes, dtype=dtype, seed=seed, error=error)
    trial = _Trial(transform, _drawn(shapes, [dtype] * len(shapes), seed), error)
    trial.check_pair(bytes_sent)
    # A transform that writes to its arguments cannot be trained with.
    trial.judge()
    trial.check_training(seed)
    trial.judge()
    errors = _highest([trial.gather_error, trial.training_error], transform.axes)
    return TransformReport(trial.gather_bytes, trial.scatter_bytes, *errors)


def _highest(numbers: list[float], axes: Sequence[Axis]) -> list[float]:
    """The highest that any rank has of each number; NaN where any rank has it."""
    columns = zip(*comm.everyone(numbers, axes, "check_transform"), strict=True)
    return [max(column, key=lambda number: (number != number, number)) for column in columns]


class _Trial:
    """One transform on one tree, and the claims so far: for each the value that was found, and its bound."""

    def __init__(self, transform: ShardTransform, full: list[torch.Tensor], error: float) -> None:
        self.transform, self.full, self.error = transform, full, error
        self.params = shard(full, transform)
        self.specs = [leaf.spec for leaf in self.params]
        self.stored = [leaf.local for leaf in self.params]
        self.excess: dict[str, tuple[float, float]] = {}
        self.gather_bytes = self.scatter_bytes = self.gather_error = self.training_error = 0.0

    def claim(self, path: str, found: float, bound: float) -> None:
        """Store a measurement and its bound."""
        self.excess[path] = (found, bound)

    def check_pair(self, bytes_sent: tuple[float, float] | None) -> None:
        """Measure the transform as a value, its storage, and gather and scatter by themselves."""
        copy = pickle.loads(pickle.dumps(self.transform))
        same = copy == self.transform and hash(copy) == hash(self.transform)
        self.claim("equality of a pickled copy (use a frozen dataclass): differences", float(not same), 0.0)
        self.claim("unshard(shard(x)): differing leaves", _differing(unshard(self.params), self.full), 0.0)
        given = [tensor.clone() for tensor in self.stored]
        with comm.record() as record:
            once = self.transform.gather(self.stored, self.specs)
        self.gather_bytes = record.bytes_sent()
        twice = self.transform.gather(self.stored, self.specs)
        self.claim("gather twice: differing leaves", _differing(once, twice), 0.0)
        self.claim("gather's inputs: leaves it wrote to", _differing(given, self.stored), 0.0)
        self._check_batch("gather", partial(self.transform.gather, specs=self.specs), self.stored)
        for i, (a, b) in enumerate(zip(once, self.full, strict=True)):
            distance = _distance(a, b.to(a.dtype)) if a.shape == b.shape else math.inf
            self.gather_error = max(self.gather_error, distance)
            self.claim(f"gather of [{i}] of shape {tuple(b.shape)}: relative error", distance, self.error)
        grads = [torch.cos(tensor) for tensor in once]
        states = [self.transform.init(torch.zeros_like(grad)) for grad in grads]
        given, before = [grad.clone() for grad in grads], tree_map(torch.clone, states)
        with comm.record() as record:
            once, after = start_scatter(self.transform, grads, self.specs, states)()
        self.scatter_bytes = record.bytes_sent()
        twice, again = start_scatter(self.transform, grads, self.specs, states)()
        self.claim("scatter twice: differing leaves", _differing([once, after], [twice, again]), 0.0)
        self.claim("scatter's inputs: leaves it wrote to", _differing([given, before], [grads, states]), 0.0)
        if not reduction(self.transform).has_state:
            self._check_batch("scatter", partial(self.transform.scatter, specs=self.specs), grads)
        if self.error and any(state is not None for state in states):
            # If the state stays the same, the rounding errors of all gradients are lost.
            for _ in range(STEPS - 1):
                after = start_scatter(self.transform, grads, self.specs, after)()[1]
            kept = _differing(after, before) == 0
            self.claim(f"states of a lossy scatter: as they were, {STEPS} scatters later", float(kept), 0.0)
        shapes = [tuple(a.shape) == tuple(b.shape) for a, b in zip(once, self.stored, strict=True)]
        self.claim("scatter's outputs: leaves of other shapes than stored", float(shapes.count(False)), 0.0)
        sent = ("gather", self.gather_bytes), ("scatter", self.scatter_bytes)
        for (what, found), needed in zip(sent, bytes_sent or (), strict=False):
            self.claim(f"{what}: bytes sent away from the {needed:g} asked for", abs(found - needed), 0.0)

    def _check_batch(self, name: str, run: Callable[..., Sequence[torch.Tensor]], given: list[torch.Tensor]) -> None:
        """Compare a call with a batch of vmap with single calls, by every bit."""
        batch = [given, [2 * tensor for tensor in given]]
        single = [torch.stack(pair, -1) for pair in zip(*map(run, batch), strict=True)]
        found = run([torch.stack(pair, -1) for pair in zip(*batch, strict=True)])
        path = f"{name} with a batch of vmap behind the dims: leaves that differ from single calls"
        self.claim(path, _differing(found, single), 0.0)

    def check_training(self, seed: int) -> None:
        world, place = place_of(self.transform.axes)
        batches = [list(self._batch(seed + 1 + n)) for n in range(world)]
        own = batches[place]
        expected, far = self._one_process(batches)
        by_verbs, at_once = unshard(self._train(own, _four_verbs)), unshard(self._train(own, _in_one_call))
        self.claim("value_and_grad against the four verbs: differing leaves", _differing(at_once, by_verbs), 0.0)
        for i, (found, needed) in enumerate(zip(by_verbs, expected, strict=True)):
            rounding = torch.finfo(found.dtype).eps * STEPS * (8 + 2 * world) * _largest(needed)
            # An error of a gather passes through the gradient, which is no steeper here than twice the distance.
            bound = rounding + 3 * STEPS * self.error * (far[i] + RATE * _largest(needed))
            distance = _largest(found - needed)
            self.claim(f"training of [{i}] of shape {tuple(needed.shape)}: distance to one process", distance, bound)
            self.training_error = max(self.training_error, distance / far[i] if far[i] else 0.0)

    def judge(self) -> None:
        """Raise for all claims that do not hold; by the largest of all ranks, so that all ranks raise."""
        worst = _highest([found for found, _ in self.excess.values()], self.transform.axes)
        problems = [
            Problem(path, f"{found:.4g}", f"at most {bound:.4g}")
            for found, (path, (_, bound)) in zip(worst, self.excess.items(), strict=True)
            if not found <= bound
        ]
        remedy = "mend these in the transform, or state its error where it is lossy"
        refuse("check_transform: claims do not hold", problems, remedy, AssertionError)

    def _batch(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        for tensor in self.full:
            slope, target = (torch.rand(tensor.shape, generator=draw, dtype=torch.float64) for _ in range(2))
            yield (0.5 + slope).to(tensor.dtype), (4 * target - 2).to(tensor.dtype)

    def _one_process(self, batches: Sequence[Any]) -> tuple[list[torch.Tensor], list[float]]:
        """Compute the parameters after the steps, and how far each leaf's largest gradients would have moved it."""
        leaves, far = self.full, [0.0] * len(self.full)
        for _ in range(STEPS):
            by_leaf = list(zip(*(torch.func.grad(_loss)(leaves, batch) for batch in batches), strict=True))
            leaves = [leaf - RATE * (sum(parts) / len(parts)) for leaf, parts in zip(leaves, by_leaf, strict=True)]
            far = [a + RATE * max(map(_largest, parts)) for a, parts in zip(far, by_leaf, strict=True)]
        return leaves, far

    def _train(self, batch: Any, gradients: Callable[..., Any]) -> Tree:
        tx = sgd(RATE)
        state = TrainState.create(self.params, tx)
        for _ in range(STEPS):
            grads, transform_state = gradients(state, batch)
            state = update(tx, state, grads, transform_state=transform_state)
        return state.params


def _loss(leaves: Sequence[torch.Tensor], batch: Any) -> torch.Tensor:
    parts = [((slope * leaf - target) ** 2).sum() / 2 for leaf, (slope, target) in zip(leaves, batch, strict=True)]
    return torch.stack(parts).sum()


def _four_verbs(state: TrainState, batch: Any) -> Any:
    full = gather(state.params)
    grads, loss = torch.func.grad_and_value(_loss)(full, batch)
    objective(loss, like=state.params)
    return scatter_grads(grads, like=state.params, transform_state=state.transform_state)


def _in_one_call(state: TrainState, batch: Any) -> Any:
    def local(params: Tree) -> torch.Tensor:
        return _loss(gather(params), batch)

    return value_and_grad(local, transform_state=state.transform_state)(state.params)[1:]


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().amax()) if tensor.numel() else 0.0


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Measure the largest difference, relative to the largest magnitude."""
    scale = _largest(b)
    return _largest(a - b) / scale if scale else _largest(a - b)


def _differing(a: Tree, b: Tree) -> float:
    """Count the leaves of two trees that differ in some bit."""
    pairs = zip(flatten(a).leaves, flatten(b).leaves, strict=True)
    return float(sum(x is not y and not (x.shape == y.shape and x.dtype == y.dtype and x.equal(y)) for x, y in pairs))


def _check_trial(what: str, transform: Any, shapes: Any, dtype: Any, seed: Any, error: Any) -> None:
    """Refuse arguments that no transform can be tried with."""
    check_argument(transform, what)
    sizes = isinstance(shapes, list | tuple) and all(isinstance(shape, tuple) for shape in shapes)
    sizes = sizes and all(type(size) is int and size >= 0 for shape in shapes for size in shape)
    expect(sizes, what, "shapes to be a list of tuples of sizes", f"{shapes!r:.40}")
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    expect(floating, what, "dtype to be a floating torch.dtype", f"{dtype!r:.40}")
    check_arguments(what, SEED, seed=seed)
    check_numbers(what, NOT_NEGATIVE, error=error)


def _drawn(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], seed: int) -> list[torch.Tensor]:
    """Draw normal numbers."""
    draw = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(tuple(shape), generator=draw, dtype=torch.float64) for shape in shapes]
    return [drawn.to(dtype) for drawn, dtype in zip(numbers, dtypes, strict=True)]


def _by_transform(specs: Sequence[Spec], f: Callable[..., Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Call `f` for each transform, with a function that picks its leaves of a list, and their specs."""
    out: dict[int, torch.Tensor] = {}
    for transform, group in grouped(specs, lambda spec: spec.transform).items():

        def of(items: Sequence[Any], group: Sequence[int] = group) -> list[Any]:
            return [items[i] for i in group]

        out.update(zip(group, f(transform, of, of(specs)), strict=True))
    return [out[i] for i in range(len(specs))]


def _dot(a: torch.Tensor, b: torch.Tensor, axes: Sequence[Axis], copies: int) -> tuple[float, float]:
    """Sum the inner product over all ranks, and the same of magnitudes."""
    products = (a.to(torch.float64) * b.to(torch.float64)).reshape(-1) / copies
    sums = torch.stack([products.sum(), products.abs().sum()])
    for axis in axes:
        (sums,) = comm.all_reduce([sums], axis, "check_adjoint")
    return float(sums[0]), float(sums[1])
