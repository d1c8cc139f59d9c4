"""Checks of the laws that a sharding transform and an optimizer of one's own owe to the rest."""

import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.errors import Problem, expect, refuse
from fshard.gather import gather
from fshard.jit import jit
from fshard.mesh import init_mesh
from fshard.microbatches import place_of
from fshard.optim.native import sgd
from fshard.shard import check_transform as check_argument
from fshard.shard import shard, unshard
from fshard.testing.compare import check_pure, difference, differing_leaves, refuse_on_all_ranks
from fshard.testing.spmd import spmd
from fshard.testing.workers import RankError
from fshard.transforms import ShardTransform, compose, fully_shard, replicate
from fshard.transforms.compose import layout_axes, reduction, start_scatter, summed_axes
from fshard.transforms.strategies import ddp, hsdp, zero1, zero2, zero3
from fshard.tree import Axis, Spec, Tree, checks, flatten, grouped, tree_leaves, tree_map, unflatten
from fshard.update import GradientTransformation, Optimizer, TrainState, chain, update
from fshard.value_and_grad import value_and_grad

SHAPES = ((5, 3), (7,), (24, 8), (1, 4), (), (0, 3))
# Of gradient descent: steps, learning rate, the largest slope of a loss and the largest target.
STEPS, RATE, STEEPEST, TARGET = 3, 0.25, 1.5, 2.0


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
    checks.check_arguments("check_adjoint", checks.SEED, seed=seed)
    checks.check_arguments("check_adjoint", checks.FLOATING, dtype=dtype)
    checks.check_numbers("check_adjoint", checks.NOT_NEGATIVE, error=error)
    full = _drawn(shapes, dtype, seed)
    shards = shard(full, transform)
    # Copies, so that a transform which writes to its arguments is not taken for a wrong transpose.
    given = [leaf.local.clone() for leaf in shards]
    gathered = _by_transform(shards, lambda each, own, specs: each.gather([given[i] for i in own], specs))
    _, place = place_of(transform.axes)
    cotangents = _drawn([tensor.shape for tensor in gathered], torch.float64, seed + 1 + place)
    cotangents = [drawn.to(tensor.dtype) for drawn, tensor in zip(cotangents, gathered, strict=True)]

    def scattered_by(each: ShardTransform, own: Sequence[int], specs: Sequence[Spec]) -> Sequence[torch.Tensor]:
        grads = [cotangents[i].clone() for i in own]
        return start_scatter(each, grads, specs, [each.init(torch.zeros_like(grad)) for grad in grads])()[0]

    scattered = _by_transform(shards, scattered_by)
    problems = []
    for i, (stored, grad) in enumerate(zip(shards, scattered, strict=True)):
        copies = math.prod(axis.size for axis in transform.axes if stored.spec.dim_of(axis) is None)
        left, size = _dot(gathered[i], cotangents[i], transform.axes, 1)
        right, _ = _dot(stored.local, grad, transform.axes, copies)
        # Each product rounds, and each sum over ranks; the roundings of that many terms add up at worst.
        bound = (error + torch.finfo(dtype).eps * (4 + sum(axis.size for axis in transform.axes))) * size
        if not abs(left - right) <= bound:
            found = f"<gather(x), y> = {left!r} and <x, scatter(y)> = {right!r}, apart by {abs(left - right):.3g}"
            needed = f"inner products equal to within {bound:.3g} (shape {stored.spec.shape})"
            problems.append(Problem(f"[{i}]", found, needed))
    remedy = "make scatter the transpose of gather, with the sum over ranks; error= allows for a lossy one, as 2**-8"
    refuse("check_adjoint: scatter is not gather's transpose", problems, remedy, AssertionError)


def _by_transform(leaves: Sequence[Any], f: Callable[..., Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Call `f` for the transform of each leaf's spec, with the places of its leaves and their specs."""
    out: dict[int, torch.Tensor] = {}
    for each, own in grouped(leaves, lambda leaf: leaf.spec.transform).items():
        out.update(zip(own, f(each, own, [leaves[i].spec for i in own]), strict=True))
    return [out[i] for i in range(len(leaves))]


def _dot(a: torch.Tensor, b: torch.Tensor, axes: Sequence[Axis], copies: int) -> tuple[float, float]:
    """Sum the inner product over all ranks, and the same of magnitudes."""
    products = (a.to(torch.float64) * b.to(torch.float64)).reshape(-1) / copies
    sums = torch.stack([products.sum(), products.abs().sum()])
    for axis in axes:
        (sums,) = comm.all_reduce([sums], axis, "check_adjoint")
    return float(sums[0]), float(sums[1])


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
    and three steps of gradient descent with it in place must end where it does with replicated leaves.

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
    check_argument(transform, "check_transform")
    pair = bytes_sent is None or (isinstance(bytes_sent, tuple) and len(bytes_sent) == 2)
    expect(
        pair, "check_transform", "bytes_sent to be the pair of a gather's and a scatter's", checks.describe(bytes_sent)
    )
    kept = [axis.name for axis in layout_axes(transform) if axis not in summed_axes(transform)]
    found, remedy = f"some split over {kept}", "check the rest without them"
    expect(not kept, "check_transform", "leaves that gather makes whole", found, remedy)
    check_adjoint(transform, shapes, dtype=dtype, seed=seed, error=error)
    claims, full = _Claims(transform), _drawn(shapes, dtype, seed)
    gathered, *sent = _check_pair(claims, full, error)
    for name, found_bytes, needed in zip(("gather", "scatter"), sent, bytes_sent or sent, strict=True):
        claims.add(f"{name}: bytes sent away from the {needed:g} asked for", abs(found_bytes - needed))
    gather_error = training_error = 0.0
    for i, (a, b) in enumerate(zip(gathered, full, strict=True)):
        distance = _largest(a - b.to(a.dtype)) / (_largest(b) or 1.0)
        gather_error = max(gather_error, distance)
        claims.add(f"gather of [{i}] of shape {tuple(b.shape)}: relative error", distance, error)
    # A transform that writes to its arguments cannot be trained with.
    claims.judge()
    world, place = place_of(transform.axes)
    replicated = compose(*map(replicate, transform.axes))
    ends = [_descended(full, chosen, seed + 1 + place) for chosen in (transform, replicated)]
    for i, (a, b, start) in enumerate(zip(*ends, full, strict=True)):
        # The most that the gradients of one rank could move it.
        far = STEPS * RATE * STEEPEST * (STEEPEST * max(_largest(start), _largest(b)) + TARGET)
        distance, bound = _largest(a - b), _rounding(dtype, world) * _largest(b) + STEPS * error * far
        training_error = max(training_error, distance / (_largest(b - start) or 1.0))
        claims.add(f"training of [{i}] of shape {tuple(b.shape)}: distance to replicated leaves", distance, bound)
    claims.judge()
    errors = comm.everyone([gather_error, training_error], transform.axes, "check_transform")
    return TransformReport(*sent, *map(max, zip(*errors, strict=True)))


class _Claims:
    """The measurements of a transform so far that are out of their bounds."""

    def __init__(self, transform: ShardTransform) -> None:
        self.transform = transform
        self.problems: list[Problem] = []

    def add(self, path: str, found: float, bound: float = 0.0) -> None:
        """Compare a measurement with its bound."""
        if not found <= bound:
            self.problems.append(Problem(path, f"{found:.4g}", f"at most {bound:.4g}"))

    def same(self, path: str, a: Tree, b: Tree) -> None:
        """Count the leaves that differ in some bit."""
        self.add(path, len(differing_leaves(a, b, None, None, True)))

    def judge(self) -> None:
        """Raise on all ranks if a claim does not hold on one."""
        remedy = "mend these in the transform, or state its error where it is lossy"
        what = "check_transform: claims do not hold"
        refuse_on_all_ranks(what, self.problems, remedy, self.transform.axes, AssertionError)


def _check_pair(claims: _Claims, full: list[torch.Tensor], error: float) -> tuple[Any, float, float]:
    """Check a transform as a value, its storage, gather and scatter; return what it gathers and the bytes of both."""
    transform, params = claims.transform, shard(full, claims.transform)
    specs = [leaf.spec for leaf in params]
    copied = pickle.loads(pickle.dumps(transform))
    same = copied == transform and hash(copied) == hash(transform)
    claims.add("equality of a pickled copy (use a frozen dataclass): differences", not same)
    claims.same("unshard(shard(x)): differing leaves", unshard(params), full)

    def gathered_by(leaves: Sequence[torch.Tensor]) -> Any:
        return transform.gather(leaves, specs), None

    def scattered_by(grads: Sequence[torch.Tensor], states: Sequence[Tree]) -> Any:
        return start_scatter(transform, grads, specs, states)()

    gathered, _, gather_bytes = _checked_call(claims, "gather", gathered_by, [leaf.local for leaf in params])
    grads = [torch.cos(tensor) for tensor in gathered]
    states = [transform.init(torch.zeros_like(grad)) for grad in grads]
    _, after, scatter_bytes = _checked_call(claims, "scatter", scattered_by, grads, states)
    if error and reduction(transform).has_state:
        # If the state stays the same, the rounding errors of all gradients are lost.
        for _ in range(STEPS - 1):
            _, after = scattered_by(grads, after)
        kept = not differing_leaves(after, states, None, None, True)
        claims.add(f"states of a lossy scatter: as they were, {STEPS} scatters later", kept)
    return gathered, gather_bytes, scatter_bytes


def _checked_call(claims: _Claims, name: str, run: Callable[..., Any], tensors: Any, *states: Any) -> Any:
    """Call a half of the pair, which is to do the same each time, write to no input, and take a batch of vmap's."""
    given = [tensors, *states]
    before = tree_map(torch.clone, given)
    with comm.record() as record:
        once, after = run(*given)
    claims.same(f"{name} twice: differing leaves", [*run(*given)], [once, after])
    claims.same(f"{name}'s inputs: leaves it wrote to", before, given)
    if not tree_leaves(states):
        batch = [tensors, [2 * tensor for tensor in tensors]]
        alone = zip(*(run(each, *states)[0] for each in batch), strict=True)
        found, _ = run([torch.stack(pair, -1) for pair in zip(*batch, strict=True)], *states)
        path = f"{name} with a batch of vmap behind the dims: leaves that differ from single calls"
        claims.same(path, list(found), [torch.stack(pair, -1) for pair in alone])
    return once, after, record.bytes_sent()


def _descended(full: list[torch.Tensor], transform: ShardTransform, seed: int) -> list[torch.Tensor]:
    """Return the full leaves after steps of gradient descent on a batch of this rank."""
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    slopes, targets = (
        [(low + (high - low) * draw(leaf.shape)).to(leaf.dtype) for leaf in full]
        for low, high in ((0.5, STEEPEST), (-TARGET, TARGET))
    )

    def loss(params: Tree) -> torch.Tensor:
        terms = zip(gather(params), slopes, targets, strict=True)
        return torch.stack([(slope * leaf - target).square().sum() / 2 for leaf, slope, target in terms]).sum()

    tx = sgd(RATE)
    state = TrainState.create(shard(full, transform), tx)
    for _ in range(STEPS):
        _, grads, after = value_and_grad(loss, transform_state=state.transform_state)(state.params)
        state = update(tx, state, grads, transform_state=after)
    found: list[torch.Tensor] = unshard(state.params)
    return found


def check_optimizer(
    tx: Optimizer | GradientTransformation,
    params: Tree,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    error: float = 0.0,
    seed: int = 0,
) -> None:
    """Try an optimizer or a gradient transformation of one's own as the library will use it, on simulated ranks.

    Three updates by random gradients must end where one rank does, under every strategy and on every number of ranks;
    change nothing that they are given; give the same bits twice, and jitted; and leave a parameter whose gradient is
    None as it is. A norm or a sum that is of this rank's part of a leaf is the usual mistake: see `leaf_norms`. Call it
    outside of ranks.

    Args:
        tx: The optimizer; a transformation is followed by `sgd`.
        params: Pytree of full tensors to try it on: best two leaves or more, whose sizes no number of ranks divides.
        world_sizes: Numbers of ranks to simulate.
        error: What results may be off by beside rounding, relative to how far a leaf moves.
        seed: Seed of the gradients.

    Raises:
        AssertionError: naming the law that does not hold, and every leaf for which it does not.
        RankError: if an update raises an error, as where a gradient is None or a trace has no value.
        ValueError: if `tx` is no optimizer, a leaf is no full tensor, or a number is out of range; if the structure of
            the state depends on ranks.

    >>> from functools import partial
    >>> import fshard as fs
    >>> def update(norms, grads, state, params):
    ...     return fs.tree_map(lambda grad, norm: grad / norm, grads, norms(grads)), state
    >>> def by(norms):
    ...     return fs.GradientTransformation(lambda params: (), partial(update, norms))
    >>> params = {"v": torch.ones(7), "w": torch.ones(5, 3)}
    >>> fs.testing.check_optimizer(by(fs.leaf_norms), params, world_sizes=(1, 2))
    >>> fs.testing.check_optimizer(by(partial(fs.tree_map, torch.norm)), params, world_sizes=(1, 2))
    Traceback (most recent call last):
    AssertionError: check_optimizer: 2 ranks under zero1 do not end where one rank does
      ['params']['v']: expected ... within rtol=0, atol=..., got ... there (7 of 7 elements differ, most by ...)
      ['params']['w']: expected ... within rtol=0, atol=..., got ... there (15 of 15 elements differ, most by ...)
    To fix: take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts.
    """
    known = isinstance(tx, Optimizer | GradientTransformation)
    expect(known, "check_optimizer", "tx to be an Optimizer or a GradientTransformation", checks.describe(tx))
    checks.check_numbers("check_optimizer", checks.NOT_NEGATIVE, error=error)
    flat = flatten(params)
    checks.check_tensors("check_optimizer", flat)
    tx = tx if isinstance(tx, Optimizer) else chain(tx, sgd(0.1))
    gradients = []
    for step in range(STEPS):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed + step), dtype=torch.float64)
        leaves = [draw(leaf.shape).to(leaf) if _takes(leaf) else None for leaf in flat.leaves]
        if step == 1:
            # The first leaf that takes a gradient has none.
            leaves[next((i for i, leaf in enumerate(leaves) if leaf is not None), 0)] = None
        gradients.append(unflatten(flat.treedef, leaves))

    def program() -> dict[str, Tree]:
        return {name: _trained(tx, params, gradients, strategy, name) for name, strategy in _strategies().items()}

    needed: Tree = None
    for world in world_sizes:
        try:
            results = spmd(program, world)
        except RankError as failed:
            raise failed.__cause__ if isinstance(failed.__cause__, AssertionError) else failed from None
        needed = results[0]["ddp"] if needed is None else needed
        for name in results[0]:
            for found in results:
                _compare(f"{world} ranks under {name}", found[name], needed, flat.leaves, world, error)


def _takes(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _strategies() -> dict[str, ShardTransform]:
    line = init_mesh({"shard": -1}, device="cpu")
    grid = init_mesh({"replicate": 2 - line.size() % 2, "shard": -1}, device="cpu")
    return {
        "ddp": ddp(line),
        **{make.__name__: make(line, min_shard_elements=0) for make in (zero1, zero2, zero3)},
        "hsdp": hsdp(grid, min_shard_elements=0),
        "fully_shard(dim=-1)": fully_shard(line, dim=-1),
    }


def _trained(tx: Optimizer, params: Tree, gradients: Sequence[Tree], strategy: ShardTransform, name: str) -> Tree:
    """Update on this rank, checking each update by itself; return the full parameters and state."""
    state = TrainState.create(shard(params, strategy), tx)

    def step(state: TrainState, grads: Tree) -> TrainState:
        return update(tx, state, grads)

    def same(law: str, found: Tree, needed: Tree, remedy: str) -> None:
        problems = differing_leaves(found, needed, None, None, True)
        refuse(f"check_optimizer: {law}", problems, remedy, AssertionError)

    for full in gradients:
        grads, before = shard(full, strategy), state
        state = check_pure(step, before, grads)
        same("the same update twice has other bits", step(before, grads), state, "keep all state in the state")
        kept = tree_map(lambda new, old, g: old if g is None else new, state.params, before.params, grads)
        same("a parameter without a gradient has moved", state.params, kept, "leave it as it is where grad is None")
    # A trace takes a hundred times as long as an update, so there is one on each number of ranks.
    if name == "zero3":
        same(
            "jitted, an update has other bits", jit(step)(state, grads), step(state, grads), "compute by tensors alone"
        )
    return {"params": unshard(state.params), "state": unshard(state.opt_state)}


def _compare(where: str, found: Tree, needed: Tree, starts: Sequence[Any], world: int, error: float) -> None:
    """Compare full parameters and state with those of one rank, by rounding and by how far leaves have moved."""
    here, there = flatten(found), flatten(needed)
    checks.same_structure(f"check_optimizer: {where}", here, there)
    problems = []
    for i, (path, a, b) in enumerate(zip(here.paths, here.leaves, there.leaves, strict=True)):
        bound, rounds = 0.0, _takes(a) and _takes(b) and a.dtype == b.dtype
        if rounds:
            # State has no start, and moves by all that it is.
            moved = b - starts[i] if i < len(starts) else b
            # Of finite elements, as others are compared by themselves.
            far, size = (_largest(x.abs().nan_to_num(0.0, 0.0)) for x in (moved, b))
            bound = _rounding(b.dtype, world) * (far + size) + error * far
        problems += [Problem(path, *texts) for texts in [difference(a, b, 0.0, bound, not rounds)] if texts]
    remedy = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"
    refuse(f"check_optimizer: {where} do not end where one rank does", problems, remedy, AssertionError)


def _drawn(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Draw normal numbers."""
    sizes = isinstance(shapes, list | tuple) and all(isinstance(shape, tuple) for shape in shapes)
    expect(sizes, "check_adjoint", "shapes to be a list of tuples of sizes", checks.describe(shapes))
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def _rounding(dtype: torch.dtype, world: int) -> float:
    """Bound the rounding of all steps, relative to the largest number."""
    return torch.finfo(dtype).eps * STEPS * (8 + 2 * world)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().double().amax()) if tensor.numel() else 0.0
