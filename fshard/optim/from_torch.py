"""from_torch: any elementwise torch.optim class as a pure optimizer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import expect, refuse
from fshard.optim.leaves import counted, no_updates, partition_axes, zero
from fshard.reduction_order import ReductionOrder, find_order
from fshard.rounding import half_the_digits
from fshard.tree import Flat, Tree, flatten, is_trained, leaves_of, like, map_leaves, map_nodes, tensor_of, tensors_of
from fshard.tree.checks import check_floating, describe
from fshard.update import Optimizer, Updated

# By names of the torch class: the state of a parameter, and hyperparameters.
State = dict[str, Any]
Hyper = dict[str, Any]
Tensors = Sequence[torch.Tensor]
Make = partial[torch.optim.Optimizer]


class TorchState(NamedTuple):
    """State of an optimizer made by `from_torch`.

    Attributes:
        updates: Updates made, which schedules are called with: an int64 tensor of shape ().
        slots: State that the torch class keeps for each parameter, by its names (exp_avg, momentum_buffer, ...): trees
            in the structure of the parameters, Sharded as they are.
        hyper: Hyperparameters that were injected, by name: float64 tensors of shape (), which a caller may replace.
        counts: For classes whose first step is of its own kind: updates made of each leaf, int64 tensors of shape ().
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
    cls: type[torch.optim.Optimizer], *, inject: Sequence[str] = (), reduction_order: str | None = None, **hyper: Any
) -> Optimizer:
    """Make a pure optimizer of a torch.optim class, bit for bit the class's own arithmetic.

    Args:
        cls: The class, such as torch.optim.AdamW; its maths must be elementwise where leaves are sharded.
        inject: Names of numbers among its arguments that the state is to hold, as optax.inject_hyperparams does: they
            can be read there, after a schedule too, and replaced without a new optimizer.
        reduction_order: "tree" refuses kernels that round an element by where it stands in its shard, so that updates
            have the same bits at any world size: fused ones, and those of half precision whose last few elements
            differ.
        **hyper: Its keyword arguments (lr, betas, fused, ...). A function stands for a schedule: it is called with the
            number of updates made so far, an int64 tensor of shape (), and returns the value, as in Optax. One that is
            to be jitted is written in tensor operations: torch.where in the place of a branch, and no int(count).

    Returns:
        The optimizer. Its state keeps the parameters' specs.

    Raises:
        ValueError: if `cls` is no such class; from init, if a leaf cannot take a gradient, or the class looks across
            the elements of one that is sharded, or with reduction_order="tree" rounds elements by where they stand.
            Torch's own error, if the class refuses its arguments, or cannot step without a closure or on dense
            gradients.

    >>> import fshard as fs
    >>> tx = from_torch(torch.optim.SGD, lr=lambda count: 0.1 * 0.5**count)
    >>> params, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params["w"], state.updates
    (tensor([0.9000, 0.9000]), tensor(1))
    """
    known = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    expect(known, "from_torch", "cls to be a torch.optim class", describe(cls), "pass its arguments by name")
    order = find_order("from_torch", reduction_order)
    initial = hyper | evaluated(hyper, zero(), {})
    make = partial(cls, **initial)
    # A class refuses `capturable` on small CPU tensors.
    trial = partial(cls, **{name: value for name, value in initial.items() if name != "capturable"})
    scalars, anew, writes = observe(trial)
    # By other values than those observed, a class may write to gradients; its rate never decides that.
    writes = writes or any(callable(hyper[name]) or name in inject for name in hyper if name != "lr")

    # Kernels of torch that are neither read the counts of steps on the host.
    on_device = bool(hyper.get("fused") or hyper.get("capturable"))

    def init(params: Tree) -> TorchState:
        flat = flatten(params)
        check_floating("from_torch", flat)
        _refuse_split(trial, flat, order)
        trained = [i for i, leaf in enumerate(flat.leaves) if is_trained(leaf)]
        states = start_states(make, [owned(tensor_of(flat.leaves[i])) for i in trained])
        held = {name: torch.tensor(float(initial[name]), dtype=torch.float64) for name in inject}
        slots = _slots({}, flat, trained, states, scalars)
        return TorchState(zero(), slots, held, no_updates(params) if anew else ())

    def update(grads: Tree, state: TorchState, params: Tree, donate: bool = False) -> Updated:
        flat = flatten(params)
        now = evaluated(hyper, state.updates, state.hyper)
        before = {name: leaves_of(slot) for name, slot in state.slots.items()}
        counts = counted(state.counts, grads) if anew else ()
        taken = _taken(grads, flat, writes)
        begun = _have_begun(counts, [*taken]) if anew else [True for _ in taken]
        kept = _kept(before, [*taken], begun, donate)
        tensors = [owned(tensor, donate) for tensor in tensors_of([flat.leaves[i] for i in taken])]
        if not on_device and (accelerator := _accelerator_of(kept, scalars)):
            kept = _numbers_on(torch.device("cpu"), kept, scalars)
            states = _numbers_on(accelerator, stepped(make, tensors, [*taken.values()], kept, now), scalars)
        else:
            states = stepped(make, tensors, [*taken.values()], kept, now)
        slots = state.slots | _slots(before, flat, [*taken], states, scalars)
        held = {name: torch.as_tensor(now[name], dtype=torch.float64).detach() for name in state.hyper}
        params = flat.unflatten(_put(flat.leaves, flat, [*taken], tensors))
        return params, TorchState(state.updates + 1, slots, held, counts)

    return Optimizer(init, update, partial(update, donate=True))


def _taken(grads: Tree, flat: Flat, copies: bool) -> dict[int, torch.Tensor]:
    """Return the gradients of trained leaves by the leaves' numbers, as autograd accumulates gradients.

    Classes read the memory of complex ones, without lazy bits.
    """
    taken = {}
    for i, (grad, leaf) in enumerate(zip(tensors_of(leaves_of(grads)), flat.leaves, strict=True)):
        if grad is not None and is_trained(leaf):
            plain = (grad.detach() if grad.requires_grad else grad).resolve_conj().resolve_neg()
            taken[i] = owned(plain) if copies else plain.contiguous()
    return taken


def _have_begun(counts: Tree, numbers: Sequence[int]) -> list[bool]:
    """Tell of some leaves whether they were updated before, by counts that include the update under way."""
    leaves = leaves_of(counts)
    on_host = _moved([leaves[i] for i in numbers], torch.device("cpu"))
    return [int(count) > 1 for count in on_host]


def _kept(
    before: Mapping[str, Sequence[Any]], numbers: Sequence[int], begun: Sequence[bool], donate: bool
) -> list[State]:
    """Turn slots into torch's states of some leaves, for torch to write to; those that have not begun have none."""
    states: list[State] = [{} for _ in numbers]
    for name, slot in before.items():
        for state, tensor, has_begun in zip(states, tensors_of([slot[i] for i in numbers]), begun, strict=True):
            if has_begun and tensor is not None:
                state[name] = owned(tensor, donate)
    return states


def _accelerator_of(states: Sequence[State], names: set[str]) -> torch.device | None:
    """Find the accelerator that numbers of states are on, as inside `skip_nonfinite`; None for the processor."""
    first = next((state for state in states if state), {})
    devices = {first[name].device for name in names & first.keys()}
    return next((device for device in devices if device.type not in ("cpu", "meta")), None)


def _moved(numbers: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy numbers to a device, all at once: the host waits for each copy to the processor."""
    if not numbers or numbers[0].device == device:
        return list(numbers)
    return list(torch.stack(list(numbers)).to(device, non_blocking=device.type != "cpu").unbind())


def _numbers_on(device: torch.device, states: Sequence[State], names: set[str]) -> list[State]:
    """Return states whose numbers of some names are on a device."""
    moved = [dict(state) for state in states]
    for name in sorted(names):
        holders = [state for state in moved if name in state]
        numbers = _moved([state[name] for state in holders], device)
        for state, number in zip(holders, numbers, strict=True):
            state[name] = number
    return moved


def _put(old: Sequence[Any], flat: Flat, numbers: Sequence[int], new: Sequence[Any], alone: bool = False) -> list[Any]:
    """Put values in the place of some leaves that have others; `alone` of numbers for a whole leaf."""
    leaves = list(old)
    for i, was, value in zip(numbers, tensors_of([leaves[i] for i in numbers]), new, strict=True):
        if value is not None and value is not was:
            leaves[i] = value if alone or not isinstance(value, torch.Tensor) else like(flat.leaves[i], value)
    return leaves


def _slots(
    before: Mapping[str, Sequence[Any]], flat: Flat, numbers: Sequence[int], states: Sequence[State], scalars: set[str]
) -> dict[str, Tree]:
    """Turn torch's states of some leaves into trees by the states' names; other leaves keep theirs."""
    slots = {}
    for name in dict.fromkeys(name for state in states for name in state):
        old = before.get(name) or [None] * len(flat.leaves)
        new = [state.get(name) for state in states]
        slots[name] = flat.unflatten(_put(old, flat, numbers, new, name in scalars))
    return slots


def owned(value: Any, donated: bool = False) -> Any:
    """Return a tensor for torch to write to: the same memory, or a copy; CPU fused kernels ignore strides."""
    if not isinstance(value, torch.Tensor):
        return value
    # No detach where nothing is to be detached: each operator takes about a millisecond of a trace.
    plain = value.detach() if value.requires_grad else value
    return plain.contiguous() if donated else plain.clone(memory_format=torch.contiguous_format)


def evaluated(hyper: Hyper, count: torch.Tensor, held: Hyper) -> Hyper:
    """Evaluate the hyperparameters that change: schedules are called, others may be held by the state."""
    values = held | {name: value(count) for name, value in hyper.items() if callable(value)}
    # Torch's classes take numbers everywhere, tensors not; a trace has no value yet.
    if hyper.get("capturable") or _compat.is_tracing():
        return values
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def built(make: Make, tensors: Tensors, grads: Tensors, now: Hyper) -> torch.optim.Optimizer:
    """Make a torch optimizer of some tensors, with their gradients and hyperparameters in place."""
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
    # As a group, because torch refuses an empty list of parameters; here all leaves may be frozen.
    optimizer = make([{"params": [*tensors]}])
    (group,) = optimizer.param_groups
    for name, value in now.items():
        expect(name in group, "from_torch", "schedules of what the class keeps in its groups", name)
        group[name] = value
    return optimizer


@torch.no_grad()
def stepped(make: Make, tensors: Tensors, grads: Tensors, states: Sequence[State], now: Hyper) -> list[State]:
    """Step tensors in place, and return the class's states of them."""
    after = list(states)
    # Apart, because fused SGD takes no list of which some tensors have a momentum.
    begun = [i for i, state in enumerate(states) if state]
    fresh = [i for i, state in enumerate(states) if not state]
    for part in filter(None, (begun, fresh)):
        optimizer = built(make, [tensors[i] for i in part], [grads[i] for i in part], now)
        optimizer.state.update({tensors[i]: states[i] for i in part if states[i]})
        optimizer.step()
        for i in part:
            # It would live as long as the tensor.
            tensors[i].grad = None
            after[i] = optimizer.state[tensors[i]]
    return after


@torch.no_grad()
def start_states(make: Make, tensors: Tensors) -> list[State]:
    """Make states as before the first step, with zeros where a class makes its state only in that step.

    Without them the state would change its structure. This writes to the tensors.
    """
    optimizer = built(make, tensors, [torch.zeros_like(tensor) for tensor in tensors], {})
    _compat.init_optimizer_state(optimizer)
    early = [map_leaves(owned, dict(optimizer.state[tensor])) for tensor in tensors]
    optimizer.step()
    states = [optimizer.state[tensor] for tensor in tensors]
    return [map_leaves(_zero_like, dict(state)) | own for state, own in zip(states, early, strict=True)]


def _zero_like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def observe(make: Make) -> tuple[set[str], bool, bool]:
    """Observe first steps of a small matrix: from no state, and from zeros.

    Args:
        make: Makes an optimizer of groups of parameters.

    Returns:
        Names of state that is one number for a whole leaf, such as a step count; whether the first step is another one
        from zeros than from no state; and whether a step writes to gradients, as nesterov does with foreach, or would
        on an accelerator.
    """
    start = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
    wrote = []

    def run(state: State, make: Make = make) -> State:
        tensor, grad = start.clone(), start.cos()
        (after,) = stepped(make, [tensor], [grad], [map_leaves(owned, state)], {})
        wrote.append(not grad.equal(start.cos()))
        return {**after, "": tensor}

    first = run({})
    (zeros,) = start_states(make, [start.clone()])
    again = run(zeros)
    same = [x.equal(again[name]) if isinstance(x, torch.Tensor) else x == again[name] for name, x in first.items()]
    # On accelerators torch chooses foreach by itself.
    with suppress(Exception):
        run({}, partial(make, foreach=make.keywords.get("foreach") is not False))
    scalars = {name for name, value in first.items() if isinstance(value, torch.Tensor) and not value.dim()}
    return scalars, not all(same), any(wrote)


def _refuse_split(make: Make, flat: Flat, order: ReductionOrder) -> None:
    """Refuse leaves that are split where a class looks across elements, or rounds them by where they stand."""
    if not order.keeps_bits and not any(map(partition_axes, flat.leaves)):
        return
    name = make.func.__name__
    run = partial(_in_parts, make)
    whole = run(torch.float64)
    parts = [run(torch.float64, 1, dim) for dim in (0, 1)]
    apart = half_the_digits(whole.dtype) * float(whole.abs().max())
    if not all(torch.allclose(whole, part, rtol=0.0, atol=apart) for part in parts):
        remedy = "keep leaves whole with fs.ddp, or choose an elementwise optimizer"
        pair = "a leaf that is split", "a whole one"
        what = f"from_torch: {name} looks across the elements of a leaf"
        refuse(what, flat.problems(lambda leaf: pair if partition_axes(leaf) else None), remedy)
    elif order.keeps_bits:
        # Most kernels of half precision round the last few elements otherwise, some too rarely for a trial to show it.
        dtypes = {tensor_of(leaf).dtype for leaf in flat.leaves if is_trained(leaf)}
        inexact = [str(d) for d in dtypes if d.itemsize < 4 or not run(d).equal(run(d, 1))]
        needed = f'kernels of {name} that round an element alike wherever it stands, for reduction_order="tree"'
        remedy = "step such leaves by fs.adamw, or keep float32 and gather by fs.cast(gather=torch.bfloat16)"
        expect(not inexact, "from_torch", needed, f"others for {', '.join(inexact)}", remedy)


def _in_parts(make: Make, dtype: torch.dtype, size: int = 96, dim: int = 0) -> torch.Tensor:
    """Step a matrix by some gradients, in parts of some columns, or of rows too short for a vector register."""
    # A schedule that starts from 0 would hide a difference.
    make = partial(make, lr=0.1) if "lr" in make.keywords else make
    start = torch.linspace(-3.0, 3.0, 96 * 7, dtype=torch.float64).reshape(96, 7)
    values = start, 0.01 * start.sin(), start.cos(), 30.0 * start.sin()
    parts, *steps = (value.to(dtype).split(size, dim) for value in values)
    tensors = [*map(owned, parts)]
    states: list[State] = [{} for _ in parts]
    for grads in steps:
        states = stepped(make, tensors, [*map(owned, grads)], states, {})
    return torch.cat(tensors, dim)
