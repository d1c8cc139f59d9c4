"""Meetings: the ranks that make a mesh hear of one that fails or dies meanwhile, and end with the same error.

A rank waits for the others in the store before it calls a constructor of torch or gloo, which would wait for them
without looking at signals and notes. For a rank that fails or dies inside of one, the others wait there by a client of
the store that has its own connection. A thread looks meanwhile what became of the others, and ends that connection.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import ASKED, GRACE, LINGER, RESTART, STORE_IS_GONE, CollectiveError, ask_store, read_first
from fshard.comm.groups import RankState
from fshard.comm.processes import Process, has_ended, this_process
from fshard.errors import describe_error

T = TypeVar("T")

# Seconds between two looks at the others while a constructor waits for them: the first time, and later.
FIRST_LOOK, NEXT_LOOK = 0.5, 1.0


class Meeting:
    """One call of init_mesh, on one of the ranks that make a mesh together.

    Args:
        store: A client of the store by which ranks find each other, for the calling thread alone.
        rank: This rank.
        size: How many ranks there are.
        name: The same on all ranks, and another for each meeting.
        seconds: How long a rank waits for another.
        state: What this rank knows of the others; None before torch.distributed runs.
        client: The client of the store that constructors wait on; by default one that is made for the first of them.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        name: str,
        seconds: float,
        state: RankState | None = None,
        client: _compat.StoreClient | None = None,
    ) -> None:
        self.store = store
        self.client = client
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
        text = describe_error(error) if isinstance(error, CollectiveError) else self._describe_failure(error)
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
        if reason := self.find_reason(processes):
            raise CollectiveError(reason)

    def find_reason(self, processes: bool = True) -> str:
        """Find out why no mesh will be made, as far as this rank can tell.

        Args:
            processes: Whether to look for processes that have ended too.

        Returns:
            The reason; "" if nothing is known.
        """
        reason: str | None = ask_store(self._find_reason if processes else self._read_note)
        # The store may have gone with the rank that held it.
        return self._name_ended_ranks() if reason is None else reason

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

    def run(self, make: Callable[[Any], T]) -> T:
        """Make what waits inside torch for other ranks.

        Args:
            make: Makes it, with a client of the store that nobody else waits on or asks by. It may keep the client.

        Returns:
            What `make` returns.

        Raises:
            CollectiveError: if it cannot be made; on every rank with the same reason.
        """
        if not self.others:
            return make(self.store)
        if self.client is None:
            self.client = _compat.StoreClient(lambda: _compat.clone_of(self.store))
        begin = time.monotonic()
        ender = _WaitEnder(self, self.client)
        try:
            with ender:
                made = make(self.client.store)
        except RuntimeError as error:
            if isinstance(error, CollectiveError):
                raise
            late = time.monotonic() - begin
            reason = ender.reason or ask_store(self._find_reason, GRACE)
            if reason is None:
                # The store has gone with the rank that held it.
                reason = self._name_ended_ranks() or STORE_IS_GONE
            reason = reason or self._describe_failure(error, late)
            raise CollectiveError(reason) from error
        if ender.reason:
            raise CollectiveError(ender.reason)
        return made

    def _describe_failure(self, error: BaseException, late: float = 0.0) -> str:
        """Say that this rank has failed, or has waited in vain."""
        if late > 0.95 * self.seconds:
            first = f"init_mesh: rank {self.rank} waited {late:.0f} s for ranks {self.others} to make groups"
            return f"{first}: one of them is stopped or cannot be reached"
        name, message = type(error).__name__, describe_error(error)
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


class _WaitEnder(threading.Thread):
    """Ends the waits inside a constructor, in a context, where another rank has failed or is gone.

    Args:
        meeting: Of the ranks that make something together.
        client: The client of the store that the constructor waits on.
    """

    def __init__(self, meeting: Meeting, client: _compat.StoreClient) -> None:
        super().__init__(name="fshard init_mesh", daemon=True)
        self._meeting = meeting
        self._client = client
        self._over = threading.Event()
        # Why the waits were ended; "" if they were not.
        self.reason = ""

    def __enter__(self) -> None:
        """Begin to look."""
        if self._client.is_connected():
            self.start()

    def __exit__(self, *_: object) -> None:
        """End before what was made is used."""
        self._over.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        """Look at the other ranks until the constructor returns, or one of them has failed."""
        seconds = FIRST_LOOK
        while not self._over.wait(seconds):
            self.reason = self._meeting.find_reason()
            if self.reason:
                self._client.disconnect()
                return
            seconds = NEXT_LOOK


def absent_ranks(absent: Sequence[int], size: int) -> CollectiveError:
    """Make the error of ranks that did not come to a meeting."""
    remedy = "every rank must call init_mesh, and several in the same order"
    return CollectiveError(f"init_mesh: expected all {size} ranks, got nothing from ranks {list(absent)}; {remedy}")
