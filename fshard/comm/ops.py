"""The collectives as torch.library operators, so that eager code, traced graphs and compilers run the same thing.

Each operator starts a collective on a list of tensors and returns buffers in flight; `wait` finishes a buffer. Dim 0 of
a buffer counts ranks, or is 1 where the backend has summed already.

Algorithms:
    direct: each rank sends its rows to the others, straight into their buffers, and sums are left to the caller. Faster
        than gloo's own collectives, with sums in rank order: bitwise the same for every strategy. Between two ranks the
        buffer of a sum is what the other rank sent, and nothing else.
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
from fshard.comm.events import Collective, current_pool
from fshard.comm.groups import Group, Link, tag_of

Tensors = list[torch.Tensor]
# A collective's place in its group, and the group.
Way = tuple[Link, Group]

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


def _all_gather(tensors: Tensors, size: int, group: str, algorithm: str, way: Way) -> Tensors:
    if algorithm != "direct":
        sources = [_bytes(tensor.contiguous()) for tensor in tensors]
        gathered = _compat.start_all_gather(sources, size, group, fused=algorithm == "coalesced")
        pairs = zip(gathered, tensors, strict=True)
        return [buffer.view(tensor.dtype).view(size, *tensor.shape) for buffer, tensor in pairs]
    own = dist.get_rank(_compat.resolve_process_group(group))
    with _compat.below_autograd():
        pool = current_pool()
        buffers = [pool.empty(tensor, (size, *tensor.shape)) for tensor in tensors]
        for tensor, buffer in zip(tensors, buffers, strict=True):
            buffer[own].copy_(tensor)
            rows = list(map(_bytes, buffer))
            _swap([rows[own]] * size, rows, buffer, way)
    return buffers


def _swap(send: Tensors, receive: Tensors, buffer: torch.Tensor, way: Way) -> None:
    """Start to send each rank bytes and receive some from each, on which `buffer` waits; what this rank has stays."""
    if not send[0].numel():
        return
    step, group = way
    for work in _compat.start_swap(group.pair, group.name, send, receive, partial(tag_of, step)):
        _compat.register_work(buffer, work)
    _keep(buffer, [*send, *receive])


def _keep(buffer: torch.Tensor, under_way: Tensors) -> None:
    """Keep what gloo works on until `wait` has seen it let go.

    Else a thread of gloo is the last to hold these tensors. It asks for the interpreter to free them, and where that is
    on its way out, as right after a program's last collective, the process aborts.
    """
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


def _all_gather_like(tensors: Tensors, size: int) -> Tensors:
    return [tensor.new_empty((size, *tensor.shape)) for tensor in tensors]


def _reduce_scatter(tensors: Tensors, size: int, group: str, algorithm: str, way: Way) -> Tensors:
    if algorithm != "direct":
        sources = [tensor.contiguous() for tensor in tensors]
        fused = algorithm == "coalesced"
        return _per_dtype(sources, lambda same: _compat.start_reduce_scatter(same, size, group, fused))
    own = dist.get_rank(_compat.resolve_process_group(group))
    with _compat.below_autograd():
        buffers = _reduce_scatter_like(tensors, size, algorithm)
        for tensor, buffer in zip(tensors, buffers, strict=True):
            # Between two ranks only the other's row travels; more rows are moved together.
            _exchange(tensor if size > 2 else tensor[1 - own], buffer, own, size, way)
    return buffers


def _exchange(rows: torch.Tensor, buffer: torch.Tensor, own: int, size: int, way: Way) -> None:
    """Send each rank its row and receive one of each; between two ranks all to the other, and nothing to oneself."""
    rows = rows.contiguous()
    if size == 2:
        _swap([_bytes(rows)] * 2, [_bytes(buffer[0])] * 2, buffer, way)
        return
    buffer[own].copy_(rows[own])
    _swap(list(map(_bytes, rows)), list(map(_bytes, buffer)), buffer, way)


def _per_dtype(tensors: Tensors, start: Callable[[Tensors], Tensors]) -> Tensors:
    """Call `start` once for each dtype: gloo does not fuse sums of different ones."""
    buffers: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        buffers.update(zip(same, start([tensors[i] for i in same]), strict=True))
    return [buffers[i] for i in range(len(tensors))]


def _reduce_scatter_like(tensors: Tensors, size: int, algorithm: str) -> Tensors:
    rows = 1 if algorithm != "direct" or size == 2 else size
    return [tensor.new_empty((rows, *tensor.shape[1:])) for tensor in tensors]


def _all_reduce(tensors: Tensors, size: int, group: str, algorithm: str, way: Way) -> Tensors:
    if algorithm == "direct" and size == 2:
        own = dist.get_rank(_compat.resolve_process_group(group))
        with _compat.below_autograd():
            buffers = _all_gather_like(tensors, 1)
            for tensor, buffer in zip(tensors, buffers, strict=True):
                _exchange(tensor, buffer, own, size, way)
        return buffers
    if algorithm == "direct":
        return _all_gather(tensors, size, group, algorithm, way)
    sums = _per_dtype(tensors, lambda same: _compat.start_all_reduce(same, group, fused=algorithm == "coalesced"))
    return [total.unsqueeze(0) for total in sums]


def _all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], axis: str, size: int, group: str, label: str
) -> torch.Tensor:
    def start(step: Link, own_group: Group) -> torch.Tensor:
        with _compat.below_autograd():
            buffer = rows.new_empty(sum(receive))
            process_group = _compat.resolve_process_group(group)
            if _compat.group_devices(group).get(rows.device.type) == "gloo":
                # Between ranks that have nothing for each other there is no message.
                source, target, own = rows.split(send), buffer.split(receive), process_group.rank()
                works = _compat.start_swap(own_group.pair, group, source, target, partial(tag_of, step))
                target[own].copy_(source[own])
                _keep(buffer, [*source, *target])
            else:
                works = [dist.all_to_all_single(buffer, rows, receive, send, group=process_group, async_op=True)]
                _keep(buffer, [rows])
            for work in works:
                _compat.register_work(buffer, work)
        return buffer

    width = rows.element_size()
    sends, receives = [width * n for n in send], [width * n for n in receive]
    return recorder.started(
        "all_to_all", start, _leaving(rows, send, group), (axis, size, group, label), sends, receives
    )


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


def _collective(name: str, kernel: Callable[..., Tensors], like: Callable[[Tensors, int, str], Tensors]) -> Any:
    """Define an operator that starts a collective on a list of tensors; `like` makes its buffers."""

    def run(tensors: Tensors, axis: str, size: int, group: str, algorithm: str, label: str) -> Tensors:
        def start(*way: Any) -> Tensors:
            return kernel(tensors, size, group, algorithm, way)

        return recorder.started(name, start, tensors, (axis, size, group, label))

    def fake(tensors: Tensors, axis: str, size: int, group: str, algorithm: str, label: str) -> Tensors:
        return like(tensors, size, algorithm)

    schema = f"{name}(Tensor[] tensors, str axis, int size, str group, str algorithm, str label) -> Tensor[]"
    return _operator(schema, run, fake, _TAGS)


all_gather = _collective("all_gather", _all_gather, lambda tensors, size, _: _all_gather_like(tensors, size))
reduce_scatter = _collective("reduce_scatter", _reduce_scatter, _reduce_scatter_like)
all_reduce = _collective(
    "all_reduce",
    _all_reduce,
    lambda tensors, size, algorithm: _all_gather_like(tensors, size if algorithm == "direct" and size > 2 else 1),
)
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
    if algorithm == "direct" and (func is all_gather or (func is all_reduce and size > 2)):
        return [None for _ in tensors]
    one_row = algorithm == "direct" and func is reduce_scatter and size == 2
    sent = [tensor[0] if one_row else tensor for tensor in tensors]
    return [0 if rows.is_contiguous() else rows.nbytes for rows in sent]
