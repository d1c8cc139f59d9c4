"""check_optimizer: the laws that an optimizer of one's own owes to the rest."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import fshard as fs
from fshard.extend import describe, expect, flatten, refuse

STEPS = 3


def check_optimizer(
    tx: fs.Optimizer | fs.GradientTransformation,
    params: Any,
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
    AssertionError: check_optimizer: 2 ranks under zero3 do not end where one rank does; take norms ...: trees differ
      ['params']['v']: expected close values, got Mismatched elements: 7 / 7 (100.0%) Greatest absolute difference: ...
      ['params']['w']: expected close values, got Mismatched elements: 15 / 15 (100.0%) Greatest absolute ...
    ...
    """
    known = isinstance(tx, fs.Optimizer | fs.GradientTransformation)
    expect(known, "check_optimizer", "tx to be an Optimizer or a GradientTransformation", describe(tx))
    flat = flatten(params)
    wrong = flat.problems(lambda leaf: None if isinstance(leaf, torch.Tensor) else (describe(leaf), "a full tensor"))
    refuse("check_optimizer: leaves are no tensors", wrong, "keep other values out of the tree")
    tx = tx if isinstance(tx, fs.Optimizer) else fs.chain(tx, fs.sgd(0.1))
    takes = [i for i, leaf in enumerate(flat.leaves) if leaf.is_floating_point() or leaf.is_complex()]
    gradients = []
    for step in range(STEPS):
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        # In the second step the first leaf has no gradient.
        given = {i: draw(flat.leaves[i].shape).to(flat.leaves[i]) for i in takes[step == 1 :]}
        gradients.append(flat.unflatten([given.get(i) for i in range(len(flat.leaves))]))

    def program() -> dict[str, Any]:
        return {name: _trained(tx, params, gradients, strategy, name) for name, strategy in _strategies().items()}

    remedy = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"
    needed: Any = None
    for world in world_sizes:
        try:
            results = fs.testing.spmd(program, world)
        except fs.testing.RankError as failed:
            raise failed.__cause__ if isinstance(failed.__cause__, AssertionError) else failed from None
        needed = results[0]["ddp"] if needed is None else needed
        for name in results[0]:
            for found in results:
                _same(f"{world} ranks under {name} do not end where one rank does", remedy, found[name], needed, False)


def _same(law: str, remedy: str, found: Any, needed: Any, exact: bool = True) -> None:
    try:
        fs.testing.assert_trees_close(found, needed, exact=exact)
    except AssertionError as error:
        raise AssertionError(f"check_optimizer: {law}; {remedy}: {error}") from None


def _strategies() -> dict[str, fs.ShardTransform]:
    line = fs.init_mesh({"shard": -1}, device="cpu")
    grid = fs.init_mesh({"replicate": 2 - line.size() % 2, "shard": -1}, device="cpu")
    return {
        "ddp": fs.ddp(line),
        "zero3": fs.zero3(line, min_shard_elements=0),
        "hsdp": fs.hsdp(grid, min_shard_elements=0),
        "fully_shard(dim=-1)": fs.fully_shard(line, dim=-1),
    }


def _trained(tx: fs.Optimizer, params: Any, gradients: Sequence[Any], strategy: fs.ShardTransform, name: str) -> Any:
    """Update on this rank, checking each update by itself; return the full parameters and state."""
    state = fs.TrainState.create(fs.shard(params, strategy), tx)

    def step(state: fs.TrainState, grads: Any) -> fs.TrainState:
        return fs.update(tx, state, grads)

    for full in gradients:
        grads, before = fs.shard(full, strategy), state
        state = fs.testing.check_pure(step, before, grads)
        _same("the same update twice has other bits", "keep all state in the state", step(before, grads), state)
        kept = fs.tree_map(lambda new, old, g: old if g is None else new, state.params, before.params, grads)
        _same("a parameter without a gradient has moved", "leave it as it is where grad is None", state.params, kept)
    # A trace takes a hundred times as long as an update, so there is one on each number of ranks.
    if name == "zero3":
        traced, needed = fs.jit(step)(state, grads), step(state, grads)
        _same("jitted, an update has other bits", "compute by tensors alone", traced, needed)
    return {"params": fs.unshard(state.params), "state": fs.unshard(state.opt_state)}
