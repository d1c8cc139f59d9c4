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
from typing import Any

import torch

from fshard import _compat
from fshard.comm import recorder
from fshard.comm.events import Collective, OperatorArguments
from fshard.comm.groups import PendingCollective, tag_of

Tensors = list[torch.Tensor]

# Without this tag a trace would constant-fold an operator whose inputs are constants.
TAGS = (torch.Tag.nondeterministic_seeded,)

# The namespace of the package's own operators.
NAMESPACE = "fshard"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _parse(args: Sequence[Any]) -> OperatorArguments:
    """Name the arguments of an operator, whose schema is in `_collective`; the last five are those of all operators."""
    tensors, *sizes = args[:-5]
    return OperatorArguments(tensors, sizes, *args[-5:])


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory as bytes, because bytes are moved alike for every dtype, even one that gloo lacks."""
    # A single element counts as contiguous whatever its stride, which view does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _buffer_shape(op: str, arguments: OperatorArguments, tensor: torch.Tensor) -> tuple[int, ...]:
    """Compute the shape of an operator's buffer for one of its tensors."""
    if op == "all_gather":
        rows = arguments.size
    elif arguments.sizes:
        _, receive = arguments.sizes
        rows = sum(receive)
    elif arguments.direct:
        # The caller adds its own row to those that the others sent.
        rows = arguments.size - 1
    else:
        rows = 1
    # Dim 0 of what these send counts the rows for different ranks.
    row_dims = 1 if op in ("reduce_scatter", "all_to_all") else 0
    return (rows, *tensor.shape[row_dims:])


def _start_direct(op: str, arguments: OperatorArguments, issued: PendingCollective) -> Tensors:
    """Receive the rows of other ranks directly into buffers. The buffer of a sum has no row for this rank."""
    with _compat.below_autograd():
        return [_start_exchange(op, arguments, tensor, issued) for tensor in arguments.tensors]


def _start_exchange(
    op: str,
    arguments: OperatorArguments,
    tensor: torch.Tensor,
    issued: PendingCollective,
) -> torch.Tensor:
    """Send rows of a tensor to the other ranks, and return the buffer that their rows arrive in.

    Connections between CPUs read and write the memory of CPUs only, and a backend beside which there are none that of
    its accelerator. A tensor that lies elsewhere is copied, for which the host waits; `recorder.finish` copies what has
    arrived.
    """
    group = issued.group
    source = tensor.to(group.device)
    landing = source.new_empty(_buffer_shape(op, arguments, source))
    buffer = landing if source is tensor else tensor.new_empty(landing.shape)
    local_rank = group.local_rank
    rows_out, rows_in = _rows_by_rank(op, source, landing, arguments, local_rank)
    sent = {}
    awaited = {}
    for rank, (row_out, row_in) in enumerate(zip(rows_out, rows_in, strict=True)):
        if rank != local_rank:
            sent[rank] = view_as_bytes(row_out)
            awaited[rank] = view_as_bytes(row_in)
    for work in _compat.start_swap(group.pair, group.name, sent, awaited, partial(tag_of, issued.entry)):
        _compat.register_work(landing, work)
    # Otherwise a gloo thread may free these tensors last. It needs the interpreter lock for that, and the process
    # aborts if the interpreter is shutting down, as right after a program's last collective.
    buffer.__dict__["under_way"] = [*sent.values(), *awaited.values()]
    if landing is not buffer:
        buffer.__dict__["landing"] = landing
    return buffer


def _rows_by_rank(
    op: str,
    source: torch.Tensor,
    landing: torch.Tensor,
    arguments: OperatorArguments,
    local_rank: int,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """List the rows that are sent to each rank, and the memory that the rows of each rank arrive in.

    A row that this rank keeps is copied there. A sum receives nothing from this rank, so its own entry in the second
    list is a placeholder, which makes indices equal to ranks.
    """
    # Rows of a tensor without gaps have none.
    if op == "all_to_all":
        send, receive = arguments.sizes
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


def _start_by_backend(op: str, arguments: OperatorArguments, issued: PendingCollective) -> Tensors:
    """Start the backend's own collectives, one for each dtype, because sums of different dtypes are not fused."""
    sources: dict[torch.dtype, dict[int, torch.Tensor]] = {}
    for index, tensor in enumerate(arguments.tensors):
        source = tensor.contiguous()
        if op in ("all_gather", "all_to_all"):
            source = source.unsqueeze(-1).view(torch.uint8)
        elif source.is_complex():
            # Of lists of tensors, NCCL sums real ones alone.
            source = torch.view_as_real(source)
        sources.setdefault(source.dtype, {})[index] = source
    buffers: dict[int, torch.Tensor] = {}
    for fused in sources.values():
        started = _compat.start_by_backend(op, list(fused.values()), arguments.size, arguments.group, *arguments.sizes)
        buffers.update(zip(fused, started, strict=True))
    shaped = []
    for index, tensor in enumerate(arguments.tensors):
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
        return recorder.start(name, kernel, arguments)

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

# Waits for a buffer that one of them has started.
wait = recorder.finish

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
    return Collective.of(func.name().removeprefix("fshard::"), _parse(args))


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
