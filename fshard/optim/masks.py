"""Masks: parts of an optimizer for parts of a tree."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from fshard.checks import describe
from fshard.optim.leaves import stateless
from fshard.transforms import ShardTransform, masked_transform
from fshard.tree import Mask, Tree, Treedef, flatten, is_mask, leaves_of, matches, names_of, unflatten
from fshard.update import GradientTransformation, Optimizer, step_of


def masked(tx: Any, mask: Mask, otherwise: ShardTransform | None = None) -> Any:
    """Apply a transformation, an optimizer or a sharding transform to some leaves, as in Optax.

    Args:
        tx: The GradientTransformation, Optimizer or ShardTransform. Others' gradients pass through the first; the
            second does not change their parameters; the third leaves them to `otherwise`.
        mask: Which leaves: a glob pattern of their names or several, where a name is a leaf's keys joined by dots, such
            as "blocks.0.norm.weight", and `*` stands for anything; or a function of the name.
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
    """
    return _partition("freeze", [mask, "*"], [_unchanged("freeze", tx), tx])


def partition(parts: Mapping[Mask, Any]) -> Any:
    """Give each leaf to the first part that matches it: parameter groups.

    Args:
        parts: GradientTransformations, or Optimizers, by masks as `masked` takes them. One must match every leaf;
            `"*"` matches all that are left.

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
    if not isinstance(parts, Mapping):
        expected, remedy = "a mapping from masks to their parts", 'pass one such as {"*bias": tx, "*": other}'
        raise ValueError(f"partition: expected parts to be {expected}, got {describe(parts)}; {remedy}")
    return _partition("partition", list(parts), list(parts.values()))


def _partition(what: str, masks: Sequence[Mask], members: Sequence[Any]) -> Any:
    """Give each leaf to the first member whose mask matches it."""
    if not any(members and all(isinstance(m, cls) for m in members) for cls in (Optimizer, GradientTransformation)):
        found = ", ".join(map(describe, members)) or "nothing"
        raise ValueError(f"{what}: expected parts of Optimizers alone or GradientTransformations alone, got {found}")
    for mask in masks:
        if not is_mask(mask):
            needed = "a glob pattern of leaves' names, several, or a function of the name"
            raise ValueError(f"{what}: expected the mask to be {needed}, got {describe(mask)}")

    @lru_cache(maxsize=16)
    def owners(treedef: Treedef) -> tuple[int | None, ...]:
        """Number, for each leaf, the first member whose mask matches it."""
        numbered = list(enumerate(masks))
        return tuple(next((i for i, mask in numbered if matches(mask, name)), None) for name in names_of(treedef))

    def parts_of(tree: Tree, found: Sequence[int | None]) -> list[Tree]:
        """Take a tree apart: for each member its leaves, and None in the place of others."""
        flat = flatten(tree)
        pairs = list(zip(flat.leaves, found, strict=True))
        return [
            unflatten(flat.treedef, [leaf if owner == i else None for leaf, owner in pairs])
            for i in range(len(members))
        ]

    def init(params: Tree) -> Tree:
        treedef = flatten(params).treedef
        found = owners(treedef)
        _refuse(what, masks, found, names_of(treedef))
        return tuple(member.init(part) for member, part in zip(members, parts_of(params, found), strict=True))

    def run(grads: Tree, state: Tree, params: Tree, donate: bool = False) -> tuple[Tree, Tree]:
        if not isinstance(state, tuple) or len(state) != len(members):
            raise ValueError(
                f"{what}: expected the state to be that of the optimizer which made it, got {describe(state)}"
            )
        treedef = flatten(params).treedef
        found = owners(treedef)
        parts = zip(members, parts_of(grads, found), state, parts_of(params, found), strict=True)
        outs, states = zip(*(step_of(member, donate)(*part) for member, *part in parts), strict=True)
        leaves = [leaves_of(out) for out in outs]
        return unflatten(treedef, [None if i is None else leaves[i][n] for n, i in enumerate(found)]), states

    if isinstance(members[0], Optimizer):
        return Optimizer(init, run, partial(run, donate=True))
    return GradientTransformation(init, run)


def _unchanged(what: str, tx: Any) -> Any:
    """Make an optimizer, or a transformation, that changes nothing."""
    if isinstance(tx, Optimizer):
        return Optimizer(lambda params: (), lambda grads, state, params: (params, state))
    if not isinstance(tx, GradientTransformation):
        expected, remedy = "an Optimizer or a GradientTransformation", "make one by fs.from_torch"
        raise ValueError(f"{what}: expected tx to be {expected}, got {describe(tx)}; {remedy}")
    return stateless(lambda grads, params: grads)


def _refuse(what: str, masks: Sequence[Mask], owners: Sequence[int | None], names: Sequence[str]) -> None:
    for i, mask in enumerate(masks):
        # A mask behind others may be left with nothing, but must match something.
        if i not in owners and not any(matches(mask, name) for name in names):
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{what}: the mask {mask!r} matches no leaf of {shown}; name some of these")
    left = [name for name, owner in zip(names, owners, strict=True) if owner is None]
    if left:
        raise ValueError(
            f'{what}: no mask matches {", ".join(left[:4])}; add one for "*", which matches all that are left'
        )
