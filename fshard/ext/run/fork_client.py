"""What torch's agent starts in place of a rank: it asks the fork server for the rank, and ends as the rank does.

The rank has this process's output, environment, folder and processors. Signals that come here go on to the rank's
process group. If this process is killed, the server kills the rank.
"""

import marshal
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(address: str) -> None:
    """Have a rank started, and end with its exit code, or by the signal that ended it.

    Args:
        address: The path of the server's socket.
    """
    try:
        code = _run_rank(address)
    except (OSError, ValueError):
        # At the end of the connection there is no number.
        sys.exit("fshard.run: the process that ranks are forked from has ended. Start the job again.")
    if code < 0:
        # Its memory has been dumped, if at all.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _run_rank(address: str) -> int:
    """Have a rank started, wait for its end, and return its exit code."""
    # Until it is known whom to hand them to, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = marshal.dumps((sys.argv[1:], dict(os.environ), os.getcwd(), list(os.sched_getaffinity(0))))
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(request)
        answers = server.makefile()
        pid = int(answers.readline())
        for number in SIGNALS:
            signal.signal(number, lambda number, _: _send_signal(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return int(answers.readline())
        except (OSError, ValueError):
            _send_signal(pid, signal.SIGKILL)
            raise


def _send_signal(pid: int, number: int) -> None:
    """Send a signal to a process and its children, if they are there."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
