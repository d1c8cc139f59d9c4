"""The flight recorder: which collectives this rank has started and finished, and the message where one fails."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fshard import _compat
from fshard.comm.events import (
    KEY,
    WIDTH,
    Collective,
    Label,
    Record,
    decoded,
    listed,
    objects_of_this_rank,
    of_this_rank,
)

# Seconds in which the other ranks may answer; those that fail with this one do so at once.
ANSWERS = 1.0


class CollectiveError(RuntimeError):
    """A collective failed: a rank is gone, late beyond the process group's timeout, or does something else.

    >>> import torch, fshard as fs
    >>> def program():
    ...     mesh = fs.init_mesh({"shard": -1}, device="cpu")
    ...     params, rank = fs.shard({"w": torch.ones(2)}, fs.fully_shard(mesh)), mesh.get_rank()
    ...     loss_and_grads = fs.value_and_grad(lambda p: fs.gather(p)["w"].sum())
    ...     try:
    ...         fs.checkpoint.to_state_dict(params, rank0_only=True) if rank == 0 else loss_and_grads(params)
    ...     except fs.comm.CollectiveError as error:
    ...         return str(error)
    >>> print(fs.testing.spmd(program, world=2)[0])  # every rank must call to_state_dict
    collective mismatch between ranks
      rank 0: checkpoint.to_state_dict
      rank 1: value_and_grad begins
    To fix: let every rank make the same calls in the same order, also those whose result one rank alone uses, ...
    """


@dataclass(slots=True, eq=False)
class Issued:
    """One collective under way.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        axis: Name of the mesh axis.
        size: Ranks on it.
        group: Name of its process group.
        label: Who asked for it, and what for, encoded.
        number: How many this rank had started with it.
        left: Buffers that have not been waited for.
    """

    op: str
    axis: str
    size: int
    group: str
    label: str
    number: int
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
    """Counts one rank's collectives, and tells watchers of them.

    Attributes:
        started: How many have started.
        finished: The last one of which every buffer has landed.
        failed: How often one has failed, by process group.
        watchers: Those who are told.
    """

    started: int = 0
    finished: Issued | None = None
    failed: dict[str, int] = field(default_factory=dict)
    watchers: tuple[Watcher, ...] = ()


def flight_recorder() -> FlightRecorder:
    """Find this rank's flight recorder.

    Returns:
        The recorder, the same one at each call of this thread.

    >>> import torch, fshard as fs
    >>> def program():
    ...     axis = fs.axis_of(fs.init_mesh({"shard": -1}, device="cpu"))
    ...     before = fs.comm.flight_recorder().started
    ...     fs.comm.all_reduce([torch.ones(2)], axis, "example")
    ...     recorder = fs.comm.flight_recorder()
    ...     return recorder.started - before, recorder.finished.op, str(recorder.finished.about)
    >>> fs.testing.spmd(program, world=2)[0]
    (1, 'all_reduce', 'example')
    """
    return of_this_rank(FlightRecorder)


def started(
    op: str, kernel: Callable[[], Any], tensors: Sequence[torch.Tensor], about: tuple[str, int, str, str]
) -> Any:
    """Start a collective; its buffers lead to what the flight recorder has of it.

    Args:
        op: Its name.
        kernel: Starts it and returns a buffer in flight, or several.
        tensors: Those it sends.
        about: Its axis, size, group and encoded label.

    Returns:
        The result of the kernel.
    """
    recorder = flight_recorder()
    recorder.started += 1
    issued = Issued(op, *about, recorder.started)
    for watcher in recorder.watchers:
        watcher.starts(issued, tensors)
    try:
        buffers = kernel()
    except dist.DistError as error:
        raise _explained(issued, recorder, error) from error
    several = buffers if isinstance(buffers, list) else [buffers]
    issued.left = len(several)
    for buffer in several:
        buffer.__dict__["issued"] = issued
    for watcher in recorder.watchers:
        watcher.started(issued)
    return buffers


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
    for watcher in recorder.watchers:
        watcher.waits(issued)
    try:
        out = _compat.wait_tensor(buffer)
    except RuntimeError as error:
        raise _explained(issued, recorder, error) from error
    issued.left -= 1
    if not issued.left:
        recorder.finished = issued
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


def _explained(issued: Issued, recorder: FlightRecorder, error: Exception) -> CollectiveError:
    """Say which collective failed, and which one this rank and the others finished last.

    A rank that fails leaves a note in the store by which the ranks had found each other, and reads those of the others.
    Until then nothing is written there.
    """
    own, ranks = dist.get_rank(), _compat.group_ranks(issued.group)
    notes = {own: json.dumps([_noted(issued), recorder.finished and _noted(recorder.finished)])}
    failures = recorder.failed[issued.group] = recorder.failed.get(issued.group, 0) + 1
    # Notes of a group's first failure are not read at its second one.
    notes |= _compat.exchange_notes(f"fshard/{issued.group}/{failures}", own, notes[own], ranks, ANSWERS)
    backend = (str(error).splitlines() or [type(error).__name__])[0]
    about = issued.about
    lines = [
        f"{_described(*_noted(issued))} failed on rank {own}",
        f"  backend: {backend[:WIDTH]}",
        *([f"  leaves: {listed(about.leaves)}"] if about.units and about.leaves else []),
        *(f"  rank {rank}{', this one' if rank == own else ''}: {_said(notes.get(rank))}" for rank in ranks),
        f"To fix: {_remedy([rank for rank in ranks if rank not in notes], notes)}.",
    ]
    return CollectiveError("\n".join(lines))


def _noted(issued: Issued) -> tuple[str, int, str, str]:
    return issued.op, issued.number, issued.axis, issued.label


def _described(op: str, number: int, axis: str, label: str) -> str:
    about = decoded(label)
    return f"{op} number {number} ({about.verb}{f' of {about.unit}' if about.unit else ''}) over {axis!r}"


def _said(note: str | None) -> str:
    if note is None:
        return f"did not answer within {ANSWERS:g} s: it was killed, has ended, hangs or computes"
    failed, finished = json.loads(note)
    return f"failed in {_described(*failed)}; finished last: {_described(*finished) if finished else 'nothing'}"


def _remedy(silent: list[int], notes: dict[int, str]) -> str:
    if silent:
        ranks = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        return f"see why {ranks} did not come; where that takes long for a reason, raise the process group's timeout"
    if len(set(notes.values())) == 1:
        return (
            "all came, but not in time, or with other shapes or sizes: give them the same on every rank, raise the "
            "process group's timeout, or see which rank is late by fs.trace"
        )
    return "let every rank run the same program; where the operations above differ, the rank behind has left one out"
