"""Functions that run as the program of each rank, forked from one process: starting each from nothing takes seconds.

One process forks for all that run tests side by side. Run as `python -m tests.forked_programs DESCRIPTOR`, it serves
the listening socket of that number until its input ends. For each line that a test sends, a JSON list [ranks, timeout,
module, function, arguments, whether the interpreter ends], it forks ranks, and answers with a line: for each rank what
it printed, its errors, and its exit code.
"""

import atexit
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parents[1]
# Names the socket of the process that forks, for the processes that this one starts.
SOCKET = "FSHARD_TESTS_FORK"


class Program(NamedTuple):
    """How a rank's program ended: what it printed, its errors, and its exit code."""

    output: str
    errors: str
    code: int


class Ending:
    """How this process ends, once its threads and functions for the exit have.

    Attributes:
        code: The exit code; with None the interpreter ends as by itself. It takes a process that was forked 0.3 s to
            give up all that was loaded before.
    """

    def __init__(self) -> None:
        self.code: int | None = None

    def end(self) -> None:
        """End the process here, if its exit code is known."""
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def run_on_ranks(
    ranks: int,
    function: Callable[..., object],
    *arguments: object,
    timeout: float = 100.0,
    interpreter_ends: bool = False,
) -> list[Program]:
    """Run a function as the program of each rank, as a launcher would that restarts nobody.

    Args:
        ranks: The number of ranks, of which rank 0 holds the store.
        function: A function of a module.
        *arguments: What it is given, paths as texts.
        timeout: Seconds after which the programs are killed.
        interpreter_ends: Whether the interpreter gives up its modules too, for tests of what happens then.

    Returns:
        How each of them ended.
    """
    lines = _connection()
    command = [ranks, timeout, function.__module__, function.__name__, arguments, interpreter_ends]
    print(json.dumps(command, default=str), file=lines, flush=True)
    return [Program(*fields) for fields in json.loads(lines.readline())]


@cache
def _connection() -> TextIO:
    """Connect to the process that forks, which this one starts where none is there."""
    if SOCKET not in os.environ:
        start_forking_process()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[SOCKET]}")
        return connection.makefile("rw")


def start_forking_process() -> None:
    """Start the process that forks, for this one and for those that it starts; it ends with this one."""
    name = f"fshard-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        # Of no file, which would have to be removed.
        listener.bind(f"\0{name}")
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_programs", str(listener.fileno())],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    os.environ[SOCKET] = name
    # Leaving the block closes the pipe, which ends the process, and waits for it.
    atexit.register(process.__exit__, None, None, None)


def main() -> None:
    """Serve connections, each by a process of its own; a rank returns from here too, and ends as a program does."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    ending = Ending()
    # The first function that is registered runs last.
    atexit.register(ending.end)
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        connection, _ = listener.accept()
        # Loaded once for all ranks, when the first are asked for.
        import tests.preload  # noqa: F401

        if os.fork() == 0:
            listener.close()
            with connection, connection.makefile("rw") as lines:
                _serve(lines, ending)
            return
        connection.close()


def _serve(lines: TextIO, ending: Ending) -> None:
    """Answer lines until there are no more; a rank returns from here too."""
    for line in iter(lines.readline, ""):
        ranks, timeout, module, name, arguments, interpreter_ends = json.loads(line)
        directory = Path(tempfile.mkdtemp())
        port = _free_port()
        children = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _become_rank(rank, ranks, port, directory)
                function = getattr(importlib.import_module(module), name)
                _run(function, arguments, Ending() if interpreter_ends else ending)
                return
            children.append(pid)
        codes = _wait(children, timeout)
        programs = []
        for rank, code in enumerate(codes):
            output, errors = ((directory / f"{kind}-{rank}").read_text() for kind in ("output", "errors"))
            programs.append(Program(output, errors, code))
        shutil.rmtree(directory)
        print(json.dumps(programs), file=lines, flush=True)
    ending.code = 0


def _run(function: Callable[..., object], arguments: list[object], ending: Ending) -> None:
    """Run the program of a rank, and note the exit code that Python gives it."""
    try:
        function(*arguments)
    except Exception:
        ending.code = 1
        raise
    ending.code = 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _become_rank(rank: int, ranks: int, port: int, directory: Path) -> None:
    """Give this process the environment and the files of a rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    # Files, as a pipe would be read for as long as a child of a rank has it.
    paths = (os.devnull, directory / f"output-{rank}", directory / f"errors-{rank}")
    for descriptor, path in enumerate(paths):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)


def _wait(children: list[int], timeout: float) -> list[int]:
    """Wait for processes, kill those that take too long, and return the exit codes."""
    deadline = time.monotonic() + timeout
    codes = []
    for pid in children:
        handle = os.pidfd_open(pid)
        ended, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


if __name__ == "__main__":
    main()
