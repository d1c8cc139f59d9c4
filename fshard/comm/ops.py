"""The collectives as torch.library operators, so that eager code, traced graphs and compilers run the same thing.

Each operator starts a collective on a list of tensors and returns buffers in flight; `wait` finishes a buffer. Dim 0 of
a buffer counts ranks, those of a sum that others have sent, or is 1 where the backend has summed already.

Tensors are sent in one of two ways:
    direct: each rank sends its rows to the others, straight into their buffers, and sums are left to the caller. Faster
        than gloo's own collectives, with sums in rank order: bitwise the same for every strategy. Tensors of an
        accelerator are copied through the CPU if its ranks have no backend for the accelerator.
    by the backend: one fused collective for the whole list, which is what NCCL does best.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fshard import _compat
from fshard.comm import recorder
from fshard.comm.events import Collective, Destination
from fshard.comm.groups import ChainEntry, Group, tag_of

Tensors = list[torch.Tensor]
# Of an all-to-all the rows for each rank and from each; of others none.
Sizes = Sequence[Sequence[int]]

# Without this tag a trace would constant-fold an operator whose inputs are constants.
TAGS = (torch.Tag.nondeterministic_seeded,)

# The namespace of the package's own operators.
NAMESPACE = "fshard"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


class _Arguments(NamedTuple):
    """The arguments of an operator that starts a collective.

    Attributes:
        tensors: The tensors that this rank sends.
        sizes: As `Sizes` says.
        direct: Whether ranks send each other rows, instead of a collective of the backend.
        destination: The ranks that take part, and the caller.
    """

    tensors: Tensors
    sizes: Sizes
    direct: bool
    destination: Destination


def _parse(args: Sequence[Any]) -> _Arguments:
    """Name the positional arguments of an operator, whose schema is in `_collective`."""
    tensors, *sizes, direct, axis, size, group, label = args
    return _Arguments(tensors, sizes, direct, Destination(axis, size, group, label))


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as bytes, because bytes are moved alike for every dtype, even one that gloo lacks."""
    # A single element counts as contiguous whatever its stride, which view does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _buffer_shape(op: str, arguments: _Arguments, tensor: torch.Tensor) -> tuple[int, ...]:
    """Compute the shape of an operator's buffer for one of its tensors."""
    if op == "all_gather":
        rows = arguments.destination.size
    elif arguments.sizes:
        _, receive = arguments.sizes
        rows = sum(receive)
    elif arguments.direct:
        # The caller adds its own row to those that the others sent.
        rows = arguments.destination.size - 1
    else:
        rows = 1
    # Dim 0 of what these send counts the rows for different ranks.
    row_dims = 1 if op in ("reduce_scatter", "all_to_all") else 0
    return (rows, *tensor.shape[row_dims:])


def _start_direct(op: str, arguments: _Arguments, entry: ChainEntry, group: Group) -> Tensors:
    """Receive the rows of other ranks directly into buffers. The buffer of a sum has no row for this rank."""
    if group.pair is None and group.links is not None:
        return _start_rows_by_backend(op, arguments, entry, group)
    with _compat.below_autograd():
        return [_start_exchange(op, arguments, tensor, entry, group) for tensor in arguments.tensors]


def _start_exchange(
    op: str,
    arguments: _Arguments,
    tensor: torch.Tensor,
    entry: ChainEntry,
    group: Group,
) -> torch.Tensor:
    """Send rows of a tensor to the other ranks, and return the buffer that their rows arrive in."""
    # Connections between CPUs read and write the memory of CPUs only. A tensor of an accelerator is copied there, for
    # which the host waits; `recorder.finish` copies what has arrived to the accelerator.
    source = tensor.cpu()
    landing = source.new_empty(_buffer_shape(op, arguments, source))
    buffer = landing if source is tensor else tensor.new_empty(landing.shape)
    local_rank = group.local_rank
    rows_out, rows_in = _rows_by_rank(op, source, landing, arguments.sizes, local_rank)
    sent = {}
    awaited = {}
    for rank, (row_out, row_in) in enumerate(zip(rows_out, rows_in, strict=True)):
        if rank != local_rank:
            sent[rank] = view_as_bytes(row_out)
            awaited[rank] = view_as_bytes(row_in)
    for work in _compat.start_swap(group.pair, group.name, sent, awaited, partial(tag_of, entry)):
        _compat.register_work(landing, work)
    # Otherwise a gloo thread may free these tensors last. It needs the interpreter lock for that, and the process
    # aborts if the interpreter is shutting down, as right after a program's last collective.
    buffer.__dict__["under_way"] = [*sent.values(), *awaited.values()]
    if landing is not buffer:
        buffer.__dict__["landing"] = landing
    return buffer


def _start_rows_by_backend(op: str, arguments: _Arguments, entry: ChainEntry, group: Group) -> Tensors:
    """Exchange rows by the backend of an accelerator, beside which ranks have no connections for rows.

    These are rows of sums that each rank adds itself, and tensors of processors. The latter are copied through the
    accelerator; `recorder.finish` copies what has arrived to the processor, for which the host waits.
    """
    device = torch.accelerator.current_accelerator() or "cpu"
    others = [1] * len(group.ranks)
    others[group.local_rank] = 0
    is_sum = op in ("reduce_scatter", "all_reduce")
    sources = []
    with _compat.below_autograd():
        for tensor in arguments.tensors:
            source = tensor.to(device)
            if is_sum:
                rows = list(source) if op == "reduce_scatter" else [source] * len(others)
                del rows[group.local_rank]
                source = torch.stack(rows)
            sources.append(source)
        arguments_there = arguments._replace(tensors=sources)
        if is_sum:
            op, arguments_there = "all_to_all", arguments_there._replace(sizes=(others, others))
        buffers = _start_by_backend(op, arguments_there, entry, group)
        for index, tensor in enumerate(arguments.tensors):
            landing = buffers[index]
            if tensor.device != landing.device:
                buffers[index] = tensor.new_empty(landing.shape)
                buffers[index].__dict__["landing"] = landing
    return buffers


def _rows_by_rank(
    op: str,
    source: torch.Tensor,
    landing: torch.Tensor,
    sizes: Sizes,
    local_rank: int,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """List the rows that are sent to each rank, and the memory that the rows of each rank arrive in.

    A row that this rank keeps is copied there. A sum receives nothing from this rank, so its own entry in the second
    list is a placeholder, which makes indices equal to ranks.
    """
    # Rows of a tensor without gaps have none.
    if op == "all_to_all":
        send, receive = sizes
        rows_out = source.contiguous().split(send)
        rows_in = landing.split(receive)
        rows_in[local_rank].copy_(rows_out[local_rank])
        return rows_out, rows_in
    received = list(landing)
    if op == "all_gather":
        local_row = received[local_rank].copy_(source)
        return [local_row] * len(received), received
    received.insert(local_rank, landing)
    source = source.contiguous()
    return list(source) if op == "reduce_scatter" else [source] * len(received), received


def wait(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a buffer in flight, and for the backend to release the tensors that it worked on."""
    landed = recorder.finish(buffer)
    _compat.wait_until_released(buffer.__dict__.pop("under_way", ()))
    return landed


def _start_by_backend(op: str, arguments: _Arguments, _: ChainEntry, group: Group) -> Tensors:
    """Start the backend's own collectives, one for each dtype, because sums of different dtypes are not fused."""
    tensors = arguments.tensors
    sources = [tensor.contiguous() for tensor in tensors]
    if op in ("all_gather", "all_to_all"):
        sources = [source.unsqueeze(-1).view(torch.uint8) for source in sources]
    size = arguments.destination.size
    buffers: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(source.dtype for source in sources):
        indices = [index for index, source in enumerate(sources) if source.dtype is dtype]
        fused = [sources[index] for index in indices]
        started = _compat.start_by_backend(op, fused, size, group.name, *arguments.sizes)
        buffers.update(zip(indices, started, strict=True))
    shaped = []
    for index, tensor in enumerate(tensors):
        shaped.append(buffers[index].view(tensor.dtype).view(_buffer_shape(op, arguments, tensor)))
    return shaped


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Define an operator by its schema; `fake` makes its result for tensors without values."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fshard, name).default


def _collective(name: str, sizes: str = "") -> Any:
    """Define an operator that starts a collective on a list of tensors."""

    def run(*args: Any) -> Tensors:
        arguments = _parse(args)
        start = _start_direct if arguments.direct else _start_by_backend
        kernel = partial(start, name, arguments)
        return recorder.start(name, kernel, arguments.tensors, arguments.destination, *arguments.sizes)

    def fake(*args: Any) -> Tensors:
        arguments = _parse(args)
        return [tensor.new_empty(_buffer_shape(name, arguments, tensor)) for tensor in arguments.tensors]

    schema = f"{name}(Tensor[] tensors, {sizes}bool direct, str axis, int size, str group, str label) -> Tensor[]"
    return operator(schema, run, fake, TAGS)


all_gather = _collective("all_gather")
reduce_scatter = _collective("reduce_scatter")
all_reduce = _collective("all_reduce")
all_to_all = _collective("all_to_all", "int[] send, int[] receive, ")
# Leaves the facts that a verb was given in a graph, and does nothing else.
record_facts = operator("record_facts(str facts) -> ()", lambda facts: None, lambda facts: None, TAGS)

STARTS = (all_gather, reduce_scatter, all_reduce, all_to_all)


def collective_of(func: Any, args: Sequence[Any]) -> Collective | None:
    """Describe the collective that a call of an operator starts.

    Args:
        func: The operator.
        args: Its arguments, tensors of any kind.

    Returns:
        The entry of a record; None for other operators.
    """
    if func not in STARTS:
        return None
    arguments = _parse(args)
    name = func.name().removeprefix("fshard::")
    return Collective.of(name, arguments.tensors, arguments.sizes, arguments.destination)


def held_in_flight(func: object, args: Sequence[Any]) -> list[int | None]:
    """Tell which memory an operator holds for each of its tensors, until its buffer has been waited for.

    Args:
        func: The operator.
        args: Its arguments, tensors of any kind.

    Returns:
        For each tensor None if nothing is held, 0 if the tensor itself is, else the bytes of copies; an empty list for
        other operators.
    """
    if func not in STARTS:
        return []
    arguments = _parse(args)
    if arguments.direct and func is all_gather:
        return [None for _ in arguments.tensors]
    return [0 if tensor.is_contiguous() else tensor.nbytes for tensor in arguments.tensors]
