"""spmd: one program on several ranks, which are processes, or threads of this process."""

import atexit
import ctypes
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fshard import comm
from fshard._compat import ThreadedCollective, shared_dual_level, threaded_process_groups
from fshard.errors import expect
from fshard.testing.workers import RankError, Workers
from fshard.tree.checks import POSITIVE, check_function, check_numbers

T = TypeVar("T")

# Seconds that simulated ranks have.
SECONDS = 60.0

# Seconds in which ranks may still end, or fail, by themselves once one has failed.
GRACE = 1.0
# Seconds that the interpreter waits at its end for ranks that are still stuck.
EXIT_GRACE = 10.0
# Simulated ranks; a machine has no memory for the threads of many more.
MAX_THREADS = 4096


def spmd(f: Callable[[], T], world: int | Workers, timeout: float | None = None) -> list[T]:
    """Run `f` on every rank of a world, simulated or real.

    A simulated rank is a thread of this process with process groups of its own, built on those that torch has for its
    tests. Code written for `torch.distributed` runs unchanged, subgroups and device meshes included; only
    point-to-point messages are missing. Autograd, dispatch modes and forward-mode AD belong to a rank. State of the
    process is shared by all ranks: draw random numbers from a `torch.Generator`, catch warnings outside `f`.

    Args:
        f: The program of one rank. `torch.distributed` is initialised when it is called.
        world: Number of ranks to simulate by threads, or the processes to run them.
        timeout: Seconds after which ranks that have not ended are stuck; None means 60 for simulated ranks, and what
            the Workers were made with.

    Returns:
        What `f` returned on each rank, in rank order.

    Raises:
        ValueError: `f` is no function, or `world` or `timeout` out of range.
        RankError: A rank failed, ended or was stuck; of a simulation, its error on the lowest failing rank is the
            cause, or ranks deadlocked or called different collectives at once.
        RuntimeError: A simulation is already running.

    >>> spmd(dist.get_rank, world=3)
    [0, 1, 2]
    """
    check_function("spmd", f)
    if timeout is not None:
        check_numbers("spmd", POSITIVE, timeout=timeout)
    if isinstance(world, Workers):
        return world.run(f, timeout)
    ranks = type(world) is int and 1 <= world <= MAX_THREADS
    expect(ranks, "spmd", f"world to be Workers, or a whole number from 1 to {MAX_THREADS}", f"{world!r:.40}")
    simulation = _Simulation(f, world, SECONDS if timeout is None else timeout)
    with threaded_process_groups(simulation.join), shared_dual_level():
        return simulation.run()


class _Stop(SystemExit):
    """Ends a rank whose simulation is over: no Exception, which a program may handle, and silent in a thread."""


class _Call(NamedTuple):
    """Message of a rank that waits in a collective.

    Attributes:
        rank: The rank.
        collective: The collective.
        world: What the rank knows of the others, where it is in a collective of fshard's.
        reply: Gets True when the data is in place, False to stop, or the text of an error.
    """

    rank: int
    collective: ThreadedCollective
    reply: queue.SimpleQueue[bool | str]
    world: comm.World | None

    @property
    def key(self) -> tuple[str, int]:
        """The group, and how often it has been made anew; -1 for collectives that are not fshard's."""
        return self.collective.group, self.world.generation if self.world else -1


class _Wake(NamedTuple):
    """Message of a rank that has failed: no collective of a group works any more."""

    key: tuple[str, int]
    text: str


class _End(NamedTuple):
    """Message of a rank that has ended: the value or the error of its program."""

    rank: int
    value: Any
    error: BaseException | None


def _wait_for(threads: list[threading.Thread]) -> None:
    """Let ranks end before the interpreter does: a thread that comes back from C++ later aborts the process."""
    deadline = time.monotonic() + EXIT_GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class _Simulation:
    """The ranks' threads, and the caller's, which alone keeps account of the ranks and runs their collectives.

    A rank that ran a collective would show it to its dispatch modes and torch.func levels, which see no real one.
    """

    def __init__(self, f: Callable[[], Any], world_size: int, timeout: float) -> None:
        self.timeout = timeout
        self.inbox: queue.SimpleQueue[_Call | _End | _Wake] = queue.SimpleQueue()
        self.broken: dict[tuple[str, int], str] = {}
        self.waiting: dict[int, _Call] = {}
        self.ended: dict[int, _End] = {}
        self.over = threading.Event()
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.threads = [
            threading.Thread(target=self._rank, args=(f, rank, store), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]

    def _rank(self, f: Callable[[], Any], rank: int, store: Any) -> None:
        """Run the program of a rank, on its thread."""
        try:
            limit = timedelta(seconds=self.timeout)
            dist.init_process_group("threaded", rank=rank, world_size=len(self.threads), store=store, timeout=limit)
            comm.world().wake = lambda group, generation, text: self.inbox.put(_Wake((group, generation), text))
            try:
                value = f()
            finally:
                # A rank that ends after its simulation sees the process's own group, which is not its to destroy.
                if not self.over.is_set() and dist.is_initialized():
                    dist.destroy_process_group()
            self.inbox.put(_End(rank, value, None))
        except BaseException as error:
            self.inbox.put(_End(rank, None, error))

    def join(self, collective: ThreadedCollective) -> None:
        """Wait for a collective, on the thread of a rank that called it."""
        if threading.current_thread() not in self.threads:
            raise RuntimeError(f"{collective.kind} was called on a thread that is no rank of the running simulation")
        reply: queue.SimpleQueue[bool | str] = queue.SimpleQueue()
        world = comm.world() if dist.is_initialized() else None
        own = world if world is not None and world.waiting is not None else None
        self.inbox.put(_Call(self.threads.index(threading.current_thread()), collective, reply, own))
        match reply.get():
            case False:
                raise _Stop
            case str() as reason:
                raise dist.DistBackendError(reason)

    def run(self) -> list[Any]:
        """Run the ranks until all have ended or one has failed, and return their values or raise their error."""
        deadline = time.monotonic() + self.timeout
        try:
            for thread in self.threads:
                thread.start()
            while len(self.ended) < len(self.threads):
                message = self._receive(deadline)
                if message is None:
                    raise RankError(self._report(f"timed out after {self.timeout} s"))
                if isinstance(message, _Call):
                    self._run_if_complete(message.collective)
                elif isinstance(message, _End) and message.error:
                    break
                self._fail(lambda call: self.broken.get(call.key))
                if self.waiting and len(self.waiting) + len(self.ended) == len(self.threads):
                    if not any(call.world for call in self.waiting.values()):
                        raise RankError(self._report("deadlock"))
                    text = self._circle()
                    self._fail(lambda call: text if call.world else None)  # noqa: B023
        finally:
            self._stop()
        ends = [self.ended[rank] for rank in sorted(self.ended)]
        for end in ends:
            if end.error and not isinstance(end.error, _Stop):
                text = "".join(traceback.format_exception(end.error))
                raise RankError(f"rank {end.rank} of {len(self.threads)} failed:\n{text}") from end.error
        return [end.value for end in ends]

    def _fail(self, reason: Callable[[_Call], str | None]) -> None:
        """Let ranks that wait in a collective of fshard's end with an error, where there is a reason."""
        for rank, call in list(self.waiting.items()):
            if text := reason(call):
                del self.waiting[rank]
                call.reply.put(text)

    def _circle(self) -> str:
        """Say where ranks wait that nobody will come to."""
        positions = {r: comm.Position.of(c.world) for r, c in self.waiting.items() if c.world}
        known = {rank: position.at() for rank, position in positions.items()}
        known |= {rank: f"waits in {self.waiting[rank].collective.kind}" for rank in self.waiting if rank not in known}
        known |= dict.fromkeys(self.ended, "has ended")
        lines = [f"  rank {rank} {known[rank]}" for rank in sorted(known)]
        return "\n".join(["ranks wait for each other in different collectives", *lines])

    def _receive(self, deadline: float) -> _Call | _End | _Wake | None:
        """Take account of the next message; None if there is none by the deadline."""
        try:
            message = self.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if isinstance(message, _Call):
            self.waiting[message.rank] = message
        elif isinstance(message, _Wake):
            self.broken.setdefault(*message)
        else:
            self.ended[message.rank] = message
        return message

    def _run_if_complete(self, collective: ThreadedCollective) -> None:
        """Run a collective if every member of its group has called one."""
        calls = [self.waiting[rank] for rank in collective.ranks if rank in self.waiting]
        calls = [call for call in calls if call.collective.group == collective.group]
        if len(calls) < len(collective.ranks):
            return
        steps = {call.rank: call.world.waiting.step for call in calls if call.world and call.world.waiting}
        if len(steps) == len(calls):
            if found := comm.unequal(steps, collective.ranks):
                self.broken[calls[0].key] = found
                return
        elif len({call.collective.kind for call in calls}) > 1:
            raise RankError(self._report("different collectives at once"))
        try:
            # Inference mode: tensors that a rank made in inference mode can be written in no other.
            with torch.inference_mode():
                collective.run([call.collective.data for call in calls])
        except Exception as error:
            raise RankError(self._report(f"{collective.kind} failed: {error}")) from error
        for call in calls:
            del self.waiting[call.rank]
            call.reply.put(True)

    def _stop(self) -> None:
        """End all ranks: those in a collective at once, others when they call one, at last by an interrupt."""
        self.over.set()
        self._drain()
        for rank, thread in enumerate(self.threads):
            if rank not in self.ended and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stop))
        self._drain()
        for rank in self.ended:
            self.threads[rank].join(GRACE)
        if stuck := [thread for thread in self.threads if thread.is_alive()]:
            atexit.register(_wait_for, stuck)

    def _drain(self) -> None:
        """Refuse all collectives until all ranks have ended or the grace is over."""
        deadline = time.monotonic() + GRACE
        while len(self.ended) < len(self.threads):
            for call in self.waiting.values():
                call.reply.put(False)
            self.waiting.clear()
            if self._receive(deadline) is None:
                return

    def _report(self, headline: str) -> str:
        """Report the state of each rank: ended, waiting in a collective or running, with its stack."""
        stuck = [rank for rank in range(len(self.threads)) if rank not in self.ended]
        lines = [f"{headline}: ranks {sorted(self.ended)} of {len(self.threads)} finished, ranks {stuck} did not\n"]
        frames = sys._current_frames()
        for rank in stuck:
            if rank in self.waiting:
                collective = self.waiting[rank].collective
                lines.append(f"rank {rank} waits in {collective.kind} with ranks {collective.ranks}:\n")
            else:
                lines.append(f"rank {rank} runs:\n")
            ident = self.threads[rank].ident
            if ident in frames:
                stack = traceback.extract_stack(frames[ident])
                lines += traceback.format_list(
                    [frame for frame in stack if frame.filename not in (__file__, threading.__file__)]
                )
        return "".join(lines)
