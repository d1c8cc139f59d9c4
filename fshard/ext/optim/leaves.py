"""Math leaf by leaf on the tensors of trees that share the structure of the parameters."""

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

Math = Callable[..., tuple[torch.Tensor, ...]]


def elements_of(leaf: Any) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding."""
    return without_padding(leaf) if isinstance(leaf, fs.Sharded) else leaf


def make_varying(number: Any, axes: Sequence[fs.Axis]) -> Any:
    """Prepare a number that agrees between ranks for math on shards, so that its cotangents are summed over ranks."""
    if isinstance(number, torch.Tensor):
        for axis in axes:
            number = fs.pcast(number, axis, to="varying")
    return number


def leafwise(
    f: Math,
    grads: Any,
    old: Sequence[Any],
    given: Sequence[Any] = (),
    numbers: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Make new trees from old ones, by math on the tensors of each leaf that has a gradient.

    Args:
        f: Called with the tensors of a leaf in `grads`, in the old trees and in the given ones, and then with the
            numbers. Returns the tensors of the new trees.
        grads: The gradients. Leaves without one stay as they are.
        old: The trees that the new ones replace. They decide the dtypes, because a number of another dtype would widen
            tensors of shape (). A leaf that was frozen until now, and is None there, starts from zeros.
        given: Trees that are only read.
        numbers: Tensors among them agree between ranks. Their cotangents are summed if ranks use them on shards.

    Returns:
        As many trees as there are old ones.
    """

    @cache
    def numbers_for(axes: tuple[fs.Axis, ...]) -> list[Any]:
        return [make_varying(number, axes) for number in numbers]

    def make_leaves(grad: Any, *leaves: Any) -> Sequence[Any]:
        if grad is None:
            return leaves
        inputs = list(leaves)
        for i in range(len(old)):
            if inputs[i] is None:
                inputs[i] = _zeros_like(grad)
        local_grad, *tensors = tensors_of([grad, *inputs])
        new_tensors = f(local_grad, *tensors, *numbers_for(partition_axes(grad)))
        for i, tensor in enumerate(new_tensors):
            dtype = tensors[i].dtype
            inputs[i] = like(inputs[i], tensor if tensor.dtype is dtype else tensor.to(dtype))
        return inputs

    flat = flatten(old[0])
    columns = [leaves_of(tree) for tree in (grads, *old, *given)]
    rows = [make_leaves(*row) for row in zip(*columns, strict=True)]
    return tuple([flat.unflatten([row[i] for row in rows]) for i in range(len(old))])


def map_gradients(f: Callable[..., torch.Tensor], grads: Any, *given: Any, numbers: Sequence[Any] = ()) -> Any:
    """Make new gradients from gradients and given trees; see `leafwise`."""
    (new_grads,) = leafwise(lambda grad, _, *rest: (f(grad, *rest),), grads, [grads], given, numbers)
    return new_grads


def make_stateless(f: Callable[[Any, Any], Any]) -> fs.GradientTransformation:
    """Make a transformation without a state from a function of gradients and parameters that returns gradients."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        _check_state(state, isinstance(state, tuple) and not state, "an empty state")
        return f(grads, params), state

    return fs.GradientTransformation(lambda params: (), update)


def make_bound(bind: Callable[[Any, Any], Any]) -> fs.GradientTransformation:
    """Make a transformation without a state from the `bind` of one."""
    return make_stateless(lambda grads, params: bind(grads, params)(grads))._replace(bind=bind)


def make_stateful(
    state_class: Any,
    math: Math,
    numbers: Sequence[Any],
    check: Callable[[Any], None],
) -> fs.GradientTransformation:
    """Make a transformation whose state is a count for each leaf, and trees that start as zeros.

    Args:
        state_class: The class of the state, a NamedTuple whose first field is the counts.
        math: Called with a leaf's gradient, twice, its tensors in the trees, its count and the numbers. Returns the new
            gradient and tensors.
        numbers: As for `leafwise`.
        check: Refuses parameters for which there is no such state.
    """

    def init(params: Any) -> Any:
        check(flatten(params))
        zeros = [map_trained_leaves(_zeros_like, params) for _ in state_class._fields[1:]]
        return state_class(no_updates(params), *zeros)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        _check_state(state, isinstance(state, state_class), f"a state of class {state_class.__name__}")
        counts = count_updates(state[0], grads)
        grads, *trees = leafwise(math, grads, (grads, *state[1:]), [counts], numbers)
        return grads, state_class(counts, *trees)

    return fs.GradientTransformation(init, update)


def _check_state(state: Any, is_own: bool, expected: str) -> None:
    """Refuse the state of another optimizer, which would be passed on as it is, or be lost."""
    expect(is_own, "update", expected, describe(state), "pass the state that init of this optimizer made")


def _zeros_like(leaf: Any) -> Any:
    return like(leaf, torch.zeros_like(tensor_of(leaf), requires_grad=False))


def check_real(api_name: str, flat: Any) -> None:
    """Refuse leaves that take a gradient and are not real floating tensors."""

    def describe_misfit(leaf: Any) -> tuple[str, str] | None:
        if not is_trained(leaf) or tensor_of(leaf).is_floating_point():
            return None
        return describe(tensor_of(leaf)), "a real floating tensor"

    remedy = "store complex leaves by torch.view_as_real, or step them with fs.sgd; freeze others"
    refuse(f"{api_name}: leaves must be real floating tensors", flat.problems(describe_misfit), remedy)


def check_optimizer(api_name: str, tx: Any) -> None:
    """Refuse to wrap what is not an optimizer."""
    expect(isinstance(tx, fs.Optimizer), api_name, "tx to be an Optimizer, such as fs.from_torch", describe(tx))
