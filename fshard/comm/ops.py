"""The collectives as torch.library operators, so that eager code, traced graphs and compilers run the same thing.

Each operator starts a collective on a list of tensors and returns buffers in flight; `wait` finishes a buffer. Dim 0 of
a buffer counts ranks, those of a sum that others have sent, or is 1 where the backend has summed already.

Algorithms:
    direct: each rank sends its rows to the others, straight into their buffers, and sums are left to the caller. Faster
        than gloo's own collectives, with sums in rank order: bitwise the same for every strategy.
    coalesced: one fused collective for the whole list, which is what NCCL does best.
    flat: the backend's own collective for each tensor.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm import recorder
from fshard.comm.events import Collective
from fshard.comm.groups import Group, Link, tag_of

Tensors = list[torch.Tensor]

# How often to look whether the backend has let go, which it usually has at the first look.
LETTING_GO = 1000

# Of torch's CPU generator.
RANDOM_STATE_BYTES = torch.get_rng_state().numel()

# Without it a trace would run an operator of constants once, and leave it out of the graph.
_TAGS = (torch.Tag.nondeterministic_seeded,)

_LIBRARY = torch.library.Library("fshard", "DEF")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: moving data is then the same for every dtype, also those that gloo does not know."""
    # A single element counts as contiguous whatever its stride, which view does not allow.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _shapes(op: str, tensors: Tensors, size: int, algorithm: str) -> list[tuple[int, ...]]:
    """The shapes of an operator's buffers."""
    rows = size if op == "all_gather" else size - 1 if algorithm == "direct" else 1
    return [(rows, *tensor.shape[op == "reduce_scatter" :]) for tensor in tensors]


def _direct(op: str, tensors: Tensors, size: int, step: Link, group: Group) -> Tensors:
    """Exchange rows with all ranks, straight into buffers, of which those of sums have none for this rank."""
    own = group.own
    with _compat.below_autograd():
        shapes = _shapes(op, tensors, size, "direct")
        buffers = [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        for tensor, buffer in zip(tensors, buffers, strict=True):
            receive = list(buffer)
            if op == "all_gather":
                send = [buffer[own].copy_(tensor)] * size
            else:
                rows = tensor if op == "reduce_scatter" else tensor.contiguous().expand(size, *tensor.shape)
                send = [row.contiguous() for rank, row in enumerate(rows) if rank != own]
                # Nothing is sent to oneself.
                send.insert(own, send[0])
                receive.insert(own, receive[0])
            _swap(send, receive, buffer, step, group)
    return buffers


def _swap(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], buffer: torch.Tensor, *way: Any) -> None:
    """Start to send each rank a tensor and to receive one from each, on which `buffer` waits; its own stays."""
    step, group = way
    sent, awaited = list(map(_bytes, send)), list(map(_bytes, receive))
    works = _compat.start_swap(group.pair, group.name, sent, awaited, partial(tag_of, step))
    _hold(buffer, works, [*sent, *awaited])


def _hold(buffer: torch.Tensor, works: Sequence[Any], under_way: Tensors) -> None:
    """Let a buffer wait for transfers, and keep what gloo works on until `wait` has seen it let go.

    Else a thread of gloo is the last to hold these tensors. It asks for the interpreter to free them, and where that is
    on its way out, as right after a program's last collective, the process aborts.
    """
    for work in works:
        _compat.register_work(buffer, work)
    buffer.__dict__["under_way"] = under_way


def wait(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a buffer in flight, and for the backend to let go of the tensors that it worked on."""
    landed = recorder.landed(buffer)
    under_way = buffer.__dict__.pop("under_way", ())
    for _ in range(LETTING_GO):
        if not any(map(_compat.is_held_elsewhere, under_way)):
            break
        # The thread that finished the work is about to let go; it may need this core for it.
        os.sched_yield()
    return landed


def _by_backend(op: str, tensors: Tensors, size: int, group: str, fused: bool) -> Tensors:
    """Start the backend's own collectives, once for each dtype, as sums of different ones are not fused."""
    name, arguments = {
        "all_gather": ("all_gather_into_tensor", (size, group)),
        "reduce_scatter": ("reduce_scatter_tensor", ("sum", size, group)),
        "all_reduce": ("all_reduce", ("sum", group)),
    }[op]
    sources = [_bytes(each) if op == "all_gather" else each for each in map(torch.Tensor.contiguous, tensors)]
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(source.dtype for source in sources):
        same = [i for i, source in enumerate(sources) if source.dtype is dtype]
        started = _compat.start_by_backend(name, [sources[i] for i in same], arguments, fused)
        found.update(zip(same, started, strict=True))
    shapes = _shapes(op, tensors, size, "")
    return [found[i].view(tensors[i].dtype).view(shape) for i, shape in enumerate(shapes)]


def _all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], axis: str, size: int, group: str, label: str
) -> torch.Tensor:
    def start(step: Link, own_group: Group) -> torch.Tensor:
        with _compat.below_autograd():
            buffer = rows.new_empty(sum(receive))
            if _compat.group_devices(group).get(rows.device.type) == "gloo":
                # Between ranks that have nothing for each other there is no message.
                source, target, own = rows.split(send), buffer.split(receive), own_group.own
                target[own].copy_(source[own])
                _swap(source, target, buffer, step, own_group)
            else:
                process_group = _compat.resolve_process_group(group)
                work = dist.all_to_all_single(buffer, rows, receive, send, group=process_group, async_op=True)
                _hold(buffer, [work], [rows])
        return buffer

    leaving = _leaving(rows, send, group)
    return recorder.started("all_to_all", start, leaving, (axis, size, group, label), send, receive)


def _leaving(rows: torch.Tensor, send: list[int], group: str) -> Tensors:
    """List what an all-to-all sends to other ranks."""
    own = _compat.group_rank(group)
    return [row for rank, row in enumerate(rows.split(send)) if rank != own]


def _seed(key: torch.Tensor) -> None:
    torch.manual_seed(int(key) & (1 << 63) - 1)


def _operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> Any:
    """Define an operator by its schema; `fake` makes its result for tensors without values."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.fshard, name).default


def _collective(name: str) -> Any:
    """Define an operator that starts a collective on a list of tensors."""

    def run(tensors: Tensors, axis: str, size: int, group: str, algorithm: str, label: str) -> Tensors:
        def start(step: Link, own_group: Group) -> Tensors:
            if algorithm == "direct":
                return _direct(name, tensors, size, step, own_group)
            return _by_backend(name, tensors, size, group, algorithm == "coalesced")

        return recorder.started(name, start, tensors, (axis, size, group, label))

    def fake(tensors: Tensors, axis: str, size: int, group: str, algorithm: str, label: str) -> Tensors:
        shapes = _shapes(name, tensors, size, algorithm)
        return [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]

    schema = f"{name}(Tensor[] tensors, str axis, int size, str group, str algorithm, str label) -> Tensor[]"
    return _operator(schema, run, fake, _TAGS)


all_gather, reduce_scatter, all_reduce = map(_collective, ("all_gather", "reduce_scatter", "all_reduce"))
all_to_all = _operator(
    "all_to_all(Tensor rows, int[] send, int[] receive, str axis, int size, str group, str label) -> Tensor",
    _all_to_all,
    lambda rows, send, receive, *_: rows.new_empty(sum(receive)),
    _TAGS,
)
random_state = _operator(
    "random_state() -> Tensor", torch.get_rng_state, lambda: torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8)
)
set_random_state = _operator("set_random_state(Tensor state) -> ()", torch.set_rng_state, lambda state: None)
seed = _operator("seed(Tensor key) -> ()", _seed, lambda key: None, _TAGS)
# Leaves in a graph the facts that a verb was told; it does nothing.
told = _operator("told(str facts) -> ()", lambda facts: None, lambda facts: None, _TAGS)

# A graph keeps them in their order, though nothing uses their results.
EFFECTS = (set_random_state, seed)
_PACKED = (all_gather, reduce_scatter, all_reduce)


def collective_of(func: Any, args: Sequence[Any]) -> Collective | None:
    """Describe the collective that a call of an operator starts.

    Args:
        func: The operator.
        args: Its arguments, tensors of any kind.

    Returns:
        The entry of a record; None for other operators.
    """
    if func in _PACKED:
        tensors, axis, size, _, _, label = args
        return Collective.of(func.name().removeprefix("fshard::"), tensors, axis, size, label)
    if func is all_to_all:
        rows, send, _, axis, size, group, label = args
        return Collective.of("all_to_all", _leaving(rows, send, group), axis, size, label)
    return None


def held_in_flight(func: object, args: Sequence[Any]) -> list[int | None]:
    """Tell which memory an operator holds for each tensor that it is given, until its buffer has been waited for.

    Args:
        func: The operator.
        args: Its arguments, tensors of any kind.

    Returns:
        For each tensor None where nothing is held, 0 where it is the tensor itself, else the bytes of a copy; an empty
        list for other operators.
    """
    if func is all_to_all:
        return [0]
    if func not in _PACKED:
        return []
    tensors, _, size, _, algorithm, _ = args
    if algorithm == "direct" and func is all_gather:
        return [None for _ in tensors]
    # The rows that this rank sends to others are copied one by one.
    rows = size - 1 if algorithm == "direct" and func is reduce_scatter else 0
    sent = [(tensor[0], rows) if rows else (tensor, 1) for tensor in tensors]
    return [0 if each.is_contiguous() else copies * each.nbytes for each, copies in sent]
