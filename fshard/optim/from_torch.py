"""from_torch: any elementwise torch.optim class as a pure optimizer."""

import operator
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fshard import _compat
from fshard.checks import check_floating, kind
from fshard.optim.leaves import check_state, like, missing, none_missed, tensor_of, trained
from fshard.optim.torch_classes import (
    build,
    copied,
    evaluated,
    observe,
    on_cpu,
    refuse_across_elements,
    start_state,
)
from fshard.tree import Added, Flat, Tree, flatten, unflatten
from fshard.update import Optimizer, Targets


class TorchState(NamedTuple):
    """State of an optimizer made by `from_torch`.

    Attributes:
        updates: Updates made, which schedules are called with: an int64 tensor of shape ().
        slots: What the torch class keeps for each parameter, by its names for it (exp_avg, momentum_buffer, ...): trees
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
        ValueError: if the class cannot work without a closure or on dense gradients, refuses its arguments, or what is
            injected is no number;
            from init, if a leaf cannot take a gradient, or the class looks across the elements of one that is sharded;
            from update, if the class asks for a number that vmap has many of.

    >>> import fshard as fs
    >>> tx = from_torch(torch.optim.SGD, lr=lambda count: 0.1 * 0.5**count)
    >>> params, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params["w"], state.updates
    (tensor([0.9000, 0.9000]), tensor(1))
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(
            f"from_torch: expected cls to be a torch.optim class, got {kind(cls)}; pass its arguments by name"
        )
    if issubclass(cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        needs = "a closure" if issubclass(cls, torch.optim.LBFGS) else "sparse gradients"
        raise ValueError(f"from_torch: {cls.__name__} needs {needs}, which an update does not have; use AdamW or SGD")
    count = torch.zeros((), dtype=torch.int64)
    injected = _injected(inject, hyper, evaluated(hyper, count))
    values = on_cpu(evaluated(hyper, count))
    try:
        habits = observe(cls, values)
    except Exception as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in hyper.items()) or "none"
        expected = f"arguments that {cls.__name__} takes"
        raise ValueError(f"from_torch: expected {expected}, got {given}, of which torch says: {error}") from error

    def init(params: Tree) -> TorchState:
        flat = flatten(params)
        check_floating("from_torch", flat)
        tensors = [copied(tensor_of(flat.leaves[i])) for i in trained(flat)]
        values = evaluated(hyper, count)
        refuse_across_elements(cls, values, flat)
        optimizer = build(cls, values, tensors, [torch.zeros_like(tensor) for tensor in tensors])
        start_state(optimizer, tensors, habits.late)
        slots = _slots(optimizer, trained(flat), tensors, flat, habits.scalars, {})
        missed = none_missed(params) if habits.withheld else Added()
        return TorchState(count.clone(), slots, dict(injected), missed)

    def update(grads: Tree, state: TorchState, params: Tree, donate: bool = False) -> tuple[Tree, TorchState]:
        check_state("from_torch", state, TorchState)
        flat, gradients = flatten(params), [tensor_of(leaf) for leaf in flatten(grads).leaves]
        slots = {name: flatten(slot) for name, slot in state.slots.items()}
        chosen = [i for i in trained(flat) if gradients[i] is not None]
        given = [tensor_of(flat.leaves[i]) for i in chosen]
        donate = donate and _can_be_written([*given, *(tensor_of(v) for slot in slots.values() for v in slot.leaves)])
        new = [_written(tensor) if donate else copied(tensor) for tensor in given]
        taken = [gradients[i].detach().contiguous() for i in chosen]
        values_now = evaluated(hyper | fixed(state), state.updates)
        first: list[bool] = []
        if habits.withheld:
            counts = flatten(state.missed).leaves
            first = [int(counts[i]) == int(state.updates) for i in chosen]
        optimizer = build(cls, values_now, new, taken, first)
        for name, slot in slots.items():
            for n, (i, tensor) in enumerate(zip(chosen, new, strict=True)):
                if name in habits.withheld and first[n]:
                    continue
                if (value := tensor_of(slot.leaves[i])) is not None:
                    optimizer.state[tensor][name] = value if donate else copied(value)
        values = [value for of_one in optimizer.state.values() for value in of_one.values()]
        count, in_place = state.updates + 1, _step(optimizer, new, values)
        missed = missing(state.missed, grads) if habits.withheld else Added()
        if donate and in_place:
            if all(map(operator.is_, new, given)) and len(chosen) == len(trained(flat)):
                running[count] = _Running(optimizer, new, values, Targets.of(flat), flat, slots)
            return params, TorchState(count, state.slots, used(state, values_now), missed)
        leaves = list(flat.leaves)
        for i, tensor in zip(chosen, new, strict=True):
            leaves[i] = like(leaves[i], tensor)
        slots_after = _slots(optimizer, chosen, new, flat, habits.scalars, slots)
        return unflatten(flat.treedef, leaves), TorchState(count, slots_after, used(state, values_now), missed)

    def fixed(state: TorchState) -> dict[str, Any]:
        """Injected numbers that no schedule makes."""
        values = {name: value for name, value in state.hyper.items() if not callable(hyper[name])}
        return values if _compat.is_tracing() else {name: float(value) for name, value in values.items()}

    def used(state: TorchState, values: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What the state holds after an update: what schedules gave it."""
        return {
            name: torch.as_tensor(values[name], dtype=torch.float64).detach() if callable(hyper[name]) else tensor
            for name, tensor in state.hyper.items()
        }

    # By the count in the state that a donated update has returned, and gone with it.
    running = _RunningByCount()
    varies = bool(inject) or any(map(callable, hyper.values()))

    def resume(grads: Tree, state: TorchState, params: Tree) -> tuple[Tree, TorchState] | None:
        run = running.pop(state.updates, None) if isinstance(state, TorchState) else None
        if run is None or not run.is_of(state, params) or not run.is_alone():
            return None
        values_now = evaluated(hyper | fixed(state), state.updates) if varies else {}
        if varies:
            optimizer = cls([{"params": run.tensors}], **values_now)
            optimizer.state = run.optimizer.state
            run = run._replace(optimizer=optimizer)
        if not run.targets.take(grads):
            return None
        count, in_place = state.updates + 1, _step(run.optimizer, run.tensors, run.values)
        if in_place:
            running[count] = run
        slots = state.slots
        if not in_place:
            slots = _slots(run.optimizer, trained(run.params), run.tensors, run.params, habits.scalars, run.slots)
        return params, TorchState(count, slots, used(state, values_now), state.missed)

    def update_donated(grads: Tree, state: TorchState, params: Tree) -> tuple[Tree, TorchState]:
        return resume(grads, state, params) or update(grads, state, params, donate=True)

    return Optimizer(init, update, update_donated, resume)


def _injected(names: Sequence[str], hyper: dict[str, Any], values: dict[str, Any]) -> dict[str, torch.Tensor]:
    for name in names:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            found = "not among its arguments" if name not in hyper else kind(value)
            raise ValueError(f"from_torch: expected inject to name numbers, got {name!r}, which is {found}")
    return {name: torch.tensor(float(values[name]), dtype=torch.float64) for name in names}


class _RunningByCount(WeakTensorKeyDictionary):
    """What goes on after donated updates; a copy, or another process's, has nothing to go on from."""

    def __reduce__(self) -> tuple[type["_RunningByCount"], tuple[()]]:
        return _RunningByCount, ()

    def __deepcopy__(self, memo: Any) -> "_RunningByCount":
        return _RunningByCount()


class _Running(NamedTuple):
    """The torch optimizer of a donated update, with the tensors and the values that it steps and where they are."""

    optimizer: torch.optim.Optimizer
    tensors: list[torch.Tensor]
    values: list[Any]
    targets: Targets
    params: Flat
    slots: dict[str, Flat]

    def is_of(self, state: TorchState, params: Tree) -> bool:
        """Whether every leaf of the state and the parameters is still the same object."""
        pairs = [(self.params, params), *((flat, state.slots.get(name)) for name, flat in self.slots.items())]
        with suppress(ValueError):
            same = all(all(map(operator.is_, flat.treedef.flatten_up_to(tree), flat.leaves)) for flat, tree in pairs)
            return same and len(state.slots) == len(self.slots)
        return False

    def is_alone(self) -> bool:
        """Whether no other tensor has come to share the memory of these."""
        values = [value for value in self.values if isinstance(value, torch.Tensor)]
        return not any(_compat.share_memory([*self.tensors, *values]))


def _step(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], values: list[Any]) -> bool:
    """Step, and drop the gradients, which would live as long as the tensors; whether it wrote to tensors alone."""
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        with torch.no_grad():
            optimizer.step()
    except RuntimeError as error:
        if any(
            isinstance(value, torch.Tensor) and not value.dim() and _compat.is_transformed(value) for value in values
        ):
            found = f"{type(optimizer).__name__}, which reads its step count as a number"
            raise ValueError(
                f"from_torch: expected maths alone under vmap, got {found}; use fs.adamw, fs.adam or fs.sgd"
            ) from error
        raise
    finally:
        for tensor in tensors:
            tensor.grad = None
    kept = optimizer.state.values()
    same = sum(map(len, kept)) == len(values) and all(
        map(operator.is_, chain.from_iterable(map(dict.values, kept)), values)
    )
    return same and groups == optimizer.param_groups


def _can_be_written(values: Sequence[Any]) -> bool:
    """Whether tensors can be stepped in place: each is there once, and none has strides, which fused kernels ignore."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(set(map(id, tensors))) == len(tensors) and all(tensor.is_contiguous() for tensor in tensors)


def _written(tensor: torch.Tensor) -> torch.Tensor:
    """What a step writes to: the tensor, or another in its memory where autograd knows it."""
    return tensor.detach() if tensor.requires_grad or tensor.grad is not None else tensor


def _slots(
    optimizer: torch.optim.Optimizer,
    chosen: Sequence[int],
    tensors: Sequence[torch.Tensor],
    flat: Flat,
    scalars: frozenset[str],
    before: dict[str, Flat],
) -> dict[str, Tree]:
    """Turn torch's state for each parameter that it stepped into a tree for each name; others keep what they had."""
    names = dict.fromkeys((*before, *(name for tensor in tensors for name in optimizer.state[tensor])))
    slots = {}
    for name in names:
        leaves: list[Any] = list(before[name].leaves) if name in before else [None] * len(flat.leaves)
        for i, tensor in zip(chosen, tensors, strict=True):
            value = optimizer.state[tensor].get(name)
            per_element = isinstance(value, torch.Tensor) and name not in scalars
            leaves[i] = like(flat.leaves[i], value) if per_element else value
        slots[name] = unflatten(flat.treedef, leaves)
    return slots
