"""check_optimizer: an optimizer has one result under every strategy and on every number of ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from fshard.errors import Problem, expect, refuse
from fshard.jit import jit
from fshard.mesh import init_mesh
from fshard.optim.native import sgd
from fshard.shard import shard, unshard
from fshard.testing.compare import check_pure, differing_leaves
from fshard.testing.spmd import spmd
from fshard.testing.workers import RankError
from fshard.transforms import ShardTransform, fully_shard
from fshard.transforms.strategies import ddp, hsdp, zero1, zero2, zero3
from fshard.tree import Tree, flatten, leaves_of, unflatten
from fshard.tree.checks import (
    NOT_NEGATIVE,
    check_local,
    check_numbers,
    check_seed,
    check_tensors,
    describe,
    same_structure,
)
from fshard.update import GradientTransformation, Optimizer, TrainState, chain, update

STEPS = 3
# Each makes a transform for a mesh of one axis, and one of two.
STRATEGIES: MappingProxyType[str, Callable[[Any, Any], ShardTransform]] = MappingProxyType(
    {
        "ddp": lambda line, grid: ddp(line),
        "zero1": lambda line, grid: zero1(line, min_shard_elements=0),
        "zero2": lambda line, grid: zero2(line, min_shard_elements=0),
        "zero3": lambda line, grid: zero3(line, min_shard_elements=0),
        "hsdp": lambda line, grid: hsdp(grid, min_shard_elements=0),
        "fully_shard(dim=-1)": lambda line, grid: fully_shard(line, dim=-1),
    }
)

# A trace takes a hundred times as long as an update, so there is one on each number of ranks.
JITTED = "zero3"


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
        ValueError: if `tx` is no optimizer, a leaf is no full tensor, or a number is out of range; if the structure of
            the state depends on ranks.

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
      ['params']['v']: expected values within ... of one rank's, got some apart by ...
      ['params']['w']: expected values within ... of one rank's, got some apart by ...
    To fix: take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts.
    """
    known = isinstance(tx, Optimizer | GradientTransformation)
    expect(known, "check_optimizer", "tx to be an Optimizer or a GradientTransformation", describe(tx))
    check_numbers("check_optimizer", NOT_NEGATIVE, error=error)
    check_seed("check_optimizer", seed)
    flat = flatten(params)
    check_tensors("check_optimizer", flat)
    check_local("check_optimizer", flat)
    tx = tx if isinstance(tx, Optimizer) else chain(tx, sgd(0.1))
    grads = [_gradients(params, seed + step, step == 1) for step in range(STEPS)]
    needed: Tree = None
    for world in world_sizes:
        for name in STRATEGIES:
            results = _on_ranks(world, partial(_program, tx, params, grads, name))
            needed = results[0] if needed is None else needed
            for found in results:
                _compare(f"{world} ranks under {name}", found, needed, params, world, error)


def _on_ranks(world: int, program: Callable[[], Tree]) -> list[Tree]:
    try:
        return spmd(program, world)
    except RankError as error:
        if isinstance(error.__cause__, AssertionError):
            raise error.__cause__ from None
        raise


def _gradients(params: Tree, seed: int, first_is_none: bool) -> Tree:
    """Draw gradients of all leaves, or of all but the first one that takes a gradient."""
    draw, flat = torch.Generator().manual_seed(seed), flatten(params)
    leaves = [
        torch.randn(leaf.shape, generator=draw, dtype=torch.float64).to(leaf) if _takes(leaf) else None
        for leaf in flat.leaves
    ]
    if first_is_none:
        leaves[next((i for i, leaf in enumerate(leaves) if leaf is not None), 0)] = None
    return unflatten(flat.treedef, leaves)


def _takes(leaf: Any) -> bool:
    return leaf is not None and (leaf.is_floating_point() or leaf.is_complex())


def _program(tx: Optimizer, params: Tree, gradients: Sequence[Tree], name: str) -> Tree:
    """Update on this rank, checking each update by itself; return the full parameters and state."""
    line = init_mesh({"shard": -1}, device="cpu")
    grid = init_mesh({"replicate": 2 - line.size() % 2, "shard": -1}, device="cpu")
    strategy = STRATEGIES[name](line, grid)
    state = TrainState.create(shard(params, strategy), tx)
    for full in gradients:
        grads = shard(full, strategy)
        state = _checked(tx, state, grads)
    if name == JITTED:
        _check_jitted(tx, state, grads)
    return {"params": unshard(state.params), "state": unshard(state.opt_state)}


def _checked(tx: Optimizer, state: TrainState, grads: Tree) -> TrainState:
    try:
        after: TrainState = check_pure(partial(update, tx), state, grads)
    except (AttributeError, TypeError) as error:
        if None not in leaves_of(grads):
            raise
        text = f"check_optimizer: update raised {type(error).__name__} where a gradient is None: {error}"
        raise AssertionError(f"{text}; leave such a parameter as it is") from error
    _same_bits("the same update twice has other bits", update(tx, state, grads), after, "keep all state in the state")
    unused = [grad is None for grad in leaves_of(grads)]
    kept = [
        unflatten(flat.treedef, [leaf if is_none else None for leaf, is_none in zip(flat.leaves, unused, strict=True)])
        for flat in (flatten(after.params), flatten(state.params))
    ]
    _same_bits("a parameter without a gradient has moved", kept[0], kept[1], "leave it as it is where grad is None")
    return after


def _check_jitted(tx: Optimizer, state: TrainState, grads: Tree) -> None:
    try:
        jitted = jit(partial(update, tx))(state, grads)
    except ValueError as error:
        raise AssertionError(f"check_optimizer: update cannot be jitted: {error}") from error
    _same_bits("jitted, an update has other bits", jitted, update(tx, state, grads), "compute by tensors alone")


def _same_bits(law: str, found: Tree, needed: Tree, remedy: str) -> None:
    refuse(f"check_optimizer: {law}", differing_leaves(found, needed, None, None, True), remedy, AssertionError)


def _compare(where: str, found: Tree, needed: Tree, start: Tree, world: int, error: float) -> None:
    """Compare full parameters and state with those of one rank, by rounding and by how far leaves have moved."""
    here, there = flatten(found), flatten(needed)
    same_structure(f"check_optimizer: {where}", here, there)
    starts = [*leaves_of(start), *[None] * (len(here.leaves) - len(leaves_of(start)))]
    problems = []
    for path, a, b, before in zip(here.paths, here.leaves, there.leaves, starts, strict=True):
        if not isinstance(b, torch.Tensor):
            distance, bound = float(a != b), 0.0
        else:
            far = _largest(b if before is None else b - before)
            eps = torch.finfo(b.dtype).eps if _takes(b) else 0.0
            bound = eps * STEPS * (8 + 2 * world) * (far + _largest(b)) + error * far
            distance = _largest(a - b) if a.shape == b.shape and a.dtype == b.dtype else torch.inf
        if not distance <= bound:
            problems.append(Problem(path, f"some apart by {distance:.3g}", f"values within {bound:.3g} of one rank's"))
    remedy = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"
    what = f"check_optimizer: {where} do not end where one rank does"
    refuse(what, problems, remedy, AssertionError)


def _largest(tensor: torch.Tensor) -> float:
    numbers = tensor.to(torch.complex128).abs()
    return float(numbers.amax()) if tensor.numel() else 0.0
