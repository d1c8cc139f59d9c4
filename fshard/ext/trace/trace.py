"""trace: record when the collectives of real steps start and land, on every rank."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import fshard as fs
from fshard.ext import _compat
from fshard.ext.trace.events import Event, Timeline, offsets, packed, unpacked
from fshard.ext.trace.report import Report
from fshard.extend import Exchange, expect, watched

# Exchanges between clocks, of which the closest ones count, and the label of what a report sends.
ROUNDS, LABEL = 16, "trace"


class Trace:
    """The record of this rank, which `report` puts together with those of the others."""

    def __init__(self) -> None:
        """Begin."""
        self._events: list[Event] = []
        self._flying: dict[int, Event] = {}
        self._error, self._waits, self._end = "", 0, 0
        self._begin = time.perf_counter_ns()

    def report(self, alone: bool = False, mesh: Any | None = None) -> Report:
        """Collect the records of all ranks, and find the stragglers.

        Every rank calls it, also one whose trace was interrupted or recorded nothing: it exchanges clocks and sends
        every rank all timelines. Where one does not, the others wait for it until the process group's timeout. Times of
        ranks on different hosts are brought to one clock, and the report tells how exactly.

        Args:
            alone: Whether to leave the other ranks out, which then do not call it: as after an error, when they may be
                gone.
            mesh: The mesh of some ranks whose ranks report; None for all ranks of this run.

        Returns:
            The report, the same on every rank.

        Raises:
            ValueError: if the trace is still running, or this rank is not one of the mesh's.

        >>> import torch, fshard as fs
        >>> def program():
        ...     params = fs.shard({"w": torch.ones(4)}, fs.fully_shard(fs.init_mesh({"shard": -1}, device="cpu")))
        ...     with fs.trace() as trace:
        ...         fs.gather(params)
        ...     return trace.report()
        >>> report = fs.testing.spmd(program, world=2)[0]
        >>> [row.rank for row in report.ranks], [row.bytes for row in report.units if row.unit == "['w']"]
        ([0, 1], [8.0])
        """
        expect(self._end, "trace.report", "a trace that has ended", "one still running", "leave its context")
        if alone:
            return Report([self._own()], 0)
        exchange = Exchange(LABEL, mesh=mesh)
        rows = map(unpacked, exchange.everyone(packed((self._own(), _exchange(exchange.ranks)))))
        timelines, exchanges = zip(*rows, strict=True)
        ahead, error = offsets(exchanges)
        return Report([line.shifted(n) for line, n in zip(timelines, ahead, strict=True)], error)

    def starts(self, issued: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a collective is called."""
        event = Event(issued.collective, tuple(issued.group.ranks), time.perf_counter_ns())
        self._flying[id(issued)] = event
        self._events.append(event)

    def started(self, issued: Any) -> None:
        """Note that it is under way."""
        self._flying[id(issued)].issued = time.perf_counter_ns()

    def waits(self, issued: Any) -> None:
        """Note that one of its buffers is waited for."""
        self._waits = time.perf_counter_ns()

    def landed(self, issued: Any) -> None:
        """Note that the buffer has landed."""
        end = time.perf_counter_ns()
        # Collectives that were started before the trace are not in it.
        event = self._flying.get(id(issued))
        if event is not None:
            event.waits.append((self._waits, end))
            if not issued.left:
                del self._flying[id(issued)]

    def _conclude(self, error: BaseException | None) -> None:
        self._end = time.perf_counter_ns()
        self._error = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        for event in self._flying.values():
            # A collective that was interrupted while it started is there for the other ranks.
            event.issued = event.issued or self._end
        self._flying = {}

    def _own(self) -> Timeline:
        return Timeline(Exchange(LABEL).rank, self._begin, self._end, self._error, tuple(self._events))


def _exchange(axis: fs.Axis) -> list[tuple[int, int]]:
    """Exchange a number with all ranks several times, and note when each exchange began and ended here."""
    noted = []
    for _ in range(ROUNDS if axis.size > 1 else 0):
        begin = time.perf_counter_ns()
        fs.comm.all_gather([torch.zeros(1)], axis, LABEL)
        noted.append((begin, time.perf_counter_ns()))
    return noted


@contextmanager
def trace() -> Iterator[Trace]:
    """Record when each collective of this thread starts and is waited for, eager or jitted.

    Nothing is sent inside the context, and nothing in it is slower but collectives, by a few microseconds. The time
    between them is computing, which a report counts for the unit that was gathered last, or whose gradients it makes.
    Inside another trace both record. On CUDA times are those of the host, which does not wait for the device.

    Yields:
        The trace, whose `report` every rank calls once the context has ended; one that was left by an exception has
        the events until then.

    Raises:
        ValueError: inside a function that `fs.jit` traces, where nothing runs.

    >>> import fshard as fs
    >>> with fs.trace() as trace:
    ...     _ = torch.ones(2) + 1
    >>> len(trace.report().timelines)
    1
    """
    needed = "a place around the call of a traced function"
    expect(not _compat.is_tracing(), "trace", needed, "one inside, where nothing runs")
    recorded = Trace()
    try:
        with watched(recorded):
            yield recorded
    except BaseException as error:
        recorded._conclude(error)
        raise
    recorded._conclude(None)
