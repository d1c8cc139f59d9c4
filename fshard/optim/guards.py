"""Updates that happen or not: skipped where gradients are not finite, or collected until there are enough."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat, comm
from fshard.checks import Range, check_numbers, kind
from fshard.collectives import linear_call
from fshard.optim.leaves import check_state, joined, leafwise, missing, none_missed, zeros
from fshard.shard import without_padding
from fshard.tree import Added, Axis, Tree, flatten, is_sharded, tree_map, unflatten
from fshard.update import Optimizer


class SkipState(NamedTuple):
    """State of an optimizer made by `skip_nonfinite`.

    Attributes:
        skipped: Updates that were skipped: an int64 tensor of shape ().
        inner: The state of the optimizer inside.
    """

    skipped: torch.Tensor
    inner: Tree


def skip_nonfinite(tx: Optimizer) -> Optimizer:
    """Skip an update on every rank where a gradient holds an inf or a nan on any.

    The parameters and the state inside stay as they are, and the update is counted. Costs one collective of a single
    number over each mesh axis. Follows optax.apply_if_finite.

    Args:
        tx: The optimizer.

    Returns:
        The optimizer; its state counts what was `skipped`.

    Raises:
        ValueError: if `tx` is no optimizer.
    """
    _check_optimizer("skip_nonfinite", tx)

    def run(grads: Tree, state: SkipState, params: Tree, donate: bool = False) -> tuple[Tree, SkipState]:
        check_state("skip_nonfinite", state, SkipState)
        finite = all_finite(grads)
        step: Any = (tx.update_donated if donate else None) or tx.update
        new = either(finite, lambda: step(grads, state.inner, params), lambda: (params, state.inner))
        return new[0], SkipState(state.skipped + (~finite).long(), new[1])

    def init(params: Tree) -> SkipState:
        return SkipState(torch.zeros((), dtype=torch.int64), tx.init(params))

    return Optimizer(init, run, partial(run, donate=True))


class ScaleState(NamedTuple):
    """State of an optimizer made by `dynamic_loss_scale`.

    Attributes:
        scale: What the loss is to be multiplied by: a float32 tensor of shape ().
        good: Updates since the scale was changed or one was skipped: an int64 tensor of shape ().
        skipped: Updates that were skipped: an int64 tensor of shape ().
        inner: The state of the optimizer inside.
    """

    scale: torch.Tensor
    good: torch.Tensor
    skipped: torch.Tensor
    inner: Tree


def dynamic_loss_scale(
    tx: Optimizer,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Optimizer:
    """Divide gradients of a scaled loss by the scale, skip those that overflowed, and adapt the scale.

    Multiply the loss by `state.opt_state.scale`. A chain inside sees true gradients, so clipping goes there. Follows
    torch.amp.GradScaler: the same scale after the same gradients.

    Args:
        tx: The optimizer.
        init_scale: The scale at first.
        growth_factor: What it grows by after `growth_interval` updates in a row, above 1.
        backoff_factor: What it shrinks by where a gradient is not finite, between 0 and 1.
        growth_interval: How many updates in a row without such a gradient.

    Returns:
        The optimizer; its state holds the `scale`.

    Raises:
        ValueError: if a number is out of range; from update, if the scale becomes 0.
    """
    _check_optimizer("dynamic_loss_scale", tx)
    numbers = {"growth_factor": growth_factor, "backoff_factor": backoff_factor, "growth_interval": growth_interval}
    check_numbers("dynamic_loss_scale", Range("a number", lambda number: True), init_scale=init_scale, **numbers)
    # As the scale is kept.
    start = torch.tensor(init_scale, dtype=torch.float32)
    if not (0 < float(start) < float("inf") and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval > 0):
        found = f"{init_scale=}, {growth_factor=}, {backoff_factor=}, {growth_interval=}"
        needed = "a finite scale above 0, growth above 1, backoff between 0 and 1 and an interval of 1 or more"
        raise ValueError(f"dynamic_loss_scale: expected {needed}, got {found}")

    def init(params: Tree) -> ScaleState:
        zero = torch.zeros((), dtype=torch.int64)
        return ScaleState(start.clone(), zero, zero.clone(), tx.init(params))

    def run(grads: Tree, state: ScaleState, params: Tree, donate: bool = False) -> tuple[Tree, ScaleState]:
        check_state("dynamic_loss_scale", state, ScaleState)
        # As GradScaler does: the inverse in float64, and one multiplication.
        inverse = state.scale.double().reciprocal().float()
        unscaled = leafwise(lambda grad: (grad.to(torch.promote_types(grad.dtype, torch.float32)) * inverse,), grads)
        grads = unscaled[0] if unscaled else grads
        finite = all_finite(grads)
        good = torch.where(finite, state.good + 1, 0)
        grown, one = good == growth_interval, torch.ones((), dtype=torch.float64)
        factor = torch.where(finite, torch.where(grown, growth_factor * one, one), backoff_factor * one)
        scale = (state.scale * factor).float()
        scale = torch.where(torch.isinf(scale), state.scale, scale)
        _refuse_scale(scale)
        step: Any = (tx.update_donated if donate else None) or tx.update
        params, inner = either(finite, lambda: step(grads, state.inner, params), lambda: (params, state.inner))
        good = torch.where(grown, 0, good)
        return params, ScaleState(scale, good, state.skipped + (~finite).long(), inner)

    return Optimizer(init, run, partial(run, donate=True))


def _refuse_scale(scale: torch.Tensor) -> None:
    if not (_compat.transforms_active() or _compat.is_tracing()) and scale == 0:
        raise ValueError("dynamic_loss_scale: expected a scale above 0, got 0; look for a nan in the loss itself")


class EveryState(NamedTuple):
    """State of an optimizer made by `every_k`.

    Attributes:
        collected: Gradients collected since the last update: an int64 tensor of shape ().
        mean: Their sum divided by k, sharded as they are.
        inner: The state of the optimizer inside.
        missed: How many of the gradients collected were None, for each leaf: int64 tensors of shape ().
    """

    collected: torch.Tensor
    mean: Tree
    inner: Tree
    missed: Tree = Added()


def every_k(tx: Optimizer, k: int) -> Optimizer:
    """Update once with the mean of k gradients; the parameters stay as they are in between.

    A leaf's gradient is None where all k were. Each gradient has been reduced; `accumulate` communicates less. Follows
    optax.MultiSteps.

    Args:
        tx: The optimizer.
        k: How many gradients.

    Returns:
        The optimizer.

    Raises:
        ValueError: if `tx` is no optimizer, or `k` is no positive number.
    """
    _check_optimizer("every_k", tx)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"every_k: expected k to be a number of gradients, 1 or more, got {k!r}")

    def init(params: Tree) -> EveryState:
        return EveryState(torch.zeros((), dtype=torch.int64), zeros(params), tx.init(params), none_missed(params))

    def run(grads: Tree, state: EveryState, params: Tree, donate: bool = False) -> tuple[Tree, EveryState]:
        check_state("every_k", state, EveryState)
        add = "add_" if donate else "add"
        means = leafwise(lambda grad, mean: (getattr(mean, add)(grad, alpha=1 / k),), grads, state.mean, first=1)
        mean = joined(means[0], state.mean) if means else state.mean
        missed = missing(state.missed, grads)
        due = state.collected + 1 == k
        step: Any = (tx.update_donated if donate else None) or tx.update

        def update() -> tuple[Tree, Tree, Tree, Tree]:
            new, inner = _step_with_used(step, mean, missed, k, grads, state.inner, params)
            # The state inside may keep the gradients that it was given.
            return new, inner, tree_map(torch.zeros_like, mean), tree_map(torch.zeros_like, missed)

        params, inner, mean, missed = either(due, update, lambda: (params, state.inner, mean, missed))
        return params, EveryState(torch.where(due, 0, state.collected + 1), mean, inner, missed)

    return Optimizer(init, run, partial(run, donate=True))


def _step_with_used(
    step: Callable[..., Any], mean: Tree, missed: Tree, k: int, grads: Tree, inner: Tree, params: Tree
) -> Any:
    """Update with the means of leaves of which any of k gradients was not None."""
    flat, counts = flatten(mean), flatten(missed).leaves
    if not (_compat.transforms_active() or _compat.is_tracing()):
        used = [None if n is None or int(n) == k else leaf for leaf, n in zip(flat.leaves, counts, strict=True)]
        return step(unflatten(flat.treedef, used), inner, params)
    unused = [i for i, grad in enumerate(flatten(grads).leaves) if grad is None and counts[i] is not None]
    if not unused:
        return step(mean, inner, params)
    # Of counts that have no value yet: those without a gradient now had none before either, unless other graphs ran.
    never = torch.stack([counts[i] == k for i in unused]).all()
    without = unflatten(flat.treedef, [None if i in unused else leaf for i, leaf in enumerate(flat.leaves)])
    return either(never, lambda: step(without, inner, params), lambda: step(mean, inner, params))


def all_finite(grads: Tree) -> torch.Tensor:
    """Whether every element of every gradient is finite on every rank.

    Args:
        grads: Gradients; None leaves are passed over.

    Returns:
        A bool tensor of shape (), equal on every rank.
    """
    leaves = [leaf for leaf in flatten(grads).leaves if leaf is not None]
    parts = [torch.isfinite(without_padding(leaf) if is_sharded(leaf) else leaf).all() for leaf in leaves]
    if not parts:
        return torch.tensor(True)
    bad = (~torch.stack(parts)).any().long()
    axes: dict[Axis, None] = dict.fromkeys(axis for leaf in leaves if is_sharded(leaf) for axis in leaf.spec.axes)
    comm.same_call("update", tuple(axes))
    for axis in axes:
        (bad,) = linear_call(partial(comm.all_reduce, axis=axis, label="finite"), tuple, [bad])
    return bad == 0


def either(flag: torch.Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """One of two trees by a flag: one is computed, or under a torch.func transform both."""
    if not (_compat.transforms_active() or _compat.is_tracing()):
        return yes() if bool(flag) else no()
    return tree_map(lambda a, b: torch.where(flag, a, b), yes(), no())


def _check_optimizer(what: str, tx: Any) -> None:
    if not isinstance(tx, Optimizer):
        raise ValueError(
            f"{what}: expected tx to be an Optimizer, such as fs.from_torch or an fs.chain with one, got {kind(tx)}"
        )
