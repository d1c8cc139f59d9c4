"""Meetings: the ranks that make a mesh hear of one that fails or dies meanwhile, and end with the same error.

A rank waits for the others in the store before it calls a constructor of torch or gloo, which would wait for them
without looking at signals and notes. So these wait in vain only for a rank that fails or dies inside of them, until the
timeout.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import ASKED, GRACE, LINGER, RESTART, STORE_IS_GONE, CollectiveError, ask_store, read_first
from fshard.comm.groups import RankState
from fshard.comm.processes import Process, has_ended, this_process
from fshard.errors import text_of

T = TypeVar("T")


class Meeting:
    """One call of init_mesh, on one of the ranks that make a mesh together.

    Args:
        store: A client of the store by which ranks find each other, for the calling thread alone.
        rank: This rank.
        size: How many ranks there are.
        name: The same on all ranks, and another for each meeting.
        seconds: How long a rank waits for another.
        state: What this rank knows of the others; None before torch.distributed runs.
    """

    def __init__(
        self, store: Any, rank: int, size: int, name: str, seconds: float, state: RankState | None = None
    ) -> None:
        self.rank = rank
        self.others = [other for other in range(size) if other != rank]
        self.seconds = seconds
        # None where there are no others.
        self.board: Any = store and dist.PrefixStore(f"fshard/meeting {name}", store)  # type: ignore[attr-defined]
        self.state = state
        # The processes of other ranks, as far as this one has read which they are.
        self.processes: dict[int, Process] = {}
        # Whether ranks have begun to make groups, which are of no use if one of them fails.
        self.makes_groups = False

    def __enter__(self) -> Self:
        """Show others which process this rank is."""
        if self.others:
            self.board.set(f"process/{self.rank}", json.dumps(this_process()))
            self.board.set(f"here/{self.rank}", "")
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tell the others of an error, unless they have it too."""
        if error is None or isinstance(error, ValueError) or not self.others:
            return
        text = text_of(error) if isinstance(error, CollectiveError) else self._describe_failure(error)
        reason = self._leave_note(text)
        if self.state is not None and self.makes_groups:
            self.state.failure.reason = self.state.failure.reason or reason
        keys = [f"read/{rank}" for rank in self.others]
        # The store may go with this rank.
        ask_store(lambda: self.board.set(f"read/{self.rank}", "") or self.board.check(keys), LINGER)

    @contextmanager
    def naming_the_store(self) -> Iterator[None]:
        """Name the rank that held the store, where the store does not answer in a context.

        Raises:
            CollectiveError: instead of torch's error.
        """
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(self._name_ended_ranks() or STORE_IS_GONE) from error

    def check_others(self, processes: bool = True) -> None:
        """End this rank's wait if another has failed or is gone.

        Args:
            processes: Whether to look for processes that have ended too.

        Raises:
            CollectiveError: if one has failed or is gone.
        """
        if not self.others:
            return
        reason = ask_store(self._find_reason if processes else self._read_note)
        # The store may have gone with the rank that held it.
        if reason is None:
            reason = self._name_ended_ranks()
        if reason:
            raise CollectiveError(reason)

    def wait_for_all(self) -> None:
        """Wait until all ranks have come.

        Raises:
            CollectiveError: if one does not come, has failed or is gone.
        """
        try:
            keys = [f"here/{rank}" for rank in self.others]
            _compat.wait_in_store(self.board, keys, self.seconds, self.check_others)
        except CollectiveError:
            raise
        except RuntimeError as error:
            present = ask_store(lambda: [rank for rank in self.others if self.board.check([f"here/{rank}"])])
            if present is None:
                raise CollectiveError(self._name_ended_ranks() or STORE_IS_GONE) from error
            absent = [rank for rank in self.others if rank not in present]
            raise absent_ranks(absent, len(self.others) + 1) from error

    def run(self, make: Callable[[], T]) -> T:
        """Make what waits inside torch for other ranks.

        Args:
            make: Makes it.

        Returns:
            What `make` returns.

        Raises:
            CollectiveError: if it cannot be made; on every rank with the same reason.
        """
        begin = time.monotonic()
        try:
            return make()
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            late = time.monotonic() - begin
            reason = ask_store(self._find_reason, GRACE)
            if reason is None:
                # The store has gone with the rank that held it.
                reason = self._name_ended_ranks() or STORE_IS_GONE
            reason = reason or self._describe_failure(error, late)
            raise CollectiveError(reason) from error

    def _describe_failure(self, error: BaseException, late: float = 0.0) -> str:
        """Say that this rank has failed, or has waited in vain."""
        if late > 0.95 * self.seconds:
            first = f"init_mesh: rank {self.rank} waited {late:.0f} s for ranks {self.others} to make groups"
            return f"{first}: one of them is stopped or cannot be reached"
        name, message = type(error).__name__, text_of(error)
        text = name if message == name else f"{name}: {message:.300}"
        return f"rank {self.rank} failed in init_mesh: {text}\nTo fix: {RESTART}."

    def _find_reason(self) -> str:
        """Read why no mesh will be made: the note of a rank, or that some process has ended."""
        if note := self._read_note():
            return note
        unknown = [rank for rank in self.others if rank not in self.processes]
        for rank in random.sample(unknown, min(ASKED, len(unknown))):
            if text := read_first(self.board, "process", [rank]):
                self.processes[rank] = Process(*json.loads(text))
        reason = self._name_ended_ranks()
        return self._leave_note(reason) if reason else ""

    def _read_note(self) -> str:
        note: bytes = self.board.compare_set("note", "", "")
        return note.decode()

    def _name_ended_ranks(self) -> str:
        """Say which ranks' processes have ended, as far as this one can tell; "" if none has."""
        gone = [f"rank {rank}" for rank, process in sorted(self.processes.items()) if has_ended(process)]
        return f"init_mesh: {' and '.join(gone)} was killed or has ended\nTo fix: {RESTART}." if gone else ""

    def _leave_note(self, text: str) -> str:
        """Leave a note, and return the first one that is there."""
        return ask_store(lambda: self.board.compare_set("note", "", text).decode()) or text


def absent_ranks(absent: Sequence[int], size: int) -> CollectiveError:
    """Make the error of ranks that did not come to a meeting."""
    remedy = "every rank must call init_mesh, and several in the same order"
    return CollectiveError(f"init_mesh: expected all {size} ranks, got nothing from ranks {list(absent)}; {remedy}")
