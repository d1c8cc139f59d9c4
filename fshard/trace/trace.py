"""trace: what the collectives of real steps did and when."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fshard import _compat, comm
from fshard.mesh import world
from fshard.trace.clocks import LABEL, exchange, offsets
from fshard.trace.events import Event, Timeline, packed, unpacked
from fshard.trace.memory import CUDA, cuda_meter, meter
from fshard.trace.report import Report

# Nanoseconds between two looks at the memory, which take longer than all else that is noted of a collective.
SAMPLING = 5_000_000


class _Noted:
    """One collective while it is under way."""

    __slots__ = ("about", "begin", "bytes", "issued", "landed", "members", "memory", "waits")

    def __init__(self, about: comm.Issued, members: tuple[int, ...], nbytes: int, memory: int) -> None:
        self.about, self.members, self.bytes, self.memory, self.landed = about, members, nbytes, memory, memory
        self.begin = self.issued = 0
        self.waits: list[tuple[int, int]] = []

    def event(self) -> Event:
        op, axis, size, label = self.about.op, self.about.axis, self.about.size, self.about.label
        full = self.bytes * (size if op == "all_gather" else 1)
        sent = comm.Collective(op, axis, size, label, full, 1, False).sent
        return Event(
            op,
            axis,
            self.members,
            *self.about.about,
            sent,
            self.begin,
            self.issued,
            tuple(self.waits),
            (self.memory, self.landed),
        )


class Trace:
    """What `trace` records of this rank; `report` makes something of it."""

    def __init__(self) -> None:
        """Begin."""
        self._meter = meter()
        self._noted: list[_Noted] = []
        self._flying: dict[int, _Noted] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._error, self._waits, self._end, self._left = "", 0, 0, 0
        self._held, self._begin = self._meter.read(), time.perf_counter_ns()
        self._read_at, self._last = self._begin, self._held
        self._timeline: Timeline | None = None

    def report(self, alone: bool = False) -> Report:
        """Collect what all ranks have recorded, and find out who waited for whom.

        Every rank calls it, also one whose trace was interrupted or recorded nothing: it exchanges clocks and sends
        every rank all timelines. Where one does not, the others wait for it until the process group's timeout. Times of
        ranks on different hosts are brought to one clock, and the report tells how exactly.

        Args:
            alone: Whether to leave the other ranks out, which then do not call it: as after an error, when they may be
                gone.

        Returns:
            The report, the same on every rank.

        Raises:
            ValueError: if the trace is still running.
        """
        if not self._end:
            raise ValueError("trace.report: expected a trace that has ended, got one still running; leave its context")
        if alone:
            return Report([self._own()], 0)
        axis = world()
        said = comm.texts(packed(self._own(), exchange(axis)), axis, LABEL)
        timelines, exchanges = zip(*map(unpacked, said), strict=True)
        ahead, error = offsets(exchanges)
        return Report([line.shifted(n) for line, n in zip(timelines, ahead, strict=True)], error)

    def starts(self, issued: comm.Issued, tensors: Sequence[torch.Tensor]) -> None:
        """A collective is called."""
        device = tensors[0].device
        if device.type == "cuda" and self._meter.name != CUDA:
            self._meter.close()
            self._meter = cuda_meter(device)
            self._held = self._last = self._meter.read()
        members = self._members.get(issued.group)
        if members is None:
            members = self._members[issued.group] = issued.members
        noted = _Noted(issued, members, sum(tensor.nbytes for tensor in tensors), self._memory())
        self._flying[id(issued)] = noted
        self._noted.append(noted)
        noted.begin = time.perf_counter_ns()

    def started(self, issued: comm.Issued) -> None:
        """It is under way."""
        self._flying[id(issued)].issued = time.perf_counter_ns()

    def waits(self, issued: comm.Issued) -> None:
        """One of its buffers is waited for."""
        self._waits = time.perf_counter_ns()

    def landed(self, issued: comm.Issued) -> None:
        """It has landed."""
        end = time.perf_counter_ns()
        # What was started before the trace is not in it.
        noted = self._flying.get(id(issued))
        if noted is not None:
            noted.waits.append((self._waits, end))
            noted.landed = self._memory()
            if not issued.left:
                del self._flying[id(issued)]

    def _memory(self) -> int:
        now = time.perf_counter_ns()
        if now - self._read_at >= SAMPLING:
            self._read_at, self._last = now, self._meter.read()
        return self._last

    def _conclude(self, error: BaseException | None) -> None:
        """End; what was noted becomes a timeline later, outside of what is traced."""
        self._end, self._left = time.perf_counter_ns(), self._meter.read()
        self._meter.close()
        self._error = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def _own(self) -> Timeline:
        """What this rank has recorded."""
        if self._timeline is None:
            for noted in self._noted:
                # It was interrupted while it started, and is there for the other ranks.
                noted.issued = noted.issued or self._end
            events = tuple(noted.event() for noted in self._noted)
            held = (self._held, self._left)
            about = (comm.rank(world()), self._begin, self._end, held, self._meter.name, self._error)
            self._timeline = Timeline(*about, events)
            self._noted, self._flying = [], {}
        return self._timeline


@contextmanager
def trace() -> Iterator[Trace]:
    """Record when each collective of this thread starts and is waited for, and the memory then, eager or jitted.

    Nothing is sent inside the context, and nothing in it is slower but collectives, by a few microseconds. What lies
    between them is computing, which a report counts for the unit that was gathered last, or whose gradients it makes.
    Inside another trace both record. Memory is read every 5 ms at most: what Linux holds resident for the process
    (elsewhere its peak), or on CUDA what torch's allocator has given out. On CUDA times are those of the host, which
    does not wait for the device.

    Yields:
        The trace, whose `report` every rank calls once the context has ended; one that was left by an exception has
        what there was until then.

    Raises:
        ValueError: inside of what `fs.jit` traces, where nothing runs.

    >>> import fshard as fs
    >>> with fs.trace() as trace:
    ...     _ = torch.ones(2) + 1
    >>> len(trace.report().timelines)
    1
    """
    if _compat.is_tracing():
        raise ValueError(
            "trace: expected a place around the call of a traced function, got one inside, where nothing runs"
        )
    recorded = Trace()
    try:
        with comm.watched(recorded):
            yield recorded
    except BaseException as error:
        recorded._conclude(error)
        raise
    recorded._conclude(None)
