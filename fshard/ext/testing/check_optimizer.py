"""check_optimizer: the laws that your own optimizer has to keep."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import fshard as fs
from fshard.ext.testing.laws import draw_normal
from fshard.extend import describe, expect, flatten, refuse

STEPS = 3
_NORMS = "take norms and sums of whole leaves by fs.leaf_norms or fs.global_norm; tensors are this rank's parts"


def check_optimizer(
    tx: fs.Optimizer | fs.GradientTransformation,
    params: Any,
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
) -> None:
    """Try your own optimizer or gradient transformation as the library will use it, on simulated ranks.

    It makes three updates with random gradients, under several strategies and on each number of ranks. They must end
    where those of one rank end, as closely as torch.testing.assert_close asks. They must not change their arguments,
    must give the same bits when they are repeated and when they are jitted, must keep the structure, shapes and dtypes
    of the state, must leave a parameter whose gradient is None as it is, must keep parameters finite, and must make no
    NaN in the state. The usual mistake is to take a norm or a sum of this rank's part of a leaf: see `leaf_norms`.
    Call it outside of ranks.

    Args:
        tx: The optimizer; a transformation is followed by `sgd`.
        params: Pytree of full tensors to try it on; two or more, with sizes that no number of ranks divides, show most.
        world_sizes: Numbers of ranks to simulate beside one rank, of which one or more are above 1.

    Raises:
        AssertionError: naming the law that does not hold, and every leaf for which it does not.
        RankError: if an update raises an error, for example because a gradient is None or a trace has no values.
        ValueError: if `tx` is no optimizer, if a leaf is no tensor or none has an element, if no world size has several
            ranks, or if the structure of the state depends on ranks.

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
    AssertionError: check_optimizer: rank 0 of 2 under zero3 does not end where one rank does; take norms ...: trees
    ...
      ['params']['v']: expected close values, got Mismatched elements: 7 / 7 (100.0%) Greatest absolute difference: ...
      ['params']['w']: expected close values, got Mismatched elements: 15 / 15 (100.0%) Greatest absolute ...
    ...
    """
    is_optimizer = isinstance(tx, fs.Optimizer | fs.GradientTransformation)
    expect(is_optimizer, "check_optimizer", "tx to be an Optimizer or a GradientTransformation", describe(tx))
    problems = flatten(params).problems(_describe_misfit)
    refuse("check_optimizer: leaves are no tensors", problems, "keep other values out of the tree")
    expect(any(leaf.numel() for leaf in fs.tree_leaves(params)), "check_optimizer", "params with elements", "none")
    expect(
        isinstance(world_sizes, Sequence) and any(size != 1 for size in world_sizes),
        "check_optimizer",
        "world_sizes to have one above 1",
        f"{world_sizes!r:.100}",
    )
    tx = tx if isinstance(tx, fs.Optimizer) else fs.chain(tx, fs.sgd(0.1))
    gradients = [_draw_gradients(params, step) for step in range(STEPS)]

    def program() -> dict[str, Any]:
        results = {}
        for name, strategy in _make_strategies().items():
            results[name] = _train(tx, params, gradients, name, strategy)
        return results

    expected: Any = None
    for world_size in dict.fromkeys((1, *world_sizes)):
        try:
            results = fs.testing.spmd(program, world_size)
        except fs.testing.RankError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, AssertionError) else error from None
        expected = expected or results[0]["ddp"]
        _assert_same("parameters are not finite", expected["params"], fs.tree_map(torch.nan_to_num, expected["params"]))
        for name in results[0]:
            for rank, result in enumerate(results):
                law = f"rank {rank} of {world_size} under {name} does not end where one rank does; {_NORMS}"
                _assert_same(law, result[name], expected, exact=False)


def _describe_misfit(leaf: Any) -> tuple[str, str] | None:
    return None if isinstance(leaf, torch.Tensor) else (describe(leaf), "a full tensor")


def _draw_gradients(params: Any, step: int) -> Any:
    """Draw a gradient for each leaf that takes one; in the second step the first leaf gets None."""
    flat = flatten(params)
    gradients: list[torch.Tensor | None] = []
    for i, leaf in enumerate(flat.leaves):
        is_trained = leaf.is_floating_point() or leaf.is_complex()
        (grad,) = draw_normal([leaf.shape], leaf.dtype, seed=STEPS * i + step)
        gradients.append(grad if is_trained and (i, step) != (0, 1) else None)
    return flat.unflatten(gradients)


def _make_strategies() -> dict[str, fs.ShardTransform]:
    line = fs.init_mesh({"shard": -1}, device="cpu")
    grid = fs.init_mesh({"replicate": 2 - line.size() % 2, "shard": -1}, device="cpu")
    return {
        "ddp": fs.ddp(line),
        "zero3": fs.zero3(line, min_shard_elements=0),
        "hsdp": fs.hsdp(grid, min_shard_elements=0),
        "fully_shard(dim=-1)": fs.fully_shard(line, dim=-1),
    }


def _train(tx: fs.Optimizer, params: Any, gradients: Sequence[Any], name: str, strategy: fs.ShardTransform) -> Any:
    """Update on this rank, checking each update by itself; return the full parameters and state."""

    def update(state: fs.TrainState, grads: Any) -> fs.TrainState:
        return fs.update(tx, state, grads)

    state = fs.TrainState.create(fs.shard(params, strategy), tx)
    for full in gradients:
        grads = fs.shard(full, strategy)
        state = _check_update(update, state, grads)
    # Tracing takes a hundred times as long as an update, so it is done once on each number of ranks.
    if name == "zero3":
        law = "jitted, an update has other bits; compute by tensors alone"
        _assert_same(law, fs.jit(update)(state, grads), update(state, grads))
    return {"params": fs.unshard(state.params), "state": fs.unshard(state.opt_state)}


def _check_update(update: Callable[..., fs.TrainState], before: fs.TrainState, grads: Any) -> fs.TrainState:
    """Update once, and assert what holds on each rank by itself."""
    after = fs.testing.check_pure(update, before, grads)
    law = "the state has another structure, shape, dtype or NaN after an update; return a state as init makes it"
    new_state = fs.tree_map(_mark_nan, after.opt_state)
    _assert_same(law, new_state, fs.tree_map(_mark_nan, before.opt_state))
    law = "the same update twice has other bits; keep all state in the state"
    _assert_same(law, update(before, grads), after)

    def keep_without_gradient(new: Any, old: Any, grad: Any) -> Any:
        return old if grad is None else new

    expected = fs.tree_map(keep_without_gradient, after.params, before.params, grads)
    law = "a parameter without a gradient has moved; leave it as it is where grad is None"
    _assert_same(law, after.params, expected)
    return after


def _mark_nan(leaf: Any) -> torch.Tensor:
    tensor = torch.as_tensor(leaf)
    return tensor.isnan().to(tensor.dtype)


def _assert_same(law: str, actual: Any, expected: Any, exact: bool = True) -> None:
    try:
        fs.testing.assert_trees_close(actual, expected, exact=exact)
    except (AssertionError, ValueError) as error:
        raise AssertionError(f"check_optimizer: {law}: {error}") from None
