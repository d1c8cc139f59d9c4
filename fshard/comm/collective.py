"""Start and finish collectives on lists of plain tensors; nothing here is differentiable."""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

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


def _named(axis: Axis) -> tuple[str, int, str]:
    """Name an axis to an operator."""
    return axis.name, axis.size, axis.group_name


class Packing(NamedTuple):
    """Which tensors travel alone and which share a buffer: groups of indices, singletons first."""

    groups: list[list[int]]

    def pack(self, tensors: Sequence[torch.Tensor], keep: int) -> list[torch.Tensor]:
        """Join each group's tensors along everything behind their first `keep` dims."""
        return [
            tensors[group[0]] if len(group) == 1 else torch.cat([_flat(tensors[i], keep) for i in group], dim=keep)
            for group in self.groups
        ]

    def unpack(self, buffers: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
        """Undo `pack` on buffers whose dims end in those packed; `shapes` are the tensors' own."""
        out: dict[int, torch.Tensor] = {}
        for group, buffer in zip(self.groups, buffers, strict=True):
            if len(group) == 1:
                out[group[0]] = buffer
                continue
            sizes, rows = [shapes[i].numel() for i in group], buffer.shape[:-1]
            # Of several rows each tensor would be a view with gaps: one operator copies all of them.
            split: Any = torch.split_with_sizes_copy if rows else torch.split_with_sizes
            parts = split(buffer, sizes, -1)
            out.update({i: part.view((*rows, *shapes[i])) for i, part in zip(group, parts, strict=True)})
        return [out[i] for i in range(len(out))]


def _flat(tensor: torch.Tensor, keep: int) -> torch.Tensor:
    """Join all dims behind the first `keep` into one."""
    return tensor.flatten(keep) if tensor.dim() > keep else tensor.unsqueeze(keep)


def packing(tensors: Sequence[torch.Tensor], copies: int, algorithm: Algorithm) -> Packing:
    """Let small tensors of one dtype share a buffer; a coalesced collective needs no packing."""
    alone: list[list[int]] = []
    together: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if algorithm == "coalesced" or copies * tensor.numel() * tensor.element_size() >= PACK_BYTES:
            alone.append([i])
        else:
            together.setdefault(tensor.dtype, []).append(i)
    return Packing([*alone, *together.values()])


Finish = Callable[[], list[torch.Tensor]]


def start_all_gather(
    shards: Sequence[torch.Tensor],
    axis: Axis,
    label: str | Label,
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
    packed = packing(shards, axis.size, algorithm)
    shapes = [shard.shape for shard in shards]
    buffers = ops.all_gather(packed.pack(shards, 0), *_named(axis), algorithm, encoded(labelled(label, shards)))
    return lambda: packed.unpack([ops.wait(buffer) for buffer in buffers], shapes)


def start_reduce_scatter(
    stacks: Sequence[torch.Tensor],
    axis: Axis,
    label: str | Label,
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
    packed = packing(stacks, 1, algorithm)
    shapes = [stack.shape[1:] for stack in stacks]
    sources = packed.pack(stacks, 1)
    buffers = ops.reduce_scatter(sources, *_named(axis), algorithm, encoded(labelled(label, stacks)))
    own = [source[rank(axis)] for source in sources] if _from_the_other(algorithm, axis) else None
    return lambda: packed.unpack(_sums(buffers, own, tree), shapes)


def start_all_reduce(
    tensors: Sequence[torch.Tensor],
    axis: Axis,
    label: str | Label,
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
    # The gather that runs when it is finished is for the same units.
    algorithm, label = "direct" if tree else algorithm_of(axis, tensors[0].device), labelled(label, tensors)
    packed = packing(tensors, 1, algorithm)
    shapes = [tensor.shape for tensor in tensors]
    buffers = packed.pack(tensors, 0)
    # Between two ranks an exchange of everything moves no more bytes, and is over in one round.
    once = algorithm != "direct" or axis.size == 2
    exchanged = [once or b.numel() * b.element_size() <= EXCHANGE_BYTES for b in buffers]
    small = [i for i, yes in enumerate(exchanged) if yes]
    large = [i for i, yes in enumerate(exchanged) if not yes]
    scattering = start_reduce_scatter([_rows(buffers[i], axis.size) for i in large], axis, label, tree)
    sources = [buffers[i] for i in small]
    flying = ops.all_reduce(sources, *_named(axis), algorithm, encoded(label)) if small else []
    own = sources if _from_the_other(algorithm, axis) else None

    def finish() -> list[torch.Tensor]:
        gathering = start_all_gather(scattering(), axis, label)
        sums = dict(zip(small, _sums(flying, own, tree), strict=True))
        for i, rows in zip(large, gathering(), strict=True):
            sums[i] = rows.reshape(-1)[: buffers[i].numel()].view(buffers[i].shape)
        return packed.unpack([sums[i] for i in range(len(buffers))], shapes)

    return finish


def _rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Cut a tensor's elements into `size` equal rows, the last one filled up with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(size, -1)


def _from_the_other(algorithm: Algorithm, axis: Axis) -> bool:
    """Whether sums arrive as what the other of two ranks sent."""
    return algorithm == "direct" and axis.size == 2


def _sums(
    buffers: Sequence[torch.Tensor], own: Sequence[torch.Tensor] | None, tree: bool = False
) -> list[torch.Tensor]:
    """Wait for what all ranks sent and add it up, or for what the other one sent and add this rank's own to it."""
    if own is None:
        add = _sum_pairs if tree else _sum_rows
        return [add(ops.wait(buffer)) for buffer in buffers]
    # The sum of two is the same in either order.
    return [ops.wait(buffer)[0].add_(mine) for buffer, mine in zip(buffers, own, strict=True)]


def _sum_rows(buffer: torch.Tensor) -> torch.Tensor:
    """Add the rows one after another: torch.sum's order depends on the shape."""
    if len(buffer) == 1:
        return buffer[0]
    total = buffer[0] + buffer[1]
    for row in buffer[2:]:
        total += row
    return total


def _sum_pairs(buffer: torch.Tensor) -> torch.Tensor:
    """Add neighbours, then their sums: a binary tree over a power of two of rows."""
    while len(buffer) > 1:
        buffer = buffer[0::2] + buffer[1::2]
    return buffer[0]


def all_gather(shards: Sequence[torch.Tensor], axis: Axis, label: str | Label) -> list[torch.Tensor]:
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


def reduce_scatter(stacks: Sequence[torch.Tensor], axis: Axis, label: str | Label) -> list[torch.Tensor]:
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


def all_reduce(tensors: Sequence[torch.Tensor], axis: Axis, label: str | Label) -> list[torch.Tensor]:
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
    send: Sequence[Sequence[torch.Tensor]],
    receive: Sequence[Sequence[Kind]],
    axis: Axis,
    label: str | Label,
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
    send: Sequence[Sequence[torch.Tensor]],
    receive: Sequence[Sequence[Kind]],
    axis: Axis,
    label: str | Label,
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
    flat = [_packed(row) for row in send]
    sizes = [sum(shape.numel() * dtype.itemsize for shape, dtype in row) for row in receive]
    device = device or next((tensor.device for row in send for tensor in row), torch.device("cpu"))
    # Numbers that optimizers keep on the processor travel from the accelerator where nothing else does.
    planned = of_this_rank(_FakeWorld).axes is not None
    served = planned or device.type in _compat.group_devices(axis.group_name)
    rows = _joined([row.to(device if served else message_device(axis)) for row in flat])
    lengths = [row.numel() for row in flat]
    buffer = ops.all_to_all(rows, lengths, sizes, *_named(axis), encoded(labelled(label)))

    def finish() -> list[list[torch.Tensor]]:
        landed, alone = ops.wait(buffer).to(device), sum(map(len, receive)) == 1
        return [_unpacked(part, kinds, alone) for part, kinds in zip(landed.split(sizes), receive, strict=True)]

    return finish


def _joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate rows; one that is alone is not copied."""
    filled = [row for row in rows if row.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(list(rows))


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        part = tensor.detach().contiguous().reshape(-1)
        # A single element counts as contiguous whatever its stride, which view does not allow.
        parts.append(
            (part.clone(memory_format=torch.contiguous_format) if part.numel() == 1 else part).view(torch.uint8)
        )
    return _joined(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _unpacked(row: torch.Tensor, kinds: Sequence[Kind], alone: bool) -> list[torch.Tensor]:
    tensors, start = [], 0
    for shape, dtype in kinds:
        nbytes = shape.numel() * dtype.itemsize
        # A copy, because other dtypes need bytes that are aligned, and the whole buffer must not outlive the tensors.
        part = row[start : start + nbytes]
        # One that is alone is the buffer itself, and to autograd no view of it.
        tensors.append((part if alone else part.clone()).view(dtype).reshape(shape).detach())
        start += nbytes
    return tensors
