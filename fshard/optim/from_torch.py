"""from_torch: any elementwise torch.optim class as a pure optimizer.

The file has over 600 lines, because what trial steps observe of a class decides each of its steps and refusals.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import expect, refuse
from fshard.optim.leaves import call_schedule, count_updates, no_updates, partition_axes, zero
from fshard.reduction_order import ReductionOrder, find_order
from fshard.rounding import half_the_digits
from fshard.tree import (
    Flat,
    Tree,
    attributes_of,
    device_of,
    flatten,
    grouped,
    is_sharded,
    is_tensor,
    is_trained,
    leaves_like,
    like,
    map_leaves,
    map_nodes,
    tensor_of,
    tensors_of,
)
from fshard.tree.checks import FINITE, check_floating, check_numbers, describe, refuse_donated, refuse_frozen_counters
from fshard.update import Optimizer, Updated, check_same_shards, record_numbers

# By the names of the torch class: its state of one parameter, and its hyperparameters.
State = dict[str, Any]
States = Sequence[State]
Hyper = dict[str, Any]
Tensors = Sequence[torch.Tensor]
Names = Sequence[str]
Make = partial[torch.optim.Optimizer]

CPU = torch.device("cpu")


class TorchState(NamedTuple):
    """State of an optimizer made by `from_torch`.

    Attributes:
        updates: The number of updates made, which schedules are called with: an int64 tensor of shape ().
        slots: The state that the torch class keeps for each parameter, by its names (exp_avg, momentum_buffer, ...):
            trees in the structure of the parameters, sharded as they are.
        hyper: The injected hyperparameters by name: float64 tensors of shape (), which you may replace.
        counts: The number of updates of each leaf, int64 tensors of shape (); empty for most classes, whose first step
            is like any other.
    """

    updates: torch.Tensor
    slots: dict[str, Tree]
    hyper: dict[str, torch.Tensor]
    counts: Tree = ()

    @staticmethod
    def each(f: Callable[["TorchState"], Any], tree: Tree) -> Tree:
        """Map a function over the states of this kind in a tree; other leaves stay as they are."""
        return map_nodes(f, tree, TorchState)


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    inject: str | Names = (),
    reduction_order: str | None = None,
    **hyper: Any,
) -> Optimizer:
    """Make a pure optimizer of a torch.optim class. Updates have the bits of the class's own steps.

    They have no derivative in reverse mode, and none by hyperparameters, because torch's kernels record no graph.
    Those of `sgd`, `adam` and others of fshard have.

    Args:
        cls: The class, such as torch.optim.AdamW. If leaves are sharded, its math must be elementwise.
        inject: The name of a numeric argument that the state holds, or several, as with optax.inject_hyperparams. You
            can read them there, and replace them without a new optimizer, except for those of schedules, which each
            update computes anew.
        reduction_order: "tree" makes updates have the same bits at any world size. It refuses kernels that round an
            element by its place in the shard: fused ones, and those of half precision, which treat the last few
            elements differently.
        **hyper: The keyword arguments of the class (lr, betas, fused, ...). A function is a schedule, as in Optax: it
            is called with the number of updates made so far, an int64 tensor of shape (), and returns the value. To be
            jitted, it must be written in tensor operations: torch.where instead of a branch, and no int(count).

    Returns:
        The optimizer. Its state is sharded as the parameters are.

    Raises:
        ValueError: if `cls` is not a torch.optim class, refuses its arguments, keeps something between steps that is
            not in the state of its parameters, or `inject` names no numeric argument of it; from update, if it is
            differentiated, or a schedule returns no number; from init, if a leaf cannot take a gradient, if the class
            looks across the elements of a sharded leaf, if it rounds elements by their place with
            reduction_order="tree", or if its fused kernel does not step leaves of half precision, as that of SGD on the
            CPU before torch 2.14.
            Torch's own error if the class needs a closure, or cannot step on dense gradients.

    >>> import fshard as fs
    >>> tx = from_torch(torch.optim.SGD, lr=lambda count: 0.1 * 0.5**count)
    >>> params, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params["w"], state.updates
    (tensor([0.9000, 0.9000]), tensor(1))
    """
    is_class = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    expect(is_class, "from_torch", "cls to be a torch.optim class", describe(cls), "pass its arguments by name")
    wrapped = _WrappedClass(cls, hyper, inject, find_order("from_torch", reduction_order))
    # Another's class may look at all leaves together where none is split.
    is_leafwise = cls in vars(torch.optim).values() and not wrapped.may_add_slots
    return Optimizer(wrapped.init, wrapped.update, partial(wrapped.update, donate=True), is_leafwise)


class _Selection(NamedTuple):
    """The leaves that an update changes.

    Attributes:
        flat: All parameters.
        positions: The positions of the leaves among them.
    """

    flat: Flat
    positions: list[int]

    def take(self, leaves: Sequence[Any]) -> list[Any]:
        """Take the tensors at these positions."""
        return tensors_of(list(map(leaves.__getitem__, self.positions)))

    def put(
        self,
        leaves: Sequence[Any],
        old_values: Sequence[Any],
        values: Sequence[Any],
        *,
        is_number: bool = False,
    ) -> Tree:
        """Make a tree with values at these positions, in the specs of the parameters.

        Args:
            leaves: The leaves at all positions; where a value is None, they stay.
            old_values: What `take` finds in them.
            values: The values at these positions.
            is_number: Whether a tensor is one number for a whole leaf, which has no spec.
        """
        new_leaves = list(leaves)
        # In place, none is new.
        if not all(map(operator.is_, values, old_values)):
            for i, old, value in zip(self.positions, old_values, values, strict=True):
                if value is not None and value is not old:
                    is_plain = is_number or not isinstance(value, torch.Tensor)
                    new_leaves[i] = value if is_plain else like(self.flat.leaves[i], value)
        return self.flat.unflatten(new_leaves)


class _Traits(NamedTuple):
    """What trials of a class show.

    Attributes:
        number_names: The names of state that is one number for a whole leaf, such as a step count.
        common_names: The names of state that leaves of every shape have.
        is_first_step_special: Whether a first step from zeros, made when hyperparameters had their first values,
            differs from one without a state.
        writes_gradients: Whether a step writes to gradients, as with nesterov and foreach.
    """

    number_names: Names
    common_names: set[str]
    is_first_step_special: bool
    writes_gradients: bool


class _WrappedClass:
    """A torch class with its hyperparameters, as functions of trees."""

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        hyper: Hyper,
        inject: str | Names,
        order: ReductionOrder,
    ) -> None:
        """Observe first steps of the class.

        Args:
            cls: The class.
            hyper: The hyperparameters, schedules among them.
            inject: The names of those that the state holds.
            order: The order whose bits updates keep.
        """
        self._name = cls.__name__
        self._hyper = hyper
        self._order = order
        # Outside of the block below: an error of a schedule is the user's own.
        initial = _refuse_derivatives(hyper) | _read_on_host(_evaluate(hyper, zero(), {}))
        # Makes the torch optimizer, with the hyperparameters before the first update.
        self._make: Make = partial(cls, **initial)
        try:
            defaults = _build_optimizer(self._make, (), (), {}).defaults
        except TypeError as error:
            raise ValueError(
                f"from_torch: {cls.__name__} refuses its arguments: {error}. A schedule is a function, as "
                "fs.from_torch_scheduler makes of one of torch."
            ) from error
        # Kernels that read step counts on an accelerator.
        self._has_capturable = "capturable" in defaults
        self._injected = _read_injections(inject, defaults)
        # Torch refuses `capturable` for small CPU tensors.
        initial.pop("capturable", None)
        if "lr" in initial:
            # A schedule may start from 0, and nothing would move.
            initial["lr"] = 0.7
        self._make_for_trial: Make = partial(cls, **initial)
        changing = {name for name in hyper if callable(hyper[name])} | set(self._injected)
        # Rprop and ASGD keep the learning rate that they start with.
        self._traits = _observe(self._make_for_trial, {"lr": 0.3} if "lr" in changing else {})
        # A momentum that starts from 0 gets its slot later, and states of some leaves alone would differ in structure.
        self.may_add_slots = "momentum" in changing
        # With other values than in the trial, a class may write to gradients. Its learning rate does not decide that.
        self._may_write_gradients = self._traits.writes_gradients or bool(changing - {"lr"})

    def init(self, params: Tree) -> TorchState:
        """Make the state before the first update."""
        flat = flatten(params)
        refuse_donated("from_torch", flat)
        check_floating("from_torch", flat)
        self._refuse_leaves(flat)
        selection = _Selection(flat, [i for i, leaf in enumerate(flat.leaves) if is_trained(leaf)])
        leaves = [flat.leaves[position] for position in selection.positions]
        tensors = [_make_small(leaf) if tensor_of(leaf).is_meta else _make_writable(tensor_of(leaf)) for leaf in leaves]
        states = _make_start_states(self._make, tensors, {})
        for leaf, small, state in zip(leaves, tensors, states, strict=True):
            if tensor_of(leaf).is_meta:
                self._remove_values(state, small, leaf)
        slots = self._make_slots({}, {}, selection, states)
        hyper = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._injected.items()}
        return TorchState(zero(), slots, hyper, no_updates(params) if self._traits.is_first_step_special else ())

    def update(
        self,
        grads: Tree,
        state: TorchState,
        params: Tree,
        donate: bool = False,
    ) -> Updated:
        """Make new parameters and the next state; with `donate`, in the place of the old ones."""
        flat = flatten(params)
        # A state is donated as a whole, so that its count tells.
        for given in (flat, flatten({"updates": state.updates})):
            refuse_donated("from_torch", given)
        self._refuse_state(state)
        hyper = _refuse_derivatives(_evaluate(self._hyper, state.updates, state.hyper))
        slots = {name: leaves_like(flat, slot) for name, slot in state.slots.items()}
        grad_leaves = leaves_like(flat, grads)
        # Others belong to whole leaves.
        shards = [[leaf if is_sharded(leaf) else None for leaf in slot] for slot in slots.values()]
        check_same_shards(flat, grad_leaves, *shards)
        record_numbers(self._name, flat, self._make.keywords | hyper)
        gradients = _collect_gradients(grad_leaves, flat, copy=self._may_write_gradients)
        selection = _Selection(flat, list(gradients))
        counts: Tree = ()
        has_begun = [True] * len(gradients)
        if self._traits.is_first_step_special:
            counts = count_updates(state.counts, grads)
            numbers = _move_numbers(selection.take(leaves_like(flat, counts)), CPU)
            # The current update is counted.
            has_begun = [int(number) > 1 for number in numbers]
        refuse_frozen_counters(f"from_torch: {self._name}", state)
        states: list[State] = [{} for _ in has_begun]
        old_values = {name: selection.take(slot) for name, slot in slots.items()}
        for name, values in old_values.items():
            writable = _make_all_writable(values, donate)
            for leaf_state, value, begun in zip(states, writable, has_begun, strict=True):
                if begun and value is not None:
                    leaf_state[name] = value
        old_tensors = selection.take(flat.leaves)
        tensors = _make_all_writable(old_tensors, donate)
        new_states = self._step(tensors, list(gradients.values()), states, hyper)
        new_slots = self._make_slots(slots, old_values, selection, new_states)
        new_hyper = {name: torch.as_tensor(hyper[name], dtype=torch.float64).detach() for name in state.hyper}
        new_state = TorchState(state.updates + 1, state.slots | new_slots, new_hyper, counts)
        return selection.put(flat.leaves, old_tensors, tensors), new_state

    def _refuse_state(self, state: TorchState) -> None:
        """Refuse a state that another class made, on which SGD would begin anew, or one without injected numbers.

        A state without slots begins anyway.
        """
        missing = sorted(self._traits.common_names - state.slots.keys())
        if missing and state.slots:
            slots = ", ".join(sorted(state.slots))
            raise ValueError(
                f"update: {self._name} keeps {', '.join(missing)}, but the state has {slots} of another optimizer. "
                "Make the state with this one, as by TrainState.create(params, tx)."
            )

        lost = sorted(self._injected.keys() - state.hyper.keys())
        if lost:
            raise ValueError(
                f"update: inject names {', '.join(lost)}, which hyper of the state does not have. To replace some "
                "numbers, keep the others: state._replace(hyper=state.hyper | {...})."
            )
        check_numbers("update", FINITE, **state.hyper)

    def _make_slots(
        self,
        slots: Mapping[str, Sequence[Any]],
        old_values: Mapping[str, Sequence[Any]],
        selection: _Selection,
        states: States,
    ) -> dict[str, Tree]:
        """Make slots of torch's new states. Other leaves keep what they have in the old slots."""
        new_slots = {}
        for name in dict.fromkeys(chain.from_iterable(states)):
            leaves = slots.get(name) or [None] * len(selection.flat.leaves)
            old = old_values.get(name) or [None] * len(states)
            values = [state.get(name) for state in states]
            is_number = name in self._traits.number_names
            new_slots[name] = selection.put(leaves, old, values, is_number=is_number)
        return new_slots

    def _remove_values(self, state: State, small: torch.Tensor, leaf: Any) -> None:
        """Turn the state of a small tensor into that of a leaf without values. Numbers keep their values."""
        for name, value in state.items():
            if name in self._traits.number_names or not isinstance(value, torch.Tensor):
                continue
            if value.shape != small.shape:
                raise ValueError(
                    f"from_torch: {self._name} keeps {name} in another shape than the parameter's, which is not known "
                    "for abstract leaves. Make the state with values: leave out abstract= in model.init."
                )
            state[name] = torch.empty_like(tensor_of(leaf), dtype=value.dtype)

    def _step(
        self,
        tensors: Tensors,
        grads: Tensors,
        states: States,
        hyper: Hyper,
    ) -> States:
        """Step tensors in place, by kernels that read numbers where they lie if possible; return the new states."""
        accelerator = self._find_accelerator(states)
        if self._hyper.get("fused"):
            hyper = _read_on_host(hyper, kept=["lr"])
            rate = hyper.get("lr")
            if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
                # Fused kernels of CUDA read it there as a float32.
                hyper["lr"] = rate.float()
        elif accelerator is not None and self._has_capturable and _compat.can_capture(accelerator, tensors):
            # Torch compares other hyperparameters with 0 on the host.
            kept = list(hyper) if self._hyper.get("capturable") else ["lr"]
            # In a trace tensors have another class, for which torch does not choose foreach by itself.
            foreach = self._hyper.get("foreach", "fused" not in self._hyper)
            hyper = _read_on_host(hyper, kept) | {"capturable": True, "foreach": foreach}
            states = self._put_numbers_on(accelerator, states)
        else:
            hyper = _read_on_host(hyper)
            if accelerator is not None:
                # The kernels of other classes read step counts on the host, which waits for them once.
                states = self._put_numbers_on(CPU, states)
                states = _step_in_place(self._make, tensors, grads, states, hyper)
                return self._put_numbers_on(accelerator, states)
        return _step_in_place(self._make, tensors, grads, states, hyper)

    def _find_accelerator(self, states: States) -> torch.device | None:
        """Find the accelerator that holds the numbers of states, as inside `skip_nonfinite`; None if the CPU does."""
        first: State = next(filter(None, states), {})
        for name in self._traits.number_names:
            if name in first and first[name].device.type not in ("cpu", "meta"):
                return first[name].device
        return None

    def _put_numbers_on(self, device: torch.device, states: States) -> States:
        """Return states whose numbers are on a device."""
        new_states = [dict(state) for state in states]
        for name in self._traits.number_names:
            holders = [state for state in new_states if name in state]
            numbers = _move_numbers([state[name] for state in holders], device)
            for state, number in zip(holders, numbers, strict=True):
                state[name] = number
        return new_states

    @_compat.outside_modes()
    def _refuse_leaves(self, flat: Flat) -> None:
        """Refuse leaves that the class cannot step, or not with the bits that are promised."""
        dtypes = {leaf.dtype for leaf in flat.leaves if is_trained(leaf)}
        if self._make_for_trial.keywords.get("fused"):
            self._refuse_skipped_leaves(flat, dtypes)
        if self._order.keeps_bits or any(map(partition_axes, flat.leaves)):
            self._refuse_split_leaves(flat, dtypes)

    def _refuse_skipped_leaves(self, flat: Flat, dtypes: Iterable[torch.dtype]) -> None:
        """Refuse leaves of half precision that a fused kernel of the CPU does not step.

        Until torch 2.13, that of SGD leaves full vector registers of a parameter as they are, and writes uninitialized
        memory to the momentum: https://github.com/pytorch/pytorch/issues/191763
        """
        make = self._make_for_trial
        skipped = [dtype for dtype in dtypes if dtype.itemsize < 4 and _differs_by_place(make, dtype, dim=0)]

        def describe_leaf(leaf: Any) -> str | None:
            tensor = tensor_of(leaf)
            is_skipped = is_trained(leaf) and tensor.device.type == "cpu" and tensor.dtype in skipped
            return f"is {str(tensor.dtype).removeprefix('torch.')} on the CPU" if is_skipped else None

        headline = f"from_torch: the fused kernel of {self._name} does not step these leaves"
        refuse(headline, flat.problems(describe_leaf), "leave out fused=True, or install torch 2.14")

    def _refuse_split_leaves(self, flat: Flat, dtypes: Iterable[torch.dtype]) -> None:
        """Refuse split leaves if the class looks across elements or, if bits are kept, rounds them by their place."""
        make = self._make_for_trial
        if any(_differs_by_place(make, torch.float64, dim) for dim in (0, 1)):
            headline = f"from_torch: {self._name} looks across the elements of a leaf, so it cannot step shards"
            remedy = "keep leaves whole with fs.ddp, step them with fs.whole, or choose an elementwise optimizer"
            refuse(headline, flat.problems(_describe_split), remedy)
        elif self._order.keeps_bits:
            inexact = ", ".join(sorted(str(dtype) for dtype in dtypes if _rounds_by_place(make, dtype)))
            if inexact:
                raise ValueError(
                    f"from_torch: kernels of {self._name} for {inexact} round an element by its place in the shard, so "
                    'reduction_order="tree" cannot keep the bits. Step such leaves with fs.adamw, or keep float32 and '
                    "gather with fs.cast(gather=torch.bfloat16)."
                )


def _make_small(leaf: Any) -> torch.Tensor:
    """Make a small tensor for a leaf without values: fused kernels do not take the meta device."""
    shape = [min(size, 2) for size in tensor_of(leaf).shape]
    return torch.zeros(shape, dtype=leaf.dtype, device=device_of(leaf))


def _evaluate(hyper: Hyper, count: torch.Tensor, injected: Hyper) -> Hyper:
    """Evaluate the hyperparameters that change: schedules are called, and others may be injected by the state."""
    values = dict(injected)
    for name, value in hyper.items():
        # It would make an instance of itself.
        is_class = isinstance(value, type)
        if callable(value) and not is_class:
            values[name] = call_schedule(value, name, count, allow_pairs=True)
    return values


def _read_injections(inject: str | Names, defaults: Hyper) -> dict[str, float]:
    """Read the first values of injected hyperparameters, which must be numbers."""
    is_single = isinstance(inject, str) or not isinstance(inject, Iterable)
    names: tuple[Any, ...] = (inject,) if is_single else tuple(inject)
    numeric = [name for name, value in defaults.items() if isinstance(value, float) or type(value) is int]
    for name in names:
        if name not in numeric:
            raise ValueError(
                f"from_torch: inject has {name!r:.40}, which is not a numeric argument of this class. It has "
                f"{', '.join(numeric)}."
            )
    return {name: float(defaults[name]) for name in names}


def _read_on_host(hyper: Hyper, kept: Names = ()) -> Hyper:
    """Read tensors among hyperparameters, because most of torch's kernels take numbers. A trace has no numbers yet.

    Args:
        hyper: The hyperparameters.
        kept: The names of those that kernels read themselves if they are on an accelerator.
    """
    numbers = dict(hyper)
    if _compat.is_tracing():
        return numbers
    for name, value in hyper.items():
        if isinstance(value, torch.Tensor) and (value.is_cpu or name not in kept):
            numbers[name] = value.item()
    return numbers


def _collect_gradients(grads: Sequence[Any], flat: Flat, *, copy: bool) -> dict[int, torch.Tensor]:
    """Collect the gradients of trained leaves by position, without lazy bits, because classes read their memory."""
    rows = zip(tensors_of(grads), flat.leaves, strict=True)
    gradients = {i: grad for i, (grad, leaf) in enumerate(rows) if grad is not None and is_trained(leaf)}
    plain = []
    for grad in gradients.values():
        # Calling the operators takes longer than asking.
        if grad.is_conj() or grad.is_neg():
            grad = _detach(grad).resolve_conj().resolve_neg()
        plain.append(grad)
    return dict(zip(gradients, _make_all_writable(plain, in_place=not copy), strict=True))


def _refuse_derivatives(hyper: Hyper) -> Hyper:
    """Refuse hyperparameters that are differentiated, also in forward mode: kernels read them as numbers."""
    for value in filter(torch.is_tensor, hyper.values()):
        _detach(value, _compat.any_dual([value]))
    return hyper


def _detach(tensor: torch.Tensor, is_lost: bool = False) -> torch.Tensor:
    """Detach a tensor, because steps of a class record no graph. Refuse one whose gradient would be lost."""
    # A leaf of autograd's own graph is a parameter as torch makes them.
    is_in_graph = tensor.grad_fn is not None or _compat.is_transformed(tensor)
    if is_lost or (is_in_graph and _compat.is_differentiated(tensor)):
        raise ValueError(
            "from_torch: the update is differentiated, but steps of a torch class have no derivative. Use fs.sgd, "
            "fs.adam or another optimizer of fshard, or pass constants: fs.tree_map(torch.detach, tree)."
        )
    # Detach only if necessary: each operator takes about a millisecond of a trace.
    return tensor.detach() if tensor.requires_grad else tensor


def _detach_all(values: list[Any]) -> list[Any]:
    """Detach the tensors among thousands of values; mostly none has a graph, and no line of Python runs for each."""
    if not _compat.transforms_active() and not any(attributes_of(values, "requires_grad")):
        return values
    return [_detach(value) if isinstance(value, torch.Tensor) else value for value in values]


def _make_writable(value: Any) -> Any:
    """Return a contiguous copy of a tensor for torch to write to. Other values stay."""
    return _make_all_writable([value])[0]


def _make_all_writable(values: list[Any], in_place: bool = False) -> list[Any]:
    """Return tensors for torch to write to: copies, or with `in_place` the same memory. Other values stay.

    They are contiguous, because fused kernels on the CPU ignore strides.
    """
    detached = _detach_all(values)
    are_contiguous = all(map(torch.Tensor.is_contiguous, filter(is_tensor, detached)))
    if in_place and are_contiguous:
        return detached
    copy = torch.Tensor.contiguous if in_place else partial(torch.clone, memory_format=torch.contiguous_format)
    return [copy(value) if is_tensor(value) else value for value in detached]


def _move_numbers(numbers: Tensors, device: torch.device) -> Tensors:
    """Copy numbers to a device in one copy, because the host waits for each copy to the CPU."""
    if not numbers or numbers[0].device == device:
        return numbers
    stacked = torch.stack(list(numbers))
    is_for_host = device.type == "cpu"
    if not (is_for_host or _compat.is_tracing()):
        # The host would wait for a copy from pageable memory. A trace has none.
        stacked = stacked.pin_memory()
    return stacked.to(device, non_blocking=not is_for_host).unbind()


@torch.no_grad()
def _step_in_place(
    make: Make,
    tensors: Tensors,
    grads: Tensors,
    states: States,
    hyper: Hyper,
) -> States:
    """Step tensors in place, and return the class's new states of them."""
    new_states = list(states)
    # One after the other, because fused SGD fails on a list in which only some tensors have a momentum.
    for has_begun, positions in grouped(states, bool).items():
        part = [tensors[i] for i in positions]
        optimizer = _build_optimizer(make, part, [grads[i] for i in positions], hyper)
        if has_begun:
            optimizer.state.update(zip(part, map(states.__getitem__, positions), strict=True))
        optimizer.step()
        for i, tensor in zip(positions, part, strict=True):
            # The gradient would live as long as the tensor.
            tensor.grad = None
            new_states[i] = optimizer.state[tensor]
    return new_states


def _build_optimizer(
    make: Make,
    tensors: Tensors,
    grads: Tensors,
    hyper: Hyper,
) -> torch.optim.Optimizer:
    """Make a torch optimizer of tensors, with their gradients and the current hyperparameters."""
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
    # All leaves may be frozen. Torch refuses an empty list of parameters, but not an empty group.
    optimizer = make([{"params": list(tensors)}])
    (group,) = optimizer.param_groups
    for name, value in hyper.items():
        if name not in group:
            raise ValueError(
                f"from_torch: {name} cannot change between updates, because {make.func.__name__} does not keep it in "
                "its parameter groups. Pass a number, and do not inject it."
            )
        group[name] = value
    return optimizer


@torch.no_grad()
def _make_start_states(make: Make, tensors: Tensors, hyper: Hyper) -> list[State]:
    """Make states as before the first step. This writes to the tensors.

    A class that makes its state only in the first step gets zeros, so that the structure of the state never changes.
    """
    optimizer = _build_optimizer(make, tensors, [torch.zeros_like(tensor) for tensor in tensors], hyper)
    _compat.init_optimizer_state(optimizer)
    early_states = [map_leaves(_make_writable, dict(optimizer.state[tensor])) for tensor in tensors]
    optimizer.step()
    states = []
    for tensor, early_state in zip(tensors, early_states, strict=True):
        state = dict(optimizer.state[tensor])
        zeros = map_leaves(lambda value: torch.zeros_like(value) if torch.is_tensor(value) else value, state)
        states.append(zeros | early_state)
    return states


@_compat.outside_modes()
def _observe(make: Make, start_hyper: Hyper) -> _Traits:
    """Observe steps of a small matrix: without a state, from zeros, and by one optimizer that is kept.

    Args:
        make: Makes the optimizer.
        start_hyper: Other hyperparameters, which may be those of the time when the zeros are made.

    Returns:
        What the steps show.

    Raises:
        ValueError: if steps of one optimizer differ from those of new ones that are given its states.
    """
    start = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
    used_grads = []

    def try_steps(make: Make, state: State, number: int = 1) -> State:
        tensor = start.clone()
        for _ in range(number):
            grad = start.cos()
            (state,) = _step_in_place(make, [tensor], [grad], [map_leaves(_make_writable, state)], {})
            used_grads.append(grad)
        return {**state, "": tensor}

    from_nothing = try_steps(make, {})
    (zeros,) = _make_start_states(make, [start.clone()], start_hyper)
    from_zeros = try_steps(make, zeros)
    steps = 3
    kept = start.clone()
    optimizer = _build_optimizer(make, [kept], [start.cos()], {})
    for _ in range(steps):
        optimizer.step()
        kept.grad = start.cos()
    if not kept.equal(try_steps(make, {}, steps)[""]):
        raise ValueError(
            f"from_torch: {make.func.__name__} keeps something between steps that is not in the state of its "
            "parameters, such as a count in its parameter groups. It would be lost. Keep it in self.state[parameter]."
        )
    common_names = set(zeros)
    # Adafactor keeps other state for vectors than for matrices, and Muon refuses vectors.
    with suppress(Exception):
        common_names.intersection_update(*_make_start_states(make, [start[0].clone()], {}))
    # On accelerators torch chooses foreach by itself. Classes may not have it, or not for these hyperparameters.
    with suppress(Exception):
        try_steps(partial(make, foreach=make.keywords.get("foreach") is not False), {})
    number_names = []
    for name, value in from_nothing.items():
        if isinstance(value, torch.Tensor) and not value.dim():
            number_names.append(name)
    is_special = any(torch.as_tensor(value != from_zeros[name]).any() for name, value in from_nothing.items())
    writes_gradients = not all(map(start.cos().equal, used_grads))
    return _Traits(number_names, common_names, is_special, writes_gradients)


def _describe_split(leaf: Any) -> str | None:
    names = [axis.name for axis in partition_axes(leaf)]
    return f"is split over {', '.join(map(repr, names))}" if names else None


def _differs_by_place(make: Make, dtype: torch.dtype, dim: int) -> bool:
    """Try whether steps of a matrix differ from those of its rows or columns by more than rounding."""
    whole = _step_in_parts(make, dtype)
    difference = half_the_digits(dtype) * float(whole.abs().max())
    return not torch.allclose(whole, _step_in_parts(make, dtype, size=1, dim=dim), rtol=0.0, atol=difference)


def _rounds_by_place(make: Make, dtype: torch.dtype) -> bool:
    """Tell whether a class rounds an element by its place in a shard."""
    # Most kernels of half precision round the last few elements differently, some too rarely for a trial to show.
    return dtype.itemsize < 4 or not _step_in_parts(make, dtype).equal(_step_in_parts(make, dtype, size=1))


def _step_in_parts(
    make: Make,
    dtype: torch.dtype,
    size: int = 96,
    dim: int = 0,
) -> torch.Tensor:
    """Step a matrix by some gradients, in parts: some columns, or rows too short for a vector register."""
    start = torch.linspace(-3.0, 3.0, 96 * 7, dtype=torch.float64).reshape(96, 7)
    matrices = []
    for matrix in (start, 0.01 * start.sin(), start.cos(), 30.0 * start.sin()):
        matrices.append([_make_writable(part) for part in matrix.to(dtype).split(size, dim)])
    tensors, *gradients = matrices
    states: States = [{} for _ in tensors]
    for grads in gradients:
        states = _step_in_place(make, tensors, grads, states, {})
    return torch.cat(tensors, dim)
