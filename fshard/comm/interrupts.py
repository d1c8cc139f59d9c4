"""Ctrl-C on a rank that waits: torch waits for other ranks without looking at signals, so a thread has to end the wait.

Python notes a signal at once, and raises KeyboardInterrupt when its main thread runs Python again. Where that thread
waits inside torch, nobody would raise it before the other rank comes.
"""

import os
import signal
import threading
from contextlib import suppress

from fshard.comm.groups import PendingCollective

# More signals than this are not told apart.
MOST_SIGNALS = 4096


class Interrupts:
    """Finds out, for another thread, whether Ctrl-C has come while the main thread waits for a rank.

    While a call of fshard runs in the main thread, Python writes the number of each signal to a pipe
    (`signal.set_wakeup_fd`). They are passed on to whoever listened before, such as an asyncio loop.
    """

    def __init__(self) -> None:
        """Make the pipe."""
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._is_listening = False
        self._previous_fd = -1
        # The wait that went on when Ctrl-C came, and its beginning.
        self._suspect: tuple[PendingCollective, float] | None = None

    def listen(self) -> None:
        """Begin to listen, if this is the main thread; forget signals that Python has handled by now."""
        if self._write_end < 0 or threading.current_thread() is not threading.main_thread():
            return
        if not self._is_listening:
            self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._is_listening = True
        self._receive()
        self._suspect = None

    def stop(self) -> None:
        """Stop to listen, in the thread that began to."""
        if self._is_listening and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_fd)
            self._is_listening = False

    def close(self) -> None:
        """Close the pipe, once no call can run any more."""
        self.stop()
        if not self._is_listening and self._write_end >= 0:
            ends = self._read_end, self._write_end
            self._read_end = self._write_end = -1
            for end in ends:
                os.close(end)

    def has_come(self, waiting: PendingCollective | None) -> bool:
        """Tell whether Ctrl-C has come in a wait that goes on, so that Python could not raise KeyboardInterrupt.

        Args:
            waiting: The collective that the main thread waits in; None where it does not wait.

        Returns:
            Whether that is so, at the look after the one that finds the signal: the wait may have begun after Python
            had handled it. False where the program handles Ctrl-C in a way of its own.
        """
        suspect, self._suspect = self._suspect, None
        came = signal.SIGINT in self._receive()
        if waiting is None or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False
        place = waiting, waiting.since
        if came:
            self._suspect = place
        return suspect == place

    def _receive(self) -> bytes:
        """Read the numbers of signals, and pass them on."""
        numbers = b""
        if self._read_end >= 0:
            with suppress(BlockingIOError):
                numbers = os.read(self._read_end, MOST_SIGNALS)
        if numbers and self._previous_fd >= 0:
            with suppress(OSError):
                os.write(self._previous_fd, numbers)
        return numbers
