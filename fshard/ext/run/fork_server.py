"""The process that ranks are forked from: it has imported what a rank imports until the end of its first trace.

It has one thread, for good: a thread of the parent may hold a lock at the fork that nobody would let go of in the
child. Nor does it touch an accelerator, which no fork survives. It looks at both before each fork.

For each client it forks a process that forks the rank, waits for its end, and tells the client of it.
"""

import gc
import marshal
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy
import torch

from fshard.ext import _compat
from fshard.ext.run.fork_client import SIGNALS


def explain_cold_start() -> str:
    """Say why a fork of this process is not safe; "" if it is."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"what it imports has started {threads - 1} threads"
    return "what it imports has initialized CUDA" if torch.cuda.is_initialized() else ""


def serve(listener: socket.socket) -> tuple[socket.socket, str]:
    """Fork a process for each client until the agent, whose pipe is the input, has ended.

    Args:
        listener: Where clients connect.

    Returns:
        In a process that was forked, the connection to its client, and why its rank starts Python anew, or "".

    Raises:
        SystemExit: in this process, at the end.
    """
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            raise SystemExit
        connection, _ = listener.accept()
        reason = explain_cold_start()
        if os.fork() == 0:
            listener.close()
            return connection, reason
        connection.close()


def start_rank(connection: socket.socket) -> list[str]:
    """Fork the rank that a client asks for, and wait for its end; never returns in this process.

    Args:
        connection: To the client.

    Returns:
        In the rank, which has the client's streams, environment, folder and processors, the arguments of Python.
    """
    byte, streams, _, _ = socket.recv_fds(connection, 1, 3)
    if not byte:
        # The client was killed.
        os._exit(0)
    with connection.makefile("rb") as file:
        arguments, environment, folder, processors = marshal.load(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        _report_end(pid, connection)
    os.setsid()
    connection.sendall(f"{os.getpid()}\n".encode())
    connection.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.sched_setaffinity(0, processors)
    return list(arguments)


def _report_end(pid: int, connection: socket.socket) -> None:
    """Wait for the end of a rank, which is killed if its client ends, and end this process."""
    client = connection.fileno()
    ended, _, _ = select.select([os.pidfd_open(pid), client], [], [])
    if client in ended:
        # It may not have a process group of its own yet.
        for kill in (os.kill, os.killpg):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def run_program(arguments: Sequence[str]) -> None:
    """Run a program as `python` does, in this process.

    Args:
        arguments: A path or "-m" and a module, and what the program is given.
    """
    # Each process would draw the same numbers.
    numpy.random.seed()
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[is_module:]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(sys.argv[0]))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Serve clients; in a process that was forked, run the program of its rank, and end as a program does."""
    # The agent's process group may get them too, and the agent ends this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _compat.import_for_traces()
    # A garbage collection of a rank would copy all pages that these objects are on.
    gc.collect()
    gc.freeze()
    # Nobody waits for the processes that wait for ranks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection, reason = serve(socket.socket(fileno=int(sys.argv[1])))
    arguments = start_rank(connection)
    if reason:
        print(f"fshard.run: this rank starts Python anew, because {reason}.", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, "-u", *arguments])
    run_program(arguments)


if __name__ == "__main__":
    main()
