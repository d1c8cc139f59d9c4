"""Maths leaf by leaf on the tensors of trees that share the structure of the parameters."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fshard.collectives import pcast
from fshard.errors import expect, refuse
from fshard.shard import without_padding
from fshard.tree import Axis, Flat, Tree, flatten, is_sharded, is_trained, leaves_of, like, map_leaves, tensor_of
from fshard.tree.checks import describe
from fshard.tree.nodes import tensors_of
from fshard.update import GradientTransformation, Optimizer


def partition_axes(leaf: Any) -> tuple[Axis, ...]:
    """Return the axes whose ranks hold different elements of a leaf."""
    return tuple([axis for axis in leaf.spec.partition_axes() if axis.size > 1]) if is_sharded(leaf) else ()


def elements_of(leaf: Any) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding."""
    return without_padding(leaf) if is_sharded(leaf) else leaf


def varying(number: torch.Tensor, axes: Sequence[Axis]) -> torch.Tensor:
    """Hand a number that agrees between ranks to each rank's own shards, so that its cotangents are summed."""
    for axis in axes:
        number = pcast(number, axis, to="varying")
    return number


Maths = Callable[..., tuple[torch.Tensor, ...]]


def leafwise(
    f: Maths, grads: Tree, old: Sequence[Tree], given: Sequence[Tree] = (), numbers: Sequence[Any] = ()
) -> tuple[Tree, ...]:
    """Make new trees of old ones, by maths on the tensors of each leaf that has a gradient.

    Args:
        f: Called with a leaf's tensors in `grads`, the old trees and the given ones, and then the numbers; returns the
            tensors of the new trees.
        grads: The tree that says where; other leaves stay as they are.
        old: The trees that the new ones replace: they decide their dtypes, because a number of another dtype would
            widen tensors of shape (). A leaf that was frozen until now, and is None there, begins as zeros.
        given: Trees that are only read.
        numbers: Those that are tensors agree between ranks; their cotangents are summed where ranks use them on shards.

    Returns:
        As many trees as there are old ones.
    """

    @cache
    def at(axes: tuple[Axis, ...]) -> list[Any]:
        return [varying(n, axes) if isinstance(n, torch.Tensor) else n for n in numbers]

    def new(grad: Any, *leaves: Any) -> Sequence[Any]:
        kept, rest = leaves[: len(old)], leaves[len(old) :]
        if grad is None:
            return kept
        kept = tuple([_zeros(grad) if leaf is None else leaf for leaf in kept])
        own, *held = tensors_of([grad, *kept, *rest])
        made = zip(kept, held, f(own, *held, *at(partition_axes(grad))), strict=False)
        return [like(leaf, x if x.dtype is was.dtype else x.to(was.dtype)) for leaf, was, x in made]

    flat = flatten(old[0])
    rows = [new(*row) for row in zip(*map(leaves_of, (grads, *old, *given)), strict=True)]
    return tuple(flat.unflatten(row[k] for row in rows) for k in range(len(old)))


def map_gradients(f: Callable[..., torch.Tensor], grads: Tree, *given: Tree, numbers: Sequence[Any] = ()) -> Tree:
    """Make new gradients of gradients and of given trees; see `leafwise`."""
    (new,) = leafwise(lambda grad, _, *rest: (f(grad, *rest),), grads, [grads], given, numbers)
    return new


def stateless(f: Callable[[Tree, Tree], Tree]) -> GradientTransformation:
    """Make a transformation without a state of a function from gradients and parameters to gradients."""
    return GradientTransformation(lambda params: (), lambda grads, state, params: (f(grads, params), state))


def stateful(kept: Any, maths: Maths, numbers: Sequence[Any], check: Callable[[Flat], None]) -> GradientTransformation:
    """Make a transformation whose state is a count for each leaf and trees of zeros at first.

    Args:
        kept: The class of the state, a NamedTuple whose first field is the counts.
        maths: Called with a leaf's gradient, twice, its tensors in the trees, its count and the numbers; returns the
            new gradient and tensors.
        numbers: As for `leafwise`.
        check: Refuses parameters that it cannot keep a state for.
    """

    def init(params: Tree) -> Any:
        check(flatten(params))
        return kept(no_updates(params), *(for_trained(_zeros, params) for _ in kept._fields[1:]))

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        counts = counted(state[0], grads)
        grads, *trees = leafwise(maths, grads, (grads, *state[1:]), [counts], numbers)
        return grads, kept(counts, *trees)

    return GradientTransformation(init, update)


def for_trained(f: Callable[[Any], Any], params: Tree) -> Tree:
    """Map over the leaves that take a gradient; None in the place of others."""
    return map_leaves(lambda leaf: f(leaf) if is_trained(leaf) else None, params)


def _zeros(leaf: Any) -> Any:
    return like(leaf, torch.zeros_like(tensor_of(leaf), requires_grad=False))


def zero() -> torch.Tensor:
    """Make a count of no updates."""
    return torch.zeros((), dtype=torch.int64)


def no_updates(params: Tree) -> Tree:
    """Make a count for each leaf that takes a gradient."""
    return for_trained(lambda _: zero(), params)


def counted(counts: Tree, grads: Tree) -> Tree:
    """Count an update of each leaf that has a gradient."""
    return map_leaves(lambda n, grad: n if grad is None else (zero() if n is None else n) + 1, counts, grads)


def check_real(what: str, flat: Flat) -> None:
    """Refuse leaves that take a gradient and are no real floating tensors."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        wrong = is_trained(leaf) and not tensor_of(leaf).is_floating_point()
        return (describe(tensor_of(leaf)), "a real floating tensor") if wrong else None

    remedy = "keep torch.view_as_real of complex ones, or step them by fs.sgd; freeze others"
    refuse(f"{what}: leaves are no real floating tensors", flat.problems(misfit), remedy)


def check_optimizer(what: str, tx: Any) -> None:
    """Refuse a transformation to wrap that is no optimizer."""
    expect(isinstance(tx, Optimizer), what, "tx to be an Optimizer, such as fs.from_torch", describe(tx))
