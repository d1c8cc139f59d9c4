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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import torch.distributed as dist

from fshard import _compat
from fshard.comm.failure import (
    NOTE,
    NOTE_GRACE,
    RESTART,
    STORE_IS_GONE,
    TIMEOUT_FRACTION,
    CollectiveError,
    ask_store,
    describe_failure,
    leave_note,
    linger,
    read_note,
    report_at_once,
)
from fshard.comm.groups import RankState, aside, is_simulated
from fshard.comm.links import ACCEPT_TIME, Links, Listener, connect_to, prepare_link
from fshard.comm.processes import describe_ended_ranks, name_ranks

T = TypeVar("T")

# Seconds between two looks at the others while a constructor waits for them.
LOOK_INTERVAL = 0.7
# Seconds in which one rank finds out for all others which are late, and in which those that wait answer it.
SEARCH_TIME = 5.0
ANSWER_TIME = 2.0
# The key of an `Arrival`.
ENTRY = "entry/{}"
# Counts the ranks that have waited too long.
ASKERS = "askers"
# By which others answer the first of these as long as they wait.
ANSWER = "answer/{}"
# What follows from what all ranks bring.
END = "end"
# Counts the ranks that have come, but for those that have given up.
COUNT = f"came to {END}"
# What a wait for other ranks raises, and what torch does.
ERRORS_OF_WAITS = RuntimeError | TimeoutError
CALL_INIT_MESH = "Call init_mesh on every rank; if you make several meshes, make them in the same order."


class Arrival(NamedTuple):
    """What a rank brings to a meeting.

    Attributes:
        address: Where it may be connected to.
        text: What ranks compare.
    """

    address: str
    text: str


@dataclass(eq=False)
class Meeting:
    """One call of init_mesh, on one of the ranks that make a mesh together, or the first use of another group.

    Attributes:
        store: A client of the store by which ranks find each other, for the calling thread alone.
        rank: This rank.
        ranks: All ranks.
        name: The same on all ranks, and another for each meeting.
        timeout: Seconds that a rank waits for another.
        place: What ranks call, for errors.
        remedy: What to do about ranks that have not called it.
        client: The client of the store that constructors wait on, which is made when ranks agree.
        state: This rank's, once ranks begin to make groups, which are of no use if one of them fails.
        fails_everywhere: Whether all ranks raise the error that leaves the meeting.
        peers: The ranks that this one connects with, which is set before ranks agree.
        entries: What ranks have brought, as far as this one has read it.
        listener: Where lower peers connect to this rank.
        links: The connections with peers.
        sockets: All sockets that these take.
    """

    store: Any
    rank: int
    ranks: Sequence[int]
    name: str
    timeout: float
    place: str = "init_mesh"
    remedy: str = CALL_INIT_MESH
    client: Any = None
    state: RankState | None = None
    fails_everywhere: bool = False
    peers: Sequence[int] = ()
    entries: dict[int, Arrival] = field(default_factory=dict)
    listener: Any = None
    links: Links = field(default_factory=Links)
    sockets: _compat.Sockets = field(default_factory=dict)
    # Why this rank has given up; "" if it has not.
    _reason: str = ""
    # When its wait for the others began; 0 while it does not wait.
    _since: float = 0.0
    _watcher: threading.Thread | None = None

    def __post_init__(self) -> None:
        """Find the part of the store for this meeting."""
        self.prefix = f"fshard/meeting {self.name}"
        self.board: Any = dist.PrefixStore(self.prefix, self.store)  # type: ignore[attr-defined]
        self.others = [other for other in self.ranks if other != self.rank]
        self._over = threading.Event()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tell the others of an error, unless they have it too; let the store live until they have read of it.

        Raises:
            CollectiveError: if a wait has failed, or something in torch; on every rank with the same reason.
        """
        if not self.others:
            return
        try:
            if error and not self.fails_everywhere:
                self._give_up(self._explain(error))
        finally:
            self._over.set()
        if self._watcher:
            self._watcher.join()
        # The thread may have given up behind the last wait.
        is_of_wait = self._reason and isinstance(error, ERRORS_OF_WAITS | None)
        if is_of_wait:
            report_at_once(self._reason)
        if self._reason or error:
            linger(self)
        if self.listener:
            # Others take this rank for one that has ended from now on, unless they read its note.
            self.listener.close()
        if is_of_wait:
            raise CollectiveError(self._reason) from error

    def _explain(self, error: BaseException) -> str:
        """Say why an error ends the meeting."""
        if isinstance(error, CollectiveError):
            return str(error)
        reason = ""
        if isinstance(error, ERRORS_OF_WAITS):
            is_late = 0.0 < self._since < time.monotonic() - TIMEOUT_FRACTION * self.timeout
            reason = self._explain_late_ranks() if is_late else self.find_reason(wait_is_over=True)
        return reason or f"{describe_failure(self.rank, self.place, error)}\nTo fix: {RESTART}."

    def _give_up(self, reason: str) -> None:
        """Leave a note. End the waits of this rank inside constructors, and the links by which others wait for it."""
        # A rank that comes later would take this one for one that waits, and go on as if all had come.
        ask_store(lambda: self.board.add(COUNT, -1))
        self._reason = leave_note(self.board, reason)
        if self.client:
            self.client.disconnect()
        self.links.cut()
        if self.state:
            self.state.failure = self.state.failure or self._reason

    def agree(self, text: str, merge: Callable[[Sequence[str]], str], look: Callable[[], object]) -> str:
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

        self._since = time.monotonic()
        address = self.listener.address if self.listener else ""
        # Unlike `set`, this waits for an answer. So the store is there, and stays until all have come; a new client of
        # one that has gone would wait for it.
        self.board.compare_set(ENTRY.format(self.rank), "", json.dumps(Arrival(address, text)))
        self.client = _compat.StoreClient(self.store)
        if self.board.add(COUNT, 1) == len(self.ranks):
            return self._conclude(merge)
        with aside():
            _compat.wait_in_store(self.board, [END], self.timeout, look_at_others)
        return self._read(self.peers, END)[0].decode()

    def _conclude(self, merge: Callable[[Sequence[str]], str]) -> str:
        """Find out what follows from what all ranks bring, and write it for them."""
        self._read(self.ranks)
        texts = [self.entries[rank].text for rank in self.ranks]
        # There may be two that do so.
        return self.board.compare_set(END, "", merge(texts)).decode()

    def _stand_in(self, merge: Callable[[Sequence[str]], str]) -> None:
        """Conclude on one rank for the last to come, which may have ended before it did. Others find that out later."""
        if self.board.add(COUNT, 0) == len(self.ranks):
            self._answer()
            if self.board.add("stand-ins", 1) == 1:
                self._conclude(merge)

    def _read(self, ranks: Sequence[int], *keys: str) -> list[bytes]:
        """Read some keys, and the entries of ranks, which are there."""
        values = self.board.multi_get([*keys, *map(ENTRY.format, ranks)])
        for rank, value in zip(ranks, values[len(keys) :], strict=True):
            self.entries[rank] = Arrival(*json.loads(value))
        return values

    def _explain_late_ranks(self) -> str:
        """Say who is late. The first rank to ask finds out, and the others wait for its note."""
        if ask_store(lambda: self.board.add(ASKERS, 1)) != 1:
            ask_store(self._answer)
            with suppress(RuntimeError), aside():
                _compat.wait_in_store(self.board, [NOTE], SEARCH_TIME)
        return str(self.find_reason() or ask_store(self._name_late_ranks, SEARCH_TIME) or STORE_IS_GONE)

    def _name_late_ranks(self) -> str:
        """Name the ranks that have not come, or else those that do not wait for others."""
        if absent := self._find_missing(ENTRY, self.others):
            return f"{self.place}: {name_ranks(absent)} did not call it within {self.timeout:g} s. {self.remedy}"
        time.sleep(ANSWER_TIME)
        names = name_ranks(self._find_missing(ANSWER, self.others) or self.ranks)
        first = f"{self.place}: {names} did not make process groups within {self.timeout:g} s. Look for a hang there"
        return f"{first}, or for a network in between that lets nothing pass.\nTo fix: {RESTART}."

    def _find_missing(self, key: str, ranks: list[int]) -> list[int]:
        """Find those of some ranks that have not written a key: ask for all, then for halves if some lack."""
        if self.have_come(*ranks, key=key):
            return []
        if len(ranks) == 1:
            return ranks
        middle = len(ranks) // 2
        return self._find_missing(key, ranks[:middle]) + self._find_missing(key, ranks[middle:])

    def have_come(self, *ranks: int, key: str = ENTRY) -> bool:
        """Whether all of some ranks have come, or have written another key."""
        return bool(self.board.check([*map(key.format, ranks)]))

    def connect(self) -> None:
        """Connect with this rank's peers by links; the lower one of two ranks connects to the higher one.

        Raises:
            CollectiveError: if one of them fails, is gone or does not connect.
        """
        if self.listener:
            with _compat.collecting_sockets(self.store) as self.sockets:
                self.run(self._make_links)

    def _make_links(self, _: object) -> None:
        """Connect with the higher ones of this rank's peers, then wait until the lower ones have connected."""
        links = self.links.sockets
        for peer in self.peers:
            if peer > self.rank:
                links[peer] = self._reach(peer, self.timeout)
        while missing := [peer for peer in self.peers if peer not in links]:
            arrived = self.listener.accept(*missing)
            links |= arrived
            if self._reason or time.monotonic() > self._since + self.timeout:
                raise TimeoutError
            if arrived:
                continue
            for peer in missing:
                # See whether it is there. One that is slow may have no room for another connection.
                with suppress(TimeoutError):
                    self._reach(peer, ACCEPT_TIME).close()
        for link in links.values():
            prepare_link(link, self.timeout)

    def _reach(self, peer: int, timeout: float) -> socket.socket:
        """Connect to the listener of a peer, which is there until its process ends or it has left a note."""
        try:
            return connect_to(self.entries[peer].address, self.rank, timeout)
        except RuntimeError as error:
            text = f"{self.place}: {describe_ended_ranks([peer])}, or there is {error}\nTo fix: {RESTART}."
            raise CollectiveError(self.find_reason(wait_is_over=True) or text) from error

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
        # The store may have gone since a note was read there.
        note: str | None = self._reason or ask_store(
            partial(read_note, self.board), NOTE_GRACE if wait_is_over and not ended else 0.0
        )
        if note or not (ended or wait_is_over):
            return note or ""
        if note is None:
            # The links that have ended may be those of ranks that failed because the store has gone.
            return STORE_IS_GONE
        return f"{self.place}: {describe_ended_ranks(ended)}\nTo fix: {RESTART}." if ended else ""

    def _answer(self) -> None:
        """Show a rank that looks for late ones that this one waits."""
        if self.board.check([ASKERS]):
            self.board.set(ANSWER.format(self.rank), "")

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
        if not self._watcher and self.client.sockets:
            self._watcher = threading.Thread(target=self._watch_others, name="fshard init_mesh", daemon=True)
            self._watcher.start()
        self._since = time.monotonic()
        made = make(self.client.store)
        self._since = 0.0
        if self._reason:
            raise CollectiveError(self._reason)
        return made

    def _watch_others(self) -> None:
        """Look at the other ranks until the meeting is over, and end this rank's waits if one has failed or is gone.

        Another rank that looks for late ones is answered while this one waits.
        """
        while not self._over.wait(LOOK_INTERVAL):
            if self._since:
                ask_store(self._answer)
            if reason := self.find_reason():
                self._give_up(reason)
