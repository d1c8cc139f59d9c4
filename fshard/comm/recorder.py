"""The flight recorder: which collectives this rank has started and finished, and who is told of them."""

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.events import KEY, Collective, Label, Record, decoded, described, objects_of_this_rank, of_this_rank
from fshard.comm.failure import connected, ended, failure
from fshard.comm.groups import TEXT, Group, Link, Waiting, World, world
from fshard.comm.watcher import Lookout


@dataclass(slots=True, eq=False)
class Issued:
    """One collective under way.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Name of the mesh axis.
        size: Ranks on it.
        group: Name of its process group.
        label: Who asked for it, and what for, encoded.
        world: What this rank knows of the others.
        own: The group of fshard's own.
        step: Its place there.
        left: Buffers that have not been waited for.
    """

    op: str
    axis: str
    size: int
    group: str
    label: str
    world: World
    own: Group
    step: Link
    left: int = 0

    @property
    def about(self) -> Label:
        """Who asked for it, and what for."""
        return decoded(self.label)

    def event(self, tensors: Sequence[torch.Tensor]) -> Collective:
        """Describe it by the tensors that this rank gives it."""
        return Collective.of(self.op, tensors, self.axis, self.size, self.label)


class Watcher:
    """Base of those who are told of a rank's collectives as they start and land."""

    def starts(self, issued: Issued, tensors: Sequence[torch.Tensor]) -> None:
        """A collective of these tensors is about to start."""

    def started(self, issued: Issued) -> None:
        """It is under way."""

    def waits(self, issued: Issued) -> None:
        """One of its buffers is about to be waited for."""

    def landed(self, issued: Issued) -> None:
        """That buffer has landed."""


@dataclass(slots=True)
class FlightRecorder:
    """Tells watchers of one rank's collectives.

    Attributes:
        watchers: Those who are told.
    """

    watchers: tuple[Watcher, ...] = ()


def flight_recorder() -> FlightRecorder:
    """Find this rank's flight recorder.

    Returns:
        The recorder, the same one at each call of this thread.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     with fs.comm.record():
    ...         fs.comm.all_reduce([torch.ones(2)], axis, "example")
    ...         return len(fs.comm.flight_recorder().watchers)
    >>> fs.testing.spmd(program, world=2)
    [1, 1]
    """
    return of_this_rank(FlightRecorder)


def started(
    op: str,
    kernel: Callable[[Link, Group], Any],
    tensors: Sequence[torch.Tensor],
    about: tuple[str, int, str, str],
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> Any:
    """Start a collective; its buffers lead to what the flight recorder has of it.

    Args:
        op: Its name.
        kernel: Starts it and returns a buffer in flight, or several.
        tensors: Those it sends.
        about: Its axis, size, group and encoded label.
        sends: The bytes for each rank, where ranks may send different ones.
        receives: The bytes from each.

    Returns:
        The result of the kernel.

    Raises:
        CollectiveError: if it cannot start, or the group is broken.
    """
    recorder, own = flight_recorder(), world()
    if own.broken is not None:
        raise failure(own)
    group = connected(own, about[2])
    if own.lookout is None and group.pair is not None:
        own.lookout = Lookout(own)
        own.lookout.start()
    shapes = () if sends is not None else tuple((tensor.dtype, tensor.shape) for tensor in tensors)
    hashed, text = _texts(op, about[0], about[3], shapes)
    within = f"{text} in {own.call.what}" if own.call is not None else text
    step = group.enter(op, hashed, within[:TEXT], sends, receives)
    issued = Issued(op, *about, own, group, step)
    for watcher in recorder.watchers:
        watcher.starts(issued, tensors)
    before, own.waiting = own.waiting, Waiting(group, step, time.monotonic())
    try:
        buffers = kernel(step, group)
    except dist.DistError as error:
        raise ended(own, own.waiting, error) from error
    finally:
        own.waiting = before
    several = buffers if isinstance(buffers, list) else [buffers]
    issued.left = len(several)
    for buffer in several:
        buffer.__dict__["issued"] = issued
        own.flying[id(buffer)] = weakref.ref(buffer)
    for watcher in recorder.watchers:
        watcher.started(issued)
    return buffers


@functools.lru_cache(maxsize=1024)
def _texts(op: str, axis: str, label: str, shapes: tuple[tuple[torch.dtype, torch.Size], ...]) -> tuple[str, str]:
    """Write a collective for the chain, and for messages."""
    about = decoded(label)
    # Ranks that begin different calls hear of it by the message itself.
    who = "compare" if about.is_comparison else f"{about.verb} {about.ids}"
    all_parts = about.parts or " ".join(f"{dtype} {tuple(shape)}" for dtype, shape in shapes)
    shown = about.parts or described(shapes)
    unit, size = (f" of {text}" if text else "" for text in (about.unit, "" if about.is_comparison else shown))
    return f"{op} over {axis}: {who}: {all_parts}\n", f"({about.verb}{unit}) over {axis!r}{size}"


def landed(buffer: torch.Tensor) -> torch.Tensor:
    """Wait for a buffer in flight.

    Args:
        buffer: From `started`, or from a trace, which starts nothing.

    Returns:
        The buffer, landed.

    Raises:
        CollectiveError: if the collective fails.
    """
    issued = buffer.__dict__.pop("issued", None)
    if issued is None:
        return _compat.wait_tensor(buffer)
    recorder, own = flight_recorder(), issued.world
    own.flying.pop(id(buffer), None)
    for watcher in recorder.watchers:
        watcher.waits(issued)
    before, own.waiting = own.waiting, Waiting(issued.own, issued.step, time.monotonic())
    try:
        out = _compat.wait_tensor(buffer)
    except RuntimeError as error:
        raise ended(own, own.waiting, error) from error
    finally:
        own.waiting = before
    issued.left, issued.own.finished = issued.left - 1, issued.step
    for watcher in recorder.watchers:
        watcher.landed(issued)
    return out


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher of this thread's collectives inside the context, those of a backward pass included.

    Args:
        watcher: The one that is told.

    Yields:
        Nothing.
    """
    recorder = flight_recorder()
    recorder.watchers += (watcher,)
    try:
        with _compat.keeping_thread_object(KEY, objects_of_this_rank()):
            yield
    finally:
        recorder.watchers = tuple(other for other in recorder.watchers if other is not watcher)


class _Recording(Watcher):
    def __init__(self, record: Record) -> None:
        self.record = record

    def starts(self, issued: Issued, tensors: Sequence[torch.Tensor]) -> None:
        self.record.append(issued.event(tensors))


@contextmanager
def record() -> Iterator[Record]:
    """Record every collective this thread issues inside the context, those of a backward pass included.

    Yields:
        A list of Collective that grows as collectives are issued.

    >>> import torch, fshard as fs
    >>> def program():
    ...     params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
    ...     with fs.comm.record() as record:
    ...         fs.gather(params)
    ...     return [(entry.op, entry.bytes, entry.unit) for entry in record if not entry.scalar]
    >>> fs.testing.spmd(program, world=2)[0]
    [('all_gather', 16, "['w']")]
    """
    entries = Record()
    with watched(_Recording(entries)):
        yield entries
