"""spmd: one program on several ranks, which are processes, or threads of this process."""

import atexit
import ctypes
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fshard import comm
from fshard._compat import ThreadedCollective, hide_trace_from_pytest, shared_dual_level, threaded_process_groups
from fshard.errors import expect
from fshard.testing.workers import RankError, Workers, describe_failure, failed_rank, stuck_ranks
from fshard.tree.checks import SECONDS, check_arguments

T = TypeVar("T")

# Seconds that simulated ranks have.
SIMULATION_SECONDS = 60.0
# Seconds between two looks at the rank whose turn it is. One that has hardly computed meanwhile lets the next one run
# beside it, because it may wait for that one by a lock of the program's own.
PATIENCE = 0.1

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
    point-to-point messages are missing. Simulated ranks take turns: one runs until it ends or waits in a collective.
    Autograd, dispatch modes, forward-mode AD and torch's generator of the CPU, which is as the caller's at the start,
    belong to a rank. Other state of the process is shared by all ranks: catch warnings outside `f`. A rank that waits
    for something else, such as a lock of your own, lets others run beside it after 0.1 s.

    Args:
        f: The program of one rank. `torch.distributed` is initialised when it is called.
        world: Number of ranks to simulate by threads, or the processes to run them.
        timeout: Seconds after which ranks that have not ended are stuck; None means 60 for simulated ranks, and what
            the Workers were made with.

    Returns:
        What `f` returned on each rank, in rank order.

    Raises:
        ValueError: `world` or `timeout` is out of range.
        RankError: A rank failed, ended or was stuck; of a simulation, its error on the lowest failing rank is the
            cause, or ranks deadlocked or called different collectives at once.
        RuntimeError: A simulation is already running.

    >>> spmd(dist.get_rank, world=3)
    [0, 1, 2]
    """
    # Reports of pytest end at the line of the test.
    __tracebackhide__ = True
    if timeout is not None:
        check_arguments("spmd", SECONDS, timeout=timeout)
    if isinstance(world, Workers):
        return world.run(f, timeout)
    is_in_range = type(world) is int and 1 <= world <= MAX_THREADS
    expect(is_in_range, "spmd", f"world to be Workers, or a whole number from 1 to {MAX_THREADS}", f"{world!r:.40}")
    simulation = _Simulation(f, world, SIMULATION_SECONDS if timeout is None else timeout)
    with threaded_process_groups(simulation.join), shared_dual_level(), hide_trace_from_pytest():
        try:
            return simulation.run()
        finally:
            # A failed rank's error has its mesh, and what is remembered of the mesh's ranks has the simulation.
            simulation.ended.clear()


class _Stop(SystemExit):
    """Ends a rank whose simulation is over: no Exception, which a program may handle, and silent in a thread."""


class _Wait(NamedTuple):
    """A rank's wait in a collective.

    Attributes:
        collective: The collective.
        entry: Its entry in the chain of its group, if it is fshard's.
        generation: How often its group has been made anew; -1 if it is not fshard's.
    """

    collective: ThreadedCollective
    entry: comm.ChainEntry | None
    generation: int

    @property
    def key(self) -> tuple[str, int]:
        """What a failure breaks: the group, until it is made anew."""
        return self.collective.group, self.generation

    def __str__(self) -> str:
        return f"waits in {self.entry or self.collective.kind}"


def _describe_mismatch(waits: Mapping[int, _Wait]) -> str | None:
    """Describe how the collectives that ranks of one group called differ, or return None."""
    entries = {rank: wait.entry for rank, wait in waits.items() if wait.entry}
    if len(entries) == len(waits):
        return comm.describe_difference(entries)
    kinds = {wait.collective.kind for wait in waits.values()}
    if len(kinds) == 1:
        return None
    return f"ranks call different collectives at once: {', '.join(sorted(kinds))}"


def _run_collective(collective: ThreadedCollective, waits: Mapping[int, _Wait]) -> str | None:
    """Run a collective on the data of all ranks; return the text of its failure, or None."""
    data = [wait.collective.data for wait in waits.values()]
    try:
        # A tensor that a rank made in inference mode can only be written to in inference mode.
        with torch.inference_mode():
            collective.run(data)
    except Exception as error:
        return f"{collective.kind} failed: {error}"
    return None


def _deliver(messages: Sequence[tuple[int, bytes, list[bytes]]]) -> None:
    """Put the message of each rank into the list of the rank that it is for: `run` of the collective of a swap."""
    for to, data, _ in messages:
        _, _, inbox = messages[to]
        inbox.append(data)


def _wait_for(threads: list[threading.Thread]) -> None:
    """Let ranks end before the interpreter does: a thread that comes back from C++ later aborts the process."""
    deadline = time.monotonic() + EXIT_GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class _Simulation:
    """The ranks' threads, and the caller's, which alone keeps account of the ranks and runs their collectives.

    A rank that ran a collective would show it to its dispatch modes and torch.func levels, which see no real one.

    A rank's thread runs `_run_program`, and what its program calls there: `join`, `aside`, `is_idle`, `wake`, `swap`.
    It puts into `inbox` what it asks of the caller's thread, which runs all other methods, and waits for its turn.
    """

    def __init__(self, f: Callable[[], Any], world_size: int, timeout: float) -> None:
        self.timeout = timeout
        # What ranks ask of the caller's thread, which calls it.
        self.inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        # The texts of failures by the groups that they broke: the `key` of the waits there.
        self.broken: dict[tuple[str, int], str] = {}
        # What each rank knows of the others.
        self.states: list[comm.RankState] = []
        self.waiting: dict[int, _Wait] = {}
        # What lets a rank go on: None, or the error that it is to raise.
        self.turns = [queue.SimpleQueue[BaseException | None]() for _ in range(world_size)]
        # Ranks that can go on, in the order of their turns, and the one whose turn it is.
        self.ready: list[tuple[int, BaseException | None]] = [(rank, None) for rank in range(world_size)]
        self.current: int | None = None
        # Ranks that wait outside of collectives, without a turn.
        self.beside = set[int]()
        # When the turn began, and what the rank's clock said at the last look.
        self.began = 0.0
        self.computed = 0.0
        # Of torch's generator of the CPU, as the program of each rank finds it.
        self.generator_state = torch.default_generator.get_state()
        # The value of a rank's program, or its error.
        self.ended: dict[int, tuple[Any, BaseException | None]] = {}
        self.over = threading.Event()
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.threads = [
            threading.Thread(target=self._run_program, args=(f, rank, store), name=f"rank {rank}", daemon=True)
            for rank in range(world_size)
        ]
        # The clocks of the threads, which count the time that each has computed.
        self.clocks: list[int] = []

    def _run_program(self, f: Callable[[], Any], rank: int, store: Any) -> None:
        """Run the program of a rank, on its thread."""
        value = None
        error = None
        try:
            self._wait_for_turn(rank, self.generator_state)
            limit = timedelta(seconds=self.timeout)
            dist.init_process_group("threaded", rank=rank, world_size=len(self.threads), store=store, timeout=limit)
            state = comm.rank_state()
            state.simulation = self
            self.states.append(state)
            try:
                value = f()
            finally:
                # A rank that ends after its simulation sees the process's own group, which is not its to destroy.
                if not self.over.is_set() and dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException as raised:
            error = raised
        self.inbox.put(partial(self._end, rank, value, error))

    def join(self, collective: ThreadedCollective) -> None:
        """Wait for a collective, on the thread of a rank that called it."""
        state = comm.rank_state()
        issued = state.awaited
        entry, generation = (issued.entry, state.generation) if issued else (None, -1)
        rank, generator_state = self._leave()
        self.inbox.put(partial(self._begin_wait, rank, _Wait(collective, entry, generation)))
        self._wait_for_turn(rank, generator_state)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let other ranks have their turns while this one, whose thread calls it, waits outside of collectives."""
        rank, generator_state = self._leave()
        self.beside.add(rank)
        self.inbox.put(partial(self._end_turn, rank))
        try:
            yield
        finally:
            self.beside.remove(rank)
            if not self.over.is_set():
                self.inbox.put(partial(self.ready.append, (rank, None)))
                self._wait_for_turn(rank, generator_state)

    def _leave(self) -> tuple[int, torch.Tensor]:
        """Find the rank whose thread this is, and the state of the generator that it leaves."""
        return self.threads.index(threading.current_thread()), torch.default_generator.get_state()

    def _wait_for_turn(self, rank: int, generator_state: torch.Tensor) -> None:
        """Wait, on the thread of a rank, until it may go on, with the generator as this rank has left it."""
        error = self.turns[rank].get()
        torch.default_generator.set_state(generator_state)
        if error:
            raise error

    def is_idle(self) -> bool:
        """Tell a rank that waits aside whether none goes on before another one does."""
        return len(self.waiting) + len(self.ended) + len(self.beside) >= len(self.threads) or self.over.is_set()

    def wake(self, group: str, generation: int, text: str) -> None:
        """Let ranks that wait in a group end with a text."""
        self.inbox.put(partial(self.broken.setdefault, (group, generation), text))

    def swap(self, issued: comm.PendingCollective, number: int, to: int, source: int, data: bytes) -> bytes:
        """Send a rank of a group a message and receive one, on the thread of a rank, as all of them do."""
        group = issued.group
        inbox: list[bytes] = []
        place = group.ranks.index(to)
        self.join(ThreadedCollective(group.name, group.ranks, "swap", (place, data, inbox), _deliver))
        (message,) = inbox
        return message

    def run(self) -> list[Any]:
        """Run the ranks until all have ended or one has failed, and return their values or raise their error."""
        __tracebackhide__ = True
        deadline = time.monotonic() + self.timeout
        try:
            for thread in self.threads:
                thread.start()
                self.clocks.append(time.pthread_getcpuclockid(thread.ident or 0))
            # Go on while ranks have failed only because they heard of the failure of another one.
            while len(self.ended) < len(self.threads) and all(
                isinstance(error, comm.CollectiveError) for error in self._errors().values()
            ):
                self._fail_broken()
                if self.waiting and len(self.waiting) + len(self.ended) == len(self.threads):
                    self._break_circle()
                if self._errors():
                    # A rank has heard of the failure of another one, which is about to end.
                    deadline = min(deadline, time.monotonic() + GRACE)
                self._give_turn()
                self._receive(deadline)
        except queue.Empty:
            if not self._errors():
                raise self._make_stuck_error() from None
        finally:
            self._stop()
            torch.default_generator.set_state(self.generator_state)
        errors = self._errors()
        if errors:
            rank = min(errors, key=lambda rank: (isinstance(errors[rank], comm.CollectiveError), rank))
            error = errors[rank]
            raise failed_rank(rank, len(self.threads), describe_failure(error)) from error
        return [self.ended[rank][0] for rank in range(len(self.threads))]

    def _errors(self) -> dict[int, BaseException]:
        """The errors of ranks that have failed."""
        errors = {}
        for rank, (_, error) in self.ended.items():
            if error and not isinstance(error, _Stop):
                errors[rank] = error
        return errors

    def _receive(self, deadline: float) -> None:
        """Do the next thing that ranks ask for; raise queue.Empty if there is none by the deadline."""
        next_look = time.monotonic() + PATIENCE if self.ready else deadline
        try:
            ask = self.inbox.get(timeout=max(0.0, min(next_look, deadline) - time.monotonic()))
        except queue.Empty:
            if deadline <= next_look:
                raise
            ask = self._look_at_turn
        ask()

    def _give_turn(self) -> None:
        """Let the next rank go on if no other one has its turn."""
        if self.current is None and self.ready:
            self.current, error = self.ready.pop(0)
            self.began = time.monotonic()
            self.computed = self._read_clock(self.current)
            self.turns[self.current].put(error)

    def _look_at_turn(self) -> None:
        """End the turn of a rank that waits for something, or has computed for too long."""
        rank = self.current or 0
        before = self.computed
        # The clock of a thread that has just ended is gone.
        with suppress(OSError):
            self.computed = self._read_clock(rank)
        # A wait for a processor that goes on is not counted yet.
        is_runnable = b"State:\tR" in self._read_about_thread(rank, "status")
        is_busy = is_runnable or self.computed > before + PATIENCE / 20
        # A rank that computes for ever leaves half of the time to the others.
        if not is_busy or time.monotonic() > self.began + self.timeout / 2:
            self.current = None

    def _read_clock(self, rank: int) -> float:
        """Read for how many seconds a rank's thread has computed, and a tenth of those it waited for a processor.

        On a busy machine a thread that polls waits for one whenever it wakes up, but not for half of the time.
        """
        seconds = time.clock_gettime(self.clocks[rank])
        if numbers := self._read_about_thread(rank, "schedstat").split():
            seconds += int(numbers[1]) / 1e10
        return seconds

    def _read_about_thread(self, rank: int, name: str) -> bytes:
        """Read what the kernel says of a rank's thread; some kernels say nothing.

        They say its name too, of which they keep so many bytes that its last letter may not be whole.
        """
        with suppress(OSError):
            return Path(f"/proc/self/task/{self.threads[rank].native_id}/{name}").read_bytes()
        return b""

    def _end_turn(self, rank: int) -> None:
        if self.current == rank:
            self.current = None

    def _end(self, rank: int, value: Any, error: BaseException | None) -> None:
        self._end_turn(rank)
        self.ended[rank] = value, error

    def _begin_wait(self, rank: int, wait: _Wait) -> None:
        self._end_turn(rank)
        self.waiting[rank] = wait
        if not self.over.is_set():
            self._run_if_complete(wait.collective)

    def _fail_broken(self) -> None:
        """Let ranks that wait in a collective of a broken group end with its error."""
        for rank, wait in list(self.waiting.items()):
            if text := self.broken.get(wait.key):
                self._answer(rank, dist.DistBackendError(text))

    def _answer(self, rank: int, error: BaseException | None) -> None:
        """Let a rank that waits in a collective go on when its turn comes."""
        del self.waiting[rank]
        self.ready.append((rank, error))

    def _break_circle(self) -> None:
        """Break the groups of ranks that wait where nobody will come to."""
        lines = [f"  rank {rank} {self.waiting.get(rank, 'has ended')}" for rank in range(len(self.threads))]
        text = "\n".join(["ranks wait for each other in different collectives", *lines])
        self.broken |= {wait.key: text for wait in self.waiting.values()}
        self._fail_broken()

    def _run_if_complete(self, collective: ThreadedCollective) -> None:
        """Run a collective if every member of its group has called one; break the group if that cannot be."""
        waits = {}
        for rank in collective.ranks:
            wait = self.waiting.get(rank)
            if wait and wait.collective.group == collective.group:
                waits[rank] = wait
        if len(waits) < len(collective.ranks):
            return
        failure = _describe_mismatch(waits) or _run_collective(collective, waits)
        for rank, wait in waits.items():
            if failure:
                self.broken[wait.key] = failure
            else:
                self._answer(rank, None)

    def _stop(self) -> None:
        """End all ranks: those in a collective at once, others when they call one, at last by an interrupt."""
        self.over.set()
        # Of a rank whose message an interrupt has lost nobody knows that it waits.
        for turn in self.turns:
            turn.put(_Stop())
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
        with suppress(queue.Empty):
            while len(self.ended) < len(self.threads):
                for rank in (*self.waiting, *dict(self.ready)):
                    self.turns[rank].put(_Stop())
                self.waiting.clear()
                self.ready.clear()
                self._receive(deadline)

    def _make_stuck_error(self) -> RankError:
        """Make the error of ranks that have not ended, with the collective and the stack of each."""
        frames = sys._current_frames()
        states = dict.fromkeys(dict(self.ready), "waits for its turn") | self.waiting
        stacks = {}
        for rank, thread in enumerate(self.threads):
            if rank not in self.ended:
                stack = "".join(traceback.format_stack(frames.get(thread.ident or 0)))
                stacks[rank] = f"{states.get(rank, 'runs')}:\n{stack}"
        return stuck_ranks(self.timeout, len(self.threads), stacks)
