"""The collectives as torch.library operators, so that eager code, traced graphs and compilers run the same thing.

Each operator starts a collective on a list of tensors and returns buffers in flight; `wait` finishes a buffer. Dim 0 of
a buffer counts ranks, those of a sum that others have sent, or is 1 where the backend has summed already.

Tensors go in one of two ways:
    direct: each rank sends its rows to the others, straight into their buffers, and sums are left to the caller. Faster
        than gloo's own collectives, with sums in rank order: bitwise the same for every strategy. Tensors of an
        accelerator whose ranks have no backend of its own go through the processor.
    by the backend: one fused collective for the whole list, which is what NCCL does best.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fshard import _compat
from fshard.comm import recorder
from fshard.comm.events import Collective
from fshard.comm.groups import CollectiveEntry, Group, tag_of

Tensors = list[torch.Tensor]
# Of an all-to-all the rows for each rank and from each; of others none.
Sizes = Sequence[Sequence[int]]

# How often to look whether the backend has let go, which it usually has at the first look.
LETTING_GO = 1000

# Without it a trace would run an operator of constants once, and leave it out of the graph.
TAGS = (torch.Tag.nondeterministic_seeded,)

# The namespace of the package's own operators.
NAMESPACE = "fshard"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: moving data is then the same for every dtype, also those that gloo does not know."""
    # A single element counts as contiguous whatever its stride, which view does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _shapes(op: str, tensors: Tensors, size: int, direct: bool, sizes: Sizes) -> list[tuple[int, ...]]:
    """The shapes of an operator's buffers."""
    rows = size if op == "all_gather" else sum(sizes[1]) if sizes else size - 1 if direct else 1
    return [(rows, *tensor.shape[op in ("reduce_scatter", "all_to_all") :]) for tensor in tensors]


def _direct(op: str, tensors: Tensors, size: int, sizes: Sizes, entry: CollectiveEntry, group: Group) -> Tensors:
    """Exchange rows with all ranks, straight into buffers, of which those of sums have none for this rank."""
    local_rank = group.local_rank
    buffers = []
    with _compat.below_autograd():
        for tensor, shape in zip(tensors, _shapes(op, tensors, size, True, sizes), strict=True):
            # Connections between processors read and write memory of the processor alone. A tensor of an accelerator
            # is copied there, for which the host waits; `wait` copies what has arrived to the accelerator.
            source = tensor.cpu()
            landing = source.new_empty(shape)
            buffer = landing if source is tensor else tensor.new_empty(shape)
            rows: Any
            into = list(landing.split(sizes[1]) if sizes else landing)
            if op == "all_gather":
                rows = [into[local_rank].copy_(source)] * size
            elif op == "all_to_all":
                rows = source.split(sizes[0])
                into[local_rank].copy_(rows[local_rank])
            else:
                rows = source if op == "reduce_scatter" else [source.contiguous()] * size
                into.insert(local_rank, landing)
            sent = {rank: _bytes(row.contiguous()) for rank, row in enumerate(rows) if rank != local_rank}
            awaited = {rank: _bytes(row) for rank, row in enumerate(into) if rank != local_rank}
            for work in _compat.start_swap(group.pair, group.name, sent, awaited, partial(tag_of, entry)):
                _compat.register_work(buffer, work)
            # Else a thread of gloo is the last to hold these tensors. It asks for the interpreter to free them, and
            # where that is on its way out, as right after a program's last collective, the process aborts.
            buffer.__dict__["under_way"] = [*sent.values(), *awaited.values()]
            if landing is not buffer:
                buffer.__dict__["landing"] = landing
            buffers.append(buffer)
    return buffers


def wait(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a buffer in flight, and for the backend to let go of the tensors that it worked on."""
    landed = recorder.finish(buffer)
    under_way = buffer.__dict__.pop("under_way", ())
    for _ in range(LETTING_GO):
        if not any(map(_compat.is_held_elsewhere, under_way)):
            break
        # The thread that finished the work is about to let go; it may need this core for it.
        os.sched_yield()
    landing = buffer.__dict__.pop("landing", None)
    if landing is not None:
        with _compat.below_autograd():
            landed.copy_(landing)
    return landed


def _by_backend(op: str, tensors: Tensors, size: int, sizes: Sizes, _: CollectiveEntry, group: Group) -> Tensors:
    """Start the backend's own collectives, fused for each dtype, as sums of different ones are not fused."""
    sources = [tensor.contiguous() for tensor in tensors]
    if op in ("all_gather", "all_to_all"):
        sources = [source.unsqueeze(-1).view(torch.uint8) for source in sources]
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(source.dtype for source in sources):
        same = [i for i, source in enumerate(sources) if source.dtype is dtype]
        started = _compat.start_by_backend(op, [sources[i] for i in same], size, group.name, *sizes)
        found |= zip(same, started, strict=True)
    shapes = enumerate(_shapes(op, tensors, size, False, sizes))
    return [found[i].view(tensors[i].dtype).view(shape) for i, shape in shapes]


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Define an operator by its schema; `fake` makes its result for tensors without values."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fshard, name).default


def _collective(name: str, sizes: str = "") -> Any:
    """Define an operator that starts a collective on a list of tensors."""

    def run(tensors: Tensors, *about: Any) -> Tensors:
        *sizes, direct, axis, size, group, label = about
        start = partial(_direct if direct else _by_backend, name, tensors, size, sizes)
        return recorder.start(name, start, tensors, (axis, size, group, label), *sizes)

    def fake(tensors: Tensors, *about: Any) -> Tensors:
        *sizes, direct, _, size, _, _ = about
        return list(map(torch.Tensor.new_empty, tensors, _shapes(name, tensors, size, direct, sizes)))

    schema = f"{name}(Tensor[] tensors, {sizes}bool direct, str axis, int size, str group, str label) -> Tensor[]"
    return operator(schema, run, fake, TAGS)


all_gather, reduce_scatter, all_reduce = map(_collective, ("all_gather", "reduce_scatter", "all_reduce"))
all_to_all = _collective("all_to_all", "int[] send, int[] receive, ")
# Leaves in a graph the facts that a verb was given; it does nothing.
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
    return Collective.of(func.name().removeprefix("fshard::"), args[0], args[1:-5], tuple(args[-4:]))


def held_in_flight(func: object, args: Sequence[Any]) -> list[int | None]:
    """Tell which memory an operator holds for each tensor that it is given, until its buffer has been waited for.

    Args:
        func: The operator.
        args: Its arguments, tensors of any kind.

    Returns:
        For each tensor None where nothing is held, 0 where it is the tensor itself, else the bytes of a copy; an empty
        list for other operators.
    """
    if func not in STARTS:
        return []
    tensors, *sizes, direct, _, size, group, _ = args
    if direct and func is all_gather:
        return [None for _ in tensors]
    if direct and func is not all_reduce:
        # Rows for other ranks are copied one by one, or for a ragged all-to-all each rank's rows together.
        send = sizes[0] if sizes else [1] * size
        local_rank = _compat.resolve_process_group(group).rank()
        return [_bytes_of_copies(tensor, send, local_rank) for tensor in tensors]
    return [0 if tensor.is_contiguous() else tensor.nbytes for tensor in tensors]


def _bytes_of_copies(tensor: torch.Tensor, send: Sequence[int], local_rank: int) -> int:
    """Count the bytes of the copies that are made of rows with gaps, to send so many of them to each other rank."""
    nbytes = 0
    for rank, rows in enumerate(tensor.split(list(send))):
        if rank != local_rank and not rows.is_contiguous():
            nbytes += rows.nbytes
    return nbytes
