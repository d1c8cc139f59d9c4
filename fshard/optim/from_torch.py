"""from_torch: any elementwise torch.optim class as a pure optimizer."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import expect
from fshard.optim.leaves import begun, check_state, missing, none_missed, partition_axes
from fshard.tree import Flat, Tree, flatten, is_trained, leaves_of, like, map_nodes, tensor_of, tensors_of, unflatten
from fshard.tree.checks import check_floating, check_leaves, check_sums, describe
from fshard.update import Optimizer

Hyper = dict[str, Any]
State = dict[str, Any]


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
    missed: Tree = ()

    @staticmethod
    def each(f: Callable[["TorchState"], Any], tree: Tree) -> Tree:
        """Map a function over the states of this kind in a tree; other leaves stay as they are."""
        return map_nodes(f, tree, TorchState)


def from_torch(
    cls: type[torch.optim.Optimizer], *, inject: Sequence[str] = (), sums: str | None = None, **hyper: Any
) -> Optimizer:
    """Make a pure optimizer of a torch.optim class, bit for bit the class's own arithmetic.

    Args:
        cls: The class, such as torch.optim.AdamW; its maths must be elementwise where leaves are sharded.
        inject: Names of numbers among its arguments that the state is to hold, as optax.inject_hyperparams does: they
            can be read there, after a schedule too, and replaced without a new optimizer.
        sums: "tree" refuses kernels that round an element by where it stands in its shard, so that updates have the
            same bits at any world size: fused ones, and those of half precision whose last few elements differ.
        **hyper: Its keyword arguments (lr, betas, fused, ...). A function stands for a schedule: it is called with the
            number of updates made so far, an int64 tensor of shape (), and returns the value, as in Optax. One that is
            to be jitted is written in tensor operations: torch.where in the place of a branch, and no int(count).

    Returns:
        The optimizer. Its state keeps the parameters' specs.

    Raises:
        ValueError: if the class cannot work without a closure or on dense gradients, refuses its arguments, or an
            injected argument is no number, or with sums="tree" the kernel is fused;
            from init, if a leaf cannot take a gradient, or the class looks across the elements of one that is sharded,
            or with sums="tree" rounds elements by where they stand;
            from update, if the class asks for a number that vmap has many of.

    >>> import fshard as fs
    >>> tx = from_torch(torch.optim.SGD, lr=lambda count: 0.1 * 0.5**count)
    >>> params, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params["w"], state.updates
    (tensor([0.9000, 0.9000]), tensor(1))
    """
    known = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    expect(known, "from_torch", "cls to be a torch.optim class", describe(cls), "pass its arguments by name")
    if issubclass(cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        needs = "a closure" if issubclass(cls, torch.optim.LBFGS) else "sparse gradients"
        raise ValueError(f"from_torch: {cls.__name__} needs {needs}, which an update does not have; use AdamW or SGD")
    check_sums("from_torch", sums)
    remedy = "leave out fused, or sums"
    exact = sums is None or not hyper.get("fused")
    expect(exact, "from_torch", f'a kernel of {cls.__name__} for sums="tree" that rounds alike', "fused=True", remedy)
    start = torch.zeros((), dtype=torch.int64)
    initial = evaluated(hyper, start, {})
    injected = _injected(inject, hyper, initial)
    try:
        habits = observe(cls, initial)
    except Exception as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in hyper.items()) or "none"
        expected = f"arguments that {cls.__name__} takes"
        raise ValueError(f"from_torch: expected {expected}, got {given}, of which torch says: {error}") from error
    # By other values than those observed, a class may write to gradients; its rate never decides that.
    computed = any(callable(hyper[name]) or name in injected for name in hyper if name != "lr")

    def init(params: Tree) -> TorchState:
        flat = flatten(params)
        check_floating("from_torch", flat)
        trained = [i for i, leaf in enumerate(flat.leaves) if is_trained(leaf)]
        tensors = [copied(tensor_of(flat.leaves[i])) for i in trained]
        values = evaluated(hyper, start, {})
        refuse_across_elements(cls, values, flat)
        if sums is not None:
            _refuse_inexact(cls, values, flat)
        optimizer = build(cls, values, tensors, [torch.zeros_like(tensor) for tensor in tensors])
        start_state(optimizer, tensors, habits.late)
        states = {i: optimizer.state[tensor] for i, tensor in zip(trained, tensors, strict=True)}
        missed = none_missed(params) if habits.withheld else ()
        return TorchState(start.clone(), _slots(states, flat, habits.scalars, {}), dict(injected), missed)

    def update(grads: Tree, state: TorchState, params: Tree, donate: bool = False) -> tuple[Tree, TorchState]:
        check_state("from_torch", state, TorchState)
        if habits.withheld:
            state = begun(state, grads, lambda: {"missed": none_missed(params)})
        flat, gradients = flatten(params), tensors_of(leaves_of(grads))
        before = {name: leaves_of(slot) for name, slot in state.slots.items()}
        slots = {name: tensors_of(slot) for name, slot in before.items()}
        chosen = [i for i, grad in enumerate(gradients) if grad is not None and is_trained(flat.leaves[i])]
        tensors = [tensor_of(flat.leaves[i]) for i in chosen]
        donate = donate and _can_be_written([*tensors, *itertools.chain(*slots.values())])
        new = [_plain(tensor) if donate else copied(tensor) for tensor in tensors]
        kept = [{name: slot[i] for name, slot in slots.items() if slot[i] is not None} for i in chosen]
        if not donate:
            kept = [{name: copied(value) for name, value in states.items()} for states in kept]
        first = _first_steps(state, chosen, kept, habits.withheld) if habits.withheld else []
        values = evaluated(hyper, state.updates, state.hyper)
        # As autograd accumulates gradients: classes read the memory of complex ones, without lazy bits.
        taken = [_plain(gradients[i]).resolve_conj().resolve_neg().contiguous() for i in chosen]
        if habits.writes or computed:
            taken = list(map(copied, taken))
        optimizer = build(cls, values, new, taken, first, habits.filled)
        optimizer.state.update(zip(new, kept, strict=True))
        _step(optimizer, new)
        after = [optimizer.state[tensor] for tensor in new]
        held = {
            name: torch.as_tensor(values[name], dtype=torch.float64).detach() if callable(hyper[name]) else tensor
            for name, tensor in state.hyper.items()
        }
        missed = missing(state.missed, grads) if habits.withheld else ()
        if donate and all(_in_place(states, i, slots) for states, i in zip(after, chosen, strict=True)):
            return params, TorchState(state.updates + 1, state.slots, held, missed)
        leaves = list(flat.leaves)
        for i, tensor in zip(chosen, new, strict=True):
            leaves[i] = like(leaves[i], tensor)
        new_slots = _slots(dict(zip(chosen, after, strict=True)), flat, habits.scalars, before)
        return unflatten(flat.treedef, leaves), TorchState(state.updates + 1, new_slots, held, missed)

    return Optimizer(init, update, partial(update, donate=True))


def _injected(names: Sequence[str], hyper: State, values: State) -> dict[str, torch.Tensor]:
    for name in names:
        value = values.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        found = "not among its arguments" if name not in hyper else describe(value)
        expect(number, "from_torch", "inject to name numbers", f"{name!r}, which is {found}")
    return {name: torch.tensor(float(values[name]), dtype=torch.float64) for name in names}


def _first_steps(
    state: TorchState, chosen: Sequence[int], kept: Sequence[State], withheld: frozenset[str]
) -> list[bool]:
    """Tell which leaves make their first step, and take the placeholders out of torch's states of these."""
    counts = leaves_of(state.missed)
    first = [int(counts[i]) == int(state.updates) for i in chosen]
    for states, yes in zip(kept, first, strict=True):
        for name in withheld if yes else ():
            states.pop(name, None)
    return first


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


def _in_place(states: State, i: int, slots: Mapping[str, Sequence[Any]]) -> bool:
    """Tell whether a class wrote to its state of a leaf in place, and put no other objects into it."""
    return states.keys() <= slots.keys() and all(states.get(name) is slot[i] for name, slot in slots.items())


def _can_be_written(values: Sequence[Any]) -> bool:
    """Tell whether tensors can be stepped in place: none is there twice or has strides, which fused kernels ignore."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return len(set(map(id, tensors))) == len(tensors) and all(map(torch.Tensor.is_contiguous, tensors))


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


def copied(value: Any) -> Any:
    """Copy a tensor for torch to write to; contiguous, because CPU fused kernels ignore strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone(memory_format=torch.contiguous_format)


def evaluated(hyper: Hyper, count: torch.Tensor, held: Mapping[str, torch.Tensor]) -> Hyper:
    """Evaluate hyperparameters after some updates: schedules are called, others may be held by the state."""
    values = dict(hyper)
    for name, value in hyper.items():
        computed = callable(value) or name in held
        value = value(count) if callable(value) else held.get(name, value)
        # Torch's classes take numbers everywhere, tensors not; a trace has no value yet.
        if computed and isinstance(value, torch.Tensor) and not (hyper.get("capturable") or _compat.is_tracing()):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            found = f"{value} at count {int(count)}"
            expect(False, "from_torch", f"{name} to be a finite number", found, "mend the schedule")
        values[name] = value
    return values


def build(
    cls: type[torch.optim.Optimizer],
    hyper: Hyper,
    tensors: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    first: Sequence[bool] = (),
    filled: bool = False,
) -> torch.optim.Optimizer:
    """Make a torch optimizer of some tensors, with their gradients in place.

    Args:
        cls: The class.
        hyper: Its arguments.
        tensors: The tensors that it steps.
        grads: Their gradients.
        first: Which of them make their first step. They are a group of their own, because fused SGD takes no list of
            which some tensors have a momentum.
        filled: Whether the tensors are filled in after construction, which takes much less time of many.
    """
    for tensor, grad in zip(tensors, grads, strict=True):
        # Torch refuses a tensor as its own gradient.
        tensor.grad = grad.detach() if grad is tensor else grad
    # A class checks its numbers when it is made, for which a trace has no values yet.
    traced = {name: value for name, value in hyper.items() if isinstance(value, torch.Tensor) and _compat.is_tracing()}
    parts = [list(tensors)]
    if any(first) and not all(first):
        pairs = list(zip(tensors, first, strict=True))
        parts = [[tensor for tensor, yes in pairs if yes is which] for which in (True, False)]
    # As groups, because torch refuses an empty list of parameters; here all leaves may be frozen.
    groups = [{"params": [] if filled else part} for part in parts]
    optimizer = cls(groups, **{name: hyper[name] for name in hyper if name not in traced})
    for group, part in zip(optimizer.param_groups, parts, strict=True):
        group["params"][:] = part
        group.update(traced)
    return optimizer


class Habits(NamedTuple):
    """How a class keeps its state.

    Attributes:
        scalars: Names of state that is one number for a whole leaf, such as a step count.
        late: Names of state that it makes in its first step.
        withheld: Names of late state whose placeholders must not reach the first step.
        filled: Whether its step is the same when its tensors are filled in after construction.
        writes: Whether its step writes to gradients, as nesterov does with foreach, or would on an accelerator.
    """

    scalars: frozenset[str]
    late: frozenset[str]
    withheld: frozenset[str]
    filled: bool
    writes: bool


def observe(cls: type[torch.optim.Optimizer], hyper: Hyper) -> Habits:
    """Observe one step of a small matrix, from no state, from placeholders and with tensors filled in."""
    hyper = _on_cpu(hyper)
    tensor = torch.zeros(2, 2)
    optimizer = build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
    with torch.no_grad():
        _compat.init_optimizer_state(optimizer)
    early, written = set(optimizer.state[tensor]), []

    def run(start: State, filled: bool = False, **changes: Any) -> State:
        tensor = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
        grad = torch.cos(tensor)
        before = grad.clone()
        optimizer = build(cls, hyper, [tensor], [grad], filled=filled)
        optimizer.param_groups[0].update(changes)
        optimizer.state[tensor].update({name: copied(value) for name, value in start.items()})
        with torch.no_grad():
            optimizer.step()
        written.append(not grad.equal(before))
        return {**optimizer.state[tensor], "": tensor}

    def same(again: State) -> bool:
        return all(x.equal(again[n]) if isinstance(x, torch.Tensor) else x == again[n] for n, x in state.items())

    state = run({})
    late = frozenset(state) - early - {""}
    start_state(optimizer, [tensor], late)
    start = optimizer.state[tensor]
    withheld = frozenset() if same(run(start)) else late
    filled = False
    with suppress(Exception):
        filled = same(run({name: value for name, value in start.items() if name not in withheld}, filled=True))
    if optimizer.defaults.get("foreach", True) is None and not optimizer.defaults.get("fused"):
        # On accelerators torch chooses foreach by itself.
        with suppress(Exception):
            run({}, foreach=True)
    scalars = frozenset(name for name, value in state.items() if isinstance(value, torch.Tensor) and not value.dim())
    return Habits(scalars, late, withheld, filled, any(written))


def start_state(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], late: frozenset[str]) -> None:
    """Make state as before the first step, with zeros where torch makes it only in that step.

    Without them the state would change its structure. This writes to the parameters where there is late state.
    """
    with torch.no_grad():
        _compat.init_optimizer_state(optimizer)
        early = {tensor: {name: copied(value) for name, value in optimizer.state[tensor].items()} for tensor in tensors}
        if late:
            optimizer.step()
    for tensor in tensors:
        state = optimizer.state[tensor]
        for name, value in state.items():
            zero = torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
            state[name] = early[tensor].get(name, zero)


def refuse_across_elements(cls: type[torch.optim.Optimizer], hyper: Hyper, flat: Flat) -> None:
    """Refuse leaves that are split where the class looks across their elements."""

    def misfit(leaf: Any) -> tuple[str, str] | None:
        axes = [axis.name for axis in partition_axes(leaf)]
        return (f"a leaf split over {axes}", "a whole one") if axes else None

    if any(map(partition_axes, flat.leaves)) and not _is_elementwise(cls, _on_cpu(hyper)):
        remedy = "keep leaves whole with fs.ddp, or choose an elementwise optimizer"
        check_leaves(f"from_torch: {cls.__name__} looks across the elements of a leaf", flat, misfit, remedy)


def _is_elementwise(cls: type[torch.optim.Optimizer], hyper: Hyper) -> bool:
    """Try whether an optimizer steps the halves of a matrix, cut either way, as it steps the matrix."""
    # A schedule that starts from 0 would hide the difference.
    hyper = hyper | {name: 1.0 for name in hyper if name == "lr"}
    start = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).reshape(4, 4)

    def run(part: torch.Tensor) -> torch.Tensor:
        tensor = copied(part)
        optimizer = build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
        for scale in (1e-3, 1.0, 1e3):
            tensor.grad = (scale * torch.cos(5.0 * part)).contiguous()
            with torch.no_grad():
                optimizer.step()
        return tensor

    whole = run(start)
    halves = (torch.cat([run(half) for half in start.split(2, dim)], dim) for dim in (0, 1))
    return all(torch.allclose(whole, parts, rtol=1e-9, atol=1e-12) for parts in halves)


def _refuse_inexact(cls: type[torch.optim.Optimizer], hyper: Hyper, flat: Flat) -> None:
    """Refuse leaves whose elements the class rounds by where they stand."""
    dtypes = dict.fromkeys(tensor_of(leaf).dtype for leaf in flat.leaves if is_trained(leaf))
    # A class that looks across elements has its leaves whole at any world size.
    if not dtypes or not _is_elementwise(cls, _on_cpu(hyper)):
        return
    # Most kernels of half precision round the last few elements otherwise, some too rarely for a trial to show it.
    inexact = [d for d in dtypes if d.itemsize < 4 or not _rounds_alike(cls, _on_cpu(hyper), d)]

    def misfit(leaf: Any) -> tuple[str, str] | None:
        wrong = is_trained(leaf) and tensor_of(leaf).dtype in inexact
        return (describe(tensor_of(leaf)), "a dtype without such kernels") if wrong else None

    what = f'from_torch: {cls.__name__} rounds elements by where they stand in a shard, which sums="tree" excludes'
    remedy = "step them by fs.adamw, or keep parameters in float32 and gather them by fs.cast(gather=torch.bfloat16)"
    check_leaves(what, flat, misfit, remedy)


def _rounds_alike(cls: type[torch.optim.Optimizer], hyper: Hyper, dtype: torch.dtype) -> bool:
    """Try whether elements get the same bits in a long vector as in pieces too short for a vector register."""
    hyper = hyper | {name: 0.1 for name in hyper if name == "lr"}
    start = torch.linspace(-3.0, 3.0, 7 * 96, dtype=torch.float64)
    turned = (1 + 0.7j) if dtype.is_complex else 1.0
    values = [(turned * x).to(dtype) for x in (start, *(scale * torch.sin(7.0 * start) for scale in (0.1, 1.0, 3.0)))]

    def run(first: Sequence[torch.Tensor], *grads: Sequence[torch.Tensor]) -> torch.Tensor:
        tensors = [copied(part) for part in first]
        optimizer = build(cls, hyper, tensors, [torch.zeros_like(tensor) for tensor in tensors])
        for parts in grads:
            for tensor, grad in zip(tensors, parts, strict=True):
                tensor.grad = grad.clone()
            with torch.no_grad():
                optimizer.step()
        return torch.cat(tensors)

    return run(*([value] for value in values)).equal(run(*(value.split(7) for value in values)))


def _on_cpu(hyper: Hyper) -> Hyper:
    """Leave out `capturable`, which a class refuses in trials on small CPU tensors."""
    return {name: value for name, value in hyper.items() if name != "capturable"}
