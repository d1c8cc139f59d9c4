"""from_torch: any elementwise torch.optim class as a pure optimizer."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.checks import check_floating, kind
from fshard.errors import Problem, leaf_error
from fshard.tree import Flat, Sharded, Tree, flatten, is_sharded, tree_leaves, unflatten
from fshard.update import Optimizer

Hyper = dict[str, Any]
State = dict[str, Any]


class TorchState(NamedTuple):
    """State of an optimizer made by `from_torch`.

    Attributes:
        updates: Updates made, which schedules are called with: an int64 tensor of shape ().
        slots: What the torch class keeps for each parameter, by its names for it (exp_avg, momentum_buffer, ...): trees
            in the structure of the parameters, Sharded as they are.
    """

    updates: torch.Tensor
    slots: dict[str, Tree]


def from_torch(cls: type[torch.optim.Optimizer], **hyper: Any) -> Optimizer:
    """Make a pure optimizer of a torch.optim class, bit for bit the class's own arithmetic.

    Args:
        cls: The class, such as torch.optim.AdamW; its maths must be elementwise where leaves are sharded.
        **hyper: Its keyword arguments (lr, betas, fused, ...). A function stands for a schedule: it is called with the
            number of updates made so far, an int64 tensor of shape (), and returns the value, as in Optax.

    Returns:
        The optimizer. Its state keeps the parameters' specs.

    Raises:
        ValueError: if the class cannot work without a closure or on dense gradients; from init, if a leaf cannot take
            a gradient, or the class looks across the elements of one that is sharded.

    >>> import fshard as fs
    >>> tx = from_torch(torch.optim.SGD, lr=lambda count: 0.1 * 0.5 ** int(count))
    >>> params, state = tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), {"w": torch.ones(2)})
    >>> params["w"], state.updates
    (tensor([0.9000, 0.9000]), tensor(1))
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"from_torch: got {kind(cls)}, needed a torch.optim class; pass its arguments by name")
    if issubclass(cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        needs = "a closure" if issubclass(cls, torch.optim.LBFGS) else "sparse gradients"
        raise ValueError(f"from_torch: {cls.__name__} needs {needs}, which an update does not have; use AdamW or SGD")
    count = torch.zeros((), dtype=torch.int64)
    habits = _observe(cls, _on_cpu(_evaluated(hyper, count)))

    def init(params: Tree) -> TorchState:
        flat = flatten(params)
        check_floating("from_torch", flat)
        tensors = [_copied(_tensor(flat.leaves[i])) for i in _trained(flat)]
        evaluated = _evaluated(hyper, count)
        _refuse_across_elements(cls, evaluated, flat)
        optimizer = _build(cls, evaluated, tensors, [torch.zeros_like(tensor) for tensor in tensors])
        _start(optimizer, tensors, habits.late)
        return TorchState(count.clone(), _slots(optimizer, tensors, flat, habits.scalars))

    def update(grads: Tree, state: TorchState, params: Tree, donate: bool = False) -> tuple[Tree, TorchState]:
        if not isinstance(state, TorchState):
            remedy = "update with the optimizer that made the state"
            raise ValueError(f"from_torch: the state is {kind(state)}, needed a TorchState; {remedy}")
        flat, gradients = flatten(params), flatten(grads).leaves
        trained = _trained(flat)
        # CPU fused kernels ignore strides, so what they write to in place must have none of its own.
        donate = donate and all(leaf.is_contiguous() for leaf in tree_leaves((params, state.slots)) if _is_tensor(leaf))
        own = _detached if donate else _copied
        new = [own(_tensor(flat.leaves[i])) for i in trained]
        optimizer = _build(
            cls, _evaluated(hyper, state.updates), new, [_tensor(gradients[i]).detach().contiguous() for i in trained]
        )
        for name, slot in state.slots.items():
            if name in habits.withheld and not int(state.updates):
                continue
            values = flatten(slot).leaves
            for i, tensor in zip(trained, new, strict=True):
                if values[i] is not None:
                    optimizer.state[tensor][name] = own(_tensor(values[i]))
        given = {tensor: dict(optimizer.state[tensor]) for tensor in new} if donate else {}
        with torch.no_grad():
            optimizer.step()
        if donate and _is_in_place(optimizer, given):
            for tensor in new:
                tensor.grad = None
            return params, TorchState(state.updates + 1, state.slots)
        leaves = list(flat.leaves)
        for i, tensor in zip(trained, new, strict=True):
            # Else parameters would keep gradients alive.
            tensor.grad = None
            leaves[i] = _like(leaves[i], tensor)
        slots = _slots(optimizer, new, flat, habits.scalars)
        return unflatten(flat.treedef, leaves), TorchState(state.updates + 1, slots)

    return Optimizer(init, update, partial(update, donate=True))


def _trained(flat: Flat) -> list[int]:
    """Positions of the leaves that take a gradient."""
    return [i for i, leaf in enumerate(flat.leaves) if leaf is not None and not (is_sharded(leaf) and leaf.spec.frozen)]


def _tensor(leaf: Any) -> Any:
    return leaf.local if is_sharded(leaf) else leaf


def _copied(value: Any) -> Any:
    """A copy for torch to write to; contiguous, because CPU fused kernels ignore strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone(memory_format=torch.contiguous_format)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_in_place(optimizer: torch.optim.Optimizer, given: dict[torch.Tensor, State]) -> bool:
    """Whether a step has written its state to the tensors that it was given."""
    return all(
        value is state.get(name) for tensor, state in given.items() for name, value in optimizer.state[tensor].items()
    )


def _like(leaf: Any, tensor: torch.Tensor) -> Any:
    """Wrap a tensor as the leaf is wrapped; one of another shape belongs to the whole leaf."""
    return Sharded(tensor, leaf.spec) if is_sharded(leaf) and tensor.shape == leaf.local.shape else tensor


def _evaluated(hyper: Hyper, count: torch.Tensor) -> Hyper:
    return {name: value(count) if callable(value) else value for name, value in hyper.items()}


def _on_cpu(hyper: Hyper) -> Hyper:
    """For trials on small CPU tensors, on which a class refuses to be capturable."""
    return {name: value for name, value in hyper.items() if name != "capturable"}


def _build(
    cls: type[torch.optim.Optimizer], hyper: Hyper, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    for tensor, grad in zip(tensors, grads, strict=True):
        tensor.grad = grad
    # As a group, because torch refuses an empty list of parameters; here all leaves may be frozen.
    return cls([{"params": list(tensors)}], **hyper)


class _Habits(NamedTuple):
    """How a class keeps its state.

    Attributes:
        scalars: Names of state that is one number for a whole leaf, such as a step count.
        late: Names of state that it makes in its first step.
        withheld: Names of late state whose placeholders must not reach the first step.
    """

    scalars: frozenset[str]
    late: frozenset[str]
    withheld: frozenset[str]


def _observe(cls: type[torch.optim.Optimizer], hyper: Hyper) -> _Habits:
    """See what the class does in one step of a small matrix, from nothing and from placeholders."""
    tensor = torch.zeros(2, 2)
    optimizer = _build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
    with torch.no_grad():
        _compat.init_optimizer_state(optimizer)
    early = set(optimizer.state[tensor])

    def run(start: State) -> State:
        tensor = torch.linspace(-1.0, 1.0, 4).reshape(2, 2)
        optimizer = _build(cls, hyper, [tensor], [torch.cos(tensor)])
        optimizer.state[tensor].update(start)
        with torch.no_grad():
            optimizer.step()
        return {**optimizer.state[tensor], "": tensor}

    state = run({})
    late = frozenset(state) - early - {""}
    _start(optimizer, [tensor], late)
    again = run(optimizer.state[tensor])
    same = all(v.equal(again[name]) if isinstance(v, torch.Tensor) else v == again[name] for name, v in state.items())
    scalars = frozenset(name for name, value in state.items() if isinstance(value, torch.Tensor) and not value.dim())
    return _Habits(scalars, late, frozenset() if same else late)


def _start(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], late: frozenset[str]) -> None:
    """Make state as before the first step, with zeros where torch makes it only in that step.

    Without them the state would change its structure. This writes to the parameters where there is late state.
    """
    with torch.no_grad():
        _compat.init_optimizer_state(optimizer)
        early = {
            tensor: {name: _copied(value) for name, value in optimizer.state[tensor].items()} for tensor in tensors
        }
        if late:
            optimizer.step()
    for tensor in tensors:
        state = optimizer.state[tensor]
        for name, value in state.items():
            zero = torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
            state[name] = early[tensor].get(name, zero)


def _slots(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], flat: Flat, scalars: frozenset[str]
) -> dict[str, Tree]:
    """Turn torch's state for each parameter into a tree for each name."""
    names = dict.fromkeys(name for tensor in tensors for name in optimizer.state[tensor])
    slots = {}
    for name in names:
        leaves: list[Any] = [None] * len(flat.leaves)
        for i, tensor in zip(_trained(flat), tensors, strict=True):
            value = optimizer.state[tensor].get(name)
            per_element = isinstance(value, torch.Tensor) and name not in scalars
            leaves[i] = _like(flat.leaves[i], value) if per_element else value
        slots[name] = unflatten(flat.treedef, leaves)
    return slots


def _refuse_across_elements(cls: type[torch.optim.Optimizer], hyper: Hyper, flat: Flat) -> None:
    split = [
        Problem(path, f"a leaf split over {[axis.name for axis in axes]}", "a whole one")
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
        if is_sharded(leaf) and (axes := [axis for axis in leaf.spec.partition_axes() if axis.size > 1])
    ]
    if split and not _is_elementwise(cls, _on_cpu(hyper)):
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
        optimizer = _build(cls, hyper, [tensor], [torch.zeros_like(tensor)])
        for scale in (1e-3, 1.0, 1e3):
            tensor.grad = (scale * torch.cos(5.0 * part)).contiguous()
            with torch.no_grad():
                optimizer.step()
        return tensor

    whole = run(start)
    halves = (torch.cat([run(half) for half in start.split(2, dim)], dim) for dim in (0, 1))
    return all(torch.allclose(whole, parts, rtol=1e-9, atol=1e-12) for parts in halves)
