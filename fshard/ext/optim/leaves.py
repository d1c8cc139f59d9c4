"""Math leaf by leaf on the tensors of trees that share the structure of the parameters."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch

import fshard as fs
from fshard.extend import (
    call_schedule,
    check_same_shards,
    count_updates,
    describe,
    expect,
    flatten,
    is_trained,
    leaves_like,
    like,
    map_leaves,
    map_trained_leaves,
    no_updates,
    partition_axes,
    refuse,
    refuse_donated,
    tensor_of,
    tensors_of,
    without_padding,
)

Math = Callable[..., tuple[torch.Tensor, ...]]
Number = float | torch.Tensor
Mask = str | Sequence[str] | Callable[..., bool]
Rate = Number | Callable[[torch.Tensor], Number]


def read_rate(lr: Rate, count: torch.Tensor) -> Number:
    """Return the learning rate of an update; that of a schedule by the number of updates made."""
    return call_schedule(lr, "lr", count) if callable(lr) else lr


def elements_of(leaf: Any) -> torch.Tensor:
    """Return the elements of a leaf that this rank holds, without padding."""
    return without_padding(leaf) if isinstance(leaf, fs.Sharded) else leaf


def make_varying(number: Any, axes: Sequence[fs.Axis]) -> Any:
    """Prepare a number that agrees between ranks for math on shards, so that its cotangents are summed over ranks."""
    if isinstance(number, torch.Tensor):
        for axis in axes:
            number = fs.pcast(number, axis, to="varying")
    return number


def share_out(numbers: torch.Tensor, tree: Any) -> Any:
    """Give each leaf its element of a vector of numbers that agree between ranks, prepared for math on the leaf.

    Args:
        numbers: The vector, with an element for each leaf that is not None.
        tree: The leaves.

    Returns:
        A tree of the same structure with scalars in the leaf's dtype, float32 at least. None for None.
    """

    @cache
    def elements_for(axes: tuple[fs.Axis, ...], dtype: torch.dtype) -> Any:
        return make_varying(numbers.to(dtype), axes).unbind()

    indices = count()

    def take_element(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype = torch.promote_types(leaf.dtype.to_real(), torch.float32)
        return elements_for(partition_axes(leaf), dtype)[next(indices)]

    return map_leaves(take_element, tree)


def take_with_gradient(tree: Any, grads: Any) -> Any:
    """Keep the leaves that have a gradient; others become None."""
    return map_leaves(lambda leaf, grad: None if grad is None else leaf, tree, grads)


def stack_counts(counts: Any, grads: Any, numbers: Sequence[Any] = ()) -> torch.Tensor:
    """Stack the counts of leaves that have a gradient, for math with some hyperparameters.

    Returns:
        A row of two equal float64 numbers for each leaf. Kernels round powers in full vectors in another way than the
        rest. A row is too short for a vector, so that a power does not depend on its place.
    """
    updated = fs.tree_leaves(take_with_gradient(counts, grads))
    if not updated:
        return torch.zeros(0, 2)
    # Hyperparameters and counts may be on an accelerator, and a leaf that was frozen until now has a count on the CPU.
    tensors = filter(torch.is_tensor, (*updated, *numbers))
    device = max(tensors, key=lambda tensor: not tensor.is_cpu).device
    moved = [_move_number(number, device) for number in updated]
    vector = torch.stack(moved).double()
    return vector[:, None].expand(-1, 2)


def _move_number(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    if number.device == device:
        return number
    # The host waits for a copy to an accelerator, but kernels take a number of shape () from the CPU as it is.
    return torch.zeros_like(number, device=device) + number


def is_set(number: Any) -> bool:
    """Whether a hyperparameter may be another number than 0."""
    return isinstance(number, torch.Tensor) or number != 0


def add_multiple(tensor: torch.Tensor, other: torch.Tensor, factor: Any) -> torch.Tensor:
    """Add a multiple of another tensor, with bits that depend on the elements alone."""
    # Kernels of half precision round the multiple before they add it only for the last few elements of a shard.
    if isinstance(factor, torch.Tensor) or tensor.itemsize < 4:
        return tensor + other * factor
    return tensor.add(other, alpha=factor)


def make_step(decay: Any) -> Math:
    """Make the math of a step: shrink a parameter if there may be a decay, and add a multiple of what it steps by."""

    def step(grad: torch.Tensor, param: torch.Tensor, factor: Any, shrinkage: Any) -> tuple[torch.Tensor]:
        if is_set(decay):
            param = param * shrinkage
        return (add_multiple(param, grad, factor),)

    return step


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
        old: The trees that the new ones replace, with their dtypes. A leaf that was frozen until now, and is None
            there, starts from zeros.
        given: Trees that are only read.
        numbers: Tensors among them agree between ranks. Their cotangents are summed if ranks use them on shards.

    Returns:
        As many trees as there are old ones.

    Raises:
        ValueError: if an old leaf is split otherwise than its gradient.
    """

    @cache
    def numbers_for(axes: tuple[fs.Axis, ...]) -> list[Any]:
        return [make_varying(number, axes) for number in numbers]

    def make_leaves(first: Any, grad: Any, *others: Any) -> Sequence[Any]:
        inputs = [first, *others]
        if grad is None:
            return inputs
        for i in range(len(old)):
            if inputs[i] is None:
                inputs[i] = _zeros_like(grad)
        local_grad, *tensors = tensors_of([grad, *inputs])
        # A number of another dtype would widen a tensor of shape (), but not a shard of such a leaf, of shape [1].
        wide = torch.atleast_1d(local_grad, *tensors[: len(old)])
        new_tensors = f(*wide, *tensors[len(old) :], *numbers_for(partition_axes(grad)))
        for i, tensor in enumerate(new_tensors):
            tensor = tensor.to(tensors[i].dtype)
            inputs[i] = like(inputs[i], tensor if tensors[i].dim() else tensor[0])
        return inputs

    flat = flatten(old[0])
    columns = [leaves_like(flat, tree) for tree in (grads, *old[1:], *given)]
    check_same_shards(flat, *columns[: len(old)])
    rows = list(map(make_leaves, flat.leaves, *columns))
    trees = []
    for i in range(len(old)):
        trees.append(flat.unflatten([row[i] for row in rows]))
    return tuple(trees)


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
    read_counts: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> fs.GradientTransformation:
    """Make a transformation whose state is a count for each leaf, and trees that start as zeros.

    Args:
        state_class: The class of the state, a NamedTuple whose first field is the counts.
        math: Called with a leaf's gradient, twice, its tensors in the trees, what its count decides and the numbers.
            Returns the new gradient and tensors.
        numbers: As for `leafwise`.
        check: Refuses parameters for which there is no such state.
        read_counts: Maps the counts of all leaves that have a gradient, an int64 vector, to vectors of numbers that
            `math` needs of them. An element must not depend on its place in the vector.
    """

    def init(params: Any) -> Any:
        check(flatten(params))
        zeros = [map_trained_leaves(_zeros_like, params) for _ in state_class._fields[1:]]
        return state_class(no_updates(params), *zeros)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        _check_state(state, isinstance(state, state_class), f"a state of class {state_class.__name__}")
        counts = count_updates(state[0], grads)
        given = [share_out(numbers, grads) for numbers in read_counts(stack_counts(counts, grads, numbers))]
        grads, *trees = leafwise(math, grads, (grads, *state[1:]), given, numbers)
        return grads, state_class(counts, *trees)

    return fs.GradientTransformation(init, update)


def _check_state(state: Any, is_own: bool, expected: str) -> None:
    """Refuse the state of another optimizer, which would be passed on as it is, or be lost."""
    expect(is_own, "update", expected, describe(state), "pass the state that init of this optimizer made")


def _zeros_like(leaf: Any) -> Any:
    return like(leaf, torch.zeros_like(tensor_of(leaf), requires_grad=False))


def check_real(api_name: str, flat: Any) -> None:
    """Refuse leaves that were donated, or take a gradient and are not real floating tensors."""
    refuse_donated(api_name, flat)

    def describe_misfit(leaf: Any) -> tuple[str, str] | None:
        tensor = tensor_of(leaf)
        if not is_trained(leaf) or (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            return None
        return describe(tensor), "a real floating tensor"

    remedy = "pass the parameters of model.init. Store complex ones by torch.view_as_real, or step them with fs.sgd"
    refuse(f"{api_name}: leaves must be real floating tensors", flat.problems(describe_misfit), remedy)


def check_optimizer(api_name: str, tx: Any) -> None:
    """Refuse to wrap what is not an optimizer."""
    expect(isinstance(tx, fs.Optimizer), api_name, "tx to be an Optimizer, such as fs.from_torch", describe(tx))
