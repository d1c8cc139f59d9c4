"""Checks of the laws that a sharding transform and an optimizer of one's own owe to the rest."""

import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import comm
from fshard.errors import Problem, expect, refuse
from fshard.jit import jit
from fshard.mesh import init_mesh
from fshard.microbatches import share_of
from fshard.optim.native import sgd
from fshard.shard import shard, unshard
from fshard.testing.compare import check_pure, differing_leaves, refuse_on_all_ranks
from fshard.testing.spmd import spmd
from fshard.testing.workers import RankError
from fshard.transforms import ShardTransform, fully_shard
from fshard.transforms.compose import layout_axes, start_scatter, summed_axes
from fshard.transforms.strategies import ddp, hsdp, zero3
from fshard.tree import Tree, checks, flatten, tree_leaves, tree_map, unflatten
from fshard.update import GradientTransformation, Optimizer, TrainState, chain, update

SHAPES = ((5, 3), (7,), (24, 8), (1, 4), (), (0, 3))
# Updates of check_optimizer.
STEPS = 3


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
    params = shard(_drawn(shapes, dtype, seed), transform)
    specs = [leaf.spec for leaf in params]
    # Copies, so that a transform which writes to its arguments is not taken for a wrong transpose.
    gathered = transform.gather([leaf.local.clone() for leaf in params], specs)
    _, place = share_of(transform.axes)
    drawn = _drawn([tensor.shape for tensor in gathered], torch.float64, seed + 1 + place)
    cotangents = [each.to(tensor.dtype) for each, tensor in zip(drawn, gathered, strict=True)]
    scattered, _ = start_scatter(transform, [y.clone() for y in cotangents], specs, _states(transform, cotangents))()
    rows = []
    for leaf, full, cotangent, grad in zip(params, gathered, cotangents, scattered, strict=True):
        copies = math.prod(axis.size for axis in transform.axes if leaf.spec.dim_of(axis) is None)
        rows.append([_dot(full, cotangent), _dot(leaf.local, grad) / copies, _dot(full.abs(), cotangent.abs())])
    sums = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    for axis in transform.axes:
        (sums,) = comm.all_reduce([sums], axis, "check_adjoint")
    # Each product rounds, and each sum over ranks; the roundings of that many terms add up at worst.
    relative = error + torch.finfo(dtype).eps * (4 + sum(axis.size for axis in transform.axes))
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


def _states(transform: ShardTransform, grads: Sequence[torch.Tensor]) -> list[Tree]:
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
    transform: ShardTransform,
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
    params = shard(full, transform)
    specs = [leaf.spec for leaf in params]
    problems: list[Problem] = []

    def claim(path: str, found: float, bound: float = 0.0) -> None:
        if not found <= bound:
            problems.append(Problem(path, f"{found:.4g}", f"at most {bound:.4g}"))

    copied = pickle.loads(pickle.dumps(transform))
    same = copied == transform and hash(copied) == hash(transform)
    claim("equality of a pickled copy (use a frozen dataclass): differences", not same)
    claim("unshard(shard(x)): differing leaves", _count(unshard(params), full))

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
    errors = comm.everyone(max(distances, default=0.0), transform.axes, "check_transform")
    return TransformReport(gather_bytes, scatter_bytes, max(errors))


def _checked_call(
    claim: Callable[..., None], name: str, run: Callable[..., Any], tensors: Any, *states: Any
) -> tuple[Any, float]:
    """Call a half of the pair, which is to do the same each time, write to no input, and take a batch of vmap's."""
    given = [tensors, *states]
    before = tree_map(torch.clone, given)
    with comm.record() as record:
        once = run(*given)
    claim(f"{name} twice: differing leaves", _count(run(*given), once))
    claim(f"{name}'s inputs: leaves it wrote to", _count(before, given))
    if not tree_leaves(states):
        batch = [tensors, [2 * tensor for tensor in tensors]]
        alone = zip(*(run(each, *states)[0] for each in batch), strict=True)
        found, _ = run([torch.stack(pair, -1) for pair in zip(*batch, strict=True)], *states)
        path = f"{name} with a batch of vmap behind the dims: leaves that differ from single calls"
        claim(path, _count(list(found), [torch.stack(pair, -1) for pair in alone]))
    return once[0], record.bytes_sent()


def _count(a: Tree, b: Tree) -> int:
    """Count the leaves that differ in some bit."""
    return len(differing_leaves(a, b, exact=True))


def check_optimizer(
    tx: Optimizer | GradientTransformation,
    params: Tree,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
) -> None:
    """Try an optimizer or a gradient transformation of one's own as the library will use it, on simulated ranks.

    Three updates by random gradients must end where one rank does, as closely as torch.testing.assert_close asks, under
    every strategy and on every number of ranks; change nothing that they are given; give the same bits twice, and
    jitted; and leave a parameter whose gradient is None as it is. A norm or a sum that is of this rank's part of a leaf
    is the usual mistake: see `leaf_norms`. Call it outside of ranks.

    Args:
        tx: The optimizer; a transformation is followed by `sgd`.
        params: Pytree of full tensors to try it on: best two leaves or more, whose sizes no number of ranks divides.
        world_sizes: Numbers of ranks to simulate.

    Raises:
        AssertionError: naming the law that does not hold, and every leaf for which it does not.
        RankError: if an update raises an error, as where a gradient is None or a trace has no value.
        ValueError: if `tx` is no optimizer, or a leaf no full tensor; if the structure of
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
    AssertionError: check_optimizer: 2 ranks under zero3 do not end where one rank does
      ['params']['v']: expected close values, got Mismatched elements: 7 / 7 (100.0%) Greatest absolute difference: ...
      ['params']['w']: expected close values, got Mismatched elements: 15 / 15 (100.0%) Greatest absolute ...
    ...
    To fix: take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts.
    """
    known = isinstance(tx, Optimizer | GradientTransformation)
    expect(known, "check_optimizer", "tx to be an Optimizer or a GradientTransformation", checks.describe(tx))
    flat = flatten(params)
    checks.check_tensors("check_optimizer", flat)
    tx = tx if isinstance(tx, Optimizer) else chain(tx, sgd(0.1))
    takes = [i for i, leaf in enumerate(flat.leaves) if leaf.is_floating_point() or leaf.is_complex()]
    gradients = []
    for step in range(STEPS):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        # In the second step the first leaf has no gradient.
        given = {i: draw(flat.leaves[i].shape).to(flat.leaves[i]) for i in takes[step == 1 :]}
        gradients.append(unflatten(flat.treedef, [given.get(i) for i in range(len(flat.leaves))]))

    remedy = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"

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
            problems = [problem for found in results for problem in differing_leaves(found[name], needed)]
            what = f"check_optimizer: {world} ranks under {name} do not end where one rank does"
            refuse(what, problems, remedy, AssertionError)


def _strategies() -> dict[str, ShardTransform]:
    line = init_mesh({"shard": -1}, device="cpu")
    grid = init_mesh({"replicate": 2 - line.size() % 2, "shard": -1}, device="cpu")
    return {
        "ddp": ddp(line),
        "zero3": zero3(line, min_shard_elements=0),
        "hsdp": hsdp(grid, min_shard_elements=0),
        "fully_shard(dim=-1)": fully_shard(line, dim=-1),
    }


def _trained(tx: Optimizer, params: Tree, gradients: Sequence[Tree], strategy: ShardTransform, name: str) -> Tree:
    """Update on this rank, checking each update by itself; return the full parameters and state."""
    state = TrainState.create(shard(params, strategy), tx)

    def step(state: TrainState, grads: Tree) -> TrainState:
        return update(tx, state, grads)

    def same(law: str, found: Tree, needed: Tree, remedy: str) -> None:
        refuse(f"check_optimizer: {law}", differing_leaves(found, needed, exact=True), remedy, AssertionError)

    for full in gradients:
        grads, before = shard(full, strategy), state
        state = check_pure(step, before, grads)
        same("the same update twice has other bits", step(before, grads), state, "keep all state in the state")
        kept = tree_map(lambda new, old, g: old if g is None else new, state.params, before.params, grads)
        same("a parameter without a gradient has moved", state.params, kept, "leave it as it is where grad is None")
    # A trace takes a hundred times as long as an update, so there is one on each number of ranks.
    if name == "zero3":
        traced, needed = jit(step)(state, grads), step(state, grads)
        same("jitted, an update has other bits", traced, needed, "compute by tensors alone")
    return {"params": unshard(state.params), "state": unshard(state.opt_state)}


def _drawn(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Draw normal numbers."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().double().amax()) if tensor.numel() else 0.0
