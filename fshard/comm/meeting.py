"""While ranks make a mesh, they find out if one of them fails or dies, and all of them end with the same error.

A rank waits for the others in the store before it calls a constructor of torch or gloo, which would wait for them
without looking at signals and notes. It brings what ranks compare there, and the last to come compares it for all. Then
it connects with a few of them by links, which end with its process.

A rank may also fail or die while others are inside such a constructor. They wait there by a client of the store that
has its own connection. A thread looks meanwhile what became of the other ranks, and ends that connection.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import (
    NOTE_GRACE,
    RESTART,
    STORE_IS_GONE,
    TIMEOUT_FRACTION,
    CollectiveError,
    ask_store,
    describe_failure,
    leave_note,
    linger,
    report_at_once,
)
from fshard.comm.groups import RankState, is_simulated
from fshard.comm.links import ACCEPT_TIME, Links, Listener, connect_to, prepare_link
from fshard.comm.processes import describe_ended_ranks, name_ranks
from fshard.errors import describe_error

T = TypeVar("T")

# Seconds between two looks at the others while a constructor waits for them.
LOOK_INTERVAL = 0.7
# Ranks that one request asks for, where thousands may not have come.
RANKS_OF_REQUEST = 64
# Seconds in which one rank finds out for all others which have not come.
SEARCH_TIME = 5.0
# The key of an `Arrival`.
ENTRY = "entry/{}"
# What follows from what all ranks bring; FAILED if one has given up.
END = "end"
# Counts the ranks that have come.
COUNT = f"came to {END}"
FAILED = "failed"
# The name of the note, which is for all ranks of the meeting.
ALL = "all"
NOTE = f"note/{ALL}"
CALL_INIT_MESH = "Call init_mesh on every rank; if you make several meshes, make them in the same order."


class Arrival(NamedTuple):
    """What a rank brings to a meeting.

    Attributes:
        address: Where it may be connected to.
        text: What ranks compare; "" from a rank that has given up.
    """

    address: str
    text: str


class Meeting:
    """One call of init_mesh, on one of the ranks that make a mesh together, or the first use of another group.

    Args:
        store: A client of the store by which ranks find each other, for the calling thread alone.
        rank: This rank.
        ranks: All ranks.
        name: The same on all ranks, and another for each meeting.
        timeout: Seconds that a rank waits for another.
        place: What ranks call, for errors.
        remedy: What to do about ranks that have not called it.
        client: The client of the store that constructors wait on; by default one that is made for the first of them.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        name: str,
        timeout: float,
        place: str = "init_mesh",
        remedy: str = CALL_INIT_MESH,
        client: _compat.StoreClient | None = None,
    ) -> None:
        self.store = store
        self.client = client
        self.rank = rank
        self.ranks = ranks
        self.others = [other for other in ranks if other != rank]
        self.timeout = timeout
        self.place = place
        self.remedy = remedy
        self.prefix = f"fshard/meeting {name}"
        self.board: Any = dist.PrefixStore(self.prefix, store)  # type: ignore[attr-defined]
        # Set once ranks begin to make groups, which are of no use if one of them fails.
        self.state: RankState | None = None
        # What ranks have brought, as far as this one has read it.
        self.entries: dict[int, Arrival] = {}
        # Whether all ranks raise the error that leaves the meeting.
        self.fails_everywhere = False
        # Why the waits inside a constructor were ended; "" if they were not.
        self._reason = ""
        # The ranks that this one connects with, which is set before ranks agree, and where lower ones connect to it.
        self.peers: Sequence[int] = ()
        self.listener: Any = None
        # The connections with them, and all sockets that these take.
        self.links = Links()
        self.sockets: _compat.Sockets = {}

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tell the others of an error, unless they have it too; let the store live until they have read of it."""
        if error is not None and self.others:
            if not self.fails_everywhere:
                self._report(error)
            linger(self.store, self.board, self.rank, self.others)
        if self.listener is not None:
            # Others take this rank for one that has ended from now on, unless they read its note.
            self.listener.close()

    def _report(self, error: BaseException) -> None:
        """Give up the meeting."""
        if isinstance(error, CollectiveError):
            text = describe_error(error)
            report_at_once(text)
        else:
            text = self._describe_failure(error)
        reason = self._leave_note(text)
        # The last rank to come sees by its entry that there is a note. Others may read where it listened later.
        ask_store(lambda: self._write_entry(""))
        self._end_waits()
        if self.state is not None:
            self.state.failure.reason = self.state.failure.reason or reason

    def _end_waits(self) -> None:
        """End the waits of this rank inside constructors, and the connections by which others wait for it."""
        if self.client is not None:
            self.client.disconnect()
        self.links.cut()

    def agree(self, text: str, merge: Callable[[Sequence[str]], str], look: Callable[[], object] = bool) -> str:
        """Wait until all ranks have come; find out once, on the last of them, what follows from all that they bring.

        Each rank asks the store four times, whatever their number; only the last reads what all have brought.

        Args:
            text: What this rank brings.
            merge: Maps the texts of all ranks to what follows from them.
            look: Called from time to time while this rank waits and no other one is known to have failed.

        Returns:
            What follows, the same on every rank.

        Raises:
            CollectiveError: if a rank does not come or has failed.
        """
        if not self.others:
            return merge([text])
        if self.peers and not is_simulated():
            self.listener = Listener(self.store)

        def look_at_others() -> None:
            if reason := self.find_reason():
                raise CollectiveError(reason)
            look()
            ask_store(partial(self._stand_in, merge))

        try:
            self._write_entry(text)
            if self.board.add(COUNT, 1) == len(self.ranks):
                end = self._conclude(merge)
            else:
                _compat.wait_in_store(self.board, [END], self.timeout, look_at_others)
                end = self._read(self.peers, END)[0].decode()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise CollectiveError(self._explain_absence()) from error
        if end == FAILED:
            raise CollectiveError(self._read_note())
        return end

    def _write_entry(self, text: str) -> None:
        """Write what this rank brings."""
        entry = Arrival(self.listener.address if self.listener else "", text)
        self.board.set(ENTRY.format(self.rank), json.dumps(entry))

    def _conclude(self, merge: Callable[[Sequence[str]], str]) -> str:
        """Find out what follows from what all ranks bring, and write it for them."""
        self._read(self.ranks)
        texts = [self.entries[rank].text for rank in self.ranks]
        end = FAILED if "" in texts else merge(texts)
        # There may be two that do so.
        return self.board.compare_set(END, "", end).decode()

    def _stand_in(self, merge: Callable[[Sequence[str]], str]) -> None:
        """Conclude on one rank for the last to come, which may have ended before it did. Others find that out later."""
        if self.board.add(COUNT, 0) == len(self.ranks) and self.board.add("stand-ins", 1) == 1:
            self._conclude(merge)

    def _read(self, ranks: Sequence[int], *keys: str) -> list[bytes]:
        """Read some keys, and the entries of ranks, which are there."""
        values: list[bytes] = self.board.multi_get([*keys, *map(ENTRY.format, ranks)])
        for rank, value in zip(ranks, values[len(keys) :], strict=True):
            self.entries[rank] = Arrival(*json.loads(value))
        return values

    def _explain_absence(self) -> str:
        """Say who has not come. The first rank to ask finds out, and the others wait for its note."""
        if ask_store(lambda: self.board.add("askers", 1)) != 1:
            with suppress(RuntimeError):
                _compat.wait_in_store(self.board, [NOTE], SEARCH_TIME)
        reason = self.find_reason()
        absent = None if reason else ask_store(lambda: [self._find_absent()], SEARCH_TIME)
        if absent is None:
            return reason or STORE_IS_GONE
        [ranks] = absent
        if not ranks:
            text = f"{self.place}: all ranks called it, but one of them stopped there for over {self.timeout:g} s"
            return f"{text}. Look for a process that is stopped.\nTo fix: {RESTART}."
        return f"{self.place}: {name_ranks(ranks)} did not call it within {self.timeout:g} s. {self.remedy}"

    def _find_absent(self) -> list[int]:
        """Find out which ranks have not come, by one request for each block of ranks that all have."""
        absent = []
        for first in range(0, len(self.others), RANKS_OF_REQUEST):
            block = self.others[first : first + RANKS_OF_REQUEST]
            if not self.have_come(*block):
                absent += [rank for rank in block if not self.have_come(rank)]
        return absent

    def have_come(self, *ranks: int) -> bool:
        """Whether all of some ranks have come."""
        return bool(self.board.check([ENTRY.format(rank) for rank in ranks]))

    def connect(self) -> None:
        """Connect with this rank's peers by links; the lower one of two ranks connects to the higher one.

        Raises:
            CollectiveError: if one of them fails, is gone or does not connect.
        """
        if self.listener is not None:
            with _compat.collecting_sockets(self.store) as self.sockets:
                self.run(lambda _: self._make_links(time.monotonic() + self.timeout))

    def _make_links(self, deadline: float) -> None:
        """Connect with this rank's peers, those first that wait for this one."""
        for peer in reversed(self.peers):
            link = self._reach(peer, self.timeout) if peer > self.rank else self._await(peer, deadline)
            prepare_link(link, self.timeout)
            self.links.sockets[peer] = link

    def _await(self, peer: int, deadline: float) -> socket.socket:
        """Wait until a peer has connected."""
        while (link := self.listener.accept(peer)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            if self._reason:
                raise CollectiveError(self._reason)
            # One that is slow may have no room for another connection.
            with suppress(TimeoutError):
                self._reach(peer, ACCEPT_TIME).close()
        return link

    def _reach(self, peer: int, timeout: float) -> socket.socket:
        """Connect to the listener of a peer, which is there until its process ends or it has left a note."""
        try:
            return connect_to(self.entries[peer].address, self.rank, timeout)
        except RuntimeError as error:
            text = f"{self.place}: {describe_ended_ranks([peer])}, or there is {error}\nTo fix: {RESTART}."
            reason = self.find_reason(wait_is_over=True) or self._leave_note(text)
            raise CollectiveError(reason) from error

    def find_reason(self, *, wait_is_over: bool = False) -> str:
        """Find out why no mesh will be made: by the note of a rank, or because links of another one have ended.

        Args:
            wait_is_over: Whether something has ended this rank's wait. Then a note may be about to come, and a store
                that does not answer is a reason too.

        Returns:
            The reason; "" if nothing is known.
        """
        # A rank that fails leaves its note before it ends its links.
        ended = self.links.find_ended_peers()
        note: str | None = ask_store(self._read_note, NOTE_GRACE if wait_is_over and not ended else 0.0)
        if note:
            return note
        if note is None:
            # The links that have ended may be those of ranks that failed because the store has gone.
            return STORE_IS_GONE if ended or wait_is_over else ""
        if ended:
            return self._leave_note(f"{self.place}: {describe_ended_ranks(ended)}\nTo fix: {RESTART}.")
        return ""

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
        over = threading.Event()
        watcher = threading.Thread(target=self._watch_others, args=[over], name="fshard init_mesh", daemon=True)
        if self.client.is_connected():
            watcher.start()
        try:
            made = make(self.client.store)
        except CollectiveError:
            raise
        except (RuntimeError, TimeoutError) as error:
            # The thread still shows others that this rank is not the one that hangs.
            raise CollectiveError(self._explain_lost_wait(error, time.monotonic() - begin)) from error
        finally:
            over.set()
            if watcher.is_alive():
                watcher.join()
        if self._reason:
            raise CollectiveError(self._reason)
        return made

    def _watch_others(self, over: threading.Event) -> None:
        """Look at the other ranks until a constructor returns, and end its waits if one of them has failed or is gone.

        Others see by the number of looks that this rank, which waits for them, does not hang.
        """
        while not over.wait(LOOK_INTERVAL):
            ask_store(partial(self.board.add, f"waits/{self.rank}", 1))
            self._reason = self.find_reason()
            if self._reason:
                self._end_waits()
                return

    def _explain_lost_wait(self, error: Exception, seconds: float) -> str:
        """Say why the wait in a constructor ended after some seconds, in the same words on every rank."""
        reason = self._reason or self.find_reason(wait_is_over=True)
        if reason:
            return reason
        if seconds <= TIMEOUT_FRACTION * self.timeout:
            return self._leave_note(self._describe_failure(error))
        first = f"{self.place}: {self._name_hanging_ranks()} did not make process groups within {self.timeout:g} s"
        where = "Look for a hang there, or for a network in between that lets nothing pass."
        return self._leave_note(f"{first}. {where}\nTo fix: {RESTART}.")

    def _name_hanging_ranks(self) -> str:
        """Name the ranks that do not look at the others, as those do that wait."""
        before = ask_store(self._read_waits)
        # Longer than a rank that runs needs to look again.
        time.sleep(2 * LOOK_INTERVAL)
        looks = ask_store(self._read_waits)
        hanging = [rank for rank in self.others if before and looks and looks[rank] == before[rank]]
        return name_ranks(hanging) if hanging else f"one of {name_ranks(self.ranks)}"

    def _read_waits(self) -> dict[int, int]:
        """Read how often other ranks that wait in a constructor have looked at the others."""
        return {rank: self.board.add(f"waits/{rank}", 0) for rank in self.others}

    def _describe_failure(self, error: BaseException) -> str:
        """Say that this rank has failed."""
        return f"{describe_failure(self.rank, self.place, error)}\nTo fix: {RESTART}."

    def _read_note(self) -> str:
        # Ranks may wait for the key, which compare_set would make.
        return self.board.get(NOTE).decode() if self.board.check([NOTE]) else ""

    def _leave_note(self, reason: str) -> str:
        """Leave a note, and return the first one that is there."""
        return leave_note(self.board, [ALL], reason)
