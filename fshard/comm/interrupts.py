"""Ctrl-C on a rank that waits: torch waits for other ranks without looking at signals, so a thread has to end the wait.

Python notes a signal at once, and raises KeyboardInterrupt when its main thread runs Python again. Where that thread
waits inside torch, nobody would raise it before the other rank comes.
"""

import os
import signal
import weakref
from contextlib import suppress

# More signals than this are not told apart.
MOST_SIGNALS = 4096


class Interrupts:
    """Finds out, for another thread, whether Ctrl-C has come while the main thread waits for a rank.

    While a call of fshard runs in the main thread, Python writes the number of each signal to a pipe
    (`signal.set_wakeup_fd`), unless somebody else listens already, such as an asyncio loop.
    """

    def __init__(self) -> None:
        """Make the pipe."""
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end)
        self._is_listening = False

    def listen(self) -> None:
        """Begin to listen, if this is the main thread; forget signals that Python has handled by now."""
        # Python refuses it to other threads.
        with suppress(ValueError):
            before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
            self._is_listening = True
            if before not in (-1, self._write_end):
                # One that is closed hears nothing.
                with suppress(OSError):
                    signal.set_wakeup_fd(before)
                    self._is_listening = False
            self.has_come()

    def stop(self) -> None:
        """Stop to listen, in the thread that began to."""
        with suppress(ValueError):
            if self._is_listening:
                signal.set_wakeup_fd(-1)
                self._is_listening = False

    def has_come(self) -> bool:
        """Tell whether Ctrl-C has come since the last look; False where the program handles it in a way of its own.

        Python raises KeyboardInterrupt itself, unless the main thread waits.
        """
        numbers = b""
        with suppress(BlockingIOError):
            numbers = os.read(self._read_end, MOST_SIGNALS)
        return signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler
