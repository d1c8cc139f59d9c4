"""The flight recorder: which collectives this rank has started and finished, and who is told of them."""

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.events import KEY, Collective, Record, decoded, described, objects_of_this_rank, of_this_rank
from fshard.comm.failure import connected, ended, failure
from fshard.comm.groups import Group, Link, Waiting, World, world

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Issued:
    """One collective under way.

    Attributes:
        collective: The entry of a record; None where nobody was told as it started.
        world: What this rank knows of the others.
        group: The group of fshard's own.
        step: Its place there.
        left: Buffers that have not been waited for.
    """

    collective: Collective | None
    world: World
    group: Group
    step: Link
    left: int = 0


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


W = TypeVar("W", bound=Watcher)


@dataclass(slots=True)
class FlightRecorder:
    """Tells watchers of one rank's collectives.

    Attributes:
        watchers: Those who are told.
    """

    watchers: tuple[Watcher, ...] = ()

    def tell(self, moment: str, *args: Any) -> None:
        """Call a method of each watcher."""
        for watcher in self.watchers:
            getattr(watcher, moment)(*args)


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
    kernel: Callable[[Link, Group], T],
    tensors: Sequence[torch.Tensor],
    about: tuple[str, int, str, str],
    *sizes: Sequence[int],
) -> T:
    """Start a collective; its buffers lead to what the flight recorder has of it.

    Args:
        op: Its name.
        kernel: Starts it and returns a buffer in flight, or several.
        tensors: Those it sends.
        about: Its axis, size, group and encoded label.
        *sizes: The bytes for each rank and from each, where ranks may send different ones.

    Returns:
        The result of the kernel.

    Raises:
        CollectiveError: if it cannot start, or the group is broken.
    """
    recorder, own, (axis, size, name, label) = flight_recorder(), world(), about
    if own.broken is not None:
        raise failure(own)
    group = connected(own, name)
    shapes = () if sizes else tuple((tensor.dtype, tensor.shape) for tensor in tensors)
    hashed, text = _texts(axis, label, shapes)
    text = f"{text} in {own.call.what}" if own.call is not None else text
    step = group.enter(op, f"{op} {hashed}", text, *sizes)
    entry = Collective.of(op, tensors, axis, size, label) if recorder.watchers else None
    issued = Issued(entry, own, group, step)
    recorder.tell("starts", issued, tensors)
    # Other errors are not of the connections, and pass through.
    buffers = _waiting(issued, dist.DistError, lambda: kernel(step, group))
    several = buffers if isinstance(buffers, list) else [buffers]
    issued.left = len(several)
    for buffer in several:
        buffer.__dict__["issued"] = issued
        own.flying[id(buffer)] = weakref.ref(buffer)
    recorder.tell("started", issued)
    return buffers


def _waiting(issued: Issued, kind: type[Exception], run: Callable[[], T]) -> T:
    """Run what may wait for other ranks, and say why where it fails."""
    own = issued.world
    before, own.waiting = own.waiting, Waiting(issued.group, issued.step, time.monotonic())
    try:
        return run()
    except kind as error:
        raise ended(own, own.waiting, error) from error
    finally:
        own.waiting = before


@functools.lru_cache(maxsize=1024)
def _texts(axis: str, label: str, shapes: tuple[tuple[torch.dtype, torch.Size], ...]) -> tuple[str, str]:
    """Write a collective for the chain, and for messages."""
    about = decoded(label)
    # Ranks that begin different calls hear of it by the message itself.
    who = "compare" if about.is_comparison else f"{about.verb} {about.ids}"
    shown = "" if about.is_comparison else about.parts or described(shapes)
    unit, size = (f" of {text}" if text else "" for text in (about.unit, shown))
    return f"over {axis}: {who}: {about.parts or shapes}\n", f"({about.verb}{unit}) over {axis!r}{size}"


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
    recorder = flight_recorder()
    issued.world.flying.pop(id(buffer), None)
    recorder.tell("waits", issued)
    out = _waiting(issued, RuntimeError, lambda: _compat.wait_tensor(buffer))
    issued.left, issued.group.finished = issued.left - 1, issued.step
    recorder.tell("landed", issued)
    return out


@contextmanager
def watched(watcher: W) -> Iterator[W]:
    """Tell a watcher of this thread's collectives inside the context, those of a backward pass included.

    Args:
        watcher: The one that is told.

    Yields:
        The watcher.
    """
    recorder = flight_recorder()
    recorder.watchers += (watcher,)
    try:
        with _compat.keeping_thread_object(KEY, objects_of_this_rank()):
            yield watcher
    finally:
        recorder.watchers = tuple(other for other in recorder.watchers if other is not watcher)


class _Recording(Record, Watcher):
    def starts(self, issued: Issued, _: Sequence[torch.Tensor]) -> None:
        if issued.collective is not None:
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
