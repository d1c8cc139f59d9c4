"""Maths leaf by leaf on the tensors of trees that share the structure of the parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._compat import is_tracing
from fshard.collectives import pvary
from fshard.errors import expect
from fshard.shard import without_padding
from fshard.tree import (
    Axis,
    Flat,
    Tree,
    flatten,
    is_sharded,
    is_trained,
    leaves_of,
    like,
    map_leaves,
    tensor_of,
    unflatten,
)
from fshard.tree.checks import check_floating, check_leaves, describe
from fshard.update import GradientTransformation, Optimizer


def partition_axes(leaf: Any) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different elements of a leaf."""
    return tuple(axis for axis in leaf.spec.partition_axes() if axis.size > 1) if is_sharded(leaf) else ()


def elements_of(leaf: Any) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding."""
    return without_padding(leaf) if is_sharded(leaf) else leaf


def varying(number: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Hand a number that agrees between ranks to each rank's own shards, so that its cotangents are summed."""
    for axis in axes:
        number = pvary(number, axis)
    return number


def scaled(leaf: Any, number: torch.Tensor) -> Any:
    """Scale a leaf by a number that agrees between ranks."""
    tensor = tensor_of(leaf)
    return like(leaf, tensor * varying(number, partition_axes(leaf)).to(tensor.dtype))


def leafwise(
    f: Callable[..., tuple[torch.Tensor, ...]],
    grads: Tree,
    old: Sequence[Tree],
    given: Sequence[Tree] = (),
    numbers: Sequence[Any] = (),
) -> tuple[Tree, ...]:
    """Make new trees of old ones, by maths on the tensors of each leaf that has a gradient.

    Args:
        f: Called with a leaf's tensors in `grads`, the old trees and the given ones, and then the numbers; returns the
            tensors of the new trees.
        grads: The tree that says where; other leaves stay as they are.
        old: The trees that the new ones replace: they decide their dtypes, because a number of another dtype would
            widen tensors of shape ().
        given: Trees that are only read.
        numbers: Those that are tensors agree between ranks; their cotangents are summed where ranks use them on shards.

    Returns:
        As many trees as there are old ones.
    """
    by_axes: dict[tuple[Axis, ...], list[Any]] = {}

    def new(grad: Any, *leaves: Any) -> tuple[Any, ...]:
        kept = leaves[: len(old)]
        if grad is None:
            return kept
        axes = partition_axes(grad)
        if axes not in by_axes:
            by_axes[axes] = [varying(n, axes) if isinstance(n, torch.Tensor) else n for n in numbers]
        made = f(*map(tensor_of, (grad, *leaves)), *by_axes[axes])
        return tuple(like(leaf, x.to(tensor_of(leaf).dtype)) for leaf, x in zip(kept, made, strict=True))

    flats = [flatten(tree) for tree in old]
    others = [leaves_of(tree) for tree in given]
    rows = [new(*row) for row in zip(leaves_of(grads), *(flat.leaves for flat in flats), *others, strict=True)]
    return tuple(unflatten(flat.treedef, [row[k] for row in rows]) for k, flat in enumerate(flats))


def map_gradients(f: Callable[..., torch.Tensor], grads: Tree, *given: Tree, numbers: Sequence[Any] = ()) -> Tree:
    """Make new gradients of gradients and of given trees; see `leafwise`."""
    (new,) = leafwise(lambda grad, _, *rest: (f(grad, *rest),), grads, [grads], given, numbers)
    return new


def stateless(f: Callable[[Tree, Tree], Tree]) -> GradientTransformation:
    """Make a transformation without a state of a function from gradients and parameters to gradients."""
    return GradientTransformation(lambda params: (), lambda grads, state, params: (f(grads, params), state))


def for_trained(f: Callable[[Any], Any], params: Tree) -> Tree:
    """Map over the leaves that take a gradient; None in the place of others."""
    return map_leaves(lambda leaf: f(leaf) if is_trained(leaf) else None, params)


def zeros(params: Tree) -> Tree:
    """Make zeros for every leaf that takes a gradient, with its spec."""
    return for_trained(lambda leaf: like(leaf, torch.zeros_like(tensor_of(leaf), requires_grad=False)), params)


def none_missed(params: Tree) -> Tree:
    """Start the counts of updates in which each leaf had no gradient."""
    return for_trained(lambda _: torch.zeros((), dtype=torch.int64), params)


def missing(missed: Tree, grads: Tree) -> Tree:
    """Count one more update for leaves without a gradient."""

    def count(before: Any, grad: Any) -> Any:
        if before is None or grad is None:
            return before if before is None else before + 1
        # A graph says by itself whose memory its results have.
        return before if is_tracing() else before.clone()

    return map_leaves(count, missed, grads)


def begun(state: Any, grads: Tree, make: Callable[[], dict[str, Tree]]) -> Any:
    """Begin the state of leaves that have their first gradient after they were frozen, as torch.optim does.

    Args:
        state: A NamedTuple, whose first field counts updates, and `missed` those that each leaf had no gradient in.
        grads: The gradients.
        make: Returns new trees for fields of the state that are None where a leaf was frozen.

    Returns:
        The state with these leaves.
    """
    first = next(name for name in ("missed", "momentum") if name in state._fields)
    pairs = zip(leaves_of(getattr(state, first)), leaves_of(grads), strict=True)
    if all(kept is not None or grad is None for kept, grad in pairs):
        return state

    def filled(old: Tree, new: Tree) -> Tree:
        return map_leaves(lambda kept, made: made if kept is None else kept, old, new)

    trees = make()
    if "missed" in state._fields:
        trees["missed"] = for_trained(lambda _: state[0].clone(), next(iter(trees.values())))
    return state._replace(**{name: filled(getattr(state, name), tree) for name, tree in trees.items()})


def check_real(what: str, flat: Flat) -> None:
    """Refuse leaves that take a gradient and are no real floating tensors."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        tensor = tensor_of(leaf)
        return (describe(tensor), "a real tensor") if is_trained(leaf) and tensor.is_complex() else None

    check_floating(what, flat)
    remedy = "keep torch.view_as_real of them as parameters, or step them by fs.sgd"
    check_leaves(f"{what}: leaves are complex", flat, misfit, remedy)


def check_state(what: str, state: Any, needed: type) -> None:
    """Refuse a state that another optimizer has made."""
    remedy = "update with the optimizer that made the state"
    expect(isinstance(state, needed), what, f"a state of class {needed.__name__}", describe(state), remedy)


def check_optimizer(what: str, tx: Any, such_as: str = "fs.from_torch or an fs.chain with one") -> None:
    """Refuse a transformation to wrap that is no optimizer."""
    expect(isinstance(tx, Optimizer), what, f"tx to be an Optimizer, such as {such_as}", describe(tx))
