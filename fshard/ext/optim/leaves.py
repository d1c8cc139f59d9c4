"""Maths leaf by leaf on the tensors of trees that share the structure of the parameters."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

import fshard as fs
from fshard.extend import (
    count_updates,
    describe,
    expect,
    flatten,
    is_trained,
    leaves_of,
    like,
    map_trained_leaves,
    no_updates,
    partition_axes,
    refuse,
    tensor_of,
    tensors_of,
    without_padding,
)


def elements_of(leaf: Any) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding."""
    return without_padding(leaf) if isinstance(leaf, fs.Sharded) else leaf


def varying(number: torch.Tensor, axes: Sequence[fs.Axis]) -> torch.Tensor:
    """Hand a number that agrees between ranks to each rank's own shards, so that its cotangents are summed."""
    for axis in axes:
        number = fs.pcast(number, axis, to="varying")
    return number


Maths = Callable[..., tuple[torch.Tensor, ...]]


def leafwise(
    f: Maths, grads: Any, old: Sequence[Any], given: Sequence[Any] = (), numbers: Sequence[Any] = ()
) -> tuple[Any, ...]:
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
    def at(axes: tuple[fs.Axis, ...]) -> list[Any]:
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


def map_gradients(f: Callable[..., torch.Tensor], grads: Any, *given: Any, numbers: Sequence[Any] = ()) -> Any:
    """Make new gradients of gradients and of given trees; see `leafwise`."""
    (new,) = leafwise(lambda grad, _, *rest: (f(grad, *rest),), grads, [grads], given, numbers)
    return new


def stateless(f: Callable[[Any, Any], Any]) -> fs.GradientTransformation:
    """Make a transformation without a state of a function from gradients and parameters to gradients."""
    return fs.GradientTransformation(lambda params: (), lambda grads, state, params: (f(grads, params), state))


def stateful(
    kept: Any, maths: Maths, numbers: Sequence[Any], check: Callable[[Any], None]
) -> fs.GradientTransformation:
    """Make a transformation whose state is a count for each leaf and trees of zeros at first.

    Args:
        kept: The class of the state, a NamedTuple whose first field is the counts.
        maths: Called with a leaf's gradient, twice, its tensors in the trees, its count and the numbers; returns the
            new gradient and tensors.
        numbers: As for `leafwise`.
        check: Refuses parameters that it cannot keep a state for.
    """

    def init(params: Any) -> Any:
        check(flatten(params))
        return kept(no_updates(params), *(map_trained_leaves(_zeros, params) for _ in kept._fields[1:]))

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        counts = count_updates(state[0], grads)
        grads, *trees = leafwise(maths, grads, (grads, *state[1:]), [counts], numbers)
        return grads, kept(counts, *trees)

    return fs.GradientTransformation(init, update)


def _zeros(leaf: Any) -> Any:
    return like(leaf, torch.zeros_like(tensor_of(leaf), requires_grad=False))


def check_real(what: str, flat: Any) -> None:
    """Refuse leaves that take a gradient and are no real floating tensors."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        wrong = is_trained(leaf) and not tensor_of(leaf).is_floating_point()
        return (describe(tensor_of(leaf)), "a real floating tensor") if wrong else None

    remedy = "keep torch.view_as_real of complex ones, or step them by fs.sgd; freeze others"
    refuse(f"{what}: leaves are no real floating tensors", flat.problems(misfit), remedy)


def check_optimizer(what: str, tx: Any) -> None:
    """Refuse a transformation to wrap that is no optimizer."""
    expect(isinstance(tx, fs.Optimizer), what, "tx to be an Optimizer, such as fs.from_torch", describe(tx))
