"""Start and finish collectives on lists of plain tensors; nothing here is differentiable."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch

from fshard import _compat
from fshard.comm import ops
from fshard.comm.events import Label, encoded, labelled
from fshard.tree import Axis

# A tensor smaller than this travels in one buffer with the other small ones of its dtype: below it latency costs more
# than the copy. Measured with gloo on two cores; in bytes of the full tensor.
PACK_BYTES = 256 * 1024

# Up to this many bytes a sum is cheaper as one exchange of everything than as reduce-scatter and all-gather.
EXCHANGE_BYTES = 32 * 1024

Tensors = Sequence[torch.Tensor]
Landed = list[torch.Tensor]
Finish = Callable[[], Landed]
# Who asks for a collective, for the recorder.
Who = str | Label

# Called with the axis of each collective: while there are fake axes it refuses others, else it does nothing.
refuse_other: ContextVar[Callable[[Axis], object]] = ContextVar("fshard_refuse_other", default=bool)


def rank(axis: Axis) -> int:
    """Look up this rank's coordinate on an axis.

    Args:
        axis: A mesh axis.

    Returns:
        A number from 0 to axis.size - 1.

    >>> import fshard as fs
    >>> fs.testing.spmd(lambda: fs.comm.rank(fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))), world=2)
    [0, 1]
    """
    return 0 if axis.size == 1 else _compat.resolve_process_group(axis.group_name).rank()


def serves_host(axis: Axis) -> bool:
    """Tell whether the ranks of an axis can send each other tensors of the processor.

    Args:
        axis: A mesh axis of more than one rank.

    Returns:
        Whether a message between ranks needs no host to wait for its accelerator.
    """
    return "cpu" in _compat.group_devices(axis.group_name)


def has_one_rank(axis: Axis) -> bool:
    """Whether nothing is to be sent over an axis."""
    refuse_other.get()(axis)
    return axis.size == 1


def is_direct(axis: Axis, device: torch.device) -> bool:
    """Whether ranks send each other rows of tensors of a device, as processors do, or their backend sums."""
    if _compat.is_linearizing():
        found = "torch.func.linearize, which folds collectives away"
        raise ValueError(f"expected torch.func.jvp for each tangent, or vmap of it, got {found}")
    backends = _compat.group_devices(axis.group_name)
    between_processors = backends.get("cpu")
    if between_processors is None:
        return False
    # Without a backend of its own for a device, its tensors go through the processor.
    return backends.get(device.type, between_processors) == between_processors


def _start(op: Any, tensors: Tensors, axis: Axis, label: Who, keep: int = 0, tree: bool | None = None) -> Finish:
    """Start a collective, in which small tensors of one dtype share a buffer, unless the backend fuses them.

    Args:
        op: The operator.
        tensors: Its tensors.
        axis: The ranks that take part.
        label: Who asks.
        keep: 1 where dim 0 counts rows, else 0.
        tree: Of a sum whether it is in one binary tree; None where nothing is summed.

    Returns:
        A function that waits and returns the results.
    """
    direct, own = tree or is_direct(axis, tensors[0].device), rank(axis)
    shapes = [tensor.shape[keep:] if keep else tensor.shape for tensor in tensors]
    numbers = [shape.numel() for shape in shapes]
    label = labelled(label, tensors, keep)
    # Packing follows from the shapes of rows: in an all-to-all the numbers of rows differ between ranks.
    most = PACK_BYTES / (axis.size if keep or tree is None else 1)
    groups: dict[int | torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alone = not direct or numbers[i] * tensor.itemsize >= most
        groups.setdefault(i if alone else tensor.dtype, []).append(i)

    def joined(i: int, *more: int) -> torch.Tensor:
        flat = [tensors[j].reshape(*tensors[j].shape[:keep], numbers[j]) for j in (i, *more) if more]
        return torch.cat(flat, -1) if more else tensors[i]

    sources = [joined(*group) for group in groups.values()]
    buffers = op(sources, direct, axis.name, axis.size, axis.group_name, encoded(label))

    def finish() -> Landed:
        out: dict[int, torch.Tensor] = {}
        for group, buffer, source in zip(groups.values(), buffers, sources, strict=True):
            whole = ops.wait(buffer)
            if tree is not None:
                whole = _sum(whole, source[own] if keep else source, own, tree) if direct else whole[0]
            rows, parts = whole.shape[:-1], [whole]
            if len(group) > 1:
                # Of several rows each tensor would be a view with gaps: one operator copies all of them.
                split: Any = torch.split_with_sizes_copy if rows else torch.split_with_sizes
                split = split(whole, [numbers[i] for i in group], -1)
                parts = [part.view((*rows, *shapes[i])) for i, part in zip(group, split, strict=True)]
            out.update(zip(group, parts, strict=True))
        return [out[i] for i in range(len(out))]

    return finish


def start_all_gather(shards: Tensors, axis: Axis, label: Who) -> Finish:
    """Start gathering every rank's shards.

    Args:
        shards: One tensor per leaf, of the same shapes and dtypes on every rank.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        A function that waits and returns tensors of shape (axis.size, *shard.shape), in rank order.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     finish = fs.comm.start_all_gather([torch.tensor([fs.comm.rank(axis)])], axis, "example")
    ...     beside = torch.ones(2) + 1  # is computed while the shards travel
    ...     return finish()[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[[0], [1]], [[0], [1]]]
    """
    if has_one_rank(axis) or not shards:
        return lambda: [shard.unsqueeze(0) for shard in shards]
    return _start(ops.all_gather, shards, axis, label)


def start_reduce_scatter(stacks: Tensors, axis: Axis, label: Who, tree: bool = False) -> Finish:
    """Start summing over ranks and keeping this rank's row.

    Args:
        stacks: One tensor per leaf of shape (axis.size, *shape): row i goes to rank i.
        axis: The ranks that take part.
        label: Who asks, for the recorder.
        tree: Whether sums are in one binary tree over ranks, whatever the backend.

    Returns:
        A function that waits and returns tensors of `shape`, summed in rank order on the processor.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     finish = fs.comm.start_reduce_scatter([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], axis, "example")
    ...     return finish()[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[2.0, 4.0], [6.0, 8.0]]
    """
    if has_one_rank(axis) or not stacks:
        return lambda: [stack[0] for stack in stacks]
    return _start(ops.reduce_scatter, stacks, axis, label, 1, tree)


def start_all_reduce(tensors: Tensors, axis: Axis, label: Who, tree: bool = False) -> Finish:
    """Start summing over ranks.

    Args:
        tensors: One tensor per leaf, of the same shapes and dtypes on every rank.
        axis: The ranks that take part.
        label: Who asks, for the recorder.
        tree: Whether sums are in one binary tree over ranks, whatever the backend.

    Returns:
        A function that waits and returns the sums, in rank order on the processor.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     finish = fs.comm.start_all_reduce([torch.tensor([1.0]), torch.tensor([2.0, 3.0])], axis, "example")
    ...     return [total.tolist() for total in finish()]
    >>> fs.testing.spmd(program, world=2)[0]
    [[2.0], [4.0, 6.0]]
    """
    if has_one_rank(axis) or not tensors:
        return lambda: list(tensors)
    # Between two ranks an exchange of everything moves no more bytes, and is over in one round.
    once = axis.size == 2 or sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= EXCHANGE_BYTES
    if once or not (tree or is_direct(axis, tensors[0].device)):
        return _start(ops.all_reduce, tensors, axis, label, 0, tree)
    label = labelled(label, tensors)
    scattering = start_reduce_scatter([_rows(tensor, axis.size) for tensor in tensors], axis, label, tree)

    def finish() -> Landed:
        pairs = zip(all_gather(scattering(), axis, label), tensors, strict=True)
        return [rows.reshape(-1)[: tensor.numel()].view(tensor.shape) for rows, tensor in pairs]

    return finish


def _rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Cut a tensor's elements into `size` equal rows, the last one filled up with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(size, -1)


def _sum(buffer: torch.Tensor, own: torch.Tensor, place: int, tree: bool) -> torch.Tensor:
    """Add what this rank has to the others' rows, in rank order, or neighbours first, then their sums."""
    rows = list(buffer)
    if len(rows) == 1:
        # The sum of two is the same in either order.
        return rows[0].add_(own)
    rows.insert(place, own)
    while tree and len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    # torch.sum's order depends on the shape.
    return rows[0] if tree else reduce(torch.Tensor.add_, rows[2:], rows[0] + rows[1])


def all_gather(shards: Tensors, axis: Axis, label: Who) -> Landed:
    """Gather every rank's shards and wait for them.

    Args:
        shards: As for `start_all_gather`.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        Tensors of shape (axis.size, *shard.shape), in rank order.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     first, second = fs.comm.all_gather([torch.tensor(fs.comm.rank(axis)), torch.ones(3)], axis, "example")
    ...     return first.tolist(), second.shape
    >>> fs.testing.spmd(program, world=2)[0]
    ([0, 1], torch.Size([2, 3]))
    """
    return start_all_gather(shards, axis, label)()


def reduce_scatter(stacks: Tensors, axis: Axis, label: Who) -> Landed:
    """Sum over ranks, keep this rank's row and wait for it.

    Args:
        stacks: As for `start_reduce_scatter`.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        Tensors without the stacks' first dim, summed in rank order on the processor.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     stack = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (fs.comm.rank(axis) + 1)
    ...     return fs.comm.reduce_scatter([stack], axis, "example")[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[3.0, 6.0], [9.0, 12.0]]
    """
    return start_reduce_scatter(stacks, axis, label)()


def all_reduce(tensors: Tensors, axis: Axis, label: Who) -> Landed:
    """Sum over ranks and wait.

    Args:
        tensors: As for `start_all_reduce`.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        The sums, in rank order on the processor.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.comm.all_reduce([torch.tensor([fs.comm.rank(axis) + 1.0])], axis, "example")[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[3.0], [3.0]]
    """
    return start_all_reduce(tensors, axis, label)()


def all_to_all(tensors: Tensors, send: Sequence[int], receive: Sequence[int], axis: Axis, label: Who) -> Landed:
    """Send each rank rows of its own, and wait for theirs.

    Args:
        tensors: As for `start_all_to_all`.
        send: As for `start_all_to_all`.
        receive: As for `start_all_to_all`.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        For each tensor the rows that ranks have sent, in rank order.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     rows = torch.tensor([[10 * fs.comm.rank(axis) + to] for to in range(2)])
    ...     return fs.comm.all_to_all([rows], [1, 1], [1, 1], axis, "example")[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[[0], [10]], [[1], [11]]]
    """
    return start_all_to_all(tensors, send, receive, axis, label)()


def start_all_to_all(tensors: Tensors, send: Sequence[int], receive: Sequence[int], axis: Axis, label: Who) -> Finish:
    """Start to send each rank rows of its own.

    Args:
        tensors: The rows for all ranks, in rank order; the dtypes and shapes of rows are the same on every rank.
        send: For each rank of the axis how many rows of each tensor it gets.
        receive: For each rank how many rows it sends here.
        axis: The ranks that take part.
        label: Who asks, for the recorder.

    Returns:
        A function that waits and returns for each tensor the rows that ranks have sent, in rank order.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     first = fs.comm.rank(axis) == 0
    ...     send, receive = ([0, 3], [0, 0]) if first else ([0, 0], [3, 0])
    ...     finish = fs.comm.start_all_to_all([torch.ones(sum(send))], send, receive, axis, "example")
    ...     return finish()[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[], [1.0, 1.0, 1.0]]
    """
    if has_one_rank(axis) or not tensors:
        return lambda: list(tensors)
    tensors = [tensor.detach() for tensor in tensors]
    return _start(lambda sources, *about: ops.all_to_all(sources, send, receive, *about), tensors, axis, label, 1)
