"""Observe a torch.optim class by trying it: how it keeps its state, and whether its maths is elementwise."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import Problem, leaf_error
from fshard.optim.leaves import partition_axes
from fshard.tree import Flat

Hyper = dict[str, Any]
State = dict[str, Any]


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
            found = f"{value} after {int(count)} updates"
            raise ValueError(f"from_torch: expected {name} to be a finite number, got {found}; mend the schedule")
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
    """

    scalars: frozenset[str]
    late: frozenset[str]
    withheld: frozenset[str]
    filled: bool


def observe(cls: type[torch.optim.Optimizer], hyper: Hyper) -> Habits:
    """Observe one step of a small matrix, from no state, from placeholders and with tensors filled in."""
    hyper = _on_cpu(hyper)
    tensor = torch.zeros(2, 2)
    optimizer = build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
    with torch.no_grad():
        _compat.init_optimizer_state(optimizer)
    early = set(optimizer.state[tensor])

    def run(start: State, filled: bool = False) -> State:
        tensor = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
        optimizer = build(cls, hyper, [tensor], [torch.cos(tensor)], filled=filled)
        optimizer.state[tensor].update({name: copied(value) for name, value in start.items()})
        with torch.no_grad():
            optimizer.step()
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
    scalars = frozenset(name for name, value in state.items() if isinstance(value, torch.Tensor) and not value.dim())
    return Habits(scalars, late, withheld, filled)


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
    split = [
        Problem(path, f"a leaf split over {[axis.name for axis in axes]}", "a whole one")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if (axes := partition_axes(leaf))
    ]
    if split and not _is_elementwise(cls, _on_cpu(hyper)):
        raise leaf_error(
            f"from_torch: {cls.__name__} looks across the elements of a leaf",
            split,
            "keep leaves whole with fs.ddp, or choose an elementwise optimizer",
        )


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


def _on_cpu(hyper: Hyper) -> Hyper:
    """Leave out `capturable`, which a class refuses in trials on small CPU tensors."""
    return {name: value for name, value in hyper.items() if name != "capturable"}
