"""Optimizers around optimizers: for parts of a tree, skipped updates, scaled losses, and an average of parameters."""

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

import fshard as fs
from fshard.ext.optim.leaves import Mask, check_optimizer, elements_of, leafwise, map_gradients
from fshard.extend import (
    MASK,
    NUMBER,
    Range,
    check_arguments,
    check_matches,
    check_numbers,
    describe,
    device_of,
    expect,
    flatten,
    is_mask,
    is_tracing,
    is_trained,
    leaves_like,
    leaves_of,
    like,
    map_leaves,
    map_trained_leaves,
    masked_transform,
    matches,
    record_numbers,
    run_update,
    sum_over,
    tensor_of,
    transforms_active,
    widen,
    zero,
)

# The scale is a float32, and a scale of 0 or inf would skip every update.
FLOAT32 = torch.finfo(torch.float32)
SCALE = Range("a number from 1.2e-38 to 3.4e38", lambda number: FLOAT32.tiny <= number <= FLOAT32.max)
GROWTH = Range("a finite number above 1", lambda number: 1 < number < math.inf)
BACKOFF = Range("a number above 0 and below 1", lambda number: 0 < number < 1)


class SkipState(NamedTuple):
    """State of an optimizer made by `skip_nonfinite`.

    Attributes:
        skipped: The number of updates that were skipped: an int64 tensor of shape ().
        inner: The state of the inner optimizer.
    """

    skipped: torch.Tensor
    inner: Any


def skip_nonfinite(tx: fs.Optimizer) -> fs.Optimizer:
    """Skip an update on every rank if a gradient has an inf or a nan on any rank.

    The parameters and the state of the inner optimizer then stay as they are, and the skipped update is counted. It
    costs one collective of a single number over each mesh axis. Follows optax.apply_if_finite, but for
    `max_consecutive_errors`: however many updates in a row are not finite, all are skipped.

    On an accelerator the host does not wait for the decision. The counts of `tx` lie there too, and a torch class with
    an argument `capturable` steps by the kernels that read them there.

    Args:
        tx: The optimizer.

    Returns:
        The optimizer. Its state counts the updates that were `skipped`.

    Raises:
        ValueError: if `tx` is not an optimizer.

    >>> import torch, fshard as fs
    >>> tx = fs.skip_nonfinite(fs.sgd(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> params, state = tx.update({"w": torch.tensor([1.0, torch.inf])}, tx.init(params), params)
    >>> params, state.skipped
    ({'w': tensor([1., 1.])}, tensor(1))
    """
    check_optimizer("skip_nonfinite", tx)

    def update(grads: Any, state: SkipState, params: Any, donate: bool = False) -> tuple[Any, Any]:
        is_finite = all_finite(grads)
        run = partial(run_update, "skip_nonfinite", "tx", tx, grads, state.inner, params)
        new = params, state.inner
        # Under torch.func and in a trace, the condition has no value. On an accelerator, the host would wait for it.
        if not is_finite.is_cpu or transforms_active() or is_tracing():
            # A donated update would overwrite the values that stay if a gradient is not finite.
            new = _where(is_finite, run(), new, donate)
        elif is_finite:
            new = run(donate=donate)
        new_params, inner = new
        return new_params, SkipState(state.skipped + (~is_finite).long(), inner)

    def init(params: Any) -> SkipState:
        return put_counts_beside(params, SkipState(zero(), tx.init(params)))

    return fs.Optimizer(init, update, partial(update, donate=True))


def _where(condition: torch.Tensor, new: Any, old: Any, donate: bool) -> Any:
    """Take the leaves of one tree if a condition holds, else those of another.

    Args:
        condition: A bool tensor of shape ().
        new: The tree that is taken if it holds.
        old: The other tree, of the same structure.
        donate: Whether to write the result to the leaves of `old`.

    Returns:
        The tree, each leaf on its device.
    """
    # A state that `init` did not make, such as one restored for another mesh, may have leaves on other devices than the
    # condition. The host waits for each copy to the CPU, so copy the condition once to each device.
    condition_on = cache(condition.to)

    def choose(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if new is old:
            return old
        chosen = torch.where(condition_on(old.device), new, old)
        return old.copy_(chosen) if donate else chosen

    return fs.tree_map(choose, new, old)


def put_counts_beside(params: Any, state: Any) -> Any:
    """Move numbers of a state from the CPU to the accelerator of the parameters.

    There they can be kept by a condition that the host does not read.
    """
    devices = [device_of(leaf) for leaf in leaves_of(params) if isinstance(tensor_of(leaf), torch.Tensor)]
    accelerator = next((device for device in devices if device.type not in ("cpu", "meta")), None)
    if accelerator is None:
        return state

    def move(leaf: Any) -> Any:
        is_count = isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_cpu
        return leaf.to(accelerator) if is_count else leaf

    return fs.tree_map(move, state)


class ScaleState(NamedTuple):
    """State of an optimizer made by `dynamic_loss_scale`.

    Attributes:
        scale: The factor of the loss: a float32 tensor of shape ().
        good: The number of updates since the scale last changed: an int64 tensor of shape ().
        inner: The state of `skip_nonfinite`, which counts the updates that were `skipped`.
    """

    scale: torch.Tensor
    good: torch.Tensor
    inner: Any


def dynamic_loss_scale(
    tx: fs.Optimizer,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> fs.Optimizer:
    """Divide gradients of a scaled loss by the scale, skip updates with gradients that overflowed, and adapt the scale.

    Multiply the loss by `state.opt_state.scale`. The optimizer gets gradients without the scale, so put clipping into
    `tx`. Follows torch.amp.GradScaler: the same gradients give the same scale.

    Args:
        tx: The optimizer.
        init_scale: The first scale, above 0 and within float32.
        growth_factor: The factor, above 1, by which the scale grows after `growth_interval` finite updates in a row.
        backoff_factor: The factor, between 0 and 1, by which it shrinks after a gradient that is not finite.
        growth_interval: How many finite updates in a row let it grow, 1 or more.

    Returns:
        The optimizer; its state holds the `scale`.

    Raises:
        ValueError: if a number is out of range.

    >>> import torch, fshard as fs
    >>> tx = fs.dynamic_loss_scale(fs.sgd(0.1), init_scale=4.0)
    >>> params = {"w": torch.ones(1)}
    >>> state = tx.init(params)
    >>> for grad in (torch.ones(1) * state.scale, torch.tensor([torch.inf])):
    ...     params, state = tx.update({"w": grad}, state, params)
    >>> params, state.scale
    ({'w': tensor([0.9000])}, tensor(2.))
    """
    api_name = "dynamic_loss_scale"
    check_numbers(api_name, SCALE, init_scale=init_scale)
    check_numbers(api_name, GROWTH, growth_factor=growth_factor)
    check_numbers(api_name, BACKOFF, backoff_factor=backoff_factor)
    check_arguments(api_name, NUMBER, growth_interval=growth_interval)
    skipping = skip_nonfinite(tx)

    def init(params: Any) -> Any:
        # float(), because torch.tensor takes no whole number beyond int64.
        scale = torch.tensor(float(init_scale), dtype=torch.float32)
        return put_counts_beside(params, ScaleState(scale, zero(), skipping.init(params)))

    def update(grads: Any, state: ScaleState, params: Any, donate: bool = False) -> tuple[Any, ScaleState]:
        record_numbers(api_name, flatten(grads), {"scale": state.scale})
        # As GradScaler does: the inverse in float64, and one multiplication.
        inverse = state.scale.double().reciprocal().float()

        def unscale(grad: torch.Tensor) -> torch.Tensor:
            return widen(grad) * inverse

        grads = map_gradients(unscale, grads)
        params, inner = run_update(api_name, "tx", skipping, grads, state.inner, params, donate=donate)
        is_finite = inner.skipped == state.inner.skipped
        good = torch.where(is_finite, state.good + 1, 0)
        may_grow = good == growth_interval
        old_scale = state.scale.double()
        larger = torch.where(may_grow, old_scale * growth_factor, old_scale)
        scale = torch.where(is_finite, larger, old_scale * backoff_factor).float()
        scale = torch.where(scale.isinf(), state.scale, scale)
        return params, ScaleState(scale, torch.where(may_grow, 0, good), inner)

    return fs.Optimizer(init, update, partial(update, donate=True))


class EmaState(NamedTuple):
    """State of an optimizer made by `ema`.

    Attributes:
        average: The averages of the parameters, sharded as they are. Leaves without a gradient are as they are.
        inner: The state of the inner optimizer.
    """

    average: Any
    inner: Any


def ema(tx: fs.Optimizer, decay: float) -> fs.Optimizer:
    """Keep an exponential moving average of the parameters that an optimizer makes.

    It starts from the parameters. After each update, average = decay * average + (1 - decay) * parameters. Follows
    torch.optim.swa_utils.get_ema_multi_avg_fn, and has the bits of its averages.

    Args:
        tx: The optimizer.
        decay: The part of the average that stays, from 0 to 1.

    Returns:
        The optimizer. Its state holds the `average`.

    Raises:
        ValueError: if `tx` is not an optimizer, or `decay` is out of range.

    >>> import torch, fshard as fs
    >>> tx = fs.ema(fs.sgd(1.0), decay=0.5)
    >>> params = {"w": torch.ones(1)}
    >>> params, state = tx.update({"w": torch.ones(1)}, tx.init(params), params)
    >>> params, state.average
    ({'w': tensor([0.])}, {'w': tensor([0.5000])})
    """
    check_optimizer("ema", tx)
    check_numbers("ema", Range("a number from 0 to 1", lambda number: 0 <= number <= 1), decay=decay)

    def copy(leaf: Any) -> Any:
        return like(leaf, tensor_of(leaf).clone()) if is_trained(leaf) else leaf

    def init(params: Any) -> EmaState:
        return EmaState(map_leaves(copy, params), tx.init(params))

    def update(grads: Any, state: EmaState, params: Any, donate: bool = False) -> tuple[Any, Any]:
        params, inner = run_update("ema", "tx", tx, grads, state.inner, params, donate=donate)
        record_numbers("ema", flatten(grads), {"decay": decay})
        lerp = torch.Tensor.lerp_ if donate else torch.Tensor.lerp

        def average(param: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor]:
            return (lerp(old, param, 1 - decay),)

        # The average of a leaf that had no gradient moves on towards it.
        trained = map_trained_leaves(lambda leaf: leaf, params)
        (averages,) = leafwise(average, trained, [state.average])
        return params, EmaState(averages, inner)

    return fs.Optimizer(init, update, partial(update, donate=True))


def all_finite(grads: Any) -> torch.Tensor:
    """Tell by a bool tensor of shape () whether every element of every gradient is finite on every rank."""
    flat = flatten(grads)
    # NaN for a leaf with an element that is not finite, 0 for others.
    sums = [(elements_of(leaf) * 0).sum() for leaf in flat.leaves if leaf is not None]
    is_bad = sum(sums, torch.zeros(())) != 0
    return sum_over(is_bad.long(), flat.axes) == 0


def masked(tx: Any, mask: Mask, otherwise: fs.ShardTransform | None = None) -> Any:
    """Apply a transformation, an optimizer or a sharding transform to some leaves, as in Optax.

    Args:
        tx: The fs.GradientTransformation, Optimizer or ShardTransform. The gradients of other leaves pass through a
            GradientTransformation; an Optimizer does not change other parameters; a ShardTransform leaves them to
            `otherwise`.
        mask: The leaves. A glob pattern of their names, or several: a name is a leaf's keys joined by dots, such as
            "blocks.0.norm.weight", and `*` stands for anything. Or a function of (name, leaf), which gets a tensor of
            the leaf's full shape and dtype without values, as in `lambda name, leaf: leaf.dim() >= 2`.
        otherwise: With a ShardTransform, the one for all other leaves, over the same axes. None changes nothing.

    Returns:
        Another of the kind of `tx`, with a state for these leaves only.

    Raises:
        ValueError: if `tx` or `mask` is something else, or the axes differ; from init, or shard, if `mask` matches no
            leaf.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.init_mesh({"shard": -1}, device="cpu")
    >>> strategy = fs.compose(fs.masked(fs.cast(gather=torch.bfloat16), "*weight"), fs.fully_shard(mesh))
    >>> params = fs.shard({"weight": torch.ones(2), "bias": torch.ones(2)}, strategy)
    >>> fs.tree_map(lambda leaf: leaf.dtype, fs.gather(params))
    {'weight': torch.bfloat16, 'bias': torch.float32}

    Whole strategies can be chosen in the same way. A model casts its inputs as the strategy says that has a
    `param_dtype`; torch's layers refuse weights and biases of different dtypes.

    >>> strategy = fs.masked(fs.zero3(mesh), "*bias", otherwise=fs.zero3(mesh, param_dtype=torch.bfloat16))
    >>> params = fs.shard({"weight": torch.ones(2), "bias": torch.ones(2)}, strategy)
    >>> fs.tree_map(lambda leaf: leaf.dtype, fs.gather(params))
    {'weight': torch.bfloat16, 'bias': torch.float32}
    """
    if isinstance(tx, fs.ShardTransform):
        return masked_transform(tx, mask, otherwise)
    if otherwise is not None:
        raise ValueError(
            f"masked: otherwise is for a ShardTransform, but tx is {describe(tx)}. For several parts, use fs.partition."
        )
    return _make_partition("masked", [mask, "*"], [tx, None])


def freeze(tx: Any, mask: Mask) -> Any:
    """Keep some parameters as they are, and update the others.

    Unlike leaves that are sharded as frozen, these leaves have gradients, which are not used.

    Args:
        tx: The optimizer of the others.
        mask: The leaves that are kept; see `masked`.

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
    return _make_partition("freeze", [mask, "*"], [None, tx])


def partition(parts: Mapping[Mask, Any]) -> Any:
    """Give each leaf to the first part that matches it: parameter groups.

    Args:
        parts: GradientTransformations or Optimizers, by masks as `masked` takes them. Each leaf must match one of them;
            `"*"` matches all leaves that are left.

    Returns:
        The fs.Optimizer or GradientTransformation. Its state is a tuple of the states of the parts, in their order.

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
    return _make_partition("partition", list(parts), list(parts.values()))


class _Partition(NamedTuple):
    """Members that each change some leaves.

    Attributes:
        api_name: The public function, for errors.
        masks: The masks. A leaf belongs to the first that matches it.
        members: For each mask the Optimizer or GradientTransformation of its leaves; None leaves them as they are.
        is_optimizer: Whether they change parameters, and not gradients.
    """

    api_name: str
    masks: Sequence[Mask]
    members: Sequence[Any]
    is_optimizer: bool

    def find_owners(self, flat: Any) -> list[int | None]:
        """Find for each leaf the position of its member."""
        owners = []
        for name, leaf in zip(flat.names, flat.leaves, strict=True):
            matching = (i for i, mask in enumerate(self.masks) if matches(mask, name, leaf))
            owners.append(next(matching, None))
        return owners

    def init(self, params: Any) -> Any:
        """Make the states of all members."""
        flat = flatten(params)
        owners = self.find_owners(flat)
        check_matches(self.api_name, self.masks, flat.names, flat.leaves)
        rows = zip(flat.names, owners, flat.leaves, strict=True)
        unmatched = [name for name, owner, leaf in rows if owner is None and leaf is not None]
        if unmatched:
            raise ValueError(f'{self.api_name}: no mask matches {", ".join(unmatched[:4])}. Add a part for "*".')
        states = []
        for i, member in enumerate(self.members):
            states.append(member.init(_select(flat, owners, i)) if member else ())
        return tuple(states)

    def update(self, grads: Any, state: Any, params: Any, donate: bool = False) -> tuple[Any, Any]:
        """Update the leaves of each member, and keep the others."""
        flat = flatten(params)
        grad_leaves = leaves_like(flat, grads)
        owners = self.find_owners(flat)
        leaves = list(flat.leaves if self.is_optimizer else grad_leaves)
        states = []
        for i, (member, member_state) in enumerate(zip(self.members, state, strict=True)):
            if member is not None:
                argument = f"parts[{self.masks[i]!r}]" if self.api_name == "partition" else "tx"
                member_grads = _select(flat._replace(leaves=grad_leaves), owners, i)
                member_params = _select(flat, owners, i)
                changed, member_state = run_update(
                    self.api_name, argument, member, member_grads, member_state, member_params, donate=donate
                )
                for j, leaf in enumerate(leaves_of(changed)):
                    if owners[j] == i:
                        leaves[j] = leaf
            states.append(member_state)
        return flat.unflatten(leaves), tuple(states)


def _select(flat: Any, owners: Sequence[int | None], i: int) -> Any:
    """Make a tree of the leaves of one member, and None in the place of others."""
    return flat.unflatten([leaf if owner == i else None for leaf, owner in zip(flat.leaves, owners, strict=True)])


def _make_partition(api_name: str, masks: Sequence[Mask], members: Sequence[Any]) -> Any:
    """Give each leaf to the first member whose mask matches it."""
    changing = [member for member in members if member is not None]
    kinds = {type(member) for member in changing}
    if kinds not in ({fs.Optimizer}, {fs.GradientTransformation}):
        argument = "parts" if api_name == "partition" else "tx"
        got = ", ".join(map(describe, changing)) or "nothing"
        raise ValueError(f"{api_name}: {argument} must be Optimizers only, or GradientTransformations only. Got {got}.")
    for mask in masks:
        expect(is_mask(mask), api_name, f"the mask to be {MASK}", describe(mask))
    is_optimizer = kinds == {fs.Optimizer}
    members_by_mask = _Partition(api_name, masks, members, is_optimizer)
    update = members_by_mask.update
    if is_optimizer:
        is_leafwise = all(member.is_leafwise for member in changing)
        return fs.Optimizer(members_by_mask.init, update, partial(update, donate=True), is_leafwise)
    return fs.GradientTransformation(members_by_mask.init, update)
