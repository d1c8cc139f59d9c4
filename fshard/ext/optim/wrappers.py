"""Optimizers around optimizers: parts of a tree, updates that are skipped or collected, an average of parameters."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.optim.leaves import check_optimizer, elements_of, leafwise
from fshard.ext.optim.parts import Mask
from fshard.extend import (
    MASK,
    Range,
    check_matches,
    check_numbers,
    describe,
    expect,
    flatten,
    is_mask,
    is_trained,
    leaves_of,
    like,
    map_leaves,
    map_trained_leaves,
    masked_transform,
    matches,
    run_update,
    sum_over,
    tensor_of,
    transforms_active,
    zero,
)


class SkipState(NamedTuple):
    """State of an optimizer made by `skip_nonfinite`.

    Attributes:
        skipped: Updates that were skipped: an int64 tensor of shape ().
        inner: The state of the optimizer inside.
    """

    skipped: torch.Tensor
    inner: Any


def skip_nonfinite(tx: fs.Optimizer) -> fs.Optimizer:
    """Skip an update on every rank where a gradient holds an inf or a nan on any.

    The parameters and the state inside stay as they are, and the update is counted. Costs one collective of a single
    number over each mesh axis. Follows optax.apply_if_finite.

    Args:
        tx: The optimizer.

    Returns:
        The optimizer; its state counts the updates that were `skipped`.

    Raises:
        ValueError: if `tx` is no optimizer.

    >>> import torch, fshard as fs
    >>> tx = fs.skip_nonfinite(fs.sgd(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> params, state = tx.update({"w": torch.tensor([1.0, torch.inf])}, tx.init(params), params)
    >>> params, state.skipped
    ({'w': tensor([1., 1.])}, tensor(1))
    """
    check_optimizer("skip_nonfinite", tx)

    def run(grads: Any, state: SkipState, params: Any, donate: bool = False) -> tuple[Any, Any]:
        finite = all_finite(grads)
        before = params, state.inner
        # A torch.func transform and a trace have no values, and for those of an accelerator the host would wait.
        if finite.is_cpu and not (transforms_active() or _compat.is_tracing()):
            after = before
            if finite:
                after = run_update("skip_nonfinite", "tx", tx, grads, state.inner, params, donate=donate)
        else:
            # The donated update would write to the values that are kept where a gradient is not finite.
            new = run_update("skip_nonfinite", "tx", tx, grads, state.inner, params)
            after = _where(finite, new, before, donate)
        params, inner = after
        return params, SkipState(state.skipped + (~finite).long(), inner)

    def init(params: Any) -> SkipState:
        return _counts_beside(params, SkipState(zero(), tx.init(params)))

    return fs.Optimizer(init, run, partial(run, donate=True))


def _where(condition: torch.Tensor, new: Any, old: Any, donate: bool) -> Any:
    """Take the leaves of one tree where a condition holds, else those of another.

    Args:
        condition: A bool tensor of shape ().
        new: The tree that is taken where it holds.
        old: The other tree, of the same structure.
        donate: Whether to write the result to the leaves of `old`.

    Returns:
        The tree, each leaf on its device.
    """
    # Leaves on other devices than the condition are those of a state that `init` did not make, such as one restored
    # for another mesh: one copy of the condition, and so one wait of the host, serves all of them.
    on = {condition.device: condition}

    def choose(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if new is old:
            return old
        if old.device not in on:
            on[old.device] = condition.to(old.device)
        chosen = torch.where(on[old.device], new, old)
        return old.copy_(chosen) if donate else chosen

    return fs.tree_map(choose, new, old)


def _counts_beside(params: Any, state: Any) -> Any:
    """Move numbers of a state that are on the processor to the accelerator that parameters are on.

    There they can stay as they are, by a condition that the host does not know.
    """
    devices = {leaf.device for leaf in fs.tree_leaves(params) if isinstance(leaf, torch.Tensor)}
    accelerator = next((device for device in devices if device.type not in ("cpu", "meta")), None)
    if accelerator is None:
        return state

    def move(leaf: Any) -> Any:
        is_count = isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.device.type == "cpu"
        return leaf.to(accelerator) if is_count else leaf

    return fs.tree_map(move, state)


class EmaState(NamedTuple):
    """State of an optimizer made by `ema`.

    Attributes:
        average: The averaged parameters, sharded as they are; leaves that take no gradient as they are.
        inner: The state of the optimizer inside.
    """

    average: Any
    inner: Any


def ema(tx: fs.Optimizer, decay: float) -> fs.Optimizer:
    """Keep an exponential moving average of the parameters that an optimizer makes.

    Starts from the parameters; after each update average = decay * average + (1 - decay) * parameters. Follows
    torch.optim.swa_utils.get_ema_multi_avg_fn, whose averages it has bit for bit from the first update on.

    Args:
        tx: The optimizer.
        decay: How much of the average stays, from 0 to 1.

    Returns:
        The optimizer; its state holds `average`.

    Raises:
        ValueError: if `tx` is no optimizer, or `decay` is out of range.

    >>> import torch, fshard as fs
    >>> tx = fs.ema(fs.sgd(1.0), decay=0.5)
    >>> params = {"w": torch.ones(1)}
    >>> params, state = tx.update({"w": torch.ones(1)}, tx.init(params), params)
    >>> params, state.average
    ({'w': tensor([0.])}, {'w': tensor([0.5000])})
    """
    check_optimizer("ema", tx)
    check_numbers("ema", Range("a number from 0 to 1", lambda number: 0 <= number <= 1), decay=decay)

    def init(params: Any) -> EmaState:
        average = map_leaves(lambda x: like(x, tensor_of(x).detach().clone()) if is_trained(x) else x, params)
        return EmaState(average, tx.init(params))

    def run(grads: Any, state: EmaState, params: Any, donate: bool = False) -> tuple[Any, Any]:
        params, inner = run_update("ema", "tx", tx, grads, state.inner, params, donate=donate)
        lerp = torch.Tensor.lerp_ if donate else torch.Tensor.lerp
        # A leaf without a gradient has not moved, and its average moves on towards it.
        moved = map_trained_leaves(lambda leaf: leaf, params)
        (average,) = leafwise(lambda p, old: (lerp(old, p.detach(), 1 - decay),), moved, [state.average])
        return params, EmaState(average, inner)

    return fs.Optimizer(init, run, partial(run, donate=True))


def all_finite(grads: Any) -> torch.Tensor:
    """Tell whether every element of every gradient is finite on every rank, by a bool tensor of shape ()."""
    leaves = [leaf for leaf in leaves_of(grads) if leaf is not None]
    bad = sum(((~elements_of(leaf).isfinite()).any().long() for leaf in leaves), zero())
    axes = dict.fromkeys(axis for leaf in leaves if isinstance(leaf, fs.Sharded) for axis in leaf.spec.axes)
    return sum_over(bad, tuple(axes)) == 0


def masked(tx: Any, mask: Mask, otherwise: fs.ShardTransform | None = None) -> Any:
    """Apply a transformation, an optimizer or a sharding transform to some leaves, as in Optax.

    Args:
        tx: The fs.GradientTransformation, Optimizer or ShardTransform. Others' gradients pass through the first; the
            second does not change their parameters; the third leaves them to `otherwise`.
        mask: Which leaves: a glob pattern of their names or several, where a name is a leaf's keys joined by dots, such
            as "blocks.0.norm.weight", and `*` stands for anything; or a function of (name, leaf), which gets a tensor
            of the leaf's full shape and dtype without values, as in `lambda name, leaf: leaf.dim() >= 2`.
        otherwise: For a ShardTransform: that of all other leaves, over the same axes; None changes nothing in them.

    Returns:
        Another of the kind of `tx`, with a state for those leaves only.

    Raises:
        ValueError: if `tx` or `mask` is none of these, or the axes differ; from init, or shard, if `mask` matches no
            leaf.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1}, device="cpu")
    >>> strategy = fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), "*weight"), fs.fully_shard(mesh))
    >>> params = fs.shard({"weight": torch.ones(2), "bias": torch.ones(2)}, strategy)
    >>> fs.tree_map(lambda leaf: leaf.dtype, fs.gather(params))
    {'weight': torch.bfloat16, 'bias': torch.float32}
    """
    if isinstance(tx, fs.ShardTransform):
        return masked_transform(tx, mask, otherwise)
    if otherwise is not None:
        raise ValueError(f"masked: otherwise is for ShardTransforms, not for {describe(tx)}; partition has parts")
    return _partition("masked", [mask, "*"], [tx, None])


def freeze(tx: Any, mask: Mask) -> Any:
    """Keep some parameters as they are, and update the others.

    Unlike leaves that are sharded as frozen, these have gradients, which are not used.

    Args:
        tx: The optimizer of the others.
        mask: Which leaves are kept; see `masked`.

    Returns:
        The optimizer, with a state for the others only.

    Raises:
        ValueError: as `masked`.

    >>> import torch, fshard as fs
    >>> tx = fs.freeze(fs.sgd(0.1), "body.*")
    >>> params = {"body": {"w": torch.ones(1)}, "head": {"w": torch.ones(1)}}
    >>> tx.update(params, tx.init(params), params)[0]
    {'body': {'w': tensor([1.])}, 'head': {'w': tensor([0.9000])}}
    """
    return _partition("freeze", [mask, "*"], [None, tx])


def partition(parts: Mapping[Mask, Any]) -> Any:
    """Give each leaf to the first part that matches it: parameter groups.

    Args:
        parts: GradientTransformations, or Optimizers, by masks as `masked` takes them. One must match every leaf; `"*"`
            matches all that are left.

    Returns:
        The fs.Optimizer, or the GradientTransformation; its state is a tuple of those of the parts, in their order.

    Raises:
        ValueError: if parts are of both kinds or of neither; from init, if a mask matches no leaf, or no mask a leaf.

    >>> import torch
    >>> import fshard as fs
    >>> tx = fs.partition({"*bias": fs.sgd(1.0), "*": fs.sgd(0.1)})
    >>> params = {"weight": torch.zeros(1), "bias": torch.zeros(1)}
    >>> tx.update({"weight": torch.ones(1), "bias": torch.ones(1)}, tx.init(params), params)[0]
    {'weight': tensor([-0.1000]), 'bias': tensor([-1.])}
    """
    expect(isinstance(parts, Mapping), "partition", "parts to be a mapping from masks to their parts", describe(parts))
    return _partition("partition", list(parts), list(parts.values()))


def _partition(what: str, masks: Sequence[Mask], members: Sequence[Any]) -> Any:
    """Give each leaf to the first member whose mask matches it; None leaves it as it is."""
    kinds = {type(member) for member in members if member is not None}
    found = ", ".join(map(describe, members)) or "nothing"
    needed = "parts, or tx, of Optimizers alone or GradientTransformations alone"
    expect(kinds in ({fs.Optimizer}, {fs.GradientTransformation}), what, needed, found)
    for mask in masks:
        expect(is_mask(mask), what, f"the mask to be {MASK}", describe(mask))

    def owners(flat: Any) -> list[int | None]:
        """Number, for each leaf, the first member whose mask matches it."""
        rows = zip(flat.names, flat.leaves, strict=True)
        return [next((i for i, mask in enumerate(masks) if matches(mask, name, x)), None) for name, x in rows]

    def part(flat: Any, found: list[int | None], i: int) -> Any:
        """Make a tree of the leaves of one member, and None in the place of others."""
        return flat.unflatten(leaf if owner == i else None for leaf, owner in zip(flat.leaves, found, strict=True))

    def init(params: Any) -> Any:
        flat = flatten(params)
        found = owners(flat)
        check_matches(what, masks, flat.names, flat.leaves)
        rows = zip(flat.names, found, flat.leaves, strict=True)
        left = [name for name, owner, leaf in rows if owner is None and leaf is not None]
        expect(not left, what, "a mask for every leaf", f"none for {', '.join(left[:4])}", 'add one for "*"')
        return tuple(tx.init(part(flat, found, i)) if tx else () for i, tx in enumerate(members))

    def run(grads: Any, state: Any, params: Any, donate: bool = False) -> tuple[Any, Any]:
        given, flat = flatten(grads), flatten(params)
        found, states = owners(flat), []
        leaves = list(flat.leaves if kinds == {fs.Optimizer} else given.leaves)
        for i, (member, kept) in enumerate(zip(members, state, strict=True)):
            if member is not None:
                argument = f"parts[{masks[i]!r}]" if what == "partition" else "tx"
                trees = part(given, found, i), kept, part(flat, found, i)
                new, kept = run_update(what, argument, member, *trees, donate=donate)
                leaves = [old if owner != i else x for x, old, owner in zip(leaves_of(new), leaves, found, strict=True)]
            states.append(kept)
        return flat.unflatten(leaves), tuple(states)

    if kinds == {fs.Optimizer}:
        return fs.Optimizer(init, run, partial(run, donate=True))
    return fs.GradientTransformation(init, run)
