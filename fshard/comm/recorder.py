"""The flight recorder: which collectives this rank has started and finished, and who is told of them."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.events import (
    KEY,
    Collective,
    Record,
    Shapes,
    Whose,
    decoded,
    described,
    objects_of_this_rank,
    of_this_rank,
)
from fshard.comm.failure import connected, ended, failure
from fshard.comm.groups import Group, Issued, Link, world

T = TypeVar("T")
Tensors = list[torch.Tensor]


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


W = TypeVar("W")


class Watchers(list[Any]):
    """Those who are told of one rank's collectives."""

    def tell(self, moment: str, *args: Any) -> None:
        """Call a method of each."""
        for watcher in self:
            getattr(watcher, moment)(*args)


def started(
    op: str, kernel: Callable[[Link, Group], Tensors], tensors: Tensors, whose: Whose, *sizes: Sequence[int]
) -> Tensors:
    """Start a collective; its buffers lead to what the flight recorder has of it.

    Args:
        op: Its name.
        kernel: Starts it and returns buffers in flight.
        tensors: Those it sends.
        whose: Its axis, size, group and encoded label.
        *sizes: The rows for each rank and from each, where ranks may send different ones.

    Returns:
        The result of the kernel.

    Raises:
        CollectiveError: if it cannot start, or the group is broken.
    """
    watchers, own, (axis, _, name, label) = of_this_rank(Watchers), world(), whose
    if own.broken is not None:
        raise failure(own)
    group = connected(own, name)
    hashed, text = _texts(op, axis, label, tuple((tensor.dtype, tensor.shape[len(sizes) > 0 :]) for tensor in tensors))
    text = f"{text} in {own.call.what}" if own.call is not None else text
    step = group.enter(op, hashed, text, *sizes)
    entry = Collective.of(op, tensors, sizes, whose) if watchers else None
    issued = Issued(entry, own, group, step)
    watchers.tell("starts", issued, tensors)
    # Other errors are not of the connections, and pass through.
    buffers = _waiting(issued, dist.DistError, lambda: kernel(step, group))
    issued.left = len(buffers)
    for buffer in buffers:
        buffer.__dict__["issued"] = issued
        own.flying[id(buffer)] = buffer
    watchers.tell("started", issued)
    return buffers


def _waiting(issued: Issued, kind: type[Exception], run: Callable[[], T]) -> T:
    """Run what may wait for other ranks, and say why where it fails."""
    own = issued.world
    own.waiting, issued.since = issued, time.monotonic()
    try:
        return run()
    except kind as error:
        raise ended(own, issued, error) from error
    finally:
        own.waiting = None


@functools.lru_cache(maxsize=1024)
def _texts(op: str, axis: str, label: str, shapes: Shapes) -> tuple[str, str]:
    """Write a collective for the chain, and for messages."""
    about = decoded(label)
    # Ranks that begin different calls hear of it by the message itself.
    who = "compare" if about.is_comparison else f"{about.verb} {about.units or about.leaves}"
    unit, shown = f" of {about.unit}" if about.unit else "", about.parts or described(shapes)
    return f"{op} over {axis}: {who}: {about.parts} {shapes}\n", f"({about.verb}{unit}) over {axis!r} of {shown}"


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
        return _compat.WAIT_TENSOR(buffer)
    watchers = of_this_rank(Watchers)
    issued.world.flying.pop(id(buffer), None)
    watchers.tell("waits", issued)
    out = _waiting(issued, RuntimeError, lambda: _compat.WAIT_TENSOR(buffer))
    issued.left -= 1
    watchers.tell("landed", issued)
    return out


@contextmanager
def watched(watcher: W) -> Iterator[W]:
    """Tell a watcher of this thread's collectives inside the context, those of a backward pass included.

    Args:
        watcher: The one that is told: a Watcher, or another object with its methods.

    Yields:
        The watcher.
    """
    watchers = of_this_rank(Watchers)
    watchers.append(watcher)
    try:
        with _compat.keeping_thread_object(KEY, objects_of_this_rank()):
            yield watcher
    finally:
        watchers[:] = [other for other in watchers if other is not watcher]


class _Recording(Record, Watcher):
    def starts(self, issued: Issued, _: Sequence[torch.Tensor]) -> None:
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
