"""Start and finish collectives on lists of plain tensors; nothing here is differentiable."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch

from fshard import _compat
from fshard.comm import ops
from fshard.comm.events import Label, encode_label, make_label
from fshard.comm.streams import current_stream, keep_for_current
from fshard.tree import Axis

# A tensor smaller than this travels in one buffer with the other small ones of its dtype: below it latency costs more
# than the copy. Measured with gloo on two cores; in bytes of the full tensor.
PACK_BYTES = 256 * 1024

# Up to this many bytes a sum is cheaper as one exchange of everything than as reduce-scatter and all-gather.
EXCHANGE_BYTES = 32 * 1024

Tensors = Sequence[torch.Tensor]
Results = list[torch.Tensor]
Finish = Callable[[], Results]
# The name of the caller of a collective, for the recorder.
Caller = str | Label


# While there are fake axes, this is called with the axis of each collective and refuses others.
refuse_other: ContextVar[Callable[[Axis], object] | None] = ContextVar("fshard_refuse_other", default=None)
# While there are fake axes, this rank's coordinates on them by name: a step may close over a real axis for its key.
fake_coordinates: ContextVar[Mapping[str, int] | None] = ContextVar("fshard_fake_coordinates", default=None)


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


def coordinate(axis: Axis) -> int:
    """Look up this rank's coordinate on an axis; while there are fake axes, on the one of its name.

    It is for keys alone: it may be beyond the ranks of a real axis, so what counts with `axis.size` asks for `rank`.
    """
    coordinates = fake_coordinates.get() or {}
    return coordinates[axis.name] if axis.name in coordinates else rank(axis)


def supports_cpu_messages(axis: Axis) -> bool:
    """Tell whether the ranks of an axis can send each other CPU tensors.

    Args:
        axis: A mesh axis of more than one rank.

    Returns:
        Whether they can, so that the host does not wait for the accelerator.
    """
    return "cpu" in _compat.group_devices(axis.group_name)


def has_one_rank(axis: Axis) -> bool:
    """Whether nothing is to be sent over an axis. While there are fake axes, refuses an axis that is none of them."""
    if refuse := refuse_other.get():
        refuse(axis)
    return axis.size == 1


def is_direct(axis: Axis, device: torch.device) -> bool:
    """Whether ranks exchange rows directly (CPU) or leave the collective to the backend (NCCL)."""
    if _compat.is_linearizing():
        raise ValueError(
            "torch.func.linearize runs collectives once and leaves them out of the linear function. "
            "Use torch.func.jvp for each tangent, or vmap of it."
        )
    backends = _compat.group_devices(axis.group_name)
    between_cpus = backends.get("cpu")
    # Tensors of a device that has no backend of its own are copied through the CPU.
    return between_cpus is not None and backends.get(device.type, between_cpus) == between_cpus


def _start(
    op: Any,
    tensors: Tensors,
    axis: Axis,
    label: Caller,
    row_dims: int = 0,
    sum_in_tree: bool | None = None,
) -> Finish:
    """Start a collective on a list of tensors; small ones of one dtype share a buffer, unless the backend fuses them.

    Args:
        op: The operator.
        tensors: The tensors.
        axis: The ranks that take part.
        label: The caller, for the recorder.
        row_dims: 1 if dim 0 of each tensor counts the rows that are sent to different ranks, else 0.
        sum_in_tree: For a sum, whether to add in one binary tree over ranks; None if nothing is summed.

    Returns:
        A function that waits for the collective and returns its results.
    """
    is_sum = sum_in_tree is not None
    if sum_in_tree and axis.size & (axis.size - 1):
        raise ValueError(
            f"comm: sums in a binary tree need a power of two of ranks, and the axis {axis.name!r} has {axis.size}. "
            "Sum in rank order."
        )
    direct = sum_in_tree or is_direct(axis, tensors[0].device)
    local_rank = rank(axis)
    label = make_label(label, tensors, row_dims)
    row_shapes = [tensor.shape[row_dims:] if row_dims else tensor.shape for tensor in tensors]
    row_numels = list(map(torch.Size.numel, row_shapes))
    # PACK_BYTES counts bytes of a full tensor. An all-reduce sends full tensors, other collectives one row of each.
    max_packed_bytes = PACK_BYTES if is_sum and not row_dims else PACK_BYTES / axis.size
    buckets = _bucket_small_tensors(tensors, row_numels, max_packed_bytes if direct else 0)
    sources = [_pack([tensors[index] for index in bucket], row_dims) for bucket in buckets]
    buffers = op(sources, direct, axis.name, axis.size, axis.group_name, encode_label(label))
    started_on = current_stream(tensors[0].device)

    def finish() -> Results:
        results = {}
        for bucket, buffer, source in zip(buckets, buffers, sources, strict=True):
            received = ops.wait(buffer)
            # The current stream has waited for the collective, which reads what is sent, and reads the rows itself.
            keep_for_current((received, source), started_on)
            if is_sum and direct:
                received = _sum(received, source, local_rank, row_dims, in_tree=bool(sum_in_tree))
            elif is_sum:
                # The backend has added the rows.
                received = received[0]
            if len(bucket) == 1:
                results[bucket[0]] = received
            else:
                parts = _unpack(received, [row_shapes[index] for index in bucket])
                results.update(zip(bucket, parts, strict=True))
        return [results[index] for index in range(len(results))]

    return finish


def _bucket_small_tensors(
    tensors: Tensors,
    row_numels: Sequence[int],
    max_bytes: float,
) -> list[list[int]]:
    """Decide which tensors travel in one buffer.

    Rows are measured, not tensors: in an all-to-all the number of rows differs between ranks, and ranks must agree.

    Args:
        tensors: The tensors.
        row_numels: The number of elements in one row of each tensor.
        max_bytes: A tensor travels alone if one of its rows has this many bytes or more.

    Returns:
        The tensors' indices, one list for each buffer, in the order of the first tensor in each.
    """
    buckets: dict[int | torch.dtype, list[int]] = {}
    for index, (tensor, row_numel) in enumerate(zip(tensors, row_numels, strict=True)):
        travels_alone = row_numel * tensor.itemsize >= max_bytes
        key = index if travels_alone else tensor.dtype
        if key in buckets:
            buckets[key].append(index)
        else:
            buckets[key] = [index]
    return list(buckets.values())


def _pack(tensors: Tensors, row_dims: int) -> torch.Tensor:
    """Copy the tensors of a bucket into one buffer. A tensor that travels alone is its own buffer."""
    if len(tensors) == 1:
        return tensors[0]
    flat = []
    for tensor in tensors:
        # A row of one dim is flat already, as that of most small tensors.
        if tensor.dim() != row_dims + 1:
            tensor = tensor.flatten(row_dims) if tensor.dim() > row_dims else tensor.unsqueeze(-1)
        flat.append(tensor)
    return torch.cat(flat, -1)


def _unpack(received: torch.Tensor, row_shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Split a buffer that was received into its tensors."""
    rows = received.shape[:-1]
    # With several rows, views of the buffer would have gaps between their rows. One operator copies all of them.
    split: Any = torch.split_with_sizes_copy if rows else torch.split_with_sizes
    flat_parts = split(received, list(map(torch.Size.numel, row_shapes)), -1)
    tensors = []
    for flat_part, shape in zip(flat_parts, row_shapes, strict=True):
        tensors.append(flat_part if len(shape) == 1 else flat_part.view((*rows, *shape)))
    return tensors


def start_all_gather(shards: Tensors, axis: Axis, label: Caller) -> Finish:
    """Start gathering every rank's shards.

    Args:
        shards: One tensor per leaf, of the same shapes and dtypes on every rank.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.

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


def start_reduce_scatter(stacks: Tensors, axis: Axis, label: Caller, *, in_tree: bool = False) -> Finish:
    """Start summing over ranks and keeping this rank's row.

    Args:
        stacks: One tensor per leaf of shape (axis.size, *shape): row i goes to rank i.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.
        in_tree: Whether sums are in one binary tree over ranks, whatever the backend.

    Returns:
        A function that waits and returns tensors of `shape`, summed in rank order on the CPU.

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
    return _start(ops.reduce_scatter, stacks, axis, label, row_dims=1, sum_in_tree=in_tree)


def start_all_reduce(tensors: Tensors, axis: Axis, label: Caller, *, in_tree: bool = False) -> Finish:
    """Start summing over ranks.

    Args:
        tensors: One tensor per leaf, of the same shapes and dtypes on every rank.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.
        in_tree: Whether sums are in one binary tree over ranks, whatever the backend.

    Returns:
        A function that waits and returns the sums, in rank order on the CPU.

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
    is_one_exchange = axis.size == 2 or sum(tensor.nbytes for tensor in tensors) <= EXCHANGE_BYTES
    if is_one_exchange or not (in_tree or is_direct(axis, tensors[0].device)):
        return _start(ops.all_reduce, tensors, axis, label, sum_in_tree=in_tree)
    label = make_label(label, tensors)
    rows = [_split_into_rows(tensor, axis.size) for tensor in tensors]
    finish_rows = start_reduce_scatter(rows, axis, label, in_tree=in_tree)

    def finish() -> Results:
        sums = all_gather(finish_rows(), axis, label)
        return [
            rows.reshape(-1)[: tensor.numel()].view(tensor.shape) for rows, tensor in zip(sums, tensors, strict=True)
        ]

    return finish


def start_all_to_all(
    tensors: Tensors, send: Sequence[int], receive: Sequence[int], axis: Axis, label: Caller
) -> Finish:
    """Start to send different rows to each rank.

    Args:
        tensors: The rows for all ranks, in rank order; the dtypes and shapes of rows are the same on every rank.
        send: For each rank of the axis how many rows of each tensor it gets.
        receive: For each rank how many rows it sends here.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.

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
    return _start(lambda rows, *where: ops.all_to_all(rows, send, receive, *where), tensors, axis, label, row_dims=1)


def _split_into_rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Split a tensor's elements into `size` equal rows; the last rows are filled up with zeros."""
    flat = tensor.reshape(-1)
    if missing := -flat.numel() % size:
        # Without the check, pad would copy a tensor that misses nothing.
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(size, -1)


def _sum(
    received: torch.Tensor,
    source: torch.Tensor,
    local_rank: int,
    row_dims: int,
    *,
    in_tree: bool,
) -> torch.Tensor:
    """Add this rank's row to those of the other ranks.

    Args:
        received: The rows of the other ranks, in rank order.
        source: What this rank sent: one row, or with `row_dims` a row for each rank.
        local_rank: This rank's place among all rows.
        row_dims: As for `_start`.
        in_tree: Whether to add neighbors first, then their sums; else rows are added in rank order.

    Returns:
        The sum, in new memory or in that of `received`.
    """
    local_row = source[local_rank] if row_dims else source
    rows = list(received)
    if len(rows) == 1:
        # The sum of two is the same in either order.
        return rows[0].add_(local_row)
    rows.insert(local_rank, local_row)
    if in_tree:
        return sum_in_tree(rows)
    # torch.sum adds in an order that depends on the shape.
    return reduce(torch.Tensor.add_, rows[2:], rows[0] + rows[1])


def sum_in_tree(rows: list[torch.Tensor]) -> torch.Tensor:
    """Add pairs of neighbors until one row is left."""
    while len(rows) > 1:
        rows = [left + right for left, right in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def all_gather(shards: Tensors, axis: Axis, label: Caller) -> Results:
    """Gather every rank's shards and wait for them.

    Args:
        shards: As for `start_all_gather`.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.

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


def reduce_scatter(stacks: Tensors, axis: Axis, label: Caller) -> Results:
    """Sum over ranks, keep this rank's row and wait for it.

    Args:
        stacks: As for `start_reduce_scatter`.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.

    Returns:
        Tensors without the stacks' first dim, summed in rank order on the CPU.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     stack = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (fs.comm.rank(axis) + 1)
    ...     return fs.comm.reduce_scatter([stack], axis, "example")[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[3.0, 6.0], [9.0, 12.0]]
    """
    return start_reduce_scatter(stacks, axis, label)()


def all_reduce(tensors: Tensors, axis: Axis, label: Caller) -> Results:
    """Sum over ranks and wait.

    Args:
        tensors: As for `start_all_reduce`.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.

    Returns:
        The sums, in rank order on the CPU.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     return fs.comm.all_reduce([torch.tensor([fs.comm.rank(axis) + 1.0])], axis, "example")[0].tolist()
    >>> fs.testing.spmd(program, world=2)
    [[3.0], [3.0]]
    """
    return start_all_reduce(tensors, axis, label)()


def all_to_all(tensors: Tensors, send: Sequence[int], receive: Sequence[int], axis: Axis, label: Caller) -> Results:
    """Send different rows to each rank, and wait for theirs.

    Args:
        tensors: As for `start_all_to_all`.
        send: As for `start_all_to_all`.
        receive: As for `start_all_to_all`.
        axis: The ranks that take part.
        label: The name of the caller, for the recorder.

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
