"""Ranks that are processes, kept from one program to the next."""

import faulthandler
import hashlib
import io
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist

from fshard import comm
from fshard.errors import INSTALLED, is_users_file, name_error
from fshard.tree.checks import NUMBER, SECONDS, check_arguments

T = TypeVar("T")

# Seconds in which the other ranks may still reply after one has failed.
GRACE = 2.0

# A worker's own limit on a collective: never the first to strike, because the pool's limit shows the stacks.
NEVER = timedelta(days=1)


class RankError(RuntimeError):
    """A rank failed, ended or hung.

    The first line says which, with what error, and at which line of your program; the traceback or the stacks of ranks
    follow. The last line of a traceback is the first one again. If several ranks failed, it is one that did not only
    hear of another's failure.

    >>> import fshard as fs
    >>> try:
    ...     fs.testing.spmd(lambda: 1 / 0, world=2)
    ... except fs.testing.RankError as error:
    ...     print(error)
    rank 0 of 2 failed: ZeroDivisionError: division by zero
    Traceback (most recent call last):
    ...
    ZeroDivisionError: division by zero
    rank 0 of 2 failed: ZeroDivisionError: division by zero
    """

    # Its public name, which is shorter where a summary of failing tests has few columns.
    __module__ = "fshard.testing"


def failed_rank(rank: int, world: int, failure: str) -> RankError:
    """Make the error of a rank that failed; with a traceback, its first line ends it too."""
    text = f"rank {rank} of {world} {failure}"
    first, *traceback_lines = text.splitlines()
    return RankError("\n".join([first, *traceback_lines, first]) if traceback_lines else text)


def stuck_ranks(timeout: float, world: int, stacks: Mapping[int, str]) -> RankError:
    """Make the error of ranks that have not ended, with where each of them is."""
    finished = [rank for rank in range(world) if rank not in stacks]
    first = f"timed out after {timeout} s: ranks {finished} of {world} finished, ranks {list(stacks)} did not"
    return RankError("\n".join([first, *(f"rank {rank} {stack}" for rank, stack in stacks.items())]))


def describe_failure(error: BaseException) -> str:
    """Describe the error of a rank: its class, the first line of its text and its place, and then the traceback.

    >>> print(describe_failure(ValueError("bad batch")))
    failed: ValueError: bad batch
    ValueError: bad batch
    """
    summary, _, _ = name_error(error).partition("\n")
    return f"failed: {summary}{_describe_place(error)}\n" + "".join(traceback.format_exception(error))


def _describe_place(error: BaseException) -> str:
    """Name the file and the line of the user's program where an error came from; "" if it has none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        filename = frame.filename
        # Code that was made by a program has no file, but a name as <string>.
        has_file = not filename.startswith("<")
        if has_file and is_users_file(filename) and not filename.startswith(INSTALLED):
            path = Path(filename)
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f" ({shown}:{frame.lineno})"
    return ""


class _Reply(NamedTuple):
    """How a program ended on a rank.

    Attributes:
        value: Its value.
        failure: The text of its failure.
        broken: The error by which its groups are broken.
        follows_another: Whether it failed only because another rank did.
    """

    value: Any
    failure: str | None = None
    broken: str | None = None
    follows_another: bool = False


class Workers:
    """Worker processes with a process group, which run one program after another.

    After a failure, also one that a program has handled, the workers are replaced, so that the next program finds all
    ranks in step. Programs travel by cloudpickle; modules that they name are imported along this process's `sys.path`.

    Args:
        world_size: Number of ranks.
        timeout: Seconds that starting, a program and closing may take.
        backend: Backend of the process group.

    Raises:
        RankError: A worker failed to start.

    >>> with Workers(world_size=2) as workers:
    ...     workers.run(dist.get_rank)
    [0, 1]
    """

    def __init__(self, world_size: int, timeout: float = 60.0, backend: str = "gloo") -> None:
        check_arguments("Workers", NUMBER, world_size=world_size)
        check_arguments("Workers", SECONDS, timeout=timeout)
        self.world_size = world_size
        self.timeout = timeout
        self.backend = backend
        self._closed = False
        self._start()

    def run(self, f: Callable[[], T], timeout: float | None = None) -> list[T]:
        """Run `f` on every rank.

        Args:
            f: The program of one rank. `torch.distributed` is initialised when it is called.
            timeout: Seconds after which ranks that have not replied are stuck; by default the pool's.

        Returns:
            What `f` returned on each rank, in rank order.

        Raises:
            RankError: A rank raised, was killed, exited, or was stuck when the time was up.
            RuntimeError: The workers are closed.
        """
        # Reports of pytest end at the line of the test.
        __tracebackhide__ = True
        if self._closed:
            raise RuntimeError("Workers: run was called after close; make new Workers")
        if not self._kill.alive:
            self._start()
        self._send(pickle.dumps((sys.path, _dumps(f))))
        return self._collect(self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """Destroy the process group and end the workers.

        Raises:
            RankError: A worker's exit code was not 0, or it did not exit in time.
        """
        self._closed = True
        if self._kill.alive:
            self._send(b"")
            self._collect(self.timeout)
            self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__])
        directory = Path(tempfile.mkdtemp(prefix="fshard-"))
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._stacks = [directory / f"stack_{rank}" for rank in range(self.world_size)]
        self._kill = weakref.finalize(self, _kill, self._processes, directory)
        for rank, stack in enumerate(self._stacks):
            stack.touch()
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self.backend, stack, theirs)
            process = context.Process(target=_worker, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._collect(self.timeout)

    def _send(self, request: bytes) -> None:
        for connection in self._connections:
            # A worker that has died meanwhile is found out by the reply that it does not send.
            with suppress(OSError):
                connection.send_bytes(request)

    def _collect(self, timeout: float) -> list[Any]:
        """Return the workers' replies; if a rank failed or is stuck, end the workers and raise."""
        __tracebackhide__ = True
        replies = {}
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        try:
            while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
                for connection in ready:
                    rank = pending.pop(connection)
                    replies[rank] = self._receive(rank)
                    if replies[rank].failure:
                        deadline = min(deadline, time.monotonic() + GRACE)
            # A rank that ended comes first: by that it made its peers fail, whatever their numbers.
            failures = {rank: reply.failure for rank, reply in replies.items() if reply.failure}
            if failures:
                rank = min(
                    failures,
                    key=lambda rank: (self._processes[rank].is_alive(), replies[rank].follows_another, rank),
                )
                raise failed_rank(rank, self.world_size, failures[rank])
            if pending:
                stacks = {rank: f"runs:\n{self._end_for_stack(rank)}" for rank in pending.values()}
                raise stuck_ranks(timeout, self.world_size, stacks)
        except BaseException:
            self._kill()
            raise
        if any(reply.broken for reply in replies.values()):
            self._kill()
        return [replies[rank].value for rank in range(self.world_size)]

    def _end_for_stack(self, rank: int) -> str:
        """Terminate a rank, which then writes its stack."""
        self._processes[rank].terminate()
        self._processes[rank].join(GRACE)
        return self._stacks[rank].read_text()

    def _receive(self, rank: int) -> _Reply:
        with suppress(EOFError, ConnectionError):
            return pickle.loads(self._connections[rank].recv_bytes())
        self._processes[rank].join(GRACE)
        code = self._processes[rank].exitcode or 0
        if self._closed and code == 0:
            return _Reply(None)
        return _Reply(None, f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}")


def _dumps(value: Any) -> bytes:
    """Pickle a value, with the functions in it that no module holds."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, CodeType):
                return super().reducer_override(value)
            make, arguments = self.dispatch_table[CodeType](value)
            # cloudpickle 3.1.3 leaves out where a function stands, and errors of a rank would not say it.
            return make, tuple(value.co_filename if each == "<dynamic-code>" else each for each in arguments)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _kill(processes: list[BaseProcess], directory: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    shutil.rmtree(directory)


def _worker(rank: int, world_size: int, backend: str, stack: Path, connection: Connection) -> None:
    """Serve one rank until the pool closes or its process is gone."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGTERM, stack.open("w"), chain=True)
    torch.set_num_threads(1)
    store = f"file://{stack.with_name('store')}"
    join = partial(dist.init_process_group, backend, store, timeout=NEVER, world_size=world_size, rank=rank)
    connection.send_bytes(_reply(join))
    for number in itertools.count():
        request = connection.recv_bytes()
        if not request:
            break
        warnings.showwarning = partial(_show_warning_once, stack.parent, number)
        connection.send_bytes(_reply(partial(_run, request)))
    dist.destroy_process_group()


def _show_warning_once(directory: Path, number: int, *warning: Any) -> None:
    """Show a warning as Python does, but on the first rank alone that gives it.

    Args:
        directory: The pool's.
        number: The number of the program among those of the pool.
        *warning: The arguments of `warnings.showwarning`: message, category, file and line first.
    """
    text = warnings.formatwarning(*warning[:4])
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    with suppress(FileExistsError):
        (directory / f"warning_{number}_{digest}").touch(exist_ok=False)
        print(text, end="", file=sys.stderr, flush=True)


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _run(request: bytes) -> Any:
    sys.path[:], program = pickle.loads(request)
    return pickle.loads(program)()


def _reply(f: Callable[[], Any]) -> bytes:
    """Pickle the value of `f`, or the traceback of its error."""
    try:
        value = f()
        reply = _dumps(_Reply(value, broken=comm.rank_state().failure))
    except BaseException as error:
        follows_another = isinstance(error, comm.CollectiveError)
        reply = pickle.dumps(_Reply(None, describe_failure(error), follows_another=follows_another))
    sys.stdout.flush()
    return reply
