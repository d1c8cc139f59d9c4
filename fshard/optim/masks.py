"""Masks: which leaves a part of an optimizer is for."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from fshard.checks import kind
from fshard.transforms import ShardTransform, masked_transform
from fshard.tree import Mask, Tree, Treedef, flatten, is_mask, means, names_of, unflatten
from fshard.update import GradientTransformation, Optimizer


def masked(tx: Any, mask: Mask, otherwise: ShardTransform | None = None) -> Any:
    """Apply a transformation, an optimizer or a sharding transform to some leaves, as in Optax.

    Args:
        tx: The GradientTransformation, Optimizer or ShardTransform. Others' gradients pass through the first; the
            second does not change their parameters; the third leaves them to `otherwise`.
        mask: Which leaves: a glob pattern of their names or several, where a name is a leaf's keys joined by dots, such
            as "blocks.0.norm.weight", and `*` stands for anything; or a function of the name.
        otherwise: For a ShardTransform: that of all other leaves, over the same axes; None changes nothing in them.

    Returns:
        What `tx` is, with a state for those leaves only.

    Raises:
        ValueError: if `tx` or `mask` is none of these, or the axes differ; from init, or shard, if no leaf is meant.

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
        raise ValueError(f"masked: otherwise is for ShardTransforms, not for {kind(tx)}; partition has parts")
    return partition({_checked_mask("masked", mask): tx, ("*",): _pass("masked", tx)}, "masked")


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
    """
    return partition({_checked_mask("freeze", mask): _pass("freeze", tx), ("*",): tx}, "freeze")


def partition(parts: Mapping[Mask, Any], what: str = "partition") -> Any:
    """Give each leaf to the first part that means it: parameter groups.

    Args:
        parts: GradientTransformations, or Optimizers, by masks as `masked` takes them. Every leaf must be meant by one;
            `"*"` means all that are left.
        what: Who asks, for errors.

    Returns:
        The Optimizer, or the GradientTransformation; its state is a tuple of those of the parts, in their order.

    Raises:
        ValueError: if parts are of both kinds or of neither; from init, if a mask means no leaf, or no mask a leaf.

    >>> import torch
    >>> import fshard as fs
    >>> tx = fs.partition({"*bias": fs.sgd(1.0), "*": fs.sgd(0.1)})
    >>> params = {"weight": torch.zeros(1), "bias": torch.zeros(1)}
    >>> tx.update({"weight": torch.ones(1), "bias": torch.ones(1)}, tx.init(params), params)[0]
    {'weight': tensor([-0.1000]), 'bias': tensor([-1.])}
    """
    if not isinstance(parts, Mapping):
        remedy = 'pass one such as {"*bias": tx, "*": other}'
        raise ValueError(
            f"{what}: expected parts to be a mapping from masks to their parts, got {kind(parts)}; {remedy}"
        )
    masks, members = list(parts), list(parts.values())
    if not members or not (_all(Optimizer, members) or _all(GradientTransformation, members)):
        found = ", ".join(map(kind, members)) or "nothing"
        raise ValueError(f"{what}: expected parts of Optimizers alone or GradientTransformations alone, got {found}")
    for mask in masks:
        _checked_mask(what, mask)
    owners = lru_cache(maxsize=16)(partial(_owners, tuple(masks)))

    def init(params: Tree) -> Tree:
        found = owners(flatten(params).treedef)
        _refuse(what, masks, found, flatten(params).treedef)
        return tuple(part.init(_only(params, found, i)) for i, part in enumerate(members))

    def run(grads: Tree, state: Tree, params: Tree, donate: bool = False) -> tuple[Tree, Tree]:
        if not isinstance(state, tuple) or len(state) != len(members):
            raise ValueError(f"{what}: expected the state to be that of the optimizer which made it, got {kind(state)}")
        found, outs, states = owners(flatten(params).treedef), [], []
        for i, (part, part_state) in enumerate(zip(members, state, strict=True)):
            donated = part.update_donated if donate and isinstance(part, Optimizer) else None
            out, new = (donated or part.update)(_only(grads, found, i), part_state, _only(params, found, i))
            outs.append(flatten(out).leaves)
            states.append(new)
        leaves = [None if owner is None else outs[owner][n] for n, owner in enumerate(found)]
        return unflatten(flatten(params).treedef, leaves), tuple(states)

    if isinstance(members[0], Optimizer):
        return Optimizer(init, run, partial(run, donate=True))
    return GradientTransformation(init, run)


def _checked_mask(what: str, mask: Any) -> Any:
    if not is_mask(mask):
        needed = "a glob pattern of leaves' names, several, or a function of the name"
        raise ValueError(f"{what}: expected the mask to be {needed}, got {kind(mask)}")
    # A key of a dict.
    return tuple(mask) if isinstance(mask, list) else mask


def _all(cls: type, values: Any) -> bool:
    return isinstance(values, Sequence) and bool(values) and all(isinstance(value, cls) for value in values)


def _pass(what: str, tx: Any) -> Any:
    """What leaves gradients, or parameters, as they are."""
    if isinstance(tx, Optimizer):
        return Optimizer(lambda params: (), lambda grads, state, params: (params, state))
    if not isinstance(tx, GradientTransformation):
        remedy = "make one by fs.from_torch"
        raise ValueError(
            f"{what}: expected tx to be an Optimizer or a GradientTransformation, got {kind(tx)}; {remedy}"
        )
    return GradientTransformation(lambda params: (), lambda grads, state, params: (grads, state))


def _owners(masks: tuple[Mask, ...], treedef: Treedef) -> tuple[int | None, ...]:
    """For each leaf the number of the first mask that means it."""
    return tuple(next((i for i, mask in enumerate(masks) if means(mask, name)), None) for name in names_of(treedef))


def _refuse(what: str, masks: Sequence[Mask], owners: Sequence[int | None], treedef: Treedef) -> None:
    names = names_of(treedef)
    for i, mask in enumerate(masks):
        # What is behind the others may be left with nothing, but must mean something.
        if i not in owners and not any(means(mask, name) for name in names):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{what}: the mask {mask!r} means no leaf of {shown}; name some of these")
    left = [name for name, owner in zip(names, owners, strict=True) if owner is None]
    if left:
        raise ValueError(f'{what}: no mask means {", ".join(left[:4])}; add one for "*", which means all that are left')


def _only(tree: Tree, owners: Sequence[int | None], owner: int) -> Tree:
    """The leaves of one part, and None in the place of others."""
    flat = flatten(tree)
    return unflatten(flat.treedef, [x if o == owner else None for x, o in zip(flat.leaves, owners, strict=True)])
