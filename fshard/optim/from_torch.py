"""from_torch: any elementwise torch.optim class as a pure optimizer."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.checks import check_floating, describe
from fshard.optim.leaves import check_state, missing, none_missed
from fshard.optim.torch_classes import State, build, copied, evaluated, observe, refuse_across_elements, start_state
from fshard.tree import Added, Flat, Tree, flatten, is_trained, leaves_of, like, tensor_of, unflatten
from fshard.update import Optimizer


class TorchState(NamedTuple):
    """State of an optimizer made by `from_torch`.

    Attributes:
        updates: Updates made, which schedules are called with: an int64 tensor of shape ().
        slots: State that the torch class keeps for each parameter, by its names (exp_avg, momentum_buffer, ...): trees
            in the structure of the parameters, Sharded as they are.
        hyper: Hyperparameters that were injected, by name: float64 tensors of shape (), which a caller may replace.
        missed: For classes whose first step is of its own kind and which keep no count: how many of the updates each
            leaf had no gradient in, int64 tensors of shape ().
    """

    updates: torch.Tensor
    slots: dict[str, Tree]
    hyper: dict[str, torch.Tensor]
    missed: Tree = Added()


def from_torch(cls: type[torch.optim.Optimizer], *, inject: Sequence[str] = (), **hyper: Any) -> Optimizer:
    """Make a pure optimizer of a torch.optim class, bit for bit the class's own arithmetic.

    Args:
        cls: The class, such as torch.optim.AdamW; its maths must be elementwise where leaves are sharded.
        inject: Names of numbers among its arguments that the state is to hold, as optax.inject_hyperparams does: they
            can be read there, after a schedule too, and replaced without a new optimizer.
        **hyper: Its keyword arguments (lr, betas, fused, ...). A function stands for a schedule: it is called with the
            number of updates made so far, an int64 tensor of shape (), and returns the value, as in Optax. One that is
            to be jitted is written in tensor operations: torch.where in the place of a branch, and no int(count).

    Returns:
        The optimizer. Its state keeps the parameters' specs.

    Raises:
        ValueError: if the class cannot work without a closure or on dense gradients, refuses its arguments, or an
            injected argument is no number;
            from init, if a leaf cannot take a gradient, or the class looks across the elements of one that is sharded;
            from update, if the class asks for a number that vmap has many of.

    >>> import fshard as fs
    >>> tx = from_torch(torch.optim.SGD, lr=lambda count: 0.1 * 0.5**count)
    >>> params, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params["w"], state.updates
    (tensor([0.9000, 0.9000]), tensor(1))
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        expected, remedy = "a torch.optim class", "pass its arguments by name"
        raise ValueError(f"from_torch: expected cls to be {expected}, got {describe(cls)}; {remedy}")
    if issubclass(cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        needs = "a closure" if issubclass(cls, torch.optim.LBFGS) else "sparse gradients"
        raise ValueError(f"from_torch: {cls.__name__} needs {needs}, which an update does not have; use AdamW or SGD")
    start = torch.zeros((), dtype=torch.int64)
    initial = evaluated(hyper, start, {})
    injected = _injected(inject, hyper, initial)
    try:
        habits = observe(cls, initial)
    except Exception as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in hyper.items()) or "none"
        expected = f"arguments that {cls.__name__} takes"
        raise ValueError(f"from_torch: expected {expected}, got {given}, of which torch says: {error}") from error

    def init(params: Tree) -> TorchState:
        flat = flatten(params)
        check_floating("from_torch", flat)
        trained = [i for i, leaf in enumerate(flat.leaves) if is_trained(leaf)]
        tensors = [copied(tensor_of(flat.leaves[i])) for i in trained]
        values = evaluated(hyper, start, {})
        refuse_across_elements(cls, values, flat)
        optimizer = build(cls, values, tensors, [torch.zeros_like(tensor) for tensor in tensors])
        start_state(optimizer, tensors, habits.late)
        states = {i: optimizer.state[tensor] for i, tensor in zip(trained, tensors, strict=True)}
        missed = none_missed(params) if habits.withheld else Added()
        return TorchState(start.clone(), _slots(states, flat, habits.scalars, {}), dict(injected), missed)

    def update(grads: Tree, state: TorchState, params: Tree, donate: bool = False) -> tuple[Tree, TorchState]:
        check_state("from_torch", state, TorchState)
        flat, gradients = flatten(params), [tensor_of(leaf) for leaf in leaves_of(grads)]
        before = {name: leaves_of(slot) for name, slot in state.slots.items()}
        tensors_of = {name: [tensor_of(leaf) for leaf in slot] for name, slot in before.items()}
        chosen = [i for i, grad in enumerate(gradients) if grad is not None and is_trained(flat.leaves[i])]
        tensors = [tensor_of(flat.leaves[i]) for i in chosen]
        donate = donate and _can_be_written([*tensors, *(value for slot in tensors_of.values() for value in slot)])
        new = [_plain(tensor) for tensor in tensors] if donate else [copied(tensor) for tensor in tensors]
        kept = [{name: value for name, slot in tensors_of.items() if (value := slot[i]) is not None} for i in chosen]
        if not donate:
            kept = [{name: copied(value) for name, value in states.items()} for states in kept]
        first: list[bool] = []
        if habits.withheld:
            counts = leaves_of(state.missed)
            first = [int(counts[i]) == int(state.updates) for i in chosen]
            for states, yes in zip(kept, first, strict=True):
                for name in habits.withheld if yes else ():
                    states.pop(name, None)
        values = evaluated(hyper, state.updates, state.hyper)
        # As autograd accumulates gradients: classes read the memory of complex ones, without lazy bits.
        taken = [_plain(gradients[i]).resolve_conj().resolve_neg().contiguous() for i in chosen]
        optimizer = build(cls, values, new, taken, first, habits.filled)
        optimizer.state.update(zip(new, map(dict, kept), strict=True))
        _step(optimizer, new)
        after = [optimizer.state[tensor] for tensor in new]
        held = {
            name: torch.as_tensor(values[name], dtype=torch.float64).detach() if callable(hyper[name]) else tensor
            for name, tensor in state.hyper.items()
        }
        missed = missing(state.missed, grads) if habits.withheld else Added()
        if donate and all(map(_same_objects, kept, after)):
            return params, TorchState(state.updates + 1, state.slots, held, missed)
        leaves = list(flat.leaves)
        for i, tensor in zip(chosen, new, strict=True):
            leaves[i] = like(leaves[i], tensor)
        slots = _slots(dict(zip(chosen, after, strict=True)), flat, habits.scalars, before)
        return unflatten(flat.treedef, leaves), TorchState(state.updates + 1, slots, held, missed)

    return Optimizer(init, update, partial(update, donate=True))


def _injected(names: Sequence[str], hyper: State, values: State) -> dict[str, torch.Tensor]:
    for name in names:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "not among its arguments" if name not in hyper else describe(value)
            raise ValueError(f"from_torch: expected inject to name numbers, got {name!r}, which is {found}")
    return {name: torch.tensor(float(values[name]), dtype=torch.float64) for name in names}


def _step(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> None:
    """Step, and drop the gradients, which would live as long as the tensors."""
    try:
        with torch.no_grad():
            optimizer.step()
    except RuntimeError as error:
        numbers = [value for states in optimizer.state.values() for value in states.values()]
        if any(isinstance(x, torch.Tensor) and not x.dim() and _compat.is_transformed(x) for x in numbers):
            found = f"{type(optimizer).__name__}, which reads its step count as a number"
            remedy = "use fs.adamw, fs.adam or fs.sgd"
            raise ValueError(f"from_torch: expected maths alone under vmap, got {found}; {remedy}") from error
        raise
    finally:
        for tensor in tensors:
            tensor.grad = None


def _same_objects(before: State, after: State) -> bool:
    """Tell whether a class wrote to its state in place, and put no other objects into it."""
    return len(before) == len(after) and all(after.get(name) is value for name, value in before.items())


def _can_be_written(values: Sequence[Any]) -> bool:
    """Tell whether tensors can be stepped in place: none is there twice or has strides, which fused kernels ignore."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(set(map(id, tensors))) == len(tensors) and all(tensor.is_contiguous() for tensor in tensors)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor, or another in its memory where autograd knows it."""
    return tensor.detach() if tensor.requires_grad or tensor.grad is not None else tensor


def _slots(
    states: dict[int, State], flat: Flat, scalars: frozenset[str], before: dict[str, list[Any]]
) -> dict[str, Tree]:
    """Turn torch's states of leaves, by their numbers, into a tree for each name; other leaves keep theirs."""
    slots = {}
    for name in dict.fromkeys((*before, *(name for state in states.values() for name in state))):
        leaves = list(before.get(name, [None] * len(flat.leaves)))
        for i, state in states.items():
            value = state.get(name)
            per_element = isinstance(value, torch.Tensor) and name not in scalars
            leaves[i] = like(flat.leaves[i], value) if per_element else value
        slots[name] = unflatten(flat.treedef, leaves)
    return slots
