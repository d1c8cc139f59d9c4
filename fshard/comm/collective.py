"""Start and finish collectives on lists of plain tensors; nothing here is differentiable."""

import itertools
import operator
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from fshard import _compat
from fshard.comm import ops
from fshard.comm.events import Label, encoded, labelled, of_this_rank
from fshard.tree import Axis

Algorithm = Literal["direct", "coalesced", "flat"]

# A tensor smaller than this travels in one buffer with the other small ones of its dtype: below it latency costs more
# than the copy. Measured with gloo on two cores; in bytes of the full tensor.
PACK_BYTES = 256 * 1024

# Up to this many bytes a sum is cheaper as one exchange of everything than as reduce-scatter and all-gather.
EXCHANGE_BYTES = 32 * 1024

Kind = tuple[torch.Size, torch.dtype]
Tensors = Sequence[torch.Tensor]
Finish = Callable[[], list[torch.Tensor]]
# Who asks for a collective, for the recorder.
Who = str | Label


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
    return 0 if axis.size == 1 else _compat.group_rank(axis.group_name)


def serves_host(axis: Axis) -> bool:
    """Tell whether the ranks of an axis can send each other tensors of the processor.

    Args:
        axis: A mesh axis of more than one rank.

    Returns:
        Whether a message between ranks needs no host to wait for its accelerator.
    """
    return "cpu" in _compat.group_devices(axis.group_name)


def message_device(axis: Axis) -> str:
    """Find the device from which ranks send each other messages: the processor where they can."""
    return "cpu" if serves_host(axis) else next(iter(_compat.group_devices(axis.group_name)))


class _FakeWorld:
    """The axes of `fake_world`, while this rank is inside of one."""

    axes: frozenset[Axis] | None = None


@contextmanager
def fake_world(sizes: Mapping[str, int], ranks: Mapping[str, int], backend: str) -> Iterator[dict[str, Axis]]:
    """Let there be axes to trace with, whose groups cannot communicate; only this context knows them.

    Args:
        sizes: Ranks on each axis, by its name.
        ranks: This rank's coordinate on each.
        backend: What their groups say they run on, by which collectives choose their algorithm.

    Yields:
        The axes by their names.
    """
    # Names of their own keep them from being taken for real groups.
    axes = {name: Axis(name, size, f"fake {name} {uuid.uuid4().hex}") for name, size in sizes.items()}
    groups = {axis.group_name: (ranks[name], axis.size) for name, axis in axes.items()}
    world = of_this_rank(_FakeWorld)
    before, world.axes = world.axes, frozenset(axes.values())
    try:
        with _compat.fake_process_groups(groups, backend):
            yield axes
    finally:
        world.axes = before


def has_one_rank(axis: Axis) -> bool:
    """Whether nothing is to be sent over an axis.

    Raises:
        ValueError: inside of a fake world, if the axis is not of it.
    """
    known = of_this_rank(_FakeWorld).axes
    if known is not None and axis not in known:
        sizes = ", ".join(f"{other.name!r} of {other.size} ranks" for other in sorted(known, key=lambda a: a.name))
        raise ValueError(
            f"plan: expected the step to send over axes of the planned mesh, {sizes or 'which has none'}, got axis "
            f"{axis.name!r} of {axis.size} ranks, which it closes over; pass axes as arguments, or read them "
            "from the state's leaves, as leaf.spec.axes"
        )
    return axis.size == 1


def algorithm_of(axis: Axis, device: torch.device) -> Algorithm:
    """Choose how to send by backend: direct for the processor, for accelerators coalesced if it can."""
    if _compat.is_linearizing():
        needed = "torch.func.jvp for each tangent, or vmap of it"
        raise ValueError(f"expected {needed}, got torch.func.linearize, which folds collectives away")
    backends = _compat.group_devices(axis.group_name)
    # A fake group has one backend, whatever device the tensors of a plan are on.
    mover = device.type if device.type in backends else next(iter(backends))
    if backends[mover] == backends.get("cpu"):
        return "direct"
    return "coalesced" if _compat.group_coalesces(axis.group_name, mover) else "flat"


def _start(
    op: Any, tensors: Tensors, axis: Axis, algorithm: Algorithm, label: Who, land: Callable[..., Iterable[torch.Tensor]]
) -> Finish:
    """Start a collective, in which small tensors of one dtype share a buffer, but for a fused one.

    Args:
        op: The operator, or a function of the same arguments.
        tensors: Its tensors.
        axis: The ranks that take part.
        algorithm: How to send.
        label: Who asks.
        land: Waits for buffers and makes their results, given what this rank has sent.

    Returns:
        A function that waits and returns the results.
    """
    keep, copies = int(op is ops.reduce_scatter), axis.size if op is ops.all_gather else 1
    shapes = [tensor.shape[keep:] for tensor in tensors]
    groups: dict[int | torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        alone = algorithm == "coalesced" or copies * tensor.numel() * tensor.element_size() >= PACK_BYTES
        groups.setdefault(i if alone else tensor.dtype, []).append(i)

    def joined(i: int, *more: int) -> torch.Tensor:
        flat = [tensors[j].flatten(keep) if shapes[j] else tensors[j].unsqueeze(keep) for j in (i, *more) if more]
        return torch.cat(flat, -1) if more else tensors[i]

    sources = [joined(*group) for group in groups.values()]
    about = axis.name, axis.size, axis.group_name, algorithm, encoded(labelled(label, tensors))
    buffers = op(sources, *about)

    def finish() -> list[torch.Tensor]:
        out: dict[int, torch.Tensor] = {}
        for group, whole in zip(groups.values(), land(buffers, sources), strict=True):
            rows, parts = whole.shape[:-1], [whole]
            if len(group) > 1:
                # Of several rows each tensor would be a view with gaps: one operator copies all of them.
                split: Any = torch.split_with_sizes_copy if rows else torch.split_with_sizes
                split = split(whole, [shapes[i].numel() for i in group], -1)
                parts = [part.view((*rows, *shapes[i])) for i, part in zip(group, split, strict=True)]
            out.update(zip(group, parts, strict=True))
        return [out[i] for i in range(len(out))]

    return finish


def start_all_gather(
    shards: Tensors,
    axis: Axis,
    label: Who,
) -> Finish:
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
    algorithm = algorithm_of(axis, shards[0].device)
    return _start(ops.all_gather, shards, axis, algorithm, label, lambda buffers, _: map(ops.wait, buffers))


def start_reduce_scatter(
    stacks: Tensors,
    axis: Axis,
    label: Who,
    tree: bool = False,
) -> Finish:
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
    algorithm = "direct" if tree else algorithm_of(axis, stacks[0].device)
    own = operator.itemgetter(rank(axis))
    return _start(ops.reduce_scatter, stacks, axis, algorithm, label, partial(_sums, axis, algorithm, tree, own))


def start_all_reduce(
    tensors: Tensors,
    axis: Axis,
    label: Who,
    tree: bool = False,
) -> Finish:
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
    algorithm, label = "direct" if tree else algorithm_of(axis, tensors[0].device), labelled(label, tensors)
    # Between two ranks an exchange of everything moves no more bytes, and is over in one round.
    once = axis.size == 2 or sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= EXCHANGE_BYTES
    if once or algorithm != "direct":
        own = partial(_sums, axis, algorithm, tree, lambda tensor: tensor)
        return _start(ops.all_reduce, tensors, axis, algorithm, label, own)

    def scattered(sources: Tensors, *_: object) -> Finish:
        return start_reduce_scatter([_rows(source, axis.size) for source in sources], axis, label, tree)

    def gathered(finish: Finish, sources: Tensors) -> list[torch.Tensor]:
        pairs = zip(all_gather(finish(), axis, label), sources, strict=True)
        return [rows.reshape(-1)[: source.numel()].view(source.shape) for rows, source in pairs]

    return _start(scattered, tensors, axis, algorithm, label, gathered)


def _rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Cut a tensor's elements into `size` equal rows, the last one filled up with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(size, -1)


def _sums(
    axis: Axis, algorithm: Algorithm, tree: bool, own: Callable[..., torch.Tensor], buffers: Tensors, sources: Tensors
) -> list[torch.Tensor]:
    """Add this rank's own tensors to those of the others; backends have added all."""
    landed = map(ops.wait, buffers)
    if algorithm != "direct":
        return [buffer[0] for buffer in landed]
    return [_sum(buffer, own(source), rank(axis), tree) for buffer, source in zip(landed, sources, strict=True)]


def _sum(buffer: torch.Tensor, own: torch.Tensor, place: int, tree: bool) -> torch.Tensor:
    """Add in rank order, or neighbours first, then their sums."""
    rows = list(buffer)
    if len(rows) == 1:
        # The sum of two is the same in either order.
        return rows[0].add_(own)
    rows.insert(place, own)
    while tree and len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    # torch.sum's order depends on the shape.
    total = rows[0] if tree else rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total


def all_gather(shards: Tensors, axis: Axis, label: Who) -> list[torch.Tensor]:
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


def reduce_scatter(stacks: Tensors, axis: Axis, label: Who) -> list[torch.Tensor]:
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


def all_reduce(tensors: Tensors, axis: Axis, label: Who) -> list[torch.Tensor]:
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


def all_to_all(
    send: Sequence[Tensors],
    receive: Sequence[Sequence[Kind]],
    axis: Axis,
    label: Who,
    device: torch.device | None = None,
) -> list[list[torch.Tensor]]:
    """Send each rank tensors of its own, in one message to each, and wait for theirs.

    Args:
        send: As for `start_all_to_all`.
        receive: As for `start_all_to_all`.
        axis: The ranks that take part.
        label: Who asks, for the recorder.
        device: As for `start_all_to_all`.

    Returns:
        For each rank what it has sent.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     send = [[torch.tensor([10 * fs.comm.rank(axis) + to])] for to in range(2)]
    ...     receive = [[(torch.Size([1]), torch.int64)]] * 2
    ...     return [tensors[0].item() for tensors in fs.comm.all_to_all(send, receive, axis, "example")]
    >>> fs.testing.spmd(program, world=2)
    [[0, 10], [1, 11]]
    """
    return start_all_to_all(send, receive, axis, label, device)()


def start_all_to_all(
    send: Sequence[Tensors],
    receive: Sequence[Sequence[Kind]],
    axis: Axis,
    label: Who,
    device: torch.device | None = None,
) -> Callable[[], list[list[torch.Tensor]]]:
    """Start to send each rank tensors of its own, in one message to each.

    Args:
        send: For each rank of the axis the tensors that it gets, all on one device.
        receive: For each rank the shapes and dtypes of what it sends here.
        axis: The ranks that take part.
        label: Who asks, for the recorder.
        device: Of all tensors; None reads it off those that are sent, or takes the processor where there are none.

    Returns:
        A function that waits and returns for each rank what it has sent.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     send = [[], [torch.ones(3)]] if fs.comm.rank(axis) == 0 else [[], []]
    ...     receive = [[], []] if fs.comm.rank(axis) == 0 else [[(torch.Size([3]), torch.float32)], []]
    ...     finish = fs.comm.start_all_to_all(send, receive, axis, "example")
    ...     return finish()
    >>> fs.testing.spmd(program, world=2)
    [[[], []], [[tensor([1., 1., 1.])], []]]
    """
    if has_one_rank(axis):
        return lambda: [list(row) for row in send]
    device = device or next((tensor.device for row in send for tensor in row), torch.device("cpu"))
    parts = [[_as_bytes(tensor) for tensor in row] for row in send]
    filled = [part for row in parts for part in row if part.numel()]
    # One that is alone is not copied.
    row = filled[0] if len(filled) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *filled])
    # Numbers that optimizers keep on the processor travel from the accelerator where nothing else does.
    planned = of_this_rank(_FakeWorld).axes is not None
    served = planned or device.type in _compat.group_devices(axis.group_name)
    row = row if served else row.to(message_device(axis))
    nbytes = [[shape.numel() * dtype.itemsize for shape, dtype in kinds] for kinds in receive]
    sent, awaited = [sum(part.numel() for part in row) for row in parts], list(map(sum, nbytes))
    buffer = ops.all_to_all(row, sent, awaited, axis.name, axis.size, axis.group_name, encoded(labelled(label)))

    def finish() -> list[list[torch.Tensor]]:
        landed, alone = ops.wait(buffer).to(device), sum(map(len, receive)) == 1
        found = iter(landed.split(list(itertools.chain(*nbytes))))
        return [[_as_kind(next(found), *kind, alone) for kind in kinds] for kinds in receive]

    return finish


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    part = tensor.detach().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, which view does not allow.
    return (part.clone(memory_format=torch.contiguous_format) if part.numel() == 1 else part).view(torch.uint8)


def _as_kind(part: torch.Tensor, shape: torch.Size, dtype: torch.dtype, alone: bool) -> torch.Tensor:
    """Copy a tensor out of a buffer, which it must not keep alive and may lie in unaligned; one alone is the buffer."""
    return (part if alone else part.clone()).view(dtype).reshape(shape).detach()
