"""check_optimizer: an optimizer has one result under every strategy and on every number of ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fshard.errors import Problem, expect, refuse
from fshard.jit import jit
from fshard.mesh import init_mesh
from fshard.optim.native import sgd
from fshard.shard import shard, unshard
from fshard.testing.compare import check_pure, difference, differing_leaves
from fshard.testing.spmd import spmd
from fshard.testing.workers import RankError
from fshard.transforms import ShardTransform, fully_shard
from fshard.transforms.strategies import ddp, hsdp, zero1, zero2, zero3
from fshard.tree import Tree, checks, flatten, leaves_of, tree_map, unflatten
from fshard.update import GradientTransformation, Optimizer, TrainState, chain, update

STEPS = 3


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
    checks.check_arguments("check_optimizer", checks.SEED, seed=seed)
    flat = flatten(params)
    checks.check_tensors("check_optimizer", flat)
    checks.check_local("check_optimizer", flat)
    tx = tx if isinstance(tx, Optimizer) else chain(tx, sgd(0.1))
    grads = [_gradients(params, seed + step, step == 1) for step in range(STEPS)]

    def program() -> dict[str, Tree]:
        strategies = _strategies().items()
        return {name: _trained(tx, params, grads, strategy, name == "zero3") for name, strategy in strategies}

    needed: Tree = None
    for world in world_sizes:
        try:
            results = spmd(program, world)
        except RankError as failed:
            raise failed.__cause__ if isinstance(failed.__cause__, AssertionError) else failed from None
        needed = results[0]["ddp"] if needed is None else needed
        for name in results[0]:
            for found in results:
                _compare(f"{world} ranks under {name}", found[name], needed, params, world, error)


def _takes(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _gradients(params: Tree, seed: int, first_is_none: bool) -> Tree:
    """Draw gradients of all leaves, or of all but the first one that takes a gradient."""
    draw, flat = torch.Generator().manual_seed(seed), flatten(params)
    leaves: list[torch.Tensor | None] = [None] * len(flat.leaves)
    for i in [i for i, leaf in enumerate(flat.leaves) if _takes(leaf)][first_is_none:]:
        leaves[i] = torch.randn(flat.leaves[i].shape, generator=draw, dtype=torch.float64).to(flat.leaves[i])
    return unflatten(flat.treedef, leaves)


def _strategies() -> dict[str, ShardTransform]:
    line = init_mesh({"shard": -1}, device="cpu")
    grid = init_mesh({"replicate": 2 - line.size() % 2, "shard": -1}, device="cpu")
    return {
        "ddp": ddp(line),
        **{make.__name__: make(line, min_shard_elements=0) for make in (zero1, zero2, zero3)},
        "hsdp": hsdp(grid, min_shard_elements=0),
        "fully_shard(dim=-1)": fully_shard(line, dim=-1),
    }


def _trained(tx: Optimizer, params: Tree, gradients: Sequence[Tree], strategy: ShardTransform, is_jitted: bool) -> Tree:
    """Update on this rank, checking each update by itself; return the full parameters and state."""
    state = TrainState.create(shard(params, strategy), tx)

    def step(state: TrainState, grads: Tree) -> TrainState:
        return update(tx, state, grads)

    for full in gradients:
        grads, before = shard(full, strategy), state
        kinds = (AttributeError, TypeError) if None in leaves_of(grads) else ()
        with _named("update raised {} where a gradient is None: {}; leave such a parameter as it is", kinds):
            state = check_pure(step, before, grads)
        _same("the same update twice has other bits", step(before, grads), state, "keep all state in the state")
        kept = tree_map(lambda new, old, g: old if g is None else new, state.params, before.params, grads)
        _same("a parameter without a gradient has moved", state.params, kept, "leave it as it is where grad is None")
    # A trace takes a hundred times as long as an update, so there is one on each number of ranks.
    if is_jitted:
        with _named("update cannot be jitted: {1}", (ValueError,)):
            jitted = jit(step)(state, grads)
        _same("jitted, an update has other bits", jitted, step(state, grads), "compute by tensors alone")
    return {"params": unshard(state.params), "state": unshard(state.opt_state)}


@contextmanager
def _named(text: str, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise AssertionError(f"check_optimizer: {text.format(type(error).__name__, error)}") from error


def _same(law: str, found: Tree, needed: Tree, remedy: str) -> None:
    refuse(f"check_optimizer: {law}", differing_leaves(found, needed, None, None, True), remedy, AssertionError)


def _compare(where: str, found: Tree, needed: Tree, start: Tree, world: int, error: float) -> None:
    """Compare full parameters and state with those of one rank, by rounding and by how far leaves have moved."""
    here, there = flatten(found), flatten(needed)
    checks.same_structure(f"check_optimizer: {where}", here, there)
    problems, starts = [], leaves_of(start)
    for i, (path, a, b) in enumerate(zip(here.paths, here.leaves, there.leaves, strict=True)):
        bound, rounds = 0.0, _takes(a) and _takes(b) and a.dtype == b.dtype
        if rounds:
            # State has no start, and moves by all that it is.
            far = _largest(b - starts[i] if i < len(starts) else b)
            bound = torch.finfo(b.dtype).eps * STEPS * (8 + 2 * world) * (far + _largest(b)) + error * far
        problems += [Problem(path, *texts) for texts in [difference(a, b, 0.0, bound, not rounds)] if texts]
    remedy = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"
    refuse(f"check_optimizer: {where} do not end where one rank does", problems, remedy, AssertionError)


def _largest(tensor: torch.Tensor) -> float:
    """The largest of the finite elements, as others are compared by themselves."""
    return float(tensor.abs().double().nan_to_num(0.0, 0.0).amax()) if tensor.numel() else 0.0
