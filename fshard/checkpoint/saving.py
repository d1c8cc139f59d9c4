"""Saving: a save under way, whose threads write the file of a rank and complete the checkpoint."""

import operator
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

from fshard.checkpoint.errors import CheckpointError, describe_failure
from fshard.checkpoint.exchange import Exchange
from fshard.checkpoint.files import Manifest
from fshard.checkpoint.unfinished import Unfinished

# An exit waits for this rank's write no longer than this; a disk of 0.5 GB/s takes 150 GB in the time.
EXIT_SECONDS = 300.0
# The first rank, when it has written, waits for other ranks no longer than this, as they may have been killed. Then it
# says why the checkpoint is not complete: torchrun and Slurm kill a rank 30 s after they have told it to end.
OTHERS_SECONDS = 20.0
# How often the first rank looks for what others have written: at first, and at last.
FIRST_LOOK = 0.01
LAST_LOOK = 1.0
# How often it is looked whether the program has ended.
WATCH_SECONDS = 0.1


class Saving:
    """A save under way. The checkpoint gets its name as soon as all ranks have written, also if nobody waits for it.

    A daemon thread of each rank writes, because a disk that hangs must not keep the process from ending. That of the
    first rank then completes the checkpoint. A second thread, which the interpreter waits for, gives it time at an
    exit.

    Attributes:
        step: The step that is saved.

    >>> import tempfile, torch, fshard as fs
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     saving = fs.checkpoint.save(directory, {"w": torch.ones(3)}, step=7, asynchronous=True)
    ...     saving.step, saving.wait().name  # training goes on between the two
    (7, 'step-00000007.0')
    """

    def __init__(
        self,
        exchange: Exchange,
        unfinished: Unfinished,
        write: Callable[[], Manifest],
        unlock: Callable[[], None],
    ) -> None:
        """Begin to write.

        Args:
            exchange: The ranks that save.
            unfinished: The checkpoint.
            write: Writes this rank's file, and returns the manifest with its chunks alone.
            unlock: Lets others save to the directory.
        """
        self.step = unfinished.step
        self._exchange = exchange
        self._unfinished = unfinished
        # Taken out when it is called, because it holds copies of the state.
        self._writes = [write]
        self._unlock = unlock
        self._written: Future[None] = Future()
        # Why the first rank could not complete the checkpoint.
        self._failure: Exception | None = None
        # Set when there is nothing left that an exit has to wait for, or to say; the first rank looks once more then.
        self._is_settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=exchange.label, daemon=True)
        self._thread.start()
        threading.Thread(target=self._wait_at_exit, name=f"{exchange.label} at exit", daemon=False).start()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Every rank must call this, as a collective.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: on every rank, if any of them failed; checkpoints from before are as they were.
        """
        exchange = self._exchange
        content = self._unfinished.content
        try:
            with exchange.raise_on_all_ranks(content, checks_arguments=False):
                self._written.result()
            with exchange.raise_on_all_ranks(content, checks_arguments=False):
                self._settle()
                # All ranks say that they have written, but a file system may show the report of another host late.
                if self._failure is not None:
                    self._complete(time.sleep)
        except Exception as error:
            # Where a rank was killed, this one may still complete the checkpoint.
            if isinstance(error, CheckpointError) and exchange.rank == 0:
                self._unfinished.remove()
            self._settle()
            raise
        return self._unfinished.path

    def is_written(self) -> bool:
        """Tell every rank whether all of them have written, as a collective."""
        return self._exchange.merge_objects(self._written.done(), operator.and_)

    def cancel(self) -> None:
        """Remove the checkpoint unless it is complete already, which what is still written does not bring back."""
        self._unfinished.remove()
        self._is_settled.set()

    def finish_at_exit(self) -> None:
        """Wait for a limited time until this rank has done its part, without a message to other ranks.

        If it has not by then, standard error says so.
        """
        if self._is_settled.is_set():
            return
        futures.wait([self._written], EXIT_SECONDS)
        if self._written.done():
            # The thread ends by itself after half of this time, unless the disk hangs.
            self._thread.join(2 * OTHERS_SECONDS)
        if not self._is_settled.is_set():
            sys.stderr.write(
                f"{self._exchange.label}: {self._unfinished.path} is not complete: {self._find_reason()}\n"
            )
            sys.stderr.flush()
        self._is_settled.set()

    def _find_reason(self) -> str:
        """Say why the checkpoint is not complete."""
        rank = self._exchange.rank
        if not self._written.done():
            return f"rank {rank} has not written its file within {EXIT_SECONDS:g} s"
        failure = self._written.exception() or self._failure or TimeoutError("the disk takes too long")
        return describe_failure(failure, rank, self._unfinished.path)

    def _run(self) -> None:
        try:
            self._unfinished.report(self._exchange.rank, self._writes.pop()())
        except Exception as error:
            self._written.set_exception(error)
        else:
            self._written.set_result(None)
            self._finish()
        finally:
            self._unlock()

    def _finish(self) -> None:
        """Complete the checkpoint on the first rank, which keeps the directory locked meanwhile."""
        try:
            if self._exchange.rank == 0:
                self._complete(self._is_settled.wait)
        except Exception as error:
            self._failure = error
        else:
            self._is_settled.set()

    def _complete(self, sleep: Callable[[float], object]) -> None:
        """Look, for a limited time, until all ranks have written, and complete the checkpoint.

        Args:
            sleep: Waits for some seconds; returns True, at once, if only one more look is left.

        Raises:
            CheckpointError: if a rank has not written, or a file is not there as it was written.
            OSError: if a file cannot be written.
        """
        deadline = time.monotonic() + OTHERS_SECONDS
        pause = FIRST_LOOK
        is_last = False
        while late := self._unfinished.complete():
            if is_last:
                ranks = ", ".join(map(str, late))
                raise CheckpointError(f"rank {ranks} has not written its file within {OTHERS_SECONDS:g} s of this one")
            # One more look: a rank may have written since the last one, and have been killed.
            is_last = sleep(pause) is True or time.monotonic() > deadline
            pause = min(2 * pause, LAST_LOOK)
        self._failure = None

    def _settle(self) -> None:
        """End the threads, and let others save to the directory, after this rank has written."""
        self._is_settled.set()
        self._thread.join()

    def _wait_at_exit(self) -> None:
        """Give the other thread time when the program ends."""
        program = threading.main_thread()
        while program.is_alive():
            if self._is_settled.wait(WATCH_SECONDS):
                return
        self.finish_at_exit()
