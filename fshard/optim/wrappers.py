"""Optimizers around optimizers: parts of a tree, updates that are skipped or collected, an average of parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.collectives import total
from fshard.errors import expect
from fshard.optim.leaves import (
    check_optimizer,
    check_state,
    elements_of,
    for_trained,
    leafwise,
    map_gradients,
    stateless,
)
from fshard.transforms import ShardTransform, masked_transform
from fshard.tree import (
    MASK,
    Axis,
    Flat,
    Mask,
    Tree,
    Treedef,
    flatten,
    is_mask,
    is_sharded,
    leaves_of,
    like,
    map_leaves,
    matches,
    names_of,
    tensor_of,
    tree_map,
    unflatten,
)
from fshard.tree.checks import POSITIVE, Range, check_matches, check_numbers, describe
from fshard.update import GradientTransformation, Optimizer, check_states, step_of


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

    def run(grads: Tree, state: SkipState, params: Tree, donate: bool = False) -> tuple[Tree, SkipState]:
        check_state("skip_nonfinite", state, SkipState)
        finite, step = all_finite(grads), step_of(tx, donate)
        params, inner = either(finite, lambda: step(grads, state.inner, params), lambda: (params, state.inner))
        return params, SkipState(state.skipped + (~finite).long(), inner)

    def init(params: Tree) -> SkipState:
        return SkipState(torch.zeros((), dtype=torch.int64), tx.init(params))

    return Optimizer(init, run, partial(run, donate=True))


class ScaleState(NamedTuple):
    """State of an optimizer made by `dynamic_loss_scale`.

    Attributes:
        scale: The factor of the loss: a float32 tensor of shape ().
        good: Updates since the scale was changed or one was skipped: an int64 tensor of shape ().
        skipped: Updates that were skipped: an int64 tensor of shape ().
        inner: The state of the optimizer inside.
    """

    scale: torch.Tensor
    good: torch.Tensor
    skipped: torch.Tensor
    inner: Tree


def _in_float32(number: Any) -> torch.Tensor:
    """Round a number to float32; torch.tensor takes no whole number beyond int64."""
    return torch.tensor(float(number), dtype=torch.float64).float()


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
        growth_factor: The factor that it grows by after `growth_interval` updates in a row, above 1.
        backoff_factor: The factor that it shrinks by where a gradient is not finite, between 0 and 1.
        growth_interval: How many updates in a row without such a gradient.

    Returns:
        The optimizer; its state holds the `scale`.

    Raises:
        ValueError: if a number is out of range; from an update of processors outside of jit, if the scale becomes 0.

    >>> import torch, fshard as fs
    >>> tx = fs.dynamic_loss_scale(fs.sgd(0.1), init_scale=4.0)
    >>> params = {"w": torch.ones(1)}
    >>> state = tx.init(params)
    >>> for grad in (torch.ones(1) * state.scale, torch.tensor([torch.inf])):
    ...     params, state = tx.update({"w": grad}, state, params)
    >>> params, state.scale
    ({'w': tensor([0.9000])}, tensor(2.))
    """
    check_optimizer("dynamic_loss_scale", tx)
    # As the scale is kept.
    kept = Range("a number above 0, finite in float32", lambda number: 0 < float(_in_float32(number)) < math.inf)
    check_numbers("dynamic_loss_scale", kept, init_scale=init_scale)
    start = _in_float32(init_scale)
    above, between = Range("a number above 1", lambda n: n > 1), Range("a number between 0 and 1", lambda n: 0 < n < 1)
    check_numbers("dynamic_loss_scale", above, growth_factor=growth_factor)
    check_numbers("dynamic_loss_scale", between, backoff_factor=backoff_factor)
    check_numbers("dynamic_loss_scale", POSITIVE, growth_interval=growth_interval)

    def init(params: Tree) -> ScaleState:
        device = next((tensor_of(leaf).device for leaf in leaves_of(params) if leaf is not None), None)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return ScaleState(start.clone().to(zero.device), zero, zero.clone(), tx.init(params))

    def run(grads: Tree, state: ScaleState, params: Tree, donate: bool = False) -> tuple[Tree, ScaleState]:
        check_state("dynamic_loss_scale", state, ScaleState)
        # As GradScaler does: the inverse in float64, and one multiplication.
        inverse = state.scale.double().reciprocal().float()
        grads = map_gradients(lambda grad: grad.to(torch.promote_types(grad.dtype, torch.float32)) * inverse, grads)
        finite, step = all_finite(grads), step_of(tx, donate)
        good = torch.where(finite, state.good + 1, 0)
        grown, one = good == growth_interval, torch.ones((), dtype=torch.float64, device=finite.device)
        factor = torch.where(finite, torch.where(grown, growth_factor * one, one), backoff_factor * one)
        scale = (state.scale * factor).float()
        scale = torch.where(torch.isinf(scale), state.scale, scale)
        if scale.is_cpu and _has_values() and scale == 0:
            raise ValueError("dynamic_loss_scale: expected a scale above 0, got 0; look for a nan in the loss itself")
        params, inner = either(finite, lambda: step(grads, state.inner, params), lambda: (params, state.inner))
        good = torch.where(grown, 0, good)
        return params, ScaleState(scale, good, state.skipped + (~finite).long(), inner)

    return Optimizer(init, run, partial(run, donate=True))


class EmaState(NamedTuple):
    """State of an optimizer made by `ema`.

    Attributes:
        average: The averaged parameters, sharded as they are; leaves that take no gradient as they are.
        inner: The state of the optimizer inside.
    """

    average: Tree
    inner: Tree


def ema(tx: Optimizer, decay: float) -> Optimizer:
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
    check_optimizer("ema", tx, "fs.from_torch")
    check_numbers("ema", Range("a number from 0 to 1", lambda number: 0 <= number <= 1), decay=decay)

    def init(params: Tree) -> EmaState:
        copied = for_trained(lambda leaf: like(leaf, tensor_of(leaf).detach().clone()), params)
        average = map_leaves(lambda copy, leaf: leaf if copy is None else copy, copied, params)
        return EmaState(average, tx.init(params))

    def run(grads: Tree, state: EmaState, params: Tree, donate: bool = False) -> tuple[Tree, EmaState]:
        check_state("ema", state, EmaState)
        params, inner = step_of(tx, donate)(grads, state.inner, params)
        lerp = torch.Tensor.lerp_ if donate else torch.Tensor.lerp
        # A leaf without a gradient has not moved, and its average moves on towards it.
        moved = for_trained(lambda leaf: leaf, params)
        (average,) = leafwise(lambda p, old: (lerp(old, p.detach(), 1 - decay),), moved, [state.average])
        return params, EmaState(average, inner)

    return Optimizer(init, run, partial(run, donate=True))


def all_finite(grads: Tree) -> torch.Tensor:
    """Tell whether every element of every gradient is finite on every rank.

    Args:
        grads: Gradients; None leaves are passed over.

    Returns:
        A bool tensor of shape (), equal on every rank.
    """
    leaves = [leaf for leaf in leaves_of(grads) if leaf is not None]
    parts = [torch.isfinite(elements_of(leaf)).all() for leaf in leaves]
    if not parts:
        return torch.tensor(True)
    bad = (~torch.stack(parts)).any().long()
    axes: dict[Axis, None] = dict.fromkeys(axis for leaf in leaves if is_sharded(leaf) for axis in leaf.spec.axes)
    return total(bad, tuple(axes)) == 0


def either(flag: torch.Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """Return one of two trees by a flag: both are computed where its value is not known, or only to an accelerator."""
    if flag.is_cpu and _has_values():
        return yes() if bool(flag) else no()
    return tree_map(lambda a, b: torch.where(flag, a, b), yes(), no())


def _has_values() -> bool:
    """Tell whether tensors can be read now: a torch.func transform and a trace have none."""
    return not (_compat.transforms_active() or _compat.is_tracing())


def masked(tx: Any, mask: Mask, otherwise: ShardTransform | None = None) -> Any:
    """Apply a transformation, an optimizer or a sharding transform to some leaves, as in Optax.

    Args:
        tx: The GradientTransformation, Optimizer or ShardTransform. Others' gradients pass through the first; the
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
    if isinstance(tx, ShardTransform):
        return masked_transform(tx, mask, otherwise)
    if otherwise is not None:
        raise ValueError(f"masked: otherwise is for ShardTransforms, not for {describe(tx)}; partition has parts")
    return _partition("masked", [mask, "*"], [tx, _unchanged("masked", tx)])


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
    return _partition("freeze", [mask, "*"], [_unchanged("freeze", tx), tx])


def partition(parts: Mapping[Mask, Any]) -> Any:
    """Give each leaf to the first part that matches it: parameter groups.

    Args:
        parts: GradientTransformations, or Optimizers, by masks as `masked` takes them. One must match every leaf; `"*"`
            matches all that are left.

    Returns:
        The Optimizer, or the GradientTransformation; its state is a tuple of those of the parts, in their order.

    Raises:
        ValueError: if parts are of both kinds or of neither; from init, if a mask matches no leaf, or no mask a leaf.

    >>> import torch
    >>> import fshard as fs
    >>> tx = fs.partition({"*bias": fs.sgd(1.0), "*": fs.sgd(0.1)})
    >>> params = {"weight": torch.zeros(1), "bias": torch.zeros(1)}
    >>> tx.update({"weight": torch.ones(1), "bias": torch.ones(1)}, tx.init(params), params)[0]
    {'weight': tensor([-0.1000]), 'bias': tensor([-1.])}
    """
    needed, remedy = "parts to be a mapping from masks to their parts", 'pass one such as {"*bias": tx, "*": other}'
    expect(isinstance(parts, Mapping), "partition", needed, describe(parts), remedy)
    return _partition("partition", list(parts), list(parts.values()))


def _partition(what: str, masks: Sequence[Mask], members: Sequence[Any]) -> Any:
    """Give each leaf to the first member whose mask matches it."""
    one_kind = any(members and all(isinstance(m, cls) for m in members) for cls in (Optimizer, GradientTransformation))
    found = ", ".join(map(describe, members)) or "nothing"
    expect(one_kind, what, "parts of Optimizers alone or GradientTransformations alone", found)
    for mask in masks:
        expect(is_mask(mask), what, f"the mask to be {MASK}", describe(mask))
    by_leaves = any(map(callable, masks))

    @lru_cache(maxsize=16)
    def numbered(treedef: Treedef, kinds: tuple[tuple[Any, ...] | None, ...]) -> tuple[int | None, ...]:
        """Number, for each leaf of a kind, the first member whose mask matches it."""
        leaves = [kind and torch.empty(kind[0], dtype=kind[1], device="meta") for kind in kinds] or repeat(None)
        pairs = zip(names_of(treedef), leaves, strict=False)
        return tuple(
            next((i for i, mask in enumerate(masks) if matches(mask, name, leaf)), None) for name, leaf in pairs
        )

    def owners(flat: Flat) -> tuple[int | None, ...]:
        """Number, for each leaf, the first member whose mask matches it."""
        return numbered(flat.treedef, tuple(map(_kind_of, flat.leaves)) if by_leaves else ())

    def parts_of(tree: Tree, found: Sequence[int | None]) -> list[Tree]:
        """Take a tree apart: for each member its leaves, and None in the place of others."""
        flat = flatten(tree)
        pairs = list(zip(flat.leaves, found, strict=True))
        return [
            unflatten(flat.treedef, [leaf if owner == i else None for leaf, owner in pairs])
            for i in range(len(members))
        ]

    def init(params: Tree) -> Tree:
        flat = flatten(params)
        names, found = names_of(flat.treedef), owners(flat)
        check_matches(what, masks, names, flat.leaves)
        rows = zip(names, found, flat.leaves, strict=True)
        left = [name for name, owner, leaf in rows if owner is None and leaf is not None]
        if left:
            shown = ", ".join(left[:4])
            raise ValueError(f'{what}: no mask matches {shown}; add one for "*", which matches all that are left')
        return tuple(member.init(part) for member, part in zip(members, parts_of(params, found), strict=True))

    def run(grads: Tree, state: Tree, params: Tree, donate: bool = False) -> tuple[Tree, Tree]:
        check_states(what, state, len(members))
        flat = flatten(params)
        found = owners(flat)
        parts = zip(members, parts_of(grads, found), state, parts_of(params, found), strict=True)
        outs, states = zip(*(step_of(member, donate)(*part) for member, *part in parts), strict=True)
        leaves = [leaves_of(out) for out in outs]
        return unflatten(flat.treedef, [None if i is None else leaves[i][n] for n, i in enumerate(found)]), states

    if isinstance(members[0], Optimizer):
        return Optimizer(init, run, partial(run, donate=True))
    return GradientTransformation(init, run)


def _kind_of(leaf: Any) -> tuple[Any, ...] | None:
    """Return the full shape and the dtype of a leaf; None where it has none."""
    if leaf is None:
        return None
    return tuple(leaf.spec.shape if is_sharded(leaf) else leaf.shape), tensor_of(leaf).dtype


def _unchanged(what: str, tx: Any) -> Any:
    """Make an optimizer, or a transformation, that changes nothing."""
    if isinstance(tx, Optimizer):
        return Optimizer(lambda params: (), lambda grads, state, params: (params, state))
    needed = "tx to be an Optimizer or a GradientTransformation"
    expect(isinstance(tx, GradientTransformation), what, needed, describe(tx), "make one by fs.from_torch")
    return stateless(lambda grads, params: grads)
