"""Threads that write the file of a rank, and complete the checkpoint when all ranks have written theirs."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from fshard.checkpoint.errors import CheckpointError, describe_failure
from fshard.checkpoint.unfinished import RankReport, Unfinished

# An exit waits for this rank's write no longer than this; a disk of 0.5 GB/s takes 150 GB in the time.
EXIT_SECONDS = 300.0
# A rank that has written waits for other ranks no longer than this, as they may have been killed.
OTHERS_SECONDS = 30.0
# How often a rank looks for what others have written: at first, and at last.
FIRST_LOOK = 0.01
LAST_LOOK = 1.0
# How often it is looked whether the program has ended.
WATCH_SECONDS = 0.1


class BackgroundSave:
    """Writes this rank's file of a checkpoint in a thread, which needs no further call of the program.

    The rank that finds all files written completes the checkpoint. A daemon thread does this, because a disk that hangs
    must not keep the process from ending. A second thread, which the interpreter waits for, gives it time at an exit.

    Attributes:
        written: The report of this rank's file, or the error, once this rank has written and has tried to complete the
            checkpoint.
    """

    def __init__(
        self,
        label: str,
        unfinished: Unfinished,
        rank: int,
        write: Callable[[], RankReport],
        unlock: Callable[[], None],
    ) -> None:
        """Begin to write.

        Args:
            label: The public function, for messages.
            unfinished: The checkpoint.
            rank: This rank.
            write: Writes this rank's file.
            unlock: Lets others save to the directory.
        """
        self._label = label
        self._unfinished = unfinished
        self._rank = rank
        self._write: Callable[[], RankReport] | None = write
        self._unlock = unlock
        self.written: Future[RankReport] = Future()
        self._failure: Exception | None = None
        # The program may complete or cancel the checkpoint at the moment in which the thread completes it.
        self._mutex = threading.Lock()
        self._is_cancelled = False
        self._was_complete = False
        self._stop_waiting = threading.Event()
        # Set when there is nothing left that an exit has to wait for, or to say.
        self._is_settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)
        self._thread.start()
        threading.Thread(target=self._wait_at_exit, name=f"{label} at exit", daemon=False).start()

    def confirm(self) -> None:
        """Complete the checkpoint, if no rank has yet, after all ranks have said that they have written.

        Raises:
            CheckpointError: if it cannot be completed, or this rank's file is not there.
        """
        # A file system may show the report of another host late.
        if not self._rank and not self._complete_within(OTHERS_SECONDS):
            raise CheckpointError(self._problem())
        self._unfinished.check_file(self._rank, self.written.result())

    def settle(self) -> None:
        """End the threads, and let others save to the directory, after this rank has written."""
        self._is_settled.set()
        self._stop_waiting.set()
        self._thread.join()

    def cancel(self) -> None:
        """Leave the checkpoint incomplete, unless this rank has reported its file already."""
        with self._mutex:
            self._is_cancelled = True
        self._is_settled.set()

    def finish_at_exit(self) -> None:
        """Wait for a limited time until the checkpoint is complete, without a message to other ranks.

        If the checkpoint is not complete then, standard error says so.
        """
        if self._is_settled.is_set():
            return
        futures.wait([self.written], EXIT_SECONDS)
        if self.written.done():
            # The thread ends by itself after half of this time, unless the disk hangs.
            self._thread.join(2 * OTHERS_SECONDS)
        problem = self._problem()
        if problem and not self._is_settled.is_set():
            sys.stderr.write(f"{self._label}: {problem}\n")
            sys.stderr.flush()
        self._is_settled.set()

    def _run(self) -> None:
        try:
            report = self._write_and_report()
            self._complete()
        except Exception as error:
            self.written.set_exception(error)
        else:
            self.written.set_result(report)
            self._wait_for_others()
        finally:
            self._unlock()

    def _write_and_report(self) -> RankReport:
        write, self._write = self._write, None
        assert write is not None
        report = write()
        with self._mutex:
            if self._is_cancelled:
                raise CheckpointError(f"{self._unfinished.path}: was interrupted")
            self._unfinished.report(self._rank, report)
        return report

    def _wait_for_others(self) -> None:
        """Let an exit wait for other ranks, and on the first rank keep the directory locked meanwhile."""
        try:
            is_over = self._complete_within(OTHERS_SECONDS)
        except Exception as error:
            self._failure = error
            return
        if is_over:
            self._is_settled.set()

    def _complete_within(self, seconds: float) -> bool:
        """Look, for a limited time, until all ranks have written and the checkpoint is complete."""
        deadline = time.monotonic() + seconds
        pause = FIRST_LOOK
        while True:
            # After it is told to stop it looks once more: a rank may have written since the last look, and be killed.
            is_last = time.monotonic() > deadline or self._stop_waiting.is_set()
            if self._is_over():
                return True
            if is_last:
                return False
            self._stop_waiting.wait(min(pause, max(0.0, deadline - time.monotonic())))
            # A look takes a file system as long as it has ranks.
            pause = min(2 * pause, max(LAST_LOOK, LAST_LOOK * self._unfinished.ranks / 100))

    def _is_over(self) -> bool:
        """Complete the checkpoint if all ranks have written, in case the last of them was killed before it could."""
        # Until the first rank has seen the checkpoint complete, it keeps others from a save that would remove it.
        is_first = not self._rank
        return (not is_first and self._unfinished.is_over()) or self._complete()

    def _complete(self) -> bool:
        with self._mutex:
            # A later save may have removed the checkpoint since.
            self._was_complete = self._was_complete or self._unfinished.complete()
            return self._was_complete

    def _wait_at_exit(self) -> None:
        """Give the other thread time when the program ends."""
        program = threading.main_thread()
        while program.is_alive():
            if self._is_settled.wait(WATCH_SECONDS):
                return
        self.finish_at_exit()

    def _problem(self) -> str:
        """Say why the checkpoint is not complete, if it is not."""
        path = self._unfinished.path
        if self._was_complete or self._unfinished.is_complete():
            return ""
        if not self.written.done():
            return f"{path} is not complete: rank {self._rank} has not written its file within {EXIT_SECONDS:g} s"
        failure = self.written.exception() or self._failure
        if failure:
            return f"{path} is not complete: {describe_failure(failure, self._rank, path)}"
        if self._unfinished.is_over():
            return f"{path} is not complete: its files were removed"
        late = ", ".join(map(str, self._unfinished.missing()))
        if not late:
            return f"{path} is not complete: all ranks have written their files, and the next start completes it"
        return f"{path} is not complete: rank {late} has not written its file within {OTHERS_SECONDS:g} s of this one"
