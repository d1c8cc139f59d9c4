"""The flight recorder: which collectives this rank has started and finished, and who is told of them."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.connect import connect_groups
from fshard.comm.events import (
    Collective,
    Label,
    OperatorArguments,
    Record,
    Shapes,
    decode_label,
    describe_tensors,
    encode_label,
)
from fshard.comm.failure import describe_failure, fail_collective, make_error, notify_peers
from fshard.comm.groups import PendingCollective, rank_state
from fshard.comm.links import Merge, swap_in_rounds
from fshard.tree import Axis

Tensors = list[torch.Tensor]

# Key of the watchers, shared by this thread and the threads of its backward passes.
WATCHERS_KEY = "fshard watchers"
# Key of what the thread of a running call has, and the threads of its backward passes.
CALL_KEY = "fshard thread"


def watchers() -> Sequence[Any]:
    """List those who are told of this rank's collectives: ranks are processes, or threads of one."""
    return _compat.thread_object(WATCHERS_KEY) or ()


def _notify_watchers(issued: PendingCollective, moment: str, *args: Any) -> None:
    """Call the method of a name of all that are told of a collective and have it."""
    for watcher in issued.watchers:
        if method := getattr(watcher, moment, None):
            method(issued, *args)


def start(op: str, kernel: Callable[[PendingCollective], Tensors], arguments: OperatorArguments) -> Tensors:
    """Start a collective and attach its record to its buffers.

    Args:
        op: Its name.
        kernel: Starts it and returns buffers in flight.
        arguments: What it sends, the ranks that take part, and the caller.

    Returns:
        The result of the kernel.

    Raises:
        CollectiveError: if it cannot start, or the group is broken.
    """
    # Ranks may send different numbers of rows, which are dim 0.
    row_dims = 1 if arguments.sizes else 0
    shapes = tuple((tensor.dtype, tensor.shape[row_dims:]) for tensor in arguments.tensors)
    issued = _issue(op, shapes, arguments)
    buffers = _run_waiting(issued, kernel)
    issued.left = len(buffers)
    for buffer in buffers:
        buffer.__dict__["issued"] = issued
        issued.state.in_flight[id(buffer)] = buffer
    _notify_watchers(issued, "started")
    return buffers


def _issue(op: str, shapes: Shapes, arguments: OperatorArguments) -> PendingCollective:
    """Record a collective in the chain of its group, which is connected if it is new. Raises the error of a failure."""
    state = rank_state()
    if state.failure is not None:
        raise make_error(state)
    if state.call and not _compat.thread_object(CALL_KEY):
        # Ranks would start the collectives of two threads in different orders.
        raise notify_peers(
            state, f"rank {state.rank} calls fshard from two threads at once, one of them in {state.call}"
        )
    if arguments.group not in state.groups:
        connect_groups(state, [arguments.group])
    group = state.groups[arguments.group]
    hashed, text = _texts(op, arguments.axis, arguments.label, shapes)
    if state.call:
        text = f"{text} in {state.call}"
    entry = group.record_start(op, hashed, text, *arguments.sizes)
    those_watching = watchers()
    collective = Collective.of(op, arguments) if those_watching else None
    awaits = -1, group.ranks
    issued = PendingCollective(collective, state, group, entry, those_watching, op, arguments.label, awaits=awaits)
    _notify_watchers(issued, "starts", arguments.tensors)
    return issued


def spread(known: bytes, merge: Merge, axis: Axis, label: Label, parts: str) -> bytes:
    """Let all ranks of an axis know what any of them knows, over the links between them.

    In records and texts this is an all-gather, whose bytes are those that this rank knows, once for each rank.

    Args:
        known: What this rank knows.
        merge: Merges what two ranks know.
        axis: The ranks that take part.
        label: The caller.
        parts: What that is, for texts; the same on every rank.

    Returns:
        What all ranks know together, the same on every rank.

    Raises:
        CollectiveError: if a rank fails, differs or does not come.
    """
    # Watchers are shown as many bytes, which are of no device.
    tensors = [torch.empty(len(known), dtype=torch.uint8, device="meta")] if watchers() else []
    label = label._replace(parts=parts)
    arguments = OperatorArguments(tensors, (), False, axis.name, axis.size, axis.group_name, encode_label(label))
    issued = _issue("all_gather", (), arguments)
    issued.left = 1
    _notify_watchers(issued, "started")
    _notify_watchers(issued, "waits")
    union = _run_waiting(issued, swap_in_rounds, known, merge)
    _notify_watchers(issued, "landed")
    return union


def _run_waiting(issued: PendingCollective, run: Callable[..., Any], *args: Any, is_started: bool = False) -> Any:
    """Call a function that may wait for other ranks, and say why where it fails.

    Args:
        issued: The collective.
        run: The function, of the collective and other arguments.
        *args: The other arguments.
        is_started: Whether a buffer of the collective is waited for, rather than started. A profile shows which, and
            errors of a start that are not from the connections are raised as they are.
    """
    state = issued.state
    if _compat.is_profiling():
        about = decode_label(issued.label)
        moment = " wait" if is_started else ""
        run = _compat.show_range(f"fshard::{issued.op}{moment} ({about.unit or about.verb})", run)
    # The thread that watches tells waits apart by their beginnings.
    issued.since = time.monotonic()
    state.awaited = issued
    kind = RuntimeError if is_started else dist.DistError
    try:
        return run(issued, *args)
    except kind as error:
        raise fail_collective(state, issued, error) from error
    except BaseException as error:
        # No other exchange can begin where one has stopped in the middle, as by Ctrl-C.
        if 0 <= issued.awaits[0] < math.inf:
            notify_peers(state, describe_failure(state.rank, state.call or issued.entry, error))
        raise
    finally:
        state.awaited = None


@functools.lru_cache(maxsize=1024)
def _texts(op: str, axis: str, label: str, shapes: Shapes) -> tuple[str, str]:
    """Write a collective for the hash of the chain, where it must be the same on every rank, and for messages."""
    about = decode_label(label)
    # Ranks that begin different calls hear of it by the message itself.
    who = "compare" if about.is_comparison else f"{about.verb} {about.units or about.leaves}"
    hashed = f"{op} over {axis}: {who}: {about.parts} {shapes}\n"
    unit = f" of {about.unit}" if about.unit else ""
    return hashed, f"({about.verb}{unit}) over {axis!r} of {about.parts or describe_tensors(shapes)}"


def finish(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a buffer in flight, and for the backend to release the tensors that it worked on.

    Args:
        buffer: From `start`, or from a trace, which starts nothing.

    Returns:
        The buffer, with its data.

    Raises:
        CollectiveError: if the collective fails.
    """
    issued = buffer.__dict__.pop("issued", None)
    if issued is None:
        return _compat.WAIT_TENSOR(buffer)
    issued.state.in_flight.pop(id(buffer), None)
    _notify_watchers(issued, "waits")
    result = _run_waiting(issued, _land, buffer, is_started=True)
    issued.left -= 1
    _notify_watchers(issued, "landed")
    _compat.wait_until_released(buffer.__dict__.pop("under_way", ()))
    return result


def _land(issued: PendingCollective, buffer: torch.Tensor) -> torch.Tensor:
    """Wait for the data of a buffer, and copy it where transfers do not reach the buffer's memory."""
    landing = buffer.__dict__.pop("landing", buffer)
    landed = _compat.WAIT_TENSOR(landing)
    if landing is buffer:
        return landed
    with _compat.below_autograd():
        # The host waits here for the backend of an accelerator. One that is ended early leaves anything, and no error.
        buffer.copy_(landed)
    if issued.state.is_cut:
        raise RuntimeError("the backend was ended")
    return buffer


@contextmanager
def watched(watcher: Any) -> Iterator[Any]:
    """Tell a watcher of this thread's collectives inside the context, those of a backward pass included.

    Args:
        watcher: The one that is told, by those that it has of four methods: `starts(issued, tensors)` as a collective
            is about to start, `started(issued)` when it is under way, `waits(issued)` before a buffer is waited for,
            and `landed(issued)`. It is told of the end of those collectives that started inside.

    Yields:
        The watcher.
    """
    with _compat.keeping_thread_object(WATCHERS_KEY, (*watchers(), watcher)):
        yield watcher


class _Recording(Record):
    def starts(self, issued: PendingCollective, _: Sequence[torch.Tensor]) -> None:
        self.append(issued.collective)


def record() -> AbstractContextManager[Record]:
    """Record every collective this thread issues inside the context, those of a backward pass included.

    Returns:
        A context, which gives a list of Collective that grows as collectives are issued.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.gather(params)
    ...     return [(entry.op, entry.bytes, entry.unit) for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]
    [('all_gather', 16, "['w']")]
    """
    return watched(_Recording())
