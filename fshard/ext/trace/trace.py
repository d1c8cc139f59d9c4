"""trace: record when the collectives of real steps start and land, on every rank."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fshard.ext.trace.events import Event, Timeline, find_offsets, pack, unpack
from fshard.ext.trace.report import Report
from fshard.extend import Exchange, is_tracing, watched

# So many times clocks are exchanged; the closest exchanges count.
ROUNDS = 16
# The label of what a report sends.
LABEL = "trace"


class Trace:
    """The record of this rank, which `report` puts together with those of the others."""

    def __init__(self) -> None:
        """Begin."""
        self._events: list[Event] = []
        self._in_flight: dict[int, Event] = {}
        self._error = ""
        self._wait_begin = 0
        self._end = 0
        self._begin = time.perf_counter_ns()

    def report(self, alone: bool = False, mesh: Any | None = None) -> Report:
        """Collect the records of all ranks, and find the stragglers.

        Every rank must call it, also one whose trace was interrupted or recorded nothing: it exchanges clocks and sends
        all timelines to every rank. If a rank does not call it, the others wait until the timeout of the process group.
        Times of ranks on different hosts are brought to one clock, and the report says how exactly.

        Args:
            alone: Whether to leave the other ranks out. Then they need not call it, for example after an error, when
                they may be gone.
            mesh: The mesh whose ranks report; None for all ranks of this run.

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
        >>> [row.rank for row in report.ranks], [row.bytes[0] for row in report.units if row.unit == "['w']"]
        ([0, 1], [8.0])
        """
        if not self._end:
            raise ValueError("trace.report: the trace is still running. Leave its context first.")
        if alone:
            return Report([self._make_timeline()], clock_error=0)
        exchange = Exchange(LABEL, mesh=mesh)
        packed = pack((self._make_timeline(), _exchange_clocks(exchange)))
        timelines, exchanges = zip(*map(unpack, exchange.all_gather_object(packed)), strict=True)
        offsets, error = find_offsets(exchanges)
        shifted = [timeline.shift(offset) for timeline, offset in zip(timelines, offsets, strict=True)]
        return Report(shifted, clock_error=error)

    def starts(self, issued: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Note that a collective is called."""
        event = Event(issued.collective, tuple(issued.group.ranks), time.perf_counter_ns())
        self._in_flight[id(issued)] = event
        self._events.append(event)

    def started(self, issued: Any) -> None:
        """Note that it is under way."""
        self._in_flight[id(issued)].issued = time.perf_counter_ns()

    def waits(self, issued: Any) -> None:
        """Note that one of its buffers is waited for."""
        self._wait_begin = time.perf_counter_ns()

    def landed(self, issued: Any) -> None:
        """Note that the buffer has landed."""
        end = time.perf_counter_ns()
        # Collectives that were started before the trace are not in it.
        event = self._in_flight.get(id(issued))
        if event is not None:
            event.waits.append((self._wait_begin, end))
            if not issued.left:
                del self._in_flight[id(issued)]

    def _conclude(self, error: BaseException | None) -> None:
        self._end = time.perf_counter_ns()
        self._error = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        for event in self._in_flight.values():
            # A collective that was interrupted while it started is there for the other ranks.
            event.issued = event.issued or self._end
        self._in_flight = {}

    def _make_timeline(self) -> Timeline:
        return Timeline(Exchange(LABEL).rank, self._begin, self._end, self._error, tuple(self._events))


def _exchange_clocks(exchange: Exchange) -> list[tuple[int, int]]:
    """Exchange a number with all ranks several times, and note when each exchange began and ended here."""
    times = []
    for _ in range(ROUNDS if exchange.ranks.size > 1 else 0):
        begin = time.perf_counter_ns()
        # Not a tensor, which would travel through an accelerator where only that can send.
        exchange.merge_objects(0, max)
        times.append((begin, time.perf_counter_ns()))
    return times


@contextmanager
def trace() -> Iterator[Trace]:
    """Record when each collective of this thread starts and is waited for, eager or jitted.

    The trace sends nothing inside the context, and slows down nothing but collectives, by a few microseconds. The time
    between them counts as computing, for the unit that was gathered last or whose gradients are sent next. Traces may
    be nested, and each records. On CUDA times are those of the host, which does not wait for the device.

    Yields:
        The trace, whose `report` every rank calls once the context has ended. If an exception leaves the context, the
        trace has the events until then.

    Raises:
        ValueError: inside a function that `fs.jit` traces, where nothing runs.

    >>> import fshard as fs
    >>> with fs.trace() as trace:
    ...     _ = torch.ones(2) + 1
    >>> len(trace.report().timelines)
    1
    """
    if is_tracing():
        raise ValueError(
            "trace: it is called inside a function that fs.jit traces, where nothing runs. Put it around the call of "
            "the jitted function."
        )
    recorded = Trace()
    try:
        with watched(recorded):
            yield recorded
    except BaseException as error:
        recorded._conclude(error)
        raise
    recorded._conclude(None)
