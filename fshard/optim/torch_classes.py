"""What a torch.optim class does, seen by trying it: how it keeps its state, and whether its maths is elementwise."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.errors import Problem, leaf_error
from fshard.tree import Flat, is_sharded

Hyper = dict[str, Any]
State = dict[str, Any]


def copied(value: Any) -> Any:
    """A copy for torch to write to; contiguous, because CPU fused kernels ignore strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone(memory_format=torch.contiguous_format)


def evaluated(hyper: Hyper, count: torch.Tensor) -> Hyper:
    """Hyperparameters after some updates, schedules called; torch's classes take numbers everywhere, tensors not."""
    values = dict(hyper)
    for name, value in hyper.items():
        if callable(value):
            value = value(count)
            # A trace has no value yet; fused kernels take tensors.
            keep = hyper.get("capturable") or _compat.is_tracing()
            value = value.item() if isinstance(value, torch.Tensor) and not keep else value
        if isinstance(value, float) and not math.isfinite(value):
            expected = "a finite number"
            raise ValueError(
                f"from_torch: expected {name} to be {expected}, got {value} after {int(count)} updates; mend the "
                "schedule"
            )
        values[name] = value
    return values


def on_cpu(hyper: Hyper) -> Hyper:
    """For trials on small CPU tensors, on which a class refuses to be capturable."""
    return {name: value for name, value in hyper.items() if name != "capturable"}


def build(
    cls: type[torch.optim.Optimizer],
    hyper: Hyper,
    tensors: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    first: Sequence[bool] = (),
) -> torch.optim.Optimizer:
    """A torch optimizer of some tensors, with their gradients in place.

    Those that make their `first` step are a group of their own: fused SGD takes no list of which some have a momentum.
    """
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
    # A class checks its numbers when it is made, for which a trace has no values yet.
    traced = {name: value for name, value in hyper.items() if isinstance(value, torch.Tensor) and _compat.is_tracing()}
    # As a group, because torch refuses an empty list of parameters; here all leaves may be frozen.
    groups = [{"params": list(tensors)}]
    if any(first) and not all(first):
        pairs = list(zip(tensors, first, strict=True))
        groups = [{"params": [tensor for tensor, yes in pairs if yes is which]} for which in (True, False)]
    optimizer = cls(groups, **{name: hyper[name] for name in hyper if name not in traced})
    for group in optimizer.param_groups:
        group.update(traced)
    return optimizer


class Habits(NamedTuple):
    """How a class keeps its state.

    Attributes:
        scalars: Names of state that is one number for a whole leaf, such as a step count.
        late: Names of state that it makes in its first step.
        withheld: Names of late state whose placeholders must not reach the first step.
    """

    scalars: frozenset[str]
    late: frozenset[str]
    withheld: frozenset[str]


def observe(cls: type[torch.optim.Optimizer], hyper: Hyper) -> Habits:
    """See what the class does in one step of a small matrix, from nothing and from placeholders."""
    tensor = torch.zeros(2, 2)
    optimizer = build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
    with torch.no_grad():
        _compat.init_optimizer_state(optimizer)
    early = set(optimizer.state[tensor])

    def run(start: State) -> State:
        tensor = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
        optimizer = build(cls, hyper, [tensor], [torch.cos(tensor)])
        optimizer.state[tensor].update(start)
        with torch.no_grad():
            optimizer.step()
        return {**optimizer.state[tensor], "": tensor}

    state = run({})
    late = frozenset(state) - early - {""}
    start_state(optimizer, [tensor], late)
    again = run(optimizer.state[tensor])
    same = all(v.equal(again[name]) if isinstance(v, torch.Tensor) else v == again[name] for name, v in state.items())
    scalars = frozenset(name for name, value in state.items() if isinstance(value, torch.Tensor) and not value.dim())
    return Habits(scalars, late, frozenset() if same else late)


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
        if is_sharded(leaf) and (axes := [axis for axis in leaf.spec.partition_axes() if axis.size > 1])
    ]
    if split and not _is_elementwise(cls, on_cpu(hyper)):
        raise leaf_error(
            f"from_torch: {cls.__name__} looks across the elements of a leaf",
            split,
            "keep leaves whole with fs.ddp, or choose an elementwise optimizer",
        )


def _is_elementwise(cls: type[torch.optim.Optimizer], hyper: Hyper) -> bool:
    """Try it: an elementwise optimizer steps the halves of a matrix, cut either way, as it steps the matrix."""
    # A schedule that starts from 0 would hide what the steps look at.
    hyper = hyper | {name: 1.0 for name in hyper if name == "lr"}
    start = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64).reshape(4, 4)

    def run(part: torch.Tensor) -> torch.Tensor:
        tensor = part.clone(memory_format=torch.contiguous_format)
        optimizer = build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
        for scale in (1e-3, 1.0, 1e3):
            tensor.grad = (scale * torch.cos(5.0 * part)).contiguous()
            with torch.no_grad():
                optimizer.step()
        return tensor

    whole = run(start)
    halves = (torch.cat([run(half) for half in start.split(2, dim)], dim) for dim in (0, 1))
    return all(torch.allclose(whole, parts, rtol=1e-9, atol=1e-12) for parts in halves)
